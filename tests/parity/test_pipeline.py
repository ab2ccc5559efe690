"""Pipelines train exactly the model that plain PyTorch trains in one process."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.prove import techniques
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.project import CONFIGS
from deepspeed_recipes.recipe.recipe import Data, Draft, Layout, Lora
from deepspeed_recipes.recipe.run_folder import RunFolder, read_jsonl, write_recipe
from deepspeed_recipes.training import export
from deepspeed_recipes.training.model import draft
from deepspeed_recipes.training.model.lora import add
from tests.parity import gate, plain
from tests.ranks import run_on
from tests.tiers import tiered
from tests.workers import mistakes

SETTINGS = plain.Settings()


@dataclass(frozen=True)
class Case:
    """One way to split a model."""

    layout: Layout
    world_size: int
    stage: int = 1
    micro_batch: int = 1
    checkpointing: bool = False
    family: str = "llama3-8b"

    def __str__(self) -> str:
        sizes = "x".join(str(size) for size in (self.layout.pipeline, self.layout.tensor, self.layout.sequence))
        return f"{self.family}-{sizes}-of-{self.world_size}-zero{self.stage}"


CASES = [
    Case(Layout(pipeline=2), 2, stage=0, micro_batch=2),
    Case(Layout(pipeline=2), 4, checkpointing=True),
]
IN_ALL = Case(Layout(pipeline=2, tensor=2, sequence=2), 16, family="qwen3-0.6b")
"""Data x tensor x pipeline x sequence, each 2."""
MORE = [
    IN_ALL,
    Case(Layout(pipeline=2, tensor=2, sequence=2), 8, family="qwen3-0.6b"),
    Case(Layout(pipeline=2), 2, checkpointing=True, family="gemma3-1b"),
    Case(Layout(pipeline=4), 4, stage=0, micro_batch=2, family="qwen3-0.6b"),
    Case(Layout(pipeline=2, tensor=2), 4, stage=0, family="qwen3-0.6b"),
    Case(Layout(pipeline=2, tensor=2), 4, micro_batch=2, checkpointing=True),
    Case(Layout(pipeline=2, sequence=2), 4, stage=0, checkpointing=True, family="gemma3-1b"),
    Case(Layout(pipeline=4), 8, family="gemma3-1b"),
    Case(Layout(pipeline=2, tensor=2), 8, checkpointing=True, family="qwen3-0.6b"),
    Case(Layout(pipeline=3), 3, stage=0, family="qwen3_moe-30b-a3b"),
    *(Case(Layout(pipeline=2), 2, family=family) for family in ("lfm2-1.2b", "falcon_h1-3b", "nemotron_h-30b-a3b")),
    Case(Layout(pipeline=2, tensor=2), 4, family="ministral3-8b"),
    Case(Layout(pipeline=2, sequence=2), 4, family="hunyuan-7b"),
    Case(Layout(pipeline=2), 2, checkpointing=True, family="glm4_5-air"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function that makes a small random model of a family, whose wrong gradients show."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / "model"
            tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
            whole = AutoConfig.for_model(**pages.find(family, "full").model.config)
            config = draft.shrink(whole, Draft(layers=4), tokenizer)
            config.initializer_range = 0.2
            config.num_key_value_heads = min(2, config.num_key_value_heads * 2)
            techniques.random_model(made[family], config)
        return made[family]

    return make


@pytest.fixture(scope="module")
def references(models, conversations):
    trained = {}

    def reference(family: str):
        if family not in trained:
            trained[family] = plain.train(models(family), conversations, SETTINGS)
        return trained[family]

    return reference


def recipe_of(case: Case, model: Path, data: Path, **changes):
    return gate.recipe_for(
        SETTINGS,
        model,
        data,
        f"zero{case.stage}.json",
        layout=case.layout,
        micro_batch_size=case.micro_batch,
        gradient_checkpointing=case.checkpointing,
        **changes,
    )


@pytest.mark.parametrize("case", tiered([*CASES, *MORE], CASES[1:]), ids=str)
def test_same_model_as_plain_pytorch(ranks, tmp_path, models, conversations, references, case):
    run = run_on(ranks, recipe_of(case, models(case.family), conversations), tmp_path, world_size=case.world_size)
    gate.agree(run, *references(case.family))


@pytest.mark.every
@pytest.mark.parametrize("name", ["pipeline.json", "tensor_parallel.json"])
def test_the_projects_own_files_split_stages_over_ranks(ranks, tmp_path, models, conversations, references, name):
    case = Case(Layout(pipeline=2, tensor=2), 4, family="qwen3-0.6b")
    recipe = recipe_of(case, models(case.family), conversations)
    run = run_on(ranks, replace(recipe, deepspeed=str(CONFIGS / name)), tmp_path, world_size=4)
    gate.agree(run, *references(case.family))


TIED = Case(Layout(pipeline=2), 2, stage=0, family="qwen3-0.6b")
SPLIT = Case(Layout(pipeline=2, tensor=2), 4, stage=0, family="qwen3-0.6b")


@pytest.mark.parametrize(
    ("mistake", "case"),
    tiered(
        [
            ("every_stage_counted", TIED),
            ("tied_weights_apart", TIED),
            ("norm_of_the_first_stage", TIED),
            ("own_heads_only", SPLIT),
            ("every_copy_reads_the_first_ones_share", IN_ALL),
            ("own_heads_only", IN_ALL),
            ("tied_weights_apart", IN_ALL),
            ("positions_from_zero", IN_ALL),
        ],
        {("tied_weights_apart", TIED)},
    ),
)
def test_a_mistake_is_noticed(ranks, tmp_path, models, conversations, references, mistake, case):
    run = RunFolder(tmp_path / "run")
    write_recipe(run, recipe_of(case, models(case.family), conversations))
    ranks.run(getattr(mistakes, mistake), str(run.path), log=tmp_path / "log", world_size=case.world_size)
    assert len(read_jsonl(run.metrics)) == SETTINGS.steps
    with pytest.raises(AssertionError):
        gate.agree(run, *references(case.family))


@pytest.mark.parametrize(("held_out", "world_size"), tiered([(7, 2), (1, 2), (7, 4), (3, 4)], {(7, 2)}))
def test_any_number_of_held_out_examples_is_measured(ranks, tmp_path, models, conversations, held_out, world_size):
    """Seven in micro-batches of two: the last one is not full; and fewer than a micro-batch, or than ranks."""
    validation = tmp_path / "held_out.jsonl"
    validation.write_text("".join(conversations.read_text().splitlines(keepends=True)[:held_out]))
    case = Case(Layout(pipeline=2), world_size, stage=0, micro_batch=2, family="qwen3-0.6b")
    folder = models(case.family)
    data = Data(path=str(conversations), validation=str(validation), metric="exact_match", max_new_tokens=8)
    run = run_on(
        ranks, replace(recipe_of(case, folder, conversations, max_steps=1), data=data), tmp_path, world_size=world_size
    )
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        sums = [plain.summed_loss(model, *one, SETTINGS) for one in plain.examples(validation, tokenizer, SETTINGS)]
    expected = sum(total for total, _, _ in sums) / sum(count for _, count, _ in sums)
    assert read_jsonl(run.evaluations)[0]["loss"] == pytest.approx(expected.item(), rel=gate.LOSS)


@pytest.mark.parametrize(
    ("examples", "micro_batch", "world_size"),
    tiered(
        [(count, size, ranks) for count in (7, 5, 3) for size in (1, 2, 4) for ranks in (2, 4)], {(7, 2, 2), (5, 4, 4)}
    ),
)
def test_an_epoch_that_ranks_cannot_share_evenly_counts_every_example_once(
    ranks, tmp_path, models, conversations, examples, micro_batch, world_size
):
    """The last micro-batch is not full, or there are fewer micro-batches than usual, or one column has none.

    A single example is learned by heart within five steps; rounding is 2e-5 of its loss of 0.01, and nothing of others.
    """
    data = tmp_path / "few.jsonl"
    data.write_text("".join(conversations.read_text().splitlines(keepends=True)[:examples]))
    case = Case(Layout(pipeline=2), world_size, 0, micro_batch, family="qwen3-0.6b")
    run = run_on(ranks, recipe_of(case, models(case.family), data), tmp_path, world_size=world_size)
    gate.agree(run, *plain.train(models(case.family), data, SETTINGS))


def test_packed_sequences_train_the_same_model(ranks, tmp_path, models, conversations, references):
    case = Case(Layout(pipeline=2), 2, family="gemma3-1b")
    recipe = recipe_of(case, models(case.family), conversations, packing=True, sequence_length=128)
    run = run_on(ranks, replace(recipe, global_batch_size=4), tmp_path)  # all conversations stand in four rows
    assert read_jsonl(run.metrics)[0]["tokens"] == read_jsonl(run.metrics)[-1]["tokens"] / SETTINGS.steps
    gate.agree(run, *references(case.family))


@pytest.mark.every
def test_a_resumed_pipeline_trains_the_same_model(ranks, tmp_path, models, conversations, references):
    case = Case(Layout(pipeline=2, tensor=2), 4, family="qwen3-0.6b")
    recipe = recipe_of(case, models(case.family), conversations, save_steps=3)
    run = gate.run_with_a_break(ranks, recipe, tmp_path, world_size=4)
    gate.agree(run, *references(case.family))
    saved = export.load(run.checkpoints / "checkpoint-6").state_dict()
    for name, weight in export.load(run.export).state_dict().items():
        assert torch.equal(weight, saved[name])


ADAPTED = [
    Case(Layout(pipeline=2), 2, family="qwen3-0.6b"),
    Case(Layout(pipeline=2), 4, checkpointing=True, family="gemma3-1b"),
    Case(Layout(pipeline=2, tensor=2), 4, family="qwen3-0.6b"),
]


@pytest.mark.parametrize("case", tiered(ADAPTED, ADAPTED[:1]), ids=str)
def test_adapters_train_as_in_one_process(ranks, tmp_path, models, conversations, case):
    lora = Lora(rank=4, alpha=8)
    model = models(case.family)
    seed = recipe_of(TIED, model, conversations).seed
    records, weights = plain.train(model, conversations, SETTINGS, prepare=lambda whole: add(whole, lora, seed))
    run = run_on(ranks, recipe_of(case, model, conversations, lora=lora), tmp_path, world_size=case.world_size)
    gate.agree_on_adapters(run, records, weights)
