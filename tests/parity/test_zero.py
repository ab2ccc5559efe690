"""ZeRO 0, 1, 2 and 3 on two ranks train exactly the model that plain PyTorch trains in one process."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from deepspeed_recipes.recipe.run_folder import read_json, read_jsonl
from tests.parity import gate, plain
from tests.ranks import run_on
from tests.small import in_sub_groups
from tests.tiers import tiered

SETTINGS = plain.Settings()
RELATIVE = gate.LOSS
"""The mistakes below differ by a hundred times more."""


@pytest.fixture(scope="module")
def reference(model_folder, conversations):
    return plain.train(model_folder, conversations, SETTINGS)


CASES = [(stage, accumulation) for stage in range(4) for accumulation in (1, 2)]


@pytest.mark.parametrize(("stage", "accumulation"), tiered(CASES, {(0, 1), (2, 2), (3, 2)}))
def test_same_model_as_plain_pytorch(ranks, tmp_path, model_folder, conversations, reference, stage, accumulation):
    recipe = gate.recipe_for(
        SETTINGS,
        model_folder,
        conversations,
        f"zero{stage}.json",
        micro_batch_size=8 // 2 // accumulation,
        gradient_checkpointing=stage == 2,
    )
    run = run_on(ranks, recipe, tmp_path)

    records, weights = reference
    gate.agree_on_steps(run, records, norms=RELATIVE)
    exported = load_file(run.export / "model.safetensors")
    assert set(exported) == set(weights) - {"lm_head.weight"}
    gate.near(exported, weights)
    engine = read_json(run.deepspeed)
    assert engine["zero_optimization"]["stage"] == stage
    assert engine["gradient_accumulation_steps"] == accumulation
    assert engine["train_batch_size"] == 8


@pytest.mark.parametrize(
    ("examples", "micro_batch_size", "stage"),
    tiered(
        [(count, size, stage) for count in (7, 5, 1) for size in (1, 2, 4) for stage in (0, 3)], {(7, 2, 0), (1, 1, 3)}
    ),
)
def test_an_epoch_that_ranks_cannot_share_evenly_counts_every_example_once(
    ranks, tmp_path, model_folder, conversations, examples, micro_batch_size, stage
):
    """Every step is a whole epoch of fewer examples than a global batch: one rank has fewer of them, or none."""
    data = tmp_path / "few.jsonl"
    data.write_text("".join(conversations.read_text().splitlines(keepends=True)[:examples]))
    reference = plain.train(model_folder, data, SETTINGS)
    recipe = gate.recipe_for(
        SETTINGS, model_folder, data, f"zero{stage}.json", micro_batch_size=micro_batch_size, save_steps=3
    )
    run = gate.run_with_a_break(ranks, recipe, tmp_path)
    gate.agree(run, *reference)
    per_step = len({row["tokens"] / row["step"] for row in read_jsonl(run.metrics)})
    assert per_step == 1, "a filler's tokens are not counted"


@pytest.mark.every
def test_same_model_in_many_sub_groups(ranks, tmp_path, model_folder, conversations, reference):
    recipe = gate.recipe_for(SETTINGS, model_folder, conversations, in_sub_groups(tmp_path), save_steps=3)
    run = gate.run_with_a_break(ranks, recipe, tmp_path)
    gate.agree(run, *reference, norms=RELATIVE)


@pytest.mark.parametrize("epsilon", [SETTINGS.epsilon, 1e-8])
def test_the_reference_is_exact_enough(model_folder, conversations, epsilon):
    """The bounds mean something only where rounding alone stays inside them."""
    settings = replace(SETTINGS, epsilon=epsilon)
    _, single = plain.train(model_folder, conversations, settings)
    _, double = plain.train(model_folder, conversations, settings, torch.float64)
    differences = [plain.worst(weight.double(), double[name]) for name, weight in single.items()]
    assert (max(differences) < 0.5) == (epsilon == SETTINGS.epsilon)


def test_clipping_is_part_of_the_comparison(reference):
    assert all(row["grad_norm"] > SETTINGS.clip for row in reference[0][:3])


@pytest.mark.parametrize("mistake", ["mean_of_means", "learn_prompts", "decay_everything", "clip"])
def test_a_wrong_reference_is_noticed(model_folder, conversations, reference, mistake):
    wrong = replace(SETTINGS, **{mistake: 10.0 if mistake == "clip" else True})
    records, weights = plain.train(model_folder, conversations, wrong)
    loss_differs = abs(records[-1]["loss"] / reference[0][-1]["loss"] - 1) > 100 * RELATIVE
    weights_differ = any((weights[name] - reference[1][name]).abs().max() > 1e-3 for name in weights)
    assert loss_differs and weights_differ
