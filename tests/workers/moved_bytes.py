"""How many bytes DeepSpeed moves per parameter beside what the model computes, by the operations that it calls."""

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from deepspeed_recipes.training import distributed
from tests.workers.held_experts import ZERO

WIDTHS = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product", "_unsafe_view")
"""Prefixes of operations that are counted as a layer's arithmetic, not here, and of views of their results."""
OVERWRITES = ("copy_", "zero_", "fill_")
"""Operations that write their first argument without reading it."""
UNSCALED = "grads"
"""The argument of a fused Adam that its schema says is written, which is so only where it unscales gradients."""


def size(value: Any) -> int:
    """Return the bytes of all tensors in some arguments."""
    return sum(one.numel() * one.element_size() for one in tree_leaves(value) if isinstance(one, torch.Tensor))


def moved(func: OpOverload, args: tuple, kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that an operation reads and writes, by what its schema says of its arguments."""
    schema = func._schema
    library, _, name = schema.name.partition("::")
    aliases = [returned.alias_info for returned in schema.returns]
    if library == "c10d" or name.startswith(PRODUCTS) or any(alias and not alias.is_write for alias in aliases):
        return 0  # a collective, a product, or a view
    if name.startswith(("empty", "new_empty")):
        return 0
    given = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
    total = sum(size(new) for new, alias in zip(tree_leaves(result), aliases, strict=False) if alias is None)
    for argument in schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write and argument.name != UNSCALED
        read = not written or not (name in OVERWRITES or argument.name == "out")
        total += (written + read) * size(given.get(argument.name))
    return total


class Moved(TorchDispatchMode):
    """Counts the bytes that operations move while it is active."""

    bytes = 0

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Call an operation and count what it moves."""
        result = func(*args, **(kwargs or {}))
        self.bytes += moved(func, args, kwargs or {}, result)
        return result


def per_parameter(model: torch.nn.Module, run: Callable[[], Any]) -> float:
    """Return the bytes that something moves per parameter of a model."""
    with Moved() as counter:
        run()
    whole = sum(getattr(weight, "ds_numel", weight.numel()) for weight in model.parameters())
    return counter.bytes / whole


def settings(stage: int, bf16_states: bool) -> dict[str, Any]:
    """Return DeepSpeed's settings: all weights are sharded, and gathered one by one, so that nothing is copied."""
    narrow = {"bf16_master_weights_and_grads": bf16_states, "bf16_optimizer_states": bf16_states}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True, **narrow},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {**ZERO, "stage": stage},
    }


def main(stage: int, fused: bool = True, bf16_states: bool = False) -> None:
    """Say what a step moves, and what a backward pass moves beyond that of the model alone."""
    distributed.start()
    config = LlamaConfig(vocab_size=64, **WIDTHS)
    tokens = torch.ones(1, 4, dtype=torch.long)

    def prepared() -> torch.nn.Module:
        return LlamaForCausalLM(config).to(torch.bfloat16)

    model = prepared()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    alone = per_parameter(model, loss.backward)
    model = prepared()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused, foreach=not fused)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=settings(stage, bf16_states))
    for _ in range(2):  # Adam's moments are made in the first step
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        backward = per_parameter(model, lambda loss=loss: engine.backward(loss))
        step = per_parameter(model, engine.step)
    print(f"step {step:.2f}, backward {backward - alone:.2f} bytes per parameter", flush=True)
    distributed.stop()
