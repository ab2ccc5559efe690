"""With every file of configs/ ranks train what plain PyTorch trains.

In 16 bits plain PyTorch keeps fp32 master weights, as DeepSpeed does, unless the file says otherwise.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_recipes.prove import techniques
from deepspeed_recipes.recipe import deepspeed_file, limits
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.project import CONFIGS
from deepspeed_recipes.recipe.recipe import Layout, Lora, Schedule
from deepspeed_recipes.recipe.run_folder import read_json, read_jsonl
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training import upstream
from deepspeed_recipes.training.model import lora as adapters
from deepspeed_recipes.training.model import transforms
from deepspeed_recipes.training.model.load import DTYPES
from tests.parity import gate, plain
from tests.ranks import run_on
from tests.tiers import tiered

EXACT = plain.Settings()
ROUNDED = plain.Settings(learning_rate=1e-3)
"""At the gate's own rate of 1e-2 rounding alone leads elsewhere within six steps."""
NEAR = {"loss": 1e-2, "grad_norm": 1e-2}
"""bf16 has 8 bits, 0.4 % per number. Seen: 0.7 % of a loss and 0.5 % of a norm, alike in every layout."""
ROUTED = {"loss": 1e-2, "grad_norm": 3e-2}
"""Of mixtures, where rounding sends a few tokens to another expert. Seen: 0.3 % of a loss and 1.3 % of a norm."""
NEAR_FP16 = {"loss": 2e-3, "grad_norm": 5e-3}
"""fp16 has 11 bits. Seen: 0.07 % of a loss, and 0.35 % of a mixture's norm."""
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
LAYOUTS = {
    "tensor_parallel": Layout(tensor=2),
    "sequence_parallel": Layout(sequence=2),
    "pipeline": Layout(pipeline=2),
    "expert_parallel": Layout(expert=2),
}
MIXTURES = ("expert_parallel", "zero3_moe")
MASTERS_IN_BF16 = ("bf16_states", "zero1_bf16_states")
NOT_COMPARED = {
    "deepcompile": "DeepCompile's kernels are CUDA's",
    "superoffload": "DeepSpeed's SuperOffload is for CUDA",
    "zero3_lora": "kernels that quantise weights are CUDA's",
    "zeropp": "kernels that quantise weights and gradients are CUDA's",
    "zero3_nvme": "it keeps weights in memory that are as small as here; test_offload.py compares it with wider ones",
    # At every step it updates the columns with the largest gradients and at every fourth the others, shard by shard.
    "zenflow": "no number of ranks trains what one process trains",
}
"""Why; the first four need a GPU."""
COMPARED = [name for name in NAMES if name not in NOT_COMPARED and name != "fp16"]
CASES = [
    *((name, "bf16") for name in COMPARED),
    *((name, "fp16") for name in ("fp16", *COMPARED) if name not in (*MASTERS_IN_BF16, "zero0")),
    # In fp32 the others are in the tests of their techniques.
    *((name, "fp32") for name in ("zero3_adapters", "zero3_moe")),
]
OFTEN = {(name, "bf16") for name in COMPARED} - {("zero3_moe", "bf16"), ("zero1_bf16_states", "bf16")} | {
    ("pipeline", "fp16")
}


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


def without_masters(model: torch.nn.Module, settings: plain.Settings) -> torch.optim.Optimizer:
    """Return AdamW on the weights themselves; its fused kernel, as DeepSpeed's, rounds once per weight."""
    groups = plain.groups(model, settings)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, eps=settings.epsilon, fused=True)


@pytest.fixture(scope="module")
def models(model_folder, tmp_path_factory):
    return {False: model_folder, True: techniques.random_qwen3(tmp_path_factory.mktemp("mixture"), experts=True)}


@pytest.fixture(scope="module")
def reference(models, conversations):
    """Return a function that trains in plain PyTorch, once for each kind."""

    @cache
    def trained(mixture: bool, precision: str, optimize: Callable[..., Any] | None) -> Any:
        settings = EXACT if precision == "fp32" else ROUNDED
        return plain.train(models[mixture], conversations, settings, DTYPES[precision], optimize=optimize)

    def of(name: str, precision: str) -> Any:
        masters = without_masters if name in MASTERS_IN_BF16 else MasterAdamW
        return trained(name in MIXTURES, precision, None if precision == "fp32" else masters)

    return of


@pytest.fixture
def start(ranks, tmp_path, models, conversations):
    """Return a function that trains with a file."""

    def run(name, precision, main=training_run.main, **changes):
        if precision == "fp16" and not get_accelerator().is_fp16_supported():
            pytest.skip("this processor has no fp16")
        settings = EXACT if precision == "fp32" else ROUNDED
        options = {"layout": LAYOUTS.get(name, Layout()), "precision": precision, **changes}
        model = models[name in MIXTURES]
        recipe = gate.recipe_for(settings, model, conversations, f"{name}.json", **options)
        return run_on(ranks, recipe, tmp_path, function=main)

    return run


def apart(run, records):
    """Return by how much the losses and the norms of a run differ at most, without the updates that fp16 refuses."""
    logged = read_jsonl(run.metrics)[refused(run) :]
    pairs = list(zip(logged, records[: len(logged)], strict=True))
    return {key: max(abs(ours[key] / theirs[key] - 1) for ours, theirs in pairs) for key in NEAR}


def refused(run):
    """Return how many updates at the start overflow at fp16's first loss scale: DeepSpeed leaves them out."""
    return [row["grad_norm"] is None for row in read_jsonl(run.metrics)].index(False)


def test_every_file_is_compared_or_cannot_be():
    assert len(NAMES) == 23 and {name for name, _ in CASES} == set(NAMES) - NOT_COMPARED.keys()


@pytest.mark.parametrize("name", ["deepcompile", "superoffload"])
def test_what_needs_cuda_is_refused_on_cpus(name):
    file = deepspeed_file.read(CONFIGS / f"{name}.json")
    with pytest.raises(UserError, match=rf"deepspeed={name}\.json: {NOT_COMPARED[name]}, and these ranks are on CPUs"):
        transforms.check(gate.recipe_for(EXACT, "", "", f"{name}.json"), file, on_gpu=False)


@pytest.mark.parametrize(("name", "precision"), tiered(CASES, OFTEN))
def test_same_training_as_plain_pytorch(start, reference, name, precision):
    run = start(name, precision)
    if precision == "fp32":
        gate.agree(run, *reference(name, precision))
        return
    assert read_json(run.deepspeed)[precision]["enabled"] is True
    bounds = NEAR_FP16 if precision == "fp16" else ROUTED if name in MIXTURES else NEAR
    found = apart(run, reference(name, precision)[0])
    assert all(found[key] < bounds[key] for key in bounds), found


def _with_step_of_zeros(folder: str) -> None:
    upstream.leave_out_step_of_zeros = lambda: None
    training_run.main(folder)


def test_a_step_of_zeros_is_noticed(start, reference):
    run = start("zero0", "bf16", main=_with_step_of_zeros)
    assert apart(run, reference("zero0", "bf16")[0])["loss"] > NEAR["loss"]


def test_master_weights_of_another_precision_are_noticed(reference):
    """In bf16 a step of 1e-3 is a rounding error of most weights."""
    with_masters, without = (reference(name, "bf16")[0] for name in ("zero1", "zero1_bf16_states"))
    pairs = list(zip(with_masters, without, strict=True))
    assert all(max(abs(one[key] / other[key] - 1) for one, other in pairs) > 1.5 * bound for key, bound in NEAR.items())


def _without_tied_sum(folder: str) -> None:
    upstream.sum_tied_gradients = lambda engine: None
    training_run.main(folder)


@pytest.mark.every
def test_tied_weights_whose_gradients_are_not_added_up_are_noticed(start, reference):
    run = start("pipeline", "fp16", main=_without_tied_sum)
    assert apart(run, reference("pipeline", "fp16")[0])["grad_norm"] > 5 * NEAR_FP16["grad_norm"]


ADAPTERS = Lora(rank=8, alpha=32, dropout=0.0)
ADAPTED = plain.Settings(learning_rate=1e-2)
"""Adapters begin at zero, so that a smaller rate would hardly train them in six steps."""


@pytest.fixture(scope="module")
def adapted(models, conversations):
    """Return a function that trains adapters in plain PyTorch, once for each precision and optimizer."""

    @cache
    def trained(precision: str, optimize: Callable[..., Any] = MasterAdamW) -> Any:
        def prepare(model: Any) -> Any:
            return adapters.add(model, ADAPTERS, 42)

        return plain.train(models[False], conversations, ADAPTED, DTYPES[precision], prepare, optimize)[0]

    return trained


@pytest.mark.parametrize(
    ("name", "precision"),
    tiered([(name, one) for name in ("zero1", "zero2", "zero3") for one in ("fp16", "bf16")], {("zero2", "fp16")}),
)
def test_adapters_in_16_bits_train_as_in_plain_pytorch(start, adapted, name, precision):
    run = start(name, precision, lora=ADAPTERS, learning_rate=ADAPTED.learning_rate)
    bounds = NEAR_FP16 if precision == "fp16" else NEAR
    found, records = apart(run, adapted(precision)), adapted(precision)
    assert all(found[key] < bounds[key] for key in bounds), found
    assert records[-1]["loss"] < 0.9 * records[0]["loss"], "the adapters have learned"


def test_adapters_without_fp32_copies_are_noticed(adapted):
    pairs = zip(adapted("fp16"), adapted("fp16", without_masters), strict=True)
    assert max(abs(one["loss"] / other["loss"] - 1) for one, other in pairs) > NEAR_FP16["loss"]


def test_an_update_that_overflows_is_left_out_with_its_step_of_the_schedule(start):
    run = start("zero2", "fp16", schedule=Schedule(kind="linear", warmup=0))
    logged, skipped = read_jsonl(run.metrics), refused(run)
    assert 0 < skipped < 4
    assert [row["loss"] for row in logged[:skipped]] == pytest.approx([logged[skipped]["loss"]] * skipped, rel=1e-5)
    rates = [row["learning_rate"] for row in logged]
    assert rates == pytest.approx([1e-3] * skipped + [1e-3 * (1 - step / 6) for step in range(6 - skipped)])


REFUSED_IN_FP16 = {
    "zero0": "precision=fp16 with deepspeed=zero0.json: without ZeRO, DeepSpeed divides .*; use deepspeed=zero1.json",
    "bf16_states": "precision=fp16 with deepspeed=bf16_states.json: bf16_master_weights_and_grads is for bf16",
    "zenflow": "precision=fp16 with deepspeed=zenflow.json: ZenFlow keeps updating",
}


@pytest.mark.parametrize("name", REFUSED_IN_FP16)
def test_fp16_is_refused_where_it_would_train_something_else(name):
    recipe = gate.recipe_for(EXACT, "", "", f"{name}.json", precision="fp16")
    with pytest.raises(UserError, match=REFUSED_IN_FP16[name]):
        limits.check(recipe, 2, deepspeed_file.read(recipe.deepspeed))
