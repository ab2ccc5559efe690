"""Classification and embeddings: on two ranks, whatever the ZeRO stage, what plain PyTorch trains in one process."""

from dataclasses import replace
from functools import cache

import pytest
from safetensors.torch import load_file

from deepspeed_recipes.recipe.methods import Classify, Embed
from deepspeed_recipes.recipe.run_folder import read_json, read_jsonl
from deepspeed_recipes.training import run as training_run
from tests.parity import gate, plain, texts
from tests.ranks import run_on
from tests.tiers import tiered
from tests.workers import mistakes

NOTICED = 100 * gate.LOSS
"""The mistakes below differ by more."""


@pytest.fixture(scope="module")
def examples(labelled, matching):
    """Return the examples of each method."""
    return {"classify": labelled, "embed": matching}


@pytest.fixture(scope="module")
def alone(model_folder, examples):
    """Return a function that trains in plain PyTorch, once for each case."""
    return cache(lambda *case: texts.train(case[0], model_folder, examples[case[0]], *case[1:]))


def trained(ranks, folder, model_folder, examples, method, stage, lora=False, target=training_run.main, **changes):
    """Train on two ranks, all eight examples in every step, and return the run."""
    recipe = gate.recipe_for(
        texts.SETTINGS, model_folder, examples[method], f"zero{stage}.json", method=METHODS[method]
    )
    lora = texts.ADAPTERS if lora else None
    return run_on(ranks, replace(recipe, lora=lora, **changes), folder, function=target)


METHODS = {"classify": Classify(class_weights="balanced"), "embed": Embed()}

CASES = [(method, stage, lora) for method in texts.MISTAKES for stage in range(4) for lora in (False, True)]


@pytest.mark.parametrize(("method", "stage", "lora"), tiered(CASES, {("classify", 3, False), ("embed", 3, False)}))
def test_same_model_as_plain_pytorch(ranks, tmp_path, model_folder, examples, alone, method, stage, lora):
    run = trained(ranks, tmp_path, model_folder, examples, method, stage, lora)
    records, weights = alone(method, lora)
    gate.agree_on_steps(run, records)
    exported = load_file(run.export / ("adapter_model.safetensors" if lora else "model.safetensors"))
    assert set(exported) == set(weights)
    gate.near(exported, weights)
    assert read_json(run.deepspeed)["zero_optimization"]["stage"] == stage


@pytest.mark.every
def test_micro_batches_of_any_size_are_one_batch_of_a_classifier(ranks, tmp_path, model_folder, examples, alone):
    run = trained(ranks, tmp_path, model_folder, examples, "classify", 2, micro_batch_size=1)
    gate.agree_on_steps(run, alone("classify", False)[0])


@pytest.mark.every
@pytest.mark.parametrize("count", [7, 5])
def test_each_text_of_an_epoch_that_ranks_cannot_share_evenly_counts_the_same(
    ranks, tmp_path, monkeypatch, model_folder, labelled, count
):
    """At the usual rate the loss of five texts is 0.003 after six steps, less than rounding leaves exact."""
    monkeypatch.setattr(texts, "SETTINGS", replace(texts.SETTINGS, learning_rate=1e-4))
    data = tmp_path / "few.jsonl"
    rows = labelled.read_text().splitlines(keepends=True)
    data.write_text("".join([*rows[: count - 1], rows[-1]]))  # with all three classes
    given = {"classify": data}
    run = trained(ranks, tmp_path, model_folder, given, "classify", 2, micro_batch_size=2)
    records, weights = texts.train("classify", model_folder, data, False)
    gate.agree_on_steps(run, records)
    for name, weight in load_file(run.export / "model.safetensors").items():
        assert plain.worst(weight, weights[name]) <= 1, name


@pytest.mark.parametrize(
    ("method", "mistake"),
    tiered(
        [(method, one) for method, made in texts.MISTAKES.items() for one in made],
        {("embed", "own rank"), ("embed", "no gradient through the gather")},
    ),
)
def test_a_wrong_reference_is_noticed(alone, method, mistake):
    (records, weights), (wrong, others) = alone(method, False), alone(method, False, mistake)
    assert abs(wrong[-1]["loss"] / records[-1]["loss"] - 1) > NOTICED
    assert any(plain.worst(others[name], weight) > 10 for name, weight in weights.items())


@pytest.mark.parametrize(
    ("method", "fault"),
    tiered([("classify", "loss_of_transformers"), ("embed", "constant_texts")], [("classify", "loss_of_transformers")]),
)
def test_a_wrong_run_is_noticed(ranks, tmp_path, model_folder, examples, alone, method, fault):
    """Transformers' own loss of a classifier is doubled on two ranks; without gradients the gather still gathers."""
    run = trained(ranks, tmp_path, model_folder, examples, method, 2, target=getattr(mistakes, fault), max_steps=2)
    with pytest.raises(AssertionError):
        gate.agree_on_steps(run, alone(method, False)[0][:2])
    if fault == "loss_of_transformers":
        expected = 2 * alone(method, False, "weights")[0][0]["loss"]
        assert read_jsonl(run.metrics)[0]["loss"] == pytest.approx(expected, rel=gate.LOSS)
