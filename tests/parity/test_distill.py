"""Distillation: on two ranks, whatever the ZeRO stage, what a plain loop with whole logits trains in one process."""

from dataclasses import replace
from functools import cache

import pytest
from safetensors.torch import load_file

from deepspeed_recipes.recipe.methods import Distill
from deepspeed_recipes.recipe.recipe import Lora
from deepspeed_recipes.recipe.run_folder import read_json, read_jsonl
from deepspeed_recipes.training.model import lora as adapters
from tests.parity import gate, plain, plain_distill
from tests.parity.plain_distill import NONE, SEED, Mistakes
from tests.ranks import read_logs, run_on
from tests.tiers import tiered

SETTINGS = plain.Settings(learning_rate=3e-3)
ADAPTERS = Lora(rank=4, alpha=8)
NOTICED = 100 * gate.LOSS
"""The mistakes below differ by more."""
LOSSES = {
    "mixed": Distill(loss="forward_kl", temperature=2.0, alpha=0.3),
    "reverse": Distill(loss="reverse_kl", temperature=1.5),
    "jsd": Distill(loss="jsd", beta=0.2),
    "own": Distill(loss="reverse_kl", on_policy=0.6, max_new_tokens=12),
}


@pytest.fixture(scope="module")
def alone(model_folder, teacher_folder, conversations):
    """Return a function that trains in plain PyTorch, once for each case."""

    @cache
    def trained(settings: Distill, lora: bool = False, mistakes: Mistakes = NONE, teacher: str = ""):
        prepare = (lambda model: adapters.add(model, ADAPTERS, SEED)) if lora else (lambda model: model)
        folder = teacher or str(teacher_folder)
        return plain_distill.train(model_folder, folder, conversations, SETTINGS, settings, mistakes, prepare)

    return trained


def recipe_for(model_folder, teacher_folder, conversations, stage, settings, lora=False, **changes):
    """Return the recipe of a case."""
    return gate.recipe_for(
        SETTINGS,
        model_folder,
        conversations,
        f"zero{stage}.json",
        lora=ADAPTERS if lora else None,
        method=replace(settings, teacher=str(teacher_folder)),
        micro_batch_size=2,
        **changes,
    )


CASES = [(name, stage, lora) for name in LOSSES for stage in range(4) for lora in (False, True)]
CORE = {("jsd", 3, True)}


@pytest.mark.parametrize(("name", "stage", "lora"), tiered(CASES, CORE))
def test_same_model_as_plain_pytorch(
    ranks, tmp_path, model_folder, teacher_folder, conversations, alone, name, stage, lora
):
    recipe = recipe_for(model_folder, teacher_folder, conversations, stage, LOSSES[name], lora)
    run = run_on(ranks, recipe, tmp_path)
    agree(run, *alone(LOSSES[name], lora))
    assert read_json(run.deepspeed)["zero_optimization"]["stage"] == stage


def agree(run, records, weights):
    """Fail unless losses, their parts, norms and weights are the reference's."""
    gate.agree_on_steps(run, records)
    for ours, theirs in zip(read_jsonl(run.metrics), records, strict=True):
        for name in ("divergence", "cross_entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    adapter = run.export / "adapter_model.safetensors"
    exported = load_file(adapter if adapter.exists() else run.export / "model.safetensors")
    known = {name.replace(".default.", "."): weight for name, weight in weights.items()}
    assert len(exported) >= 20
    gate.near(exported, known)


@pytest.mark.every
@pytest.mark.parametrize(("examples", "stage"), [(7, 0), (7, 3), (5, 2), (1, 3)])
def test_an_epoch_that_ranks_cannot_share_evenly_counts_every_example_once(
    ranks, tmp_path, model_folder, teacher_folder, conversations, examples, stage
):
    data = tmp_path / "few.jsonl"
    data.write_text("".join(conversations.read_text().splitlines(keepends=True)[:examples]))
    run = run_on(ranks, recipe_for(model_folder, teacher_folder, data, stage, LOSSES["mixed"]), tmp_path)
    agree(run, *plain_distill.train(model_folder, str(teacher_folder), data, SETTINGS, LOSSES["mixed"]))


@pytest.mark.every
def test_packed_under_zero3(ranks, tmp_path, model_folder, teacher_folder, conversations, alone):
    """The teacher is tried before ZeRO-3 shards whatever is made: what a trial makes, too."""
    changes = {"packing": True, "sequence_length": 128}
    recipe = recipe_for(model_folder, teacher_folder, conversations, 3, LOSSES["mixed"], **changes)
    run = run_on(ranks, replace(recipe, global_batch_size=4), tmp_path)  # all conversations stand in four rows
    agree(run, *alone(LOSSES["mixed"]))


IN_4_BITS = replace(LOSSES["mixed"], teacher_quantization="nf4")


@pytest.mark.every
@pytest.mark.parametrize("stage", [2, 3])
def test_a_teacher_in_4_bits(ranks, tmp_path, model_folder, teacher_folder, conversations, alone, stage):
    run = run_on(ranks, recipe_for(model_folder, teacher_folder, conversations, stage, IN_4_BITS), tmp_path)
    agree(run, *alone(IN_4_BITS))
    whole = sum(weight.numel() for weight in load_file(teacher_folder / "model.safetensors").values())
    assert f"teacher: {whole:,} parameters" in read_logs(tmp_path / "log")[0], "unpacked"


def test_a_teacher_in_16_bits_would_be_noticed(alone):
    noticed(alone(IN_4_BITS), alone(LOSSES["mixed"]))


MISTAKES = {
    "direction": ("reverse", Mistakes(swapped=True)),
    "temperature": ("mixed", Mistakes(unsquared=True)),
    "beta": ("jsd", Mistakes(beta_of_student=True)),
    "ranks": ("mixed", Mistakes(halved=True)),
    "prompts": ("mixed", Mistakes(learn_prompts=True)),
    "answers": ("own", Mistakes(never_writes=True)),
    "stale": ("own", Mistakes(stale=True)),
}


@pytest.mark.parametrize("mistake", tiered(MISTAKES, {"temperature", "answers"}))
def test_a_wrong_reference_is_noticed(alone, mistake):
    name, mistakes = MISTAKES[mistake]
    noticed(alone(LOSSES[name]), alone(LOSSES[name], mistakes=mistakes))


@pytest.mark.every
@pytest.mark.parametrize("change", [{"alpha": 0.4}, {"temperature": 2.2}, {"loss": "jsd"}])
def test_another_setting_is_noticed(alone, change):
    noticed(alone(LOSSES["mixed"]), alone(replace(LOSSES["mixed"], **change)))


@pytest.mark.every
def test_another_teacher_is_noticed(alone, model_folder):
    noticed(alone(LOSSES["mixed"]), alone(LOSSES["mixed"], teacher=str(model_folder)))


def noticed(right, wrong):
    """Fail unless losses and weights differ by far more than the comparison allows."""
    (records, weights), (others, changed) = right, wrong
    assert abs(others[-1]["loss"] / records[-1]["loss"] - 1) > NOTICED
    assert any(plain.worst(changed[name], weight) > 10 for name, weight in weights.items())
