"""The benchmarks: each runs end to end as a draft, takes turns, and keeps its results when it is interrupted."""

import argparse
import json
import os
import shutil
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from deepspeed_recipes.benchmarks import cases, measure, own_process
from deepspeed_recipes.benchmarks.cases import ALL, BENCHMARKS, CASE, LIMIT, STEPS, WARM_UP, Benchmark, Case, recipe_of
from deepspeed_recipes.commands import benchmark
from deepspeed_recipes.planning.cost.constants import FILE
from deepspeed_recipes.planning.hardware.cluster import Cluster
from deepspeed_recipes.planning.hardware.gpus import find
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from scripts.maintain import gpu_results
from scripts.maintain.calibration import MEASUREMENTS, calibrate, measured_runs
from scripts.maintain.documents import documents, index
from tests.ranks import read_logs

DRAFT = argparse.Namespace(draft=True, quick=True, output=None)


@pytest.fixture
def forked(ranks):
    """Return a way to run orders that need not import everything again."""

    def start(order, folder, seconds):
        (folder / "order.json").write_text(json.dumps(order))
        paths = [str(folder / "order.json"), str(folder / "result.json")]
        ranks.run(measure.main, *paths, world_size=1, log=folder / "log", timeout=seconds)
        result = folder / "result.json"
        return json.loads(result.read_text()) if result.exists() else {"error": "\n".join(read_logs(folder / "log"))}

    return start


@pytest.mark.parametrize(
    "name", [one if one == "full_1b" else pytest.param(one, marks=pytest.mark.every) for one in BENCHMARKS]
)
def test_each_benchmark_runs_as_a_draft(forked, tmp_path, name):
    result = benchmark.run(BENCHMARKS[name], argparse.Namespace(draft=True, quick=False, output=tmp_path), forked)
    for label, runs in result["runs"].items():
        for run in runs:
            assert "error" not in run, f"{label}: {run}"
            assert run["tokens_per_second"] > 0 and len(run["step_seconds"]) == 3 and run["flops_per_step"] > 0
    kept = json.loads((tmp_path / f"{name}_draft.json").read_text())
    assert kept["draft"] and kept["limits"]["matrix_flops"] > 0 and kept["environment"]["packages"]
    table = (tmp_path / f"{name}_draft.md").read_text()
    assert table.startswith("DRAFT")
    if BENCHMARKS[name].grows:
        assert all(longest > 0 for longest, _ in result["longest"].values())
    else:
        assert result["complete"] and all(len(runs) == 1 for runs in result["runs"].values())
        assert all(f"| {label} |" in table for label in result["runs"])


COMPARED = [one.name for one in BENCHMARKS.values() if not one.estimates]


def test_all_promised_benchmarks_exist():
    promised = "full_1b zero_tax full_8b lora_8b qlora_8b packing attention long_context offload planner_error"
    assert set(BENCHMARKS) == {*promised.split(), "planner_error_8b"}
    assert LIMIT < 480 and STEPS >= 20 and WARM_UP > 0
    for one in BENCHMARKS.values():
        labels = [case.label for case in one.cases]
        assert len(labels) == len(set(labels)) >= 2
        for case in one.cases:
            assert recipe_of(case, 5, draft=False).max_steps == 5


FOUND = {
    "tokens_per_step": 100.0,
    "flops_per_step": 1e12,
    "step_seconds": [0.5, 0.4, 0.6] * 7,
    "tokens_per_second": 200.0,
    "host_peak_gib": 1.0,
    "reads_per_step": 4,
}
ENVIRONMENT = {"gpus": ["NVIDIA H200"], "cpu_count": 16, "packages": defaultdict(lambda: "1.0")}
MACHINE = {"limits": {"matrix_flops": 4e12}, "environment": ENVIRONMENT}
TWO = replace(BENCHMARKS["packing"], cases=(Case("a", "recipe"), Case("b", "recipe")))


def of(answers):
    """Return a start that answers in order, and what it was asked."""
    asked, rest = [], iter(answers)

    def start(order, folder, seconds):
        asked.append(order["case"] if order["case"] == "limits" else order["case"]["label"])
        return dict(MACHINE) if order["case"] == "limits" else dict(next(rest))

    return start, asked


@pytest.fixture
def on_gpu(monkeypatch, tmp_path):
    """Return options for a machine that says it has a GPU; results go elsewhere than into the project."""
    monkeypatch.setattr(benchmark, "visible_gpus", lambda: 1)
    return argparse.Namespace(draft=False, quick=False, output=tmp_path)


def test_contenders_take_turns(on_gpu):
    start, asked = of([FOUND] * 4)
    benchmark.run(TWO, on_gpu, start)
    assert asked == ["limits", "a", "b", "b", "a"]
    start, asked = of([FOUND] * 2)
    benchmark.run(TWO, DRAFT, start)
    assert asked == ["limits", "a", "b"], "whether it runs is seen at once"


def test_a_failure_is_reported_and_not_retried(on_gpu):
    start, asked = of([FOUND, {"error": "out of memory"}, FOUND])
    result = benchmark.run(TWO, on_gpu, start)
    assert asked == ["limits", "a", "b", "a"]
    assert "| b |" in cases.table(result) and "out of memory" in cases.table(result)


@pytest.mark.parametrize(
    ("error", "said"),
    [("the folder holds no weights", "packing: padded: the folder holds no weights\n"), ("out of memory", "")],
)
def test_a_contender_that_cannot_run_fails_the_command(on_gpu, monkeypatch, capsys, error, said):
    """That it runs out of memory is what was measured."""
    start, _ = of([FOUND, {"error": error}, FOUND])
    monkeypatch.setattr(benchmark.own_process, "start", start)
    assert benchmark.main(["packing", "--output", str(on_gpu.output)]) == bool(said)
    assert capsys.readouterr().err == said


def test_results_are_kept_when_interrupted(tmp_path):
    start, _ = of([FOUND])  # and then the list ends
    with pytest.raises(StopIteration):
        benchmark.run(TWO, argparse.Namespace(draft=True, quick=False, output=tmp_path), start)
    kept = json.loads((tmp_path / "packing_draft.json").read_text())
    assert not kept["complete"] and len(kept["runs"]["a"]) == 1 and kept["runs"]["b"] == []
    assert "not reached" in (tmp_path / "packing_draft.md").read_text()


def test_no_run_starts_that_would_exceed_the_time_limit(monkeypatch, capsys):
    ticks = iter(range(0, 10**6, 100))
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: next(ticks))
    start, asked = of([FOUND] * 4)
    result = benchmark.run(TWO, DRAFT, start)
    assert len(asked) < 3 and not result["complete"]
    assert "out of time" in capsys.readouterr().out


def test_the_whole_list_leaves_time_for_its_last_part():
    names, left, given = len(BENCHMARKS) + 1, 60.0 * ALL, []
    for number in range(names, 0, -1):
        given.append(benchmark.share(left, number))
        left -= given[-1]
    assert sum(given) <= 60 * ALL < 30 * 60 and given[0] < LIMIT and given == sorted(given, reverse=True)
    assert benchmark.share(left, 1) == 1, "what has run over leaves nothing"


def test_a_contender_has_its_own_limit(monkeypatch):
    given = []
    start, _ = of([FOUND] * 2)
    benchmark.run(
        TWO, DRAFT, lambda order, folder, seconds: given.append(seconds) or start(order, folder, seconds), 200
    )
    assert len(given) == 3 and all(0 < seconds <= CASE for seconds in given)


def test_contenders_run_in_processes_of_their_own(tmp_path):
    """The real way to start them: what has trained, what fails with all that it printed, what does not end."""
    case = replace(BENCHMARKS["full_1b"].cases[-2], changes=("sequence_length=1024", "micro_batch_size=2"))
    order = {"case": asdict(case), "warm_up": 1, "steps": 2, "draft": True}
    before = dict(os.environ)
    for name in "abc":
        (tmp_path / name).mkdir()
    trained = own_process.start(order, tmp_path / "a", 300)
    assert trained["tokens_per_second"] > 0 and len(trained["step_seconds"]) == 2
    failed = own_process.start({**order, "case": {**order["case"], "page": "nowhere"}}, tmp_path / "b", 300)
    assert "nowhere" in failed["error"] and "Traceback" in failed["output"]
    assert own_process.start({**order, "steps": 10**6}, tmp_path / "c", 4)["error"] == "not finished in 4 s"
    assert dict(os.environ) == before


def test_a_draft_is_never_kept_among_the_measurements(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    start, _ = of([FOUND] * 4)
    benchmark.run(TWO, DRAFT, start)
    assert not list(tmp_path.iterdir())


def test_a_table_shows_medians_and_shares():
    runs = {"a": [FOUND], "b": [{**FOUND, "step_seconds": [1.0] * 20, "peak_allocated_gib": 12.34}], "c": []}
    table = cases.table({"runs": runs, **MACHINE})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[2][:4] == ["a", "200", "20.0%", "1.000"]
    assert rows[2][4] == f"{2e12 / 989.4e12:.1%}" and rows[2][5] == "50.0%"
    assert rows[3][1] == "100" and rows[3][3] == "0.500" and rows[3][6] == "12.3"
    assert rows[4] == ["c", *[""] * 6, "not reached"]
    assert "reserved GiB" in cases.COLUMNS and "reserved" not in table, "nothing of it was measured"


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "out of memory"),
        ("Traceback\nValueError: no", "ValueError: no"),
        ("", "ended without any output"),
    ],
)
def test_the_cause_of_a_failure_is_given_in_a_few_words(output, why):
    assert own_process.cause(output) == why


# From the measurements into the planner's constants


@pytest.mark.every
def test_calibrate_reads_what_is_measured(forked, tmp_path, monkeypatch):
    labels = ("llama3-3b full, zero2, 2 x 4,096", "qwen3-4b lora, zero3, 4 x 4,096, checkpointing")
    cases = [case for case in BENCHMARKS["planner_error"].cases if case.label in labels]
    compiled = replace(cases[0], label="compiled", changes=(*cases[0].changes, "compile=regional"))
    one = Benchmark("lora_8b", "", (*cases, compiled, replace(cases[0], label="peer", peer="plain")), estimates=True)
    result = benchmark.run(one, argparse.Namespace(draft=True, quick=True, output=tmp_path), forked)
    assert result["complete"]
    # As it would have been on a GPU, where nothing is shrunken.
    result = read_json(tmp_path / "lora_8b_draft.json") | {"draft": False}
    result["environment"]["gpus"] = ["NVIDIA H200"]
    result["runs"]["compiled"][0]["recipe"]["compile"] = "regional"  # a draft compiles nothing
    monkeypatch.setattr(measured_runs, "MEASUREMENTS", tmp_path)
    assert list(measured_runs._own_runs()) == [], "drafts are none"
    write_json(tmp_path / "lora_8b_gpu.json", result)

    full, lora = measured_runs._own_runs()
    assert full.table == "ours, lora_8b" and full.fitted and full.software == "deepspeed"
    assert full.cluster == Cluster(find("H200")) and full.profile.parameters == 3_212_749_824
    assert (full.setup.zero_stage, full.setup.micro_batch_size, full.setup.sequence_length) == (2, 2, 128)
    assert lora.profile.model_type == "qwen3" and lora.setup.lora and lora.setup.gradient_checkpointing
    for run, label in zip((full, lora), labels, strict=True):
        assert run.tokens_per_second_per_gpu == pytest.approx(result["runs"][label][0]["tokens_per_second"])
        assert calibrate.predicted(run, json.loads(FILE.read_text())) > 0

    write_json(tmp_path / "lora_8b_gpu.json", result | {"benchmark": "planner_error"})
    assert not any(run.fitted for run in measured_runs._own_runs()), "these are there to judge by"


# From the measurements into the documents


def on_a_gpu() -> dict:
    runs = {"packed": [{**FOUND, "model": "llama3-1b-full", "peak_allocated_gib": 12.34}], "padded": []}
    cases = [{"label": label, "peer": "recipe"} for label in runs]
    environment = ENVIRONMENT | {"packages": {}}
    told = {"benchmark": "packing", "about": "", "date": "2027-01-01", "draft": False, "complete": True}
    return {**told, **MACHINE, "environment": environment, "cases": cases, "runs": runs}


def measured(folder: Path) -> Path:
    """Return the folder with the measurements on a CPU, beside which a test puts others."""
    for file in MEASUREMENTS.glob("*_cpu.*"):
        shutil.copy(file, folder)
    return folder


def test_a_table_of_dashes_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MEASUREMENTS", measured(tmp_path))
    assert documents.measurements()["speed"] == "No comparison has been run on a GPU yet.\n"
    write_json(tmp_path / "packing_gpu.json", on_a_gpu())
    assert "| packing | packed | 200 |" in documents.measurements()["speed"]


def test_the_index_shows_what_was_measured(tmp_path, monkeypatch):
    write_json(tmp_path / "packing_gpu.json", on_a_gpu())
    write_json(tmp_path / "lora_8b_gpu.json", on_a_gpu() | {"benchmark": "lora_8b", "draft": True})
    monkeypatch.setattr(index, "MEASUREMENTS", tmp_path)
    assert list(gpu_results.results(tmp_path)) == ["packing"], "drafts are none"
    assert str(gpu_results.measured_recipes(tmp_path)["llama3-1b-full"]) == "12.3 GiB, 200 tokens/s (H200, 2027-01-01)"
    assert "| measured per GPU |" in index.families()
    assert "| 1b full: 12.3 GiB, 200 tokens/s (H200, 2027-01-01) |" in index.families()
    summary = gpu_results.summary(COMPARED, gpu_results.results(tmp_path))
    assert "| packing | packed | 200 | 1.000 |" in summary
    assert "full_1b" not in summary and "padded" not in summary, "what was not measured is left out"
