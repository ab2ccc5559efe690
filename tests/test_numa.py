"""Ranks keep to the cores near their GPUs: read off a system that is written here, and applied to real threads."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepspeed_recipes.machine import readings
from deepspeed_recipes.training import distributed

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
    system_of(tmp_path, {0: "0-1", 1: "2-3", 2: ""}, {"0000:17:00.0": -1})  # a virtual machine; memory without cores
    assert readings.cores_near(0, ["0000:17:00.0"], 1, tmp_path) == set()
    assert sorted(readings.numa_nodes(tmp_path)) == [0, 1]


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
