"""Tensor parallelism, alone and with data parallelism, trains exactly the model that plain PyTorch trains."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from deepspeed_recipes.prove import techniques
from deepspeed_recipes.recipe import compatibility, pages
from deepspeed_recipes.recipe.recipe import Data, Draft, Layout, Lora
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.model import draft
from tests.parity import gate, plain
from tests.ranks import run_on
from tests.small import language_families
from tests.tiers import tiered
from tests.workers import mistakes, split_layers

SETTINGS = plain.Settings()
RELATIVE = gate.LOSS


@pytest.fixture(scope="module")
def reference(model_folder, conversations):
    return plain.train(model_folder, conversations, SETTINGS)


def exact(model_folder, conversations, stage, **changes):
    recipe = gate.recipe_for(SETTINGS, model_folder, conversations, f"zero{stage}.json")
    return replace(recipe, **{"layout": Layout(tensor=2), "micro_batch_size": 2, **changes})


def differences(run, reference) -> dict[str, float]:
    """Return the largest difference of losses, of gradient norms, and of weights as a share of what is allowed."""
    records, weights = reference
    logged = read_jsonl(run.metrics)
    assert [row["step"] for row in logged] == list(range(1, SETTINGS.steps + 1))
    found = {
        key: max(abs(ours[key] / theirs[key] - 1) for ours, theirs in zip(logged, records, strict=True))
        for key in ("loss", "grad_norm")
    }
    exported = load_file(run.export / "model.safetensors")
    assert set(exported) == set(weights) - {"lm_head.weight"}
    found["weights"] = max(plain.worst(weight, weights[name]) for name, weight in exported.items())
    return found


@pytest.mark.parametrize(
    ("stage", "world_size"),
    tiered([(stage, size) for stage in range(4) for size in (2, 4)], {(3, 2)}),
)
def test_same_model_as_plain_pytorch(ranks, tmp_path, model_folder, conversations, reference, stage, world_size):
    recipe = exact(model_folder, conversations, stage, gradient_checkpointing=stage in (1, 3))
    run = run_on(ranks, recipe, tmp_path, world_size)
    found = differences(run, reference)
    assert found["loss"] < RELATIVE and found["grad_norm"] < RELATIVE and found["weights"] <= 1, found
    engine = read_json(run.deepspeed)
    assert engine["zero_optimization"]["stage"] == stage
    assert engine["tensor_parallel"]["autotp_size"] == 2
    assert engine["gradient_accumulation_steps"] == 8 // 2 // (world_size // 2)


@pytest.mark.parametrize(
    ("mistake", "shows_in"),
    tiered([("counted_twice", "grad_norm"), ("parts_of_norms", "weights")], {("parts_of_norms", "weights")}),
)
def test_a_mistake_is_noticed(ranks, tmp_path, model_folder, conversations, reference, mistake, shows_in):
    recipe = exact(model_folder, conversations, 1)
    run = run_on(ranks, recipe, tmp_path, 4, function=getattr(split_layers, mistake))
    assert differences(run, reference)[shows_in] > {"grad_norm": 1000 * RELATIVE, "weights": 100}[shows_in]


@pytest.mark.every
@pytest.mark.parametrize("stage", [1, 3])
def test_the_export_has_the_same_bytes_as_unsplit(ranks, tmp_path, model_folder, conversations, stage):
    """A learning rate that moves nothing: what is trained stays what was loaded."""
    still = exact(model_folder, conversations, stage, learning_rate=1e-60, weight_decay=0.0, max_steps=1)
    exports = []
    for name, recipe in (("split", still), ("whole", replace(still, layout=Layout(), micro_batch_size=1))):
        (tmp_path / name).mkdir()
        exports.append(run_on(ranks, recipe, tmp_path / name, 4, function=mistakes.untrained).export)
    # The model card and what training/ keeps are no part of the model; they say in which layout it was trained.
    beside = {"README.md", "training"}
    names, others = (sorted({file.name for file in export.iterdir()} - beside) for export in exports)
    assert "model.safetensors" in names and names == others
    for name in set(names) - {"expected.json"}:
        assert (exports[0] / name).read_bytes() == (exports[1] / name).read_bytes(), name
    # What the ranks answered is computed in parts, and rounds otherwise.
    answers, alone = (
        [value for text in read_json(export / "expected.json")["texts"] for value in text["logprobs"]]
        for export in exports
    )
    assert answers == pytest.approx(alone, abs=1e-4)


@pytest.mark.every
@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_saving_and_resuming_match_the_unsplit_model(ranks, tmp_path, model_folder, conversations, stage):
    data = Data(path=str(conversations), validation=str(conversations), metric="exact_match", max_new_tokens=60)
    recipe = exact(
        model_folder,
        conversations,
        stage,
        data=data,
        learning_rate=3e-3,
        max_steps=40,
        save_steps=30,
        keep_checkpoints=9,
    )
    split = run_on(ranks, recipe, tmp_path, 4)
    (tmp_path / "plain").mkdir()
    whole = run_on(ranks, replace(recipe, layout=Layout(), save_steps=0), tmp_path / "plain")
    ours, theirs = (read_jsonl(run.evaluations) for run in (split, whole))
    assert [row["step"] for row in ours] == [0, 40]
    for mine, plains in zip(ours, theirs, strict=True):
        # Forty steps at this rate blow rounding up; what the loss is without them is exact.
        assert mine["loss"] == pytest.approx(plains["loss"], rel=2e-2 if mine["step"] else RELATIVE)
        assert mine["exact_match"] == plains["exact_match"]
    assert ours[1]["exact_match"] > 0.4, "or equality would say nothing"
    assert [row["tokens"] for row in read_jsonl(split.metrics)] == [row["tokens"] for row in read_jsonl(whole.metrics)]

    again = RunFolder(tmp_path / "again")
    shutil.copytree(split.path, again.path)
    shutil.rmtree(again.checkpoints / "checkpoint-40", ignore_errors=True)
    shutil.rmtree(again.export)
    again.metrics.unlink()
    ranks.check(training_run.main, str(again.path), world_size=4, log=tmp_path / "again.log")
    records = {row["step"]: row for row in read_jsonl(split.metrics)}
    resumed = read_jsonl(again.metrics)
    assert [row["step"] for row in resumed] == list(range(31, 41))
    for row in resumed:
        assert row["loss"] == records[row["step"]]["loss"]
        assert row["grad_norm"] == records[row["step"]]["grad_norm"]
    assert (again.export / "model.safetensors").read_bytes() == (split.export / "model.safetensors").read_bytes()
    saved = load_file(again.checkpoints / "checkpoint-30" / "model.safetensors")
    assert {name: weight.shape for name, weight in saved.items()} == {
        name: weight.shape for name, weight in load_file(split.export / "model.safetensors").items()
    }


@pytest.mark.every
@pytest.mark.parametrize("stage", range(4))
def test_adapters_train_as_in_the_unsplit_model(ranks, tmp_path, model_folder, conversations, stage):
    recipe = exact(model_folder, conversations, stage, lora=Lora(rank=4, alpha=8))
    runs = {}
    for name, layout in (("split", Layout(tensor=2)), ("whole", Layout())):
        (tmp_path / name).mkdir()
        world_size = 4 if name == "split" else 2
        runs[name] = run_on(ranks, replace(recipe, layout=layout), tmp_path / name, world_size)
    for ours, theirs in zip(*(read_jsonl(run.metrics) for run in runs.values()), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=RELATIVE)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=RELATIVE)
    split, whole = (load_file(run.export / "adapter_model.safetensors") for run in runs.values())
    assert split.keys() == whole.keys() and len(split) == 28
    for name, weight in split.items():
        assert weight.abs().max() > 0 and plain.worst(weight, whole[name]) <= 1, name


@pytest.mark.every
def test_adapters_initialised_differently_are_synchronised(ranks, tmp_path, model_folder, conversations):
    """Rank 0 has drawn the draft's weights before: its adapters are others, until they are sent to the rest."""
    model = pages.page("llama3").full("1b").model
    recipe = exact(model_folder, conversations, 1, model=model, draft=Draft(enabled=True), lora=Lora(rank=4))
    run = run_on(ranks, recipe, tmp_path)
    assert read_json(run.summary)["logit_difference"] < 1e-5


def families_to_split() -> list[str]:
    return [name for name in language_families() if not {_type(name)} & set(compatibility.FAMILIES["tensor"])]


def _type(family: str) -> str:
    return next(iter(pages.page(family).SIZES.values())).config["model_type"]


HEADS = [(family, tied) for family in families_to_split() for tied in (True, False)]


@pytest.mark.parametrize(("family", "tied"), tiered(HEADS, {("llama3", False)}))
def test_a_loss_in_tiles_reads_the_whole_head(ranks, tmp_path, conversations, family, tied):
    """What a run has at real sizes: tiles, checkpointing and ZeRO-1 over the ranks of a split model."""
    whole = {**next(iter(pages.page(family).SIZES.values())).config, "tie_word_embeddings": tied}
    tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
    config = draft.shrink(AutoConfig.for_model(**whole), Draft(layers=2), tokenizer)
    for name in ("attention_dropout", "residual_dropout"):  # Seed-OSS has both: what is dropped differs from plain
        if hasattr(config, name):
            setattr(config, name, 0.0)
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = max(2, config.num_key_value_heads)
    model = tmp_path / "model"
    reference = plain_where_fp32_is_exact(model, config, conversations)
    recipe = exact(model, conversations, 1, tiled_loss=True, gradient_checkpointing=True)
    gate.agree(run_on(ranks, recipe, tmp_path), *reference)
    if not tied:  # a tied head is the embeddings, which are never split
        (tmp_path / "wrong").mkdir()
        wrong = run_on(ranks, replace(recipe, max_steps=1), tmp_path / "wrong", function=split_layers.head_in_parts)
        assert abs(read_jsonl(wrong.metrics)[0]["loss"] / reference[0][0]["loss"] - 1) > 100 * gate.LOSS


def plain_where_fp32_is_exact(model, config, conversations):
    """Write a model that is as steep as possible, and train it in plain PyTorch, in fp64.

    A gated delta rule that begins as steep as the other layers rounds in fp32 by more than the bounds, in plain PyTorch
    too: the model is then less steep, until fp32 and fp64 agree within half of them.
    """
    for steep in (0.2, 0.1, 0.05):
        config.initializer_range = steep
        techniques.random_model(model, config)
        records, weights = plain.train(model, conversations, SETTINGS)
        precise, expected = plain.train(model, conversations, SETTINGS, dtype=torch.float64)
        apart = {
            key: max(abs(one[key] / other[key] - 1) for one, other in zip(records, precise, strict=True)) / bound
            for key, bound in (("loss", gate.LOSS), ("grad_norm", gate.NORM))
        }
        apart["weights"] = max(plain.worst(weight, expected[name]) for name, weight in weights.items())
        if max(apart.values()) <= 0.5:
            return precise, expected
    raise AssertionError(f"plain PyTorch rounds too much: {apart}")


BY_GRAPH = {
    "olmo3": pages.page("olmo3").SIZES["7b"].config,
    "opt": {"model_type": "opt", "dropout": 0.0},
    "gptj": {"model_type": "gptj"},
}
"""OLMo's plan splits whole inputs, which AutoTP refuses; OPT and GPT-J have no plan: the layers' graph says how."""


@pytest.mark.every
@pytest.mark.parametrize(("kind", "stage"), [(kind, stage) for kind in BY_GRAPH for stage in (1, 3)])
def test_what_autotp_cannot_split_trains_as_the_unsplit_model(ranks, tmp_path, conversations, kind, stage):
    page = pages.page("olmo3").full("7b")
    source = replace(page, model=replace(page.model, config=BY_GRAPH[kind]), draft=Draft(True, 2, 64))
    draft.write(source, tmp_path / "model", torch.float32)
    recipe = exact(tmp_path / "model", conversations, stage, precision="fp32")
    split = run_on(ranks, recipe, tmp_path, 4)
    (tmp_path / "whole").mkdir()
    whole = run_on(ranks, replace(recipe, layout=Layout()), tmp_path / "whole")
    for ours, theirs in zip(read_jsonl(split.metrics), read_jsonl(whole.metrics), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=RELATIVE)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=10 * RELATIVE)
    weights, expected = (load_file(run.export / "model.safetensors") for run in (split, whole))
    assert weights.keys() == expected.keys()
    assert max(plain.worst(weight, expected[name]) for name, weight in weights.items()) <= 1
