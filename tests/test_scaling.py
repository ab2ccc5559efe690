"""`ds-recipes benchmark scaling`: real runs of several ranks, and what is made of their times."""

import os
import shutil

import pytest

from deepspeed_recipes.benchmarks import scaling
from deepspeed_recipes.benchmarks.overhead import Bench
from deepspeed_recipes.commands import benchmark
from deepspeed_recipes.planning.hardware import machine_file
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from scripts.maintain import gpu_results
from scripts.maintain.calibration import cpu_speed
from scripts.maintain.documents import documents

SETTINGS = {"zero_stage": 2, "steps": 40, "micro_batch": 8, "length": 256, "dtype": "fp32"}


def one(tokens_per_second, step_seconds):
    return [{"tokens_per_second": tokens_per_second, "step_seconds": step_seconds, "peak_gib": 1.0}]


@pytest.fixture
def result():
    """Return times as of two cores: two ranks lose a tenth, four share the cores."""
    weak = {"1": one(1000.0, 1.0), "2": one(1800.0, 1.11), "4": one(1600.0, 2.5)}
    strong = {"1": one(1000.0, 4.0), "2": one(1900.0, 2.1), "4": one(1600.0, 2.5)}
    found = {
        "benchmark": "scaling",
        "date": "2027-01-01",
        "settings": SETTINGS,
        "environment": {"gpus": []},
        "cores": 2,
        "runs": {"weak": weak, "strong": strong},
        "predicted": {"weak": {"1": 1.0, "2": 0.95, "4": 0.48}},
    }
    return found


def test_efficiency_is_the_share_of_n_times_one_rank(result):
    weak = [(count, efficiency) for count, _, efficiency, _ in scaling.efficiencies(result, "weak")]
    assert weak == [(1, 1.0), (2, 0.9), (4, 0.4)]
    assert [one[2] for one in scaling.efficiencies(result, "strong")] == [1.0, 0.95, 0.4]


def test_the_prediction_is_the_planners_once_the_cpu_is_measured(tmp_path, monkeypatch):
    bench = Bench(folder=tmp_path, gpus=0, ranks=2, **SETTINGS)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert scaling.predicted(bench, [1, 2, 4]) == {}
    machine_file.default_file().parent.mkdir()
    shutil.copy(cpu_speed.MACHINE, machine_file.default_file())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    weak, strong = (scaling.predicted(bench, [1, 2, 4])[kind] for kind in ("weak", "strong"))
    assert weak["1"] == strong["1"] == 1 > weak["2"] > strong["2"] > 0.8, "ZeRO-2 averages after each micro-batch"
    assert 0.4 < weak["4"] < 0.5, "two ranks to a core"
    stored = read_json(cpu_speed.MEASUREMENTS / "scaling_cpu.json")
    for kind in scaling.KINDS:
        for _, _, measured, predicted in scaling.efficiencies(stored, kind):
            assert predicted == pytest.approx(measured, abs=0.05)


def test_the_table_says_where_ranks_share_cores(result):
    shown = scaling.section(result)
    assert "| the same work per rank | 2 | 1,800 | 90% | 95% |" in shown
    assert "| the same work in all | 4 on 2 cores | 1,600 | 40% | - |" in shown
    assert "4 ranks reach at most 50%" in shown and "2 CPU cores, one thread per rank" in shown
    assert scaling.png(result).startswith(b"\x89PNG")


def test_the_document_shows_what_is_measured(result, tmp_path):
    assert documents.scaled(tmp_path) == "Not measured yet.\n"
    write_json(tmp_path / "scaling_cpu.json", result)
    assert "(scaling_cpu.png)" in documents.scaled(tmp_path) and "1,800" in documents.scaled(tmp_path)
    assert gpu_results.results(tmp_path) == {}


def test_ranks_double():
    assert scaling.counts(None, 0) == [1, 2, 4] and scaling.counts(6, 0) == [1, 2, 4]
    assert scaling.counts(None, 16) == [1, 2, 4, 8] and scaling.counts(2, 8) == [1, 2]
    for asked, gpus in ((None, 1), (1, 0), (4, 2)):
        with pytest.raises(UserError, match="compares 1 rank with 2 or more"):
            scaling.counts(asked, gpus)


@pytest.mark.every
def test_one_and_two_ranks_are_measured(launcher, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    words = ["--gpus", "2", "--steps", "40", "--rounds", "1", "--micro-batch", "1", "--length", "128"]
    assert benchmark.main(["scaling", *words, "--output", str(tmp_path)]) == 0, capsys.readouterr().err
    found, screen = read_json(tmp_path / "scaling_cpu.json"), capsys.readouterr().out
    for kind in scaling.KINDS:
        counts, speeds, measured, predicted = zip(*scaling.efficiencies(found, kind), strict=True)
        assert counts == (1, 2) and min(speeds) > 0 and measured[0] == 1 and measured[1] > 0
        assert not any(predicted), "this CPU was not measured"
    assert found["runs"]["strong"]["2"] == found["runs"]["weak"]["2"], "the same run"
    assert scaling.table(found) in screen and (tmp_path / "scaling_cpu.md").read_text() in screen
    assert (tmp_path / "scaling_cpu.png").read_bytes().startswith(b"\x89PNG")
