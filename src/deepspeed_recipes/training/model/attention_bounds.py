"""Finds by trial the integers of a configuration that limit attention: windows, chunks, blocks."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from . import remote_code

DIFFERENCE = 1e-4
"""Smallest difference of fp32 logits, relative to the largest, that is more than rounding."""
Place = tuple[str, ...]
"""The keys that lead to a field; several if it is in a nested block."""


def within(config: PreTrainedConfig, bound: int) -> PreTrainedConfig:
    """Return a small configuration in which everything that limits attention is at most `bound` tokens.

    Lowering such an integer changes late tokens and leaves early tokens unchanged. Integers that change the weights'
    shapes are sizes, and those that scale positions also change early tokens.

    Args:
        config: of a small model, which is built and run once for every candidate.
        bound: tokens.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, config.vocab_size, (1, bound + bound // 2), generator=generator)
    shapes, expected = _shapes(config), _logits(config, tokens)
    small = copy.deepcopy(config)
    for place in _larger(config.to_dict(), bound):
        try:
            changed = _with(config, place, bound)
            if _shapes(changed) != shapes:
                continue
            logits = _logits(changed, tokens)
        except Exception:  # a model's own code may raise anything at a value that it does not expect
            continue
        off = (logits - expected).abs().amax(-1)[0] / expected.abs().max()
        if off[: bound // 2].max() < DIFFERENCE < off[bound:].max():
            small = _with(small, place, bound)
    return small


def _larger(values: dict[str, Any], bound: int, above: Place = ()) -> Iterator[Place]:
    """Yield the places of integers above `bound`, and of lists that contain one."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _larger(value, bound, (*above, name))
        elif _lowered(value, bound) != value:
            yield *above, name


def _lowered(value: Any, bound: int) -> Any:
    if isinstance(value, list):
        return [_lowered(one, bound) for one in value]
    return min(value, bound) if isinstance(value, int) else value


def _with(config: PreTrainedConfig, place: Place, bound: int) -> PreTrainedConfig:
    """Return a copy in which the value at `place` is lowered to `bound`."""
    changed = copy.deepcopy(config)
    *above, name = place
    owner: Any = changed
    for key in above:
        owner = owner[key] if isinstance(owner, dict) else getattr(owner, key)
    values = owner if isinstance(owner, dict) else vars(owner)
    values[name] = _lowered(values[name], bound)
    return changed


def _shapes(config: PreTrainedConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=remote_code.here())
    return {name: value.shape for name, value in model.named_parameters()}


@torch.no_grad()
def _logits(config: PreTrainedConfig, tokens: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        options: dict[str, Any] = {
            "attn_implementation": "eager",
            "dtype": torch.float32,
            "trust_remote_code": remote_code.here(),
        }
        model = AutoModelForCausalLM.from_config(config, **options).eval()
    return model(input_ids=tokens, use_cache=False).logits
