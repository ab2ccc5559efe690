"""The load of a GPU, by NVML, and of this machine; and the cores near a GPU, those of its NUMA node.

NVML needs the optional package `nvidia-ml-py`. A reading of a GPU is slow compared with a kernel launch and covers all
processes of the machine: do not call it in a training step.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from ..recipe.gpus import GIB


class Gpu:
    """A GPU that is read repeatedly."""

    def __init__(self, uuid: str) -> None:
        """Find the GPU by its UUID, `GPU-...`, since NVML and CUDA_VISIBLE_DEVICES number GPUs differently.

        Raises:
            Exception: the module is missing (ImportError), or NVML's own error: no driver, no permission, a lost GPU.
        """
        import pynvml

        self.nvml: Any = pynvml
        pynvml.nvmlInit()
        self.handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self.before: dict[str, tuple[float, float]] = {}
        self.unsupported: set[Callable[[], object]] = set()
        self.errors: list[Exception] = []
        """Errors of the last `read`, without those for values that this GPU does not support."""

    def read(self) -> dict[str, float]:
        """Return the current values; a value that cannot be read is left out."""
        found: dict[str, float] = {}
        self.errors = []
        for reading in (self._load, self._memory, self._power, self._temperature, self._pcie, self._nvlink):
            if reading in self.unsupported:
                continue
            try:
                found |= reading()
            except Exception as error:
                if isinstance(error, getattr(self.nvml, "NVMLError_NotSupported", ())):
                    self.unsupported.add(reading)
                else:
                    self.errors.append(error)
        return found

    def _load(self) -> dict[str, float]:
        """Return the percent of the last second or less in which a kernel ran, and in which memory was accessed."""
        rates = self.nvml.nvmlDeviceGetUtilizationRates(self.handle)
        return {"gpu_utilization": rates.gpu, "gpu_memory_utilization": rates.memory}

    def _memory(self) -> dict[str, float]:
        """Return the memory used by all processes."""
        return {"gpu_memory_gib": round(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used / GIB, 3)}

    def _power(self) -> dict[str, float]:
        return {"gpu_power_watts": self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3}

    def _temperature(self) -> dict[str, float]:
        kind = self.nvml.NVML_TEMPERATURE_GPU
        return {"gpu_temperature_celsius": self.nvml.nvmlDeviceGetTemperature(self.handle, kind)}

    def _pcie(self) -> dict[str, float]:
        """Return the traffic of the last 20 ms, which NVML reports in KB/s."""
        ask, nvml = self.nvml.nvmlDeviceGetPcieThroughput, self.nvml
        return {
            "pcie_received_bytes_per_second": ask(self.handle, nvml.NVML_PCIE_UTIL_RX_BYTES) * 1e3,
            "pcie_sent_bytes_per_second": ask(self.handle, nvml.NVML_PCIE_UTIL_TX_BYTES) * 1e3,
        }

    def _nvlink(self) -> dict[str, float]:
        """Return the traffic of all links since the last reading; NVML counts KiB since the driver was loaded."""
        found: dict[str, float] = {}
        fields = {
            "nvlink_received_bytes_per_second": self.nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
            "nvlink_sent_bytes_per_second": self.nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        }
        all_links = 0xFFFFFFFF  # NVML's number for all NVLinks of a GPU together
        values = self.nvml.nvmlDeviceGetFieldValues(self.handle, [(field, all_links) for field in fields.values()])
        for name, value in zip(fields, values, strict=True):
            if value.nvmlReturn == self.nvml.NVML_SUCCESS:
                now = time.monotonic()
                since, count = self.before.get(name, (now, 0.0))
                self.before[name] = (now, value.value.ullVal)
                if now > since:
                    found[name] = round((value.value.ullVal - count) * 1024 / (now - since))
        return found


class Host:
    """The machine, read repeatedly; rates are means since the last reading."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.before = _counters()
        self.times = psutil.cpu_times()

    def read(self) -> dict[str, float]:
        """Return percentages, GiB and bytes per second, without values that the system does not count."""
        now, counted, memory = time.monotonic(), _counters(), psutil.virtual_memory()
        seconds = max(now - self.since, 1e-3)
        rates = {
            f"{name}_bytes_per_second": round(max(0, count - self.before[name]) / seconds)
            for name, count in counted.items()
            if name in self.before
        }
        self.since, self.before = now, counted
        # `psutil.cpu_percent` compares with the last call of the same thread: the first sample of a thread would be 0.
        before, self.times = self.times, psutil.cpu_times()
        fields = [
            name for name in self.times._fields if "guest" not in name
        ]  # Linux counts a guest's as the user's too
        spent = {name: getattr(self.times, name) - getattr(before, name) for name in fields}
        idle, total = spent["idle"] + spent.get("iowait", 0.0), sum(spent.values())
        return {
            "cpu_utilization": round(100 * max(0.0, 1 - idle / total), 1) if total > 0 else 0.0,
            "host_memory_percent": memory.percent,
            "host_memory_gib": round((memory.total - memory.available) / GIB, 3),
            **rates,
        }


def _counters() -> dict[str, int]:
    """Return bytes since the machine was started."""
    disks = psutil.disk_io_counters()  # None in a container that hides them
    networks = [one for name, one in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    found = {"disk_read": disks.read_bytes, "disk_written": disks.write_bytes} if disks else {}
    received, sent = sum(one.bytes_recv for one in networks), sum(one.bytes_sent for one in networks)
    return {**found, "network_received": received, "network_sent": sent}


SYSTEM = Path("/sys")


def node_of(address: str, system: Path = SYSTEM) -> int | None:
    """Return the NUMA node of a PCI device, `0000:17:00.0`, or None if sysfs, at `system`, does not report it."""
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cores_near(gpu: int, gpus: Sequence[str], threads: int, system: Path = SYSTEM) -> frozenset[int]:
    """Return the cores that a rank should be bound to, or an empty set if it should not be bound.

    If the GPUs of a node need more threads than the node has cores, it is better to spread the ranks over all cores.

    Args:
        gpu: index of the rank's GPU in `gpus`.
        gpus: PCI addresses of the GPUs of all ranks on this machine.
        threads: threads per rank.
        system: see `node_of`.
    """
    cores: dict[int, frozenset[int]] = {}  # those that this process may use, by node
    for folder in (system / "devices/system/node").glob("node[0-9]*"):
        parts = [part.split("-") for part in (folder / "cpulist").read_text().strip().split(",") if part]  # 0-3,8
        listed = {number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)}
        if usable := listed & os.sched_getaffinity(0):
            cores[int(folder.name.removeprefix("node"))] = frozenset(usable)
    own = node_of(gpus[gpu], system)
    if len(cores) < 2 or own not in cores:
        return frozenset()
    sharing = sum(node_of(address, system) == own for address in gpus)
    return cores[own] if sharing * threads <= len(cores[own]) else frozenset()


def bind(cores: frozenset[int]) -> None:
    """Bind this process to these cores: its threads, and the threads that they start.

    A rank on cores of the other socket launches its kernels, and copies to and from host memory, over the link between
    the sockets. PyTorch's launcher can keep ranks near their GPUs, which gains 1 to 10 % (torch 2.13,
    torch/numa/binding.py). DeepSpeed's launcher divides the cores in the order of the ranks, regardless of their GPUs,
    and needs numactl.
    """
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)
