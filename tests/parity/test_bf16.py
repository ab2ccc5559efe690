"""In bf16 every configuration and layout trains what plain PyTorch trains in bf16 with fp32 master weights."""

from typing import Any

import pytest
import torch

from recipes.spec.recipe import Layout
from recipes.spec.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from recipes.training import run as training_run
from recipes.training import upstream
from tests.parity import gate, plain
from tests.tiers import tiered

SETTINGS = plain.Settings(learning_rate=1e-3)
"""At the gate's own rate of 1e-2 rounding alone leads elsewhere within six steps."""
NEAR = 1e-2
"""bf16 has 8 bits, 0.4 % per number. Seen: 0.7 % of a loss and 0.3 % of a norm, alike in every layout."""
LAYOUTS = {
    **dict.fromkeys(("zero0", "zero1", "zero2", "zero3", "zero3_hpz", "zero3_adapters"), Layout()),
    **dict.fromkeys(("zero2_offload", "zero3_offload", "zero3_offload_params"), Layout()),
    "tensor_parallel": Layout(tensor=2),
    "sequence_parallel": Layout(sequence=2),
    "pipeline": Layout(pipeline=2),
}
"""The files of configs/ whose optimizer is Adam with fp32 states and runs on a CPU; `zero3_nvme` is in test_offload.py.
DeepSpeed refuses fp16 on a CPU."""


class MasterAdamW(torch.optim.AdamW):
    """AdamW on fp32 copies of the weights, which get its results rounded."""

    def __init__(self, model: torch.nn.Module, settings: plain.Settings) -> None:
        """Copy the weights."""
        self.rounded = [group["params"] for group in plain.groups(model, settings)]
        copies = [
            group | {"params": [one.detach().float().requires_grad_() for one in group["params"]]}
            for group in plain.groups(model, settings)
        ]
        super().__init__(copies, lr=settings.learning_rate, eps=settings.epsilon)

    def _pairs(self) -> Any:
        for group, rounded in zip(self.param_groups, self.rounded, strict=True):
            yield from zip(group["params"], rounded, strict=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the weights themselves."""
        for _, weight in self._pairs():
            weight.grad = None

    def step(self, closure: Any = None) -> None:
        """Update the copies with the weights' gradients, and the weights with the copies."""
        for master, weight in self._pairs():
            master.grad = weight.grad.float()
        super().step()
        with torch.no_grad():
            for master, weight in self._pairs():
                weight.copy_(master)


@pytest.fixture(scope="module")
def reference(model_folder, conversations):
    return plain.train(model_folder, conversations, SETTINGS, dtype=torch.bfloat16, optimize=MasterAdamW)


def trained(ranks, folder, model_folder, conversations, name, main=training_run.main):
    run = RunFolder(folder / "run")
    options = {"layout": LAYOUTS[name], "precision": "bf16"}
    write_recipe(run, gate.recipe_for(SETTINGS, model_folder, conversations, f"{name}.json", **options))
    ranks.check(main, str(run.path), log=folder / "log")
    assert read_json(run.deepspeed)["bf16"]["enabled"] is True
    return read_jsonl(run.metrics)


def apart(logged, records, key):
    return max(abs(ours[key] / theirs[key] - 1) for ours, theirs in zip(logged, records, strict=True))


@pytest.mark.parametrize("name", tiered(LAYOUTS, {"zero0"}))
def test_losses_and_norms_are_those_of_master_weights(ranks, tmp_path, model_folder, conversations, reference, name):
    logged = trained(ranks, tmp_path, model_folder, conversations, name)
    assert apart(logged, reference[0], "loss") < NEAR and apart(logged, reference[0], "grad_norm") < NEAR


def _with_step_of_zeros(folder: str) -> None:
    upstream.leave_out_step_of_zeros = lambda: None
    training_run.main(folder)


def test_a_step_of_zeros_is_noticed(ranks, tmp_path, model_folder, conversations, reference):
    logged = trained(ranks, tmp_path, model_folder, conversations, "zero0", main=_with_step_of_zeros)
    assert apart(logged, reference[0], "loss") > NEAR
