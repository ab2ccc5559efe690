"""Runs that learn from feedback: a resumed one is the same run, and the report shows the method's own numbers."""

import json
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from deepspeed_recipes.recipe.methods import Kto
from deepspeed_recipes.recipe.recipe import Lora, Schedule
from deepspeed_recipes.recipe.run_folder import read_jsonl
from deepspeed_recipes.report.page import Chart
from deepspeed_recipes.report.run_data import read
from deepspeed_recipes.report.sections import curves
from deepspeed_recipes.training.methods import kto
from deepspeed_recipes.training.model.draft import TINY_MODEL
from tests.parity import gate
from tests.ranks import run_on
from tests.small import small
from tests.tiers import tiered

NUMBERS = {
    "dpo": {"rewards/margins", "rewards/accuracies"},
    "kto": {"kl", "rewards/chosen", "rewards/rejected"},
    "orpo": {"nll_loss", "odds_loss", "rewards/margins", "rewards/accuracies"},
    "simpo": {"rewards/margins", "rewards/accuracies"},
}


@pytest.mark.parametrize("method", tiered(NUMBERS, ("kto",)))
def test_it_resumes_exactly_and_its_numbers_are_in_the_report(ranks, tmp_path, model_folder, pairs, judged, method):
    data = judged if method == "kto" else pairs
    recipe = small(model_folder, data, "zero2.json", method=method, lora=Lora(rank=4), save_steps=3, micro_batch_size=2)
    recipe = replace(recipe, data=replace(recipe.data, validation=str(data)), schedule=Schedule("cosine", 0.1))
    run = run_on(ranks, replace(recipe, learning_rate=3e-3), tmp_path)
    records = read_jsonl(run.metrics)
    gate.resume(ranks, run, tmp_path)
    numbers = {"loss", "grad_norm"} | NUMBERS[method]
    for row, before in zip(read_jsonl(run.metrics), records, strict=True):
        for name in numbers:
            assert row[name] == pytest.approx(before[name], rel=1e-6, abs=1e-9), (row["step"], name)
    drawn = {block.title for block in curves.section(read(run.path)).blocks if isinstance(block, Chart)}
    assert drawn >= {curves.named(recipe, name) for name in NUMBERS[method]}


@pytest.mark.parametrize(
    ("good_weight", "good", "bad", "said"),
    [
        (1.0, 10, 10, None),
        (4.0, 5, 20, None),
        (1.0, 1, 15, "count 0.067 times as much as the bad ones; the paper advises 1 to 1.33, and kto.good_weight=15"),
        (1.0, 20, 5, "count 4 times as much as the bad ones; the paper advises 1 to 1.33, and kto.bad_weight=4 makes"),
    ],
)
def test_judged_answers_of_which_one_kind_outweighs_the_other_are_named(
    alone, tmp_path, capsys, good_weight, good, bad, said
):
    labels, file = [True] * good + [False] * bad, tmp_path / "judged.jsonl"
    rows = [{"prompt": f"Question {at}", "completion": "Answer", "label": label} for at, label in enumerate(labels)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = replace(small(TINY_MODEL, file, method="kto", micro_batch_size=1), method=Kto(good_weight=good_weight))
    kto.datasets(recipe, AutoTokenizer.from_pretrained(TINY_MODEL))
    shown = capsys.readouterr().out
    assert said in shown if said else "warning" not in shown
