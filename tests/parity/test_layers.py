"""What a run says of its layers is what plain PyTorch says of them, however the ranks hold the model."""

from dataclasses import dataclass, field, replace

import pytest
from transformers import AutoConfig

from deepspeed_recipes.prove import techniques
from deepspeed_recipes.recipe import deepspeed_file, limits
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Layout, Lora
from deepspeed_recipes.recipe.run_folder import read_jsonl
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.model.lora import add
from tests import ROOT
from tests.parity import gate, plain
from tests.ranks import run_on
from tests.small import in_round_robin, in_sub_groups
from tests.tiers import tiered
from tests.workers import mistakes

SETTINGS = plain.Settings(steps=3)
"""Rounding grows with every step, fast where ReLUs switch: without ZeRO, in two stages, layer 0's norm is off by 3e-5,
4e-5, and 2e-4 at the fourth step."""
SHARE = 1e-4
"""Of a number, by which it may differ; in fp32 a weight minus its update has lost digits of the update."""


@dataclass(frozen=True)
class Case:
    """One way to hold the model."""

    stage: int
    layout: Layout = field(default_factory=Layout)
    world_size: int = 2
    sub_groups: bool = False
    round_robin: bool = False
    adapters: bool = False

    def __str__(self) -> str:
        sizes = "x".join(str(size) for size in (self.layout.pipeline, self.layout.tensor, self.layout.sequence))
        kind = "-lora" * self.adapters + "-groups" * self.sub_groups + "-round-robin" * self.round_robin
        return f"zero{self.stage}-{sizes}-of-{self.world_size}{kind}"


CORE = [Case(0, Layout(pipeline=2, tensor=2), 4)]
MORE = [
    *(Case(stage) for stage in range(4)),
    Case(3, sub_groups=True),
    Case(2, round_robin=True),
    *(Case(stage, Layout(tensor=2), 4) for stage in (0, 1)),
    *(Case(stage, Layout(pipeline=2), 4) for stage in (0, 1)),
    *(Case(stage, Layout(sequence=2), 4) for stage in (0, 3)),
    *(Case(stage, adapters=True) for stage in range(4)),
    Case(1, Layout(tensor=2), 4, adapters=True),
    Case(1, Layout(pipeline=2), 4, adapters=True),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory, model_folder):
    """Return a function that makes a model with units that are off for every token; tied to its embedding, or not."""

    def make(tied: bool):
        folder = tmp_path_factory.getbasetemp() / f"layers-{tied}"
        if not folder.exists():
            config = AutoConfig.from_pretrained(model_folder)
            config.hidden_act, config.tie_word_embeddings, config.num_hidden_layers = "relu", tied, 4
            config.layer_types = config.layer_types * 2
            techniques.random_model(folder, config)
        return folder

    return make


def recipe_of(case, model, data, folder):
    deepspeed = in_sub_groups(folder) if case.sub_groups else f"zero{case.stage}.json"
    deepspeed = in_round_robin(folder) if case.round_robin else deepspeed
    recipe = gate.recipe_for(SETTINGS, model, data, deepspeed, layout=case.layout, micro_batch_size=1)
    return replace(recipe, lora=Lora(rank=4, alpha=8)) if case.adapters else recipe


@pytest.fixture(scope="module")
def reference(models, conversations):
    trained = {}

    def of(case, tied):
        key = (case.adapters, tied)
        if key not in trained:
            prepare = (lambda whole: add(whole, Lora(rank=4, alpha=8), 42)) if case.adapters else (lambda whole: whole)
            trained[key] = plain.train(models(tied), conversations, SETTINGS, prepare=prepare)[0]
        return trained[key]

    return of


def worst(run, records) -> dict[str, float]:
    """Return by how much each of the numbers differs at most, as a share of the number; of `dead`, absolutely."""
    logged = read_jsonl(run.metrics)
    assert len(logged) == len(records) == SETTINGS.steps
    found = dict.fromkeys(("grad_norm", "update_ratio", "dead"), 0.0)
    for ours, theirs in zip(logged, records, strict=True):
        assert list(ours["layers"]) == list(theirs["layers"])
        for name, expected in theirs["layers"].items():
            measured = {key: value for key, value in ours["layers"][name].items() if key != "verdict"}
            assert measured.keys() == expected.keys(), name
            for key, value in expected.items():
                off = abs(measured[key] - value)
                found[key] = max(found[key], off if key == "dead" else off / value)
    return found


def trained(ranks, folder, case, model, data, main=training_run.main):
    return run_on(ranks, recipe_of(case, model, data, folder), folder, case.world_size, function=main)


@pytest.mark.parametrize("case", tiered([*CORE, *MORE], CORE), ids=str)
def test_same_numbers_as_plain_pytorch(ranks, tmp_path, models, conversations, reference, case):
    tied = case.layout.pipeline > 1 or case.stage == 2
    run = trained(ranks, tmp_path, case, models(tied), conversations)
    records = reference(case, tied)
    if not case.adapters:
        assert 0.01 < records[-1]["layers"]["model.layers.1"]["dead"] < 0.9
    assert max(worst(run, records).values()) < SHARE, worst(run, records)
    for row in read_jsonl(run.metrics):
        whole = sum(one["grad_norm"] ** 2 for one in row["layers"].values()) ** 0.5
        assert whole == pytest.approx(row["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("mistake", "case", "shows_in"),
    tiered(
        [
            ("after_clipping", Case(2), "grad_norm"),
            ("counted_on_every_rank", Case(0, Layout(tensor=2), 2), "grad_norm"),
            ("without_decay", Case(1), "update_ratio"),
        ],
        lambda case: case[0] == "counted_on_every_rank",
    ),
)
def test_a_mistake_is_noticed(ranks, tmp_path, models, conversations, reference, mistake, case, shows_in):
    run = trained(ranks, tmp_path, case, models(False), conversations, getattr(mistakes, mistake))
    assert worst(run, reference(case, False))[shows_in] > 10 * SHARE


@pytest.mark.parametrize("stage", [2, 3])
def test_there_are_none_where_they_would_be_wrong(tmp_path, models, conversations, stage):
    recipe = recipe_of(Case(stage, Layout(tensor=2), 4), models(False), conversations, tmp_path)
    file = deepspeed_file.read(str(ROOT / "configs" / recipe.deepspeed))
    assert not training_run.measures_layers(recipe, file)
    assert training_run.measures_layers(replace(recipe, layout=Layout()), file)
    with pytest.raises(UserError, match=r"layer_stats=true with deepspeed=.*: it does not work with tensor"):
        limits.check(replace(recipe, layer_stats=True), 8, file)
