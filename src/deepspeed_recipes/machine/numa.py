"""Finds the cores near a GPU, those of the NUMA node that the GPU is attached to, and binds processes to them.

A rank on cores of the other socket launches its kernels, and copies to and from host memory, over the link between the
sockets. PyTorch's launcher can keep ranks near their GPUs, which gains 1 to 10 % (torch 2.13, torch/numa/binding.py).
DeepSpeed's launcher divides the cores in the order of the ranks, regardless of their GPUs, and needs numactl.
"""

import os
from collections.abc import Sequence
from pathlib import Path

SYSTEM = Path("/sys")


def nodes(system: Path = SYSTEM) -> dict[int, frozenset[int]]:
    """Return the cores that this process may use, by NUMA node; nodes without such cores are left out."""
    allowed = os.sched_getaffinity(0)
    found = {
        int(folder.name.removeprefix("node")): _numbers((folder / "cpulist").read_text()) & allowed
        for folder in sorted((system / "devices/system/node").glob("node[0-9]*"))
    }
    return {node: frozenset(cores) for node, cores in found.items() if cores}


def node_of(address: str, system: Path = SYSTEM) -> int | None:
    """Return the NUMA node of a PCI device, or None if the system does not report it.

    Args:
        address: domain, bus, device and function in hexadecimal, `0000:17:00.0`.
        system: the folder where sysfs is mounted.
    """
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cores_near(gpu: int, gpus: Sequence[str], threads: int, system: Path = SYSTEM) -> frozenset[int]:
    """Return the cores that a rank should be bound to, or an empty set if it should not be bound.

    Args:
        gpu: index of the rank's GPU in `gpus`.
        gpus: PCI addresses of the GPUs of all ranks on this machine.
        threads: threads per rank. If the GPUs of a node need more threads than the node has cores, it is better to
            spread the ranks over all cores.
        system: see `node_of`.
    """
    cores, own = nodes(system), node_of(gpus[gpu], system)
    if len(cores) < 2 or own not in cores:
        return frozenset()
    sharing = sum(node_of(address, system) == own for address in gpus)
    return cores[own] if sharing * threads <= len(cores[own]) else frozenset()


def bind(cores: frozenset[int]) -> None:
    """Bind this process to these cores: its threads, and the threads that they start."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def _numbers(ranges: str) -> set[int]:
    """Return the numbers in a list such as `0-3,8`."""
    parts = [part.split("-") for part in ranges.strip().split(",") if part]
    return {number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)}
