"""Sequence parallelism trains exactly the model that plain PyTorch trains in one process, at every ZeRO stage."""

from dataclasses import dataclass, replace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.recipe.recipe import Layout, Lora
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from deepspeed_recipes.training.model.lora import add
from tests import ROOT
from tests.parity import gate, plain
from tests.ranks import run_on
from tests.tiers import tiered
from tests.workers import mistakes

SETTINGS = plain.Settings()
TWO, FOUR = Layout(sequence=2), Layout(sequence=4)
ROWS = 4
"""In which all conversations stand when they are packed."""


@dataclass(frozen=True)
class Case:
    """One way to divide sequences."""

    stage: int
    layout: Layout = TWO
    world_size: int = 2
    accumulation: int = 1
    packing: bool = False
    checkpointing: bool = False

    def __str__(self) -> str:
        how = ["packed"] * self.packing + ["checkpointing"] * self.checkpointing
        others = [f"{self.layout.pipeline}stages"] * (self.layout.pipeline > 1)
        others += [f"{self.layout.tensor}tensor"] * (self.layout.tensor > 1)
        sizes = "-".join([f"{self.layout.sequence}of{self.world_size}", *others, f"accumulate{self.accumulation}"])
        return "-".join([f"zero{self.stage}", sizes, *how])


CASES = [
    Case(stage=0, accumulation=2),
    Case(stage=1, checkpointing=True, packing=True),
    Case(stage=2, world_size=4, packing=True),
    Case(stage=3, accumulation=2, checkpointing=True),
]
MORE = [
    Case(stage=3, layout=FOUR, world_size=4, accumulation=2, checkpointing=True),
    *(
        case
        for stage in range(4)
        for case in (
            Case(stage, accumulation=1),
            Case(stage, accumulation=2, packing=True, checkpointing=True),
            Case(stage, world_size=4),
            Case(stage, world_size=4, accumulation=2, packing=True),
            Case(stage, FOUR, world_size=4, packing=True),
        )
        if case not in CASES
    ),
    Case(1, Layout(sequence=2, pipeline=2), world_size=4, accumulation=2, packing=True, checkpointing=True),
    Case(1, Layout(sequence=2, tensor=2), world_size=4, packing=True),
    Case(0, Layout(sequence=2, tensor=2, pipeline=2), world_size=8, accumulation=2),
]


@pytest.fixture(scope="module")
def reference(model_folder, conversations):
    return plain.train(model_folder, conversations, SETTINGS)


@pytest.fixture(scope="module")
def tokens(model_folder, conversations):
    """Return how many tokens the data has."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    turns = [row["messages"] for row in read_jsonl(conversations)]
    return sum(len(tokenizer.apply_chat_template(one, return_dict=True)["input_ids"]) for one in turns)


def recipe_of(case, model, data, **changes):
    rows = ROWS if case.packing else 8
    copies = case.world_size // (case.layout.sequence * case.layout.tensor * case.layout.pipeline)
    return gate.recipe_for(
        SETTINGS,
        model,
        data,
        f"zero{case.stage}.json",
        layout=case.layout,
        global_batch_size=rows,
        micro_batch_size=rows // copies // case.accumulation,
        packing=case.packing,
        sequence_length=96,
        gradient_checkpointing=case.checkpointing,
        **changes,
    )


@pytest.mark.parametrize("case", tiered([*CASES, *MORE], CASES[2:]), ids=str)
def test_same_model_as_plain_pytorch(ranks, tmp_path, model_folder, conversations, reference, tokens, case):
    run = run_on(ranks, recipe_of(case, model_folder, conversations), tmp_path, world_size=case.world_size)
    gate.agree(run, *reference)
    logged = read_jsonl(run.metrics)
    assert [row["tokens"] for row in logged] == [tokens * step for step in range(1, SETTINGS.steps + 1)]
    engine = read_json(run.deepspeed)
    assert engine["zero_optimization"]["stage"] == case.stage
    assert engine["gradient_accumulation_steps"] == case.accumulation


@pytest.mark.every
@pytest.mark.parametrize("template", ["zero2_offload", "zero3_offload", "zero3_offload_params", "sequence_parallel"])
def test_it_works_with_any_template(ranks, tmp_path, model_folder, conversations, reference, template):
    recipe = recipe_of(Case(stage=3, accumulation=2), model_folder, conversations)
    run = run_on(ranks, replace(recipe, deepspeed=str(ROOT / "configs" / f"{template}.json")), tmp_path)
    gate.agree(run, *reference)


PACKED = Case(stage=1, packing=True)
ALONE = Case(stage=1)
SPREAD = Case(stage=0, layout=FOUR, world_size=4)


@pytest.mark.parametrize(
    ("mistake", "case"),
    tiered(
        [
            ("gradients_times_size", ALONE),
            ("masks_of_parts", PACKED),
            ("shifted_after_the_cut", ALONE),
            ("positions_from_zero", ALONE),
            ("heads_of_one", SPREAD),
        ],
        {("masks_of_parts", PACKED)},
    ),
)
def test_a_mistake_is_noticed(ranks, tmp_path, model_folder, conversations, reference, mistake, case):
    run = RunFolder(tmp_path / "run")
    write_recipe(run, recipe_of(case, model_folder, conversations, save_steps=0))
    ranks.run(getattr(mistakes, mistake), str(run.path), log=tmp_path / "log", world_size=case.world_size)
    assert len(read_jsonl(run.metrics)) == SETTINGS.steps
    with pytest.raises(AssertionError):
        gate.agree_on_steps(run, reference[0])


@pytest.mark.every
def test_a_resumed_run_trains_the_same_model(ranks, tmp_path, model_folder, conversations, reference):
    recipe = recipe_of(Case(stage=3), model_folder, conversations, save_steps=3)
    run = gate.run_with_a_break(ranks, recipe, tmp_path)
    gate.agree(run, *reference)
    saved = AutoModelForCausalLM.from_pretrained(run.checkpoints / "checkpoint-6").state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(run.export).state_dict().items():
        assert weight.equal(saved[name])


@pytest.mark.every
def test_adapters_train_as_in_one_process(ranks, tmp_path, model_folder, conversations):
    lora = Lora(rank=4, alpha=8)
    case = Case(stage=2, checkpointing=True)
    recipe = recipe_of(case, model_folder, conversations, lora=lora)
    records, weights = plain.train(
        model_folder, conversations, SETTINGS, prepare=lambda whole: add(whole, lora, recipe.seed)
    )
    run = run_on(ranks, recipe, tmp_path)
    gate.agree_on_adapters(run, records, weights)
