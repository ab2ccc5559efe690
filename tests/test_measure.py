"""Machines that were measured: the file, the plans that use it, and runs on an H100 beside these plans."""

import copy
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_recipes.benchmarks.cases import BENCHMARKS, recipe_of
from deepspeed_recipes.commands import launch, plan
from deepspeed_recipes.commands.doctor import measure
from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.planning.cost.constants import CPU_SPEEDS
from deepspeed_recipes.planning.hardware import machine_file
from deepspeed_recipes.planning.hardware.cluster import Cluster, of_cpus, with_measurements
from deepspeed_recipes.planning.hardware.gpus import find
from deepspeed_recipes.planning.search import forecast, plans, strategies
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import RunFolder, append_jsonl, read_json, write_json
from scripts.maintain.calibration import cpu_speed
from scripts.maintain.documents.estimates import DOCUMENTS
from tests import ROOT

MEASUREMENTS = Path(__file__).parents[1] / "scripts" / "maintain" / "measurements"
H100 = MEASUREMENTS / "machine_h100.json"
"""One H100 with a slow host, 2026-11-26; the runs below were on it, minutes later."""
RUNS = json.loads((MEASUREMENTS / "planner_error_gpu.json").read_text())["runs"]
ONE = Cluster(find("H100"), cores=16)


def speeds(recipe, document_length):
    """Return tokens per second by datasheets, and with the machine's measurements."""
    found = []
    for cluster in (ONE, with_measurements(ONE, H100, False, pytest.fail)):
        request = strategies.plan_request(recipe, cluster, document_length=document_length)
        found.append(strategies.evaluate(request, recipe).speed)
    return found


def test_two_runs_of_an_h100_are_within_five_percent_of_the_plan():
    ran = [case for case in BENCHMARKS["planner_error"].cases if RUNS[case.label]]
    assert len(ran) == 2
    for case in ran:
        measured = RUNS[case.label][0]["tokens_per_second"]
        for speed in speeds(recipe_of(case, 1, draft=False), DOCUMENTS):
            assert speed == pytest.approx(measured, rel=0.05)


def test_a_run_that_waits_for_its_host_is_predicted_once_the_host_was_measured():
    """`make demo`, ZeRO-3 with a model of 3M parameters: 11,049 tokens/s there; steps 2 to 10 of a 1B ran at 27,925."""
    by_datasheet, by_measurements = speeds(pages.find("tiny", "full"), 76)
    assert by_datasheet > 2.5 * 11_049 and by_measurements == pytest.approx(11_049, rel=0.1)
    sizes = ("sequence_length=2048", "global_batch_size=4", "micro_batch_size=4")
    assert speeds(overrides.apply(pages.find("llama3-1b", "full"), sizes), 76) == pytest.approx([27_925] * 2, rel=0.05)


def test_slower_measurements_make_slower_plans(tmp_path):
    """Each measurement counts: made a hundred times slower, it slows down the plan that depends on it."""
    whole = json.loads(H100.read_text())
    whole["seconds"] |= {
        "all_reduce large": 4e-4,
        "all_gather large": 2e-4,
        "all_gather small": 2e-5,
        "host_adam": 0.01,
    }
    plans = {
        "products": ("llama3-8b", "full", 8, ""),
        "attention": ("llama3-8b", "long_context", 8, ""),
        "copy": ("llama3-8b", "full", 8, ""),
        "from_host": ("llama3-8b", "full", 1, "zero2_offload.json"),
        "host_adam": ("llama3-8b", "full", 1, "zero2_offload.json"),
        "layer zero1": ("llama3-1b", "lora", 1, ""),
        "layer zero3": ("llama3-1b", "lora", 8, "zero3.json"),
        "all_reduce large": ("llama3-70b", "full", 8, "zero3.json"),
        "all_gather small": ("llama3-1b", "full", 8, "zero3.json"),
    }

    def speed(name, seconds):
        page, variant, gpus, config = plans[name]
        file = tmp_path / "machine.json"
        file.write_text(json.dumps(whole | {"ranks": 8, "seconds": seconds}))
        recipe = overrides.apply(pages.find(page, variant), [f"deepspeed={config}"] if config else [])
        cluster = with_measurements(replace(ONE, gpus_per_node=gpus), file, False, pytest.fail)
        return strategies.evaluate(strategies.plan_request(recipe, cluster), recipe).speed

    def slower(value):
        return {key: slower(one) for key, one in value.items()} if isinstance(value, dict) else 100 * value

    for name in plans:
        changed = whole["seconds"] | {name: slower(whole["seconds"][name])}
        assert speed(name, changed) < 0.99 * speed(name, whole["seconds"]), name


BROKEN = {
    "of another version": (lambda data: data | {"version": 0}, "version 0 is not 1"),
    "a list": (lambda data: [data], "version None is not 1"),
    "without a probe": (lambda data: data | {"seconds": {}}, "products of no dtype"),
    "negative": (lambda data: data | {"seconds": data["seconds"] | {"copy": -1}}, "seconds.copy"),
    "not a number": (lambda data: data | {"seconds": data["seconds"] | {"copy": float("nan")}}, "seconds.copy"),
    "by hand": (lambda data: data | {"seconds": data["seconds"] | {"copy": "fast"}}, "damaged"),
    "an empty network": (lambda data: data | {"network": {}}, "damaged"),
    "a negative spread": (lambda data: data | {"spread": -0.1}, "damaged"),
    "zero": (lambda data: data | {"seconds": data["seconds"] | {"copy": 0}}, "seconds.copy is missing or no time"),
    "without products": (lambda data: data | {"seconds": data["seconds"] | {"products": {}}}, "products of no dtype"),
    "other products": (lambda data: data | {"seconds": data["seconds"] | {"products": {"x fp32": 1}}}, "damaged"),
    "no attention": (lambda data: data | {"seconds": data["seconds"] | {"attention": 0}}, "seconds.attention"),
    "half an attention": (
        lambda data: data | {"seconds": data["seconds"] | {"attention": {"flash_2 bf16 forward": 1}}},
        "seconds.attention.flash_2 bf16 both",
    ),
    "half a layer": (
        lambda data: data | {"seconds": data["seconds"] | {"layer zero3": {"forward": 1}}},
        "seconds.layer zero3.backward",
    ),
    "without ranks": (lambda data: data | {"ranks": 0}, "damaged (spread 0.0, ranks 0)"),
    "a list of seconds": (lambda data: data | {"seconds": []}, "damaged"),
    "without sizes": (lambda data: data | {"sizes": {}}, "damaged"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_broken_is_named_and_datasheets_are_used(tmp_path, name):
    change, reason = BROKEN[name]
    file, said = tmp_path / "machine.json", []
    file.write_text(json.dumps(change(json.loads(H100.read_text()))))
    assert with_measurements(ONE, file, False, said.append) == ONE
    assert len(said) == 1 and str(file) in said[0] and reason in said[0] and "Datasheets are used instead" in said[0]


def test_every_entry_that_the_planner_reads_of_a_cpu_is_needed(tmp_path):
    """Without any one of the entries the file is refused, or plans are as before."""
    whole, file = json.loads(cpu_speed.MACHINE.read_text()), tmp_path / "machine.json"

    def speeds():
        cluster = of_cpus(machine_file.read(file), 2)
        return [
            strategies.search(strategies.plan_request(pages.find("tiny", name), cluster)).best.speed
            for name in ("full", "lora")
        ]

    file.write_text(json.dumps(whole))
    before = speeds()
    for name, value in whole["seconds"].items():
        for inner in value if isinstance(value, dict) else [None]:
            changed = copy.deepcopy(whole)
            changed["seconds"].pop(name) if inner is None else changed["seconds"][name].pop(inner)
            file.write_text(json.dumps(changed))
            try:
                assert speeds() == before or name in ("products", "host_adam"), (name, inner)
            except UserError as error:
                assert "is missing or no time" in str(error), (name, inner)


def test_a_file_that_is_cut_off_or_missing_is_named(tmp_path):
    for file, content in ((tmp_path / "cut.json", H100.read_text()[:500]), (tmp_path / "none.json", None)):
        if content:
            file.write_text(content)
        said = []
        assert with_measurements(ONE, file, False, said.append) == ONE and str(file) in said[0]


def test_measurements_of_this_machine_apply_to_its_own_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    said = []
    assert with_measurements(ONE, None, False, said.append) == ONE and not said, "never measured"
    machine_file.default_file().parent.mkdir()
    shutil.copy(H100, machine_file.default_file())
    assert with_measurements(ONE, None, True, said.append).machine
    other = Cluster(find("A100-80GB"))
    assert with_measurements(other, None, True, said.append) == other and not said, "the user asked about another GPU"
    assert with_measurements(other, None, False, said.append) == other, "the GPUs of this machine were exchanged"
    assert "measured on NVIDIA H100" in said[0] and "the plan is for A100 80GB" in said[0]


def test_plan_uses_the_file_that_is_named(capsys, printed_by):
    words = ["tiny", "full", "--json", "--machine", str(H100)]
    found = json.loads(printed_by("plan", *words))
    assert found["hardware"]["gpu"] == "H100" and found["hardware"]["gpus_per_node"] == 1
    assert found["hardware"]["measured"] == {"file": str(H100), "date": "2026-11-26"}
    assert plan.main([*words, "--gpu", "4090"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["hardware"]["measured"] is None and "the plan is for RTX 4090" in told.err
    plan.main(["tiny", "full", "--machine", str(H100)])
    assert f"rates measured on 2026-11-26 ({H100})" in " ".join(capsys.readouterr().out.split())


def test_a_measured_network_replaces_the_usual_one_unless_the_user_names_another(tmp_path, capsys):
    """An all-reduce of 16 ranks on two nodes sends 15/8 of its message; 0.02 s for 2 GiB are 1,611 Gbit/s."""
    data = json.loads(H100.read_text())
    data["sizes"]["message"] = 2**31
    data["network"] = {"hosts": 2, "ranks": 16, "seconds": {"all_reduce large": 0.02, "all_gather large": 0.01}}
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(data))
    words = ["llama3-8b", "--machine", str(file), "--gpus", "8", "--nodes", "2", "--json"]
    found = []
    for more in ([], ["--network", "1611"], ["--network", "400"]):
        assert plan.main([*words, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    rates = [one["hardware"]["network_gbs"] for one in found]
    assert rates == pytest.approx([15 / 8 * 2**31 / 0.02 / 1e9, 1611 / 8, 50], rel=1e-3)
    speeds = [one["plans"][0]["tokens_per_second_per_gpu"] for one in found]
    assert speeds[0] > speeds[1] > speeds[2], "a collective reaches only a share of a network's nominal rate"


RECIPE = overrides.apply(pages.find("llama3-1b", "lora"), ["deepspeed=zero1.json"])


def a_run(runs, name, factor, cluster=ONE, change=lambda summary: summary):
    """Write a finished run that was `factor` times as fast as planned, after a slow first step."""
    plan = strategies.evaluate(strategies.plan_request(RECIPE, cluster), RECIPE)
    run = RunFolder(runs / "llama3-1b-lora" / name)
    run.path.mkdir(parents=True)
    for speed in (10.0, factor, factor, factor):
        append_jsonl(run.metrics, {"step": 1, "tokens_per_second": speed * plan.time.tokens_per_second_per_gpu})
    speeds = {"tokens_per_second": 1.0, "gpu_peak_gib": 1.0, "gpu_reserved_gib": 1.0}
    write_json(run.summary, {"stopped": False, **speeds})
    forecast.compare(run, plan)
    write_json(run.summary, change(read_json(run.summary)))


def planned(cluster, recipe=RECIPE):
    return strategies.evaluate(strategies.plan_request(recipe, cluster), recipe)


def test_runs_correct_the_next_plans_of_their_kind(tmp_path):
    for name, factor in (("1", 0.7), ("2", 0.8), ("3", 0.9)):
        a_run(tmp_path, name, factor)
    a_run(tmp_path, "4", 0.1, change=lambda summary: summary | {"predicted": None})
    (tmp_path / "llama3-1b-lora" / "5").mkdir()
    (tmp_path / "llama3-1b-lora" / "5" / "summary.json").write_text("{cut")
    here = plans.corrected(ONE, tmp_path)
    before, after = planned(ONE), planned(here)
    assert after.correction.runs == 3 and after.speed == pytest.approx(0.8 * before.speed)
    assert after.speed_range[0] > 0.8 * before.speed_range[0], "the machine is known by its runs"
    full = overrides.apply(pages.find("llama3-1b", "full"), [])
    assert planned(here, full).speed == planned(ONE, full).speed, "another kind"
    assert planned(here, replace(RECIPE, deepspeed="zero3.json")).correction.runs == 0
    measured = with_measurements(ONE, H100, False, pytest.fail)
    assert not plans.corrected(measured, tmp_path).corrections, "predicted by other rates"
    # A corrected prediction is not corrected again by the run that confirms it.
    a_run(tmp_path, "6", 0.8, cluster=here)
    (again,) = plans.corrected(ONE, tmp_path).corrections.values()
    assert again.runs == 4 and again.factor == pytest.approx(0.8)


def test_the_answer_names_the_runs_that_correct_it(tmp_path, monkeypatch, printed_by):
    for name in "12":
        a_run(tmp_path / "runs", name, 0.5)
    monkeypatch.chdir(tmp_path)
    words = ["llama3-1b", "lora", "--gpu", "H100", "deepspeed=zero1.json"]
    assert "are corrected by 2 finished runs here: x 0.50; without them" in " ".join(printed_by("plan", *words).split())
    first = json.loads(printed_by("plan", *words, "--json"))["plans"][0]
    assert first["corrected_by"] == {"runs": 2, "factor": pytest.approx(0.5)}
    first = json.loads(printed_by("plan", *words[:3], "A100-80GB", words[-1], "--json"))["plans"][0]
    assert first["corrected_by"] == {"runs": 0, "factor": 1.0}, "they ran on other GPUs"


def test_busy_gpus_are_named(tmp_path, monkeypatch, refusal):
    monkeypatch.setattr(measure, "visible_gpus", lambda: 1)
    monkeypatch.setattr(measure.system, "output", lambda *_: "4711, python, 30000 MiB")
    assert "in use (4711, python, 30000 MiB)" in refusal("doctor", "--measure", tmp_path / "node.json")


@pytest.mark.parametrize("where", cpu_speed.MACHINES)
def test_step_times_of_cpu_ranks_are_within_fifteen_percent_of_the_plan(where):
    machine, _, found = cpu_speed.stored(file := cpu_speed.MACHINES[where])
    judges = [one for one in found if one.judges]
    assert len(found) == len(cpu_speed.cases_of(machine)) >= 20 and abs(len(judges) - len(found) / 2) < 1
    assert statistics.median(abs(one.ratio - 1) for one in judges) <= 0.15
    assert statistics.mean(one.inside for one in judges) >= 0.9
    if file == cpu_speed.MACHINE:
        assert cpu_speed.prediction_range(found) == pytest.approx(CPU_SPEEDS, abs=0.01)


def test_a_cpu_without_bf16_is_planned_in_fp32(tmp_path, capsys, refusal):
    file = tmp_path / "machine.json"
    data = json.loads(cpu_speed.MACHINE.read_text())
    for part in (data["seconds"], data["alone"]):
        for name in part.keys() & {"products", "attention", "wide", "parameter"}:
            part[name] = {key: value for key, value in part[name].items() if "bf16" not in key}
    file.write_text(json.dumps(data))
    assert len(cpu_speed.cases_of(machine_file.read(file))) == len(cpu_speed.CASES) - 3
    words = ["tiny", "--gpu", "cpu", "--machine", str(file)]
    speeds = []
    for more in ([], ["precision=fp32"]):
        assert plan.main([*words, *more, "--json"]) == 0
        speeds.append(json.loads(capsys.readouterr().out)["plans"][0]["tokens_per_second_per_gpu"])
    assert speeds[0] == speeds[1]
    assert "CPU has no bf16; write precision=fp32" in refusal("plan", *words, "precision=bf16")
    assert plan.main(["llama3-1b", *words[1:], "--method", "lora"]) == 0
    assert "no instructions for bf16, so training is in fp32" in " ".join(capsys.readouterr().out.split())
    cluster = cpu_speed.of_cpus(machine_file.read(file))
    assert forecast.forecast(replace(RECIPE, precision="bf16"), cluster) is None
    assert forecast.forecast(replace(RECIPE, precision="fp32", deepspeed="zero1.json"), cluster)


def test_a_run_in_bf16_on_a_cpu_without_it_is_warned_of(monkeypatch, capsys):
    for supported in (True, False):
        monkeypatch.setattr(measure.system, "computes_bf16", lambda answer=supported: answer)
        assert launch.main(["tiny", "full", "--dry-run", "precision=bf16"]) == 0
        assert ("this CPU has no instructions for it" in capsys.readouterr().err) is not supported


def test_ranks_that_end_without_an_error_are_named_by_their_last_line(tmp_path):
    script = "print('terminate called without an active exception', flush=True); import os; os._exit(3)"
    with pytest.raises(UserError, match="failed with status 3: terminate called without an active exception"):
        measure.started([sys.executable, "-c", script], dict(os.environ), tmp_path / "measured.json")


def measured(*words):
    """Return what doctor prints, in a process of its own: the ranks are forks of what the environment starts with."""
    command = [sys.executable, str(ROOT / "scripts/doctor.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.every
def test_a_step_of_cpu_ranks_takes_as_long_as_planned(tmp_path, ranks):
    """On this machine, as it is now: a neighbour's load counts in both, but need not be the same in both."""
    file = tmp_path / "machine.json"
    measured("--measure", str(file), "--gpus", "2")
    cases = [case for case in cpu_speed.CASES if case.model == "tiny" and not case.changes][:3]
    runs = {case.label: [cpu_speed.measured(case, tmp_path / str(number))] for number, case in enumerate(cases)}
    assert all(one.inside for one in cpu_speed.comparisons(machine_file.read(file), runs))


def test_the_range_of_an_uneven_machine_is_wider(tmp_path, printed_by):
    """By the spread of its speed in quadrature: a factor of 1.18 and one of 1.32 (1.96 x sqrt(2) x 0.1) make 1.38."""
    ranges = {}
    for spread in (0.0, 0.1, 0.101):
        file = tmp_path / f"{spread}.json"
        file.write_text(json.dumps(json.loads(cpu_speed.MACHINE.read_text()) | {"spread": spread}))
        first = json.loads(printed_by("plan", "tiny", "--gpu", "cpu", "--machine", file, "--json"))["plans"][0]
        speed, (low, high) = first["tokens_per_second_per_gpu"], first["tokens_per_second_per_gpu_range"]
        ranges[spread] = (low / speed, high / speed)
        said = " ".join(printed_by("plan", "tiny", "--gpu", "cpu", "--machine", file).split())
        assert ("Its speed varied by 10% while it was measured" in said) is (spread > 0.1)
    assert ranges[0.0] == pytest.approx(CPU_SPEEDS) and ranges[0.1] == pytest.approx((0.678, 1.382), abs=0.001)
    rounds = [{"products": {"512": 1.0}, "attention": {"both": seconds}} for seconds in (2.0, 5.0)]
    assert measure.spread(rounds[:1], []) == 0
    assert measure.spread(rounds, []) == measure.spread(rounds, rounds) == pytest.approx(math.log(2) / math.sqrt(2))
    assert measure.spread(rounds, 2 * rounds[:1]) == pytest.approx(math.log(2) / 2), "pooled"
    assert machine_file.median_of([{"a": {"b": one}} for one in (3, 1, 2)]) == {"a": {"b": 2}}


def test_cpu_ranks_are_planned_once_they_are_measured(tmp_path, monkeypatch, capsys, refusal):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "--gpu cpu: this machine's CPU was not measured" in refusal("plan", "tiny", "--gpu", "cpu")
    assert "was measured on NVIDIA H100" in refusal("plan", "tiny", "--gpu", "cpu", "--machine", H100)
    machine_file.default_file().parent.mkdir()
    shutil.copy(cpu_speed.MACHINE, machine_file.default_file())
    found = []
    for words in (["--gpu", "cpu"], [], ["--gpu", "cpu", "--gpus", "1"]):
        assert plan.main(["tiny", *words, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    named, here, alone = (one["plans"][0]["step_seconds"] for one in found)
    assert named == here and 1.5 * named < alone < 2.1 * named, "one rank has twice the sequences"
    assert found[0]["hardware"]["gpu"] == "CPU"
    assert "--nodes: CPU ranks" in refusal("plan", "tiny", "--gpu", "cpu", "--nodes", "2")
    # More ranks or machines are not planned either, where nothing fits and where a deadline is missed.
    assert run_command("plan", ["qwen3-8b", "--gpu", "cpu", "layout.pipeline=2"]) == 1
    assert "nothing fits with layout.pipeline=2" in (said := capsys.readouterr().err) and "--nodes" not in said
    error = refusal("plan", "tiny", "--gpu", "cpu", "--tokens", "9T", "--deadline", "1h")
    assert "no cluster of up to 1 node of CPU finishes" in error
    assert launch.main(["tiny", "full", "--dry-run"]) == 0
    assert re.match(r"forecast: .* GiB per rank \(.*\), [\d,]+ tokens/s\n", capsys.readouterr().out)


def test_doctor_measures_this_machine(tmp_path, ranks):
    """With real ranks; the figures are only asked to be there."""
    file = tmp_path / "machine.json"
    printed = measured("--measure", str(file), "--quick", "--gpus", "2", "--nvme", str(tmp_path))
    machine = machine_file.read(file)
    assert (
        machine.device == "CPU" and machine.ranks == 2 and machine.nvme_gbs > 0 and machine.seconds["all_reduce large"]
    )
    assert machine.sizes["repeats"] == 2 and "--quick: few repetitions" in printed
    assert "TFLOP/s" in printed and "all-reduce over 2 ranks" in printed and "ZeRO-3" in printed
