"""Answers for NVML where there is no GPU: nvidia-ml-py's names, units and errors; fails where NVML_FAILS says so."""

import os
import time
from types import SimpleNamespace

NVML_SUCCESS = NVML_TEMPERATURE_GPU = 0
NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
LINK_KIB_PER_SECOND = 2000


class NVMLError(Exception):
    """As nvidia-ml-py's."""


class NVMLError_NotSupported(NVMLError):
    """A GPU lacks it."""


def answer(name, value):
    failing = os.environ.get("NVML_FAILS")
    if failing == name:
        raise NVMLError("GPU is lost")
    if failing == f"unsupported {name}":
        raise NVMLError_NotSupported("Not Supported")
    return value


if os.environ.get("NVML_FAILS") == "import":
    raise ImportError("No module named 'pynvml'")


def nvmlInit():
    answer("init", None)


def nvmlDeviceGetHandleByUUID(uuid):
    assert uuid.startswith("GPU-")
    return answer("handle", uuid)


def nvmlDeviceGetUtilizationRates(handle):
    return answer("load", SimpleNamespace(gpu=90 + int(handle[-1]), memory=40))


def nvmlDeviceGetMemoryInfo(handle):
    return answer("memory", SimpleNamespace(used=3 * 2**30, total=80 * 2**30))


def nvmlDeviceGetPowerUsage(handle):
    return answer("power", 654_321)


def nvmlDeviceGetTemperature(handle, kind):
    return answer("temperature", 61 + kind)


def nvmlDeviceGetPcieThroughput(handle, direction):
    return answer("pcie", 1500 if direction == NVML_PCIE_UTIL_RX_BYTES else 700)


def nvmlDeviceGetFieldValues(handle, fields):
    total = int(time.monotonic() * LINK_KIB_PER_SECOND)
    values = [SimpleNamespace(nvmlReturn=NVML_SUCCESS, value=SimpleNamespace(ullVal=total)) for _ in fields]
    return answer("nvlink", values)
