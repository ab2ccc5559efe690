"""A loss and feed-forward layers in tiles train exactly the model that plain PyTorch trains in one process."""

from dataclasses import dataclass, field, replace

import pytest

from deepspeed_recipes.recipe.recipe import Data, Layout, Lora
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from deepspeed_recipes.training.model.lora import add
from tests.parity import gate, plain
from tests.ranks import run_on
from tests.tiers import tiered
from tests.workers import mistakes

SETTINGS = plain.Settings()


@dataclass(frozen=True)
class Case:
    """One way to train in tiles."""

    stage: int
    layout: Layout = field(default_factory=Layout)
    world_size: int = 2
    checkpointing: bool = False

    def __str__(self) -> str:
        return f"zero{self.stage}-{self.layout.sequence}sequence-{self.layout.tensor}tensor-of{self.world_size}"


CASES = [
    Case(0),
    Case(3, Layout(sequence=2), checkpointing=True),
]
MORE = [
    Case(1),
    Case(2, checkpointing=True),
    Case(3),
    Case(1, Layout(sequence=2), world_size=4),
    Case(2, Layout(sequence=2), checkpointing=True),
    Case(1, Layout(tensor=2)),
    Case(3, Layout(tensor=2), world_size=4, checkpointing=True),
    Case(1, Layout(sequence=2, tensor=2), world_size=4),
]


@pytest.fixture(scope="module")
def reference(model_folder, conversations):
    return plain.train(model_folder, conversations, SETTINGS)


def recipe_of(case, model, data, **changes):
    copies = case.world_size // (case.layout.sequence * case.layout.tensor)
    return gate.recipe_for(
        SETTINGS,
        model,
        data,
        f"zero{case.stage}.json",
        layout=case.layout,
        micro_batch_size=8 // copies // 2,
        gradient_checkpointing=case.checkpointing,
        tiled_loss=True,
        tiled_mlp=True,
        **changes,
    )


@pytest.mark.parametrize("case", tiered([*CASES, *MORE], CASES[:1]), ids=str)
def test_same_model_as_plain_pytorch(ranks, tmp_path, model_folder, conversations, reference, case):
    run = run_on(ranks, recipe_of(case, model_folder, conversations), tmp_path, world_size=case.world_size)
    gate.agree(run, *reference)


@pytest.mark.parametrize("mistake", tiered(["mean_of_tiles", "a_tile_forgotten"], {"mean_of_tiles"}))
def test_a_mistake_is_noticed(ranks, tmp_path, model_folder, conversations, reference, mistake):
    run = RunFolder(tmp_path / "run")
    write_recipe(run, recipe_of(Case(0), model_folder, conversations))
    ranks.run(getattr(mistakes, mistake), str(run.path), log=tmp_path / "log")
    assert len(read_jsonl(run.metrics)) == SETTINGS.steps
    with pytest.raises(AssertionError):
        gate.agree_on_steps(run, reference[0])


@pytest.mark.every
@pytest.mark.parametrize("pipeline", [pytest.param(False, id="data"), pytest.param(True, id="pipeline")])
def test_tiled_feed_forward_layers_work_with_adapters(ranks, tmp_path, model_folder, conversations, pipeline):
    lora = Lora(rank=4, alpha=8)
    layout = Layout(pipeline=2) if pipeline else Layout()
    recipe = gate.recipe_for(
        SETTINGS,
        model_folder,
        conversations,
        "zero1.json",
        layout=layout,
        micro_batch_size=2,
        lora=lora,
        gradient_checkpointing=True,
        tiled_mlp=True,
        tiled_loss=not pipeline,
    )
    records, _ = plain.train(model_folder, conversations, SETTINGS, prepare=lambda whole: add(whole, lora, recipe.seed))
    run = run_on(ranks, recipe, tmp_path)
    gate.agree_on_steps(run, records)


@pytest.mark.every
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.every), 3])
def test_evaluation_between_steps_changes_nothing(ranks, tmp_path, model_folder, conversations, reference, stage):
    """Under ZeRO-3 the head's weight is fetched ahead of time in the order of the last pass, whichever that was."""
    data = Data(path=str(conversations), validation=str(conversations), metric="exact_match", max_new_tokens=8)
    recipe = recipe_of(Case(stage), model_folder, conversations, eval_steps=2)
    run = run_on(ranks, replace(recipe, data=data), tmp_path)
    gate.agree(run, *reference)
    measured = read_jsonl(run.evaluations)
    assert [row["step"] for row in measured] == [0, 2, 4, 6]
    assert measured[0]["loss"] == pytest.approx(reference[0][0]["loss"], rel=1e-5)
    assert read_json(run.deepspeed)["zero_optimization"]["stage"] == stage
