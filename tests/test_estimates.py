"""The planner's estimates for the cases of `planner_error`, compared with other estimators and measurements."""

import json
from dataclasses import replace

import pytest

from deepspeed_recipes.benchmarks.cases import BENCHMARKS, recipe_of
from deepspeed_recipes.planning.hardware.cluster import Cluster
from deepspeed_recipes.planning.hardware.gpus import find
from deepspeed_recipes.recipe.run_folder import write_json
from scripts.maintain import gpu_results
from scripts.maintain.documents import estimates
from tests import ROOT

CASES = [case for one in BENCHMARKS.values() if one.estimates for case in one.cases]
GPU = {"environment": {"gpus": ["NVIDIA H100 80GB HBM3"]}, "limits": {}, "draft": False}


@pytest.fixture(scope="module")
def rows():
    return list(estimates.rows({}))


def test_the_cases_cover_the_comparison():
    recipes = [recipe_of(case, 1, draft=False) for case in CASES]
    stages = {json.loads((ROOT / "configs" / one.deepspeed).read_text())["zero_optimization"]["stage"]
              for one in recipes}  # fmt: skip
    assert len(recipes) >= 12 and stages == {1, 2, 3}
    assert {"llama3-1b", "llama3-8b"} <= {f"{one.family}-{one.size}" for one in recipes}
    ways = {(one.variant, one.gradient_checkpointing) for one in recipes}
    assert ways == {(variant, on) for variant in ("full", "lora", "qlora") for on in (True, False)}
    assert len({one.sequence_length for one in recipes}) == 2
    assert all(one.global_batch_size == one.micro_batch_size for one in recipes)


def test_nearly_all_fit_one_gpu_of_the_kind(rows):
    assert sum(not one.plan.fits for one in rows) <= 1


def test_the_other_estimators_ignore_adapters(rows):
    full, lora = rows[3], rows[4]
    assert full.label.startswith("llama3-3b full") and lora.label.startswith("llama3-3b lora")
    assert full.deepspeed == lora.deepspeed == pytest.approx(20 * 3_212_749_824 / 2**30)
    assert full.accelerate == lora.accelerate == pytest.approx(8 * 3_212_749_824 / 2**30)
    assert lora.allocates < full.allocates / 2


def test_measurements_are_shown_beside_the_estimates_with_the_error(rows):
    ran = {"peak_allocated_gib": 2 * rows[0].allocates, "tokens_per_second": rows[0].plan.speed / 1.1}
    one = replace(rows[0], run=ran)
    assert (one.memory_error, one.speed_error) == pytest.approx((-0.5, 0.1))
    table = estimates.render([one, *rows[1:]])
    assert "| -50.0% |" in table and "| +10.0% |" in table
    assert "Over 1 of 14 runs memory is off by 50.0% in the median and 50.0% at worst, speed by 10.0%" in table


def test_runs_that_ran_out_of_memory_against_the_prediction_are_named(rows):
    failed = {"error": "out of memory"}
    assert "fit, but ran out of memory: llama3-1b full, zero1, 4 x 4,096." in estimates.summary(
        [replace(rows[0], run=failed)]
    )
    warned = replace(rows[0], run=failed, plan=replace(rows[0].plan, shortfalls=("200 GiB of 140 on a GPU",)))
    assert not warned.ran_out_of_memory, "it was said that it would not fit"


def test_estimates_are_for_the_gpu_that_was_measured(tmp_path):
    label = CASES[0].label
    ran = {"peak_allocated_gib": 50.0, "tokens_per_second": 1000.0}
    write_json(tmp_path / "planner_error_gpu.json", GPU | {"benchmark": "planner_error", "runs": {label: [ran]}})
    found = list(estimates.rows(gpu_results.results(tmp_path)))
    assert found[0].plan.cluster == Cluster(find("H100")) and found[0].measured == ran
    assert found[1].measured is None and found[-1].plan.cluster == Cluster(find("H200"))
