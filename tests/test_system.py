"""system.jsonl: what GPUs and nodes do during a run, measured without slowing it down or ever ending it.

Ranks keep to the cores near their GPUs: read off a system that is written here, and applied to real threads.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from deepspeed_recipes.machine import readings
from deepspeed_recipes.machine.readings import Host
from deepspeed_recipes.recipe.run_folder import RunFolder, append_jsonl, read_jsonl
from deepspeed_recipes.training import distributed
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.callbacks import system_log
from tests.ranks import read_logs, run_on
from tests.small import small
from tests.workers import system_log as worker

NVML = str(Path(__file__).parent / "nvml")
HOST = {"cpu_utilization", "host_memory_gib", "host_memory_percent", "network_sent_bytes_per_second"}
GPU = {"gpu_utilization", "gpu_memory_gib", "gpu_power_watts", "gpu_temperature_celsius", "pcie_sent_bytes_per_second"}


def trained(ranks, folder, model, data, function, *words, steps=3):
    return run_on(ranks, small(model, data, "zero2.json", max_steps=steps), folder, function=function, words=words)


@pytest.mark.every
def test_a_run_on_cpus_samples_its_host_once(ranks, tmp_path, model_folder, conversations):
    run = trained(ranks, tmp_path, model_folder, conversations, training_run.main)
    rows = read_jsonl(run.system)
    assert rows and {row["rank"] for row in rows} == {0} and set(rows[-1]) >= HOST
    assert not any(key.startswith("gpu_") for key in rows[-1]) and rows[-1]["step"] == 3
    assert abs(rows[-1]["time"] - run.metrics.stat().st_mtime) < 60
    assert "gpu_utilization" not in read_jsonl(run.metrics)[-1] and "nvidia-ml-py" not in "".join(
        read_logs(tmp_path / "log")
    )


def test_every_rank_samples_its_gpu_and_metrics_have_the_load(ranks, tmp_path, model_folder, conversations):
    # Ten samples a second: three steps of an idle machine are over before the second one.
    run = trained(ranks, tmp_path, model_folder, conversations, worker.main, "", steps=40)
    rows = read_jsonl(run.system)
    by_rank = {rank: [row for row in rows if row["rank"] == rank] for rank in (0, 1)}
    assert all(set(row) >= GPU for row in rows) and {len(found) > 3 for found in by_rank.values()} == {True}
    assert {row["gpu_utilization"] for row in by_rank[1]} == {91} and "nvlink_sent_bytes_per_second" in rows[-1]
    assert rows == sorted(rows, key=lambda row: row["time"])
    assert not list(run.ranks.glob("*.system.jsonl")), "joined into one file"
    # A step that is over before the next sample has no load of its own.
    assert {row["gpu_utilization"] for row in read_jsonl(run.metrics) if "gpu_utilization" in row} == {90}


@pytest.mark.every
@pytest.mark.parametrize("failing", ["power", "init"])
def test_an_error_of_nvml_ends_no_run_and_is_said_once(ranks, tmp_path, model_folder, conversations, failing):
    run = trained(ranks, tmp_path, model_folder, conversations, worker.main, failing)
    said = "\n".join(read_logs(tmp_path / "log"))
    assert said.count("NVMLError: GPU is lost") == 2, "once by each of the ranks"
    assert run.export.exists() and len(read_jsonl(run.metrics)) == 3
    rows = read_jsonl(run.system)
    assert rows and not any("gpu_power_watts" in row for row in rows)
    assert all(("gpu_utilization" in row) == (failing == "power") for row in rows)


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.syspath_prepend(NVML)
    yield lambda failing: monkeypatch.setenv("NVML_FAILS", failing)
    sys.modules.pop("pynvml", None)


def test_readings_have_their_units(nvml):
    nvml("")
    gpu = readings.Gpu("GPU-3")
    first = gpu.read()
    assert not any(name.startswith("nvlink") for name in first), "a rate needs two readings"
    time.sleep(0.05)
    found = gpu.read()
    assert found["gpu_utilization"] == 93 and found["gpu_memory_gib"] == 3 and found["gpu_power_watts"] == 654.321
    assert found["pcie_received_bytes_per_second"] == 1.5e6 and found["pcie_sent_bytes_per_second"] == 7e5
    assert found["nvlink_sent_bytes_per_second"] == pytest.approx(2000 * 1024, rel=0.2)


def test_what_a_gpu_lacks_is_left_out_without_a_word(nvml):
    nvml("unsupported nvlink")
    gpu = readings.Gpu("GPU-0")
    for _ in range(2):
        found = gpu.read()
        assert set(found) >= GPU and not gpu.errors
    nvml("temperature")
    assert GPU - set(gpu.read()) == {"gpu_temperature_celsius"} and str(gpu.errors[0]) == "GPU is lost"
    nvml("")
    assert set(gpu.read()) >= GPU and not gpu.errors, "it may come back"


def test_the_hosts_numbers_are_the_systems(tmp_path):
    host = Host()
    start = time.process_time()
    while time.process_time() - start < 0.2:
        pass
    (tmp_path / "file").write_bytes(os.urandom(2**20))
    with ThreadPoolExecutor() as another:  # the first reading of a thread too: psutil.cpu_percent would return 0
        found = another.submit(host.read).result()
    assert 0 < found["cpu_utilization"] <= 100 and set(found) >= HOST
    assert found["host_memory_gib"] == pytest.approx(psutil.virtual_memory().used / 2**30, rel=0.5)


def test_files_of_ranks_are_joined_by_time_and_half_a_line_is_left_out(tmp_path):
    run = RunFolder(tmp_path)
    run.ranks.mkdir()
    for rank, path in ((0, run.system), (1, run.system_of(1)), (12, run.system_of(12))):
        for moment in (1.0, 2.0):
            append_jsonl(path, {"time": moment + rank / 100, "rank": rank})
    with run.system_of(12).open("a") as file:
        file.write('{"time": 9')
    system_log.join(run)
    assert [row["rank"] for row in read_jsonl(run.system)] == [0, 1, 12] * 2
    assert list(run.ranks.iterdir()) == []
    shutil.copy(run.system, tmp_path / "before")
    system_log.join(run)
    assert run.system.read_text() == (tmp_path / "before").read_text()


def test_a_full_disk_stops_the_samples_only(alone, tmp_path, capsys):
    log = system_log.SystemLog(RunFolder(tmp_path / "missing"), None)
    log.host = Host()
    log.ended.set()
    log._sample()
    said = capsys.readouterr().out
    assert said.count("training continues: FileNotFoundError") == 1 and json.dumps(log.place)


HERE = Path(__file__).resolve().parents[1]


def system_of(folder: Path, cores: dict[int, str], gpus: dict[str, int]) -> Path:
    """Write what Linux says of a machine: NUMA nodes with their cores, and GPUs with their nodes."""
    for node, listed in cores.items():
        place = folder / f"devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{listed}\n")
    for address, node in gpus.items():
        place = folder / "bus/pci/devices" / address
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{node}\n")
    return folder


GPUS = {f"0000:{bus:02x}:00.0": node for bus, node in ((0x17, 0), (0x2A, 0), (0xBB, 1), (0xDB, 1))}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two sockets with 16 cores, hyperthreads counted behind them, and two GPUs each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    return system_of(tmp_path, {0: "0-7,16-23", 1: "8-15,24-31"}, GPUS)


def test_a_rank_keeps_to_the_node_of_its_gpu(machine):
    first, second = {*range(8), *range(16, 24)}, {*range(8, 16), *range(24, 32)}
    assert [readings.cores_near(gpu, list(GPUS), 8, machine) for gpu in range(4)] == [first, first, second, second]


def test_a_rank_asks_for_the_gpu_that_it_computes_on(machine, monkeypatch):
    kept = []
    places = [SimpleNamespace(pci_domain_id=0, pci_bus_id=int(gpu[5:7], 16), pci_device_id=0) for gpu in GPUS]
    monkeypatch.setattr(readings, "cores_near", partial(readings.cores_near, system=machine))
    monkeypatch.setattr(readings, "bind", kept.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for name, value in {"is_available": True, "device_count": 4, "current_device": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", places.__getitem__)
    assert distributed.keep_near_gpu() == frozenset() and not kept, "these ranks are on CPUs"
    monkeypatch.setattr(distributed, "on_gpu", lambda: True)
    assert distributed.keep_near_gpu() == {*range(8, 16), *range(24, 32)}
    assert kept == [{*range(8, 16), *range(24, 32)}]


def test_it_keeps_to_what_it_may_use(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 9})
    assert readings.cores_near(0, list(GPUS), 1, machine) == {1, 2}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2})
    assert readings.cores_near(0, list(GPUS), 1, machine) == set(), "one node is left, so there is nothing to choose"
    assert readings.cores_near(3, list(GPUS), 1, machine) == set()


def test_more_gpus_than_a_nodes_cores_can_serve_use_all_cores(machine):
    assert readings.cores_near(0, list(GPUS), 9, machine) == set()


def test_a_machine_that_does_not_say_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert readings.cores_near(0, ["0000:17:00.0"], 1, tmp_path) == set(), "no nodes, no device"
    system_of(tmp_path / "virtual", {0: "0-1", 1: "2-3"}, {"0000:17:00.0": -1})
    assert readings.cores_near(0, ["0000:17:00.0"], 1, tmp_path / "virtual") == set()
    system_of(tmp_path / "memory", {0: "0-3", 1: ""}, {"0000:17:00.0": 0})  # a node of memory without cores
    assert readings.cores_near(0, ["0000:17:00.0"], 1, tmp_path / "memory") == set()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_threads_that_exist_and_threads_to_come_are_kept(tmp_path):
    """In a process of its own, with torch's threads; on the core that comes last."""
    program = """
import json, os, sys, threading
import torch
from deepspeed_recipes.machine import readings
torch.ones(2000, 2000) @ torch.ones(2000, 2000)
readings.bind(frozenset([int(sys.argv[1])]))
later = []
thread = threading.Thread(target=lambda: later.append(os.sched_getaffinity(0)))
thread.start()
thread.join()
now = [os.sched_getaffinity(int(one)) for one in os.listdir("/proc/self/task")]
print(json.dumps([sorted(one) for one in now + later]))
"""
    core = max(os.sched_getaffinity(0))
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    output = subprocess.run(
        [sys.executable, "-c", program, str(core)],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    affinities = json.loads(output)
    assert len(affinities) > 2 and affinities == [[core]] * len(affinities)
