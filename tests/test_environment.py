"""What a run writes down about where it ran, and that looking never ends it."""

import pytest
import torch

from deepspeed_recipes.training import distributed
from deepspeed_recipes.training.callbacks import metrics


def test_versions_of_what_is_not_installed_are_left_out():
    found = distributed.versions(["torch", "no-such-package"])
    assert list(found) == ["torch"] and found["torch"].startswith("2.")


class NVMLError(Exception):
    """As NVIDIA's bindings raise: no RuntimeError."""


@pytest.mark.parametrize("error", [ModuleNotFoundError("pynvml"), NVMLError("GPU is lost")])
def test_a_failing_management_library_does_not_end_a_run(monkeypatch, error):
    def utilization():
        raise error

    monkeypatch.setattr(distributed, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 2**30)
    assert metrics.memory() == {
        "host_peak_gib": pytest.approx(metrics.memory()["host_peak_gib"]),
        "gpu_peak_gib": 1,
        "gpu_reserved_gib": 1,
    }
