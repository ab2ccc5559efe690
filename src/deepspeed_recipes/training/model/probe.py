"""Compares computations of a shrunken model: every check before a run that does not go by a model's name uses this.

A check makes a draft of the model's class, computes logits and gradients in two ways, and accepts a difference that
rounding explains.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...recipe.errors import first_line
from ...recipe.files import Json
from ...recipe.recipe import Draft
from .. import distributed
from . import attention, remote_code, transforms
from .draft import WINDOW, shrink

LEAK = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Smallest difference of logits that rounding does not explain, relative to the largest logit. Measured in fp32 on
drafts of every size in `recipes/`: at most 2e-6 if documents are kept apart, at least 2e-1 if they attend to each
other."""
Place = tuple[str, ...]
"""The keys that lead to a field; several if it is in a nested block."""
_WITHIN: dict[tuple[type, str], PreTrainedConfig] = {}
"""What `_within` has found, by the class and the content of a configuration."""


def draft_of(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    name: str = "eager",
    dtype: torch.dtype = torch.float32,
    certain: bool = False,
) -> PreTrainedModel:
    """Return a random draft, without a key/value cache; its windows, chunks and blocks are at most `WINDOW` tokens.

    Args:
        config: of the real model; the draft is of its class, with every kind of its layers.
        tokenizer: for the size of the vocabulary.
        name: an attention implementation, as in `from_pretrained(attn_implementation=...)`.
        dtype: of the weights.
        certain: without dropout, so that it computes the same in training as in evaluation.
    """
    small = shrink(config, Draft(layers=4), tokenizer)
    key = (type(small), small.to_json_string(use_diff=False))
    if key not in _WITHIN:  # packing and the head are checked on the same draft, of which this builds several models
        _WITHIN[key] = _within(small, WINDOW)
    small = copy.deepcopy(_WITHIN[key])
    small.use_cache = False
    for key, value in small.to_dict().items() if certain else ():
        if "drop" in key and isinstance(value, float):
            setattr(small, key, 0.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            small,
            attn_implementation=attention.loadable(name),
            dtype=dtype,
            trust_remote_code=remote_code.here(),
        )
    transforms.switch_by_batch(model)
    return model.to("cuda" if dtype == torch.bfloat16 else "cpu").eval()


def check_dtype(name: str) -> torch.dtype:
    """Return the dtype to check an implementation in: bf16, on the GPU, for kernels that need a GPU."""
    only_there = attention.is_flash(name) or (name not in ("auto", "sdpa", "eager") and torch.cuda.is_available())
    return torch.bfloat16 if only_there else torch.float32


def random_tokens(config: PreTrainedConfig, rows: int, length: int) -> torch.Tensor:
    """Return random tokens, [rows, length], the same for every model with a vocabulary of the same size."""
    return torch.randint(5, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))


def off(found: torch.Tensor, expected: torch.Tensor, least: float = 1e-9) -> float:
    """Return the largest difference relative to the largest value, which is at least `least`; infinity for NaN."""
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=least)).nan_to_num(torch.inf).item()


def computed(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits of a model, and the gradients of its loss by the weights' names."""
    model.zero_grad()
    output = model(input_ids=tokens.to(model.device), labels=tokens.to(model.device))
    output.loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return output.logits.detach(), gradients


def on_two_ranks(compute: Callable[[dist.ProcessGroup], object]) -> tuple[Any, str]:
    """Return the result of `compute` on ranks 0 and 1, or None, and the error's first line; a collective of all ranks.

    Whatever a model's own code raises is an answer here, not a crash.
    """
    group = dist.new_group([0, 1])
    answer: list[tuple[object, str]] = [(None, "")]
    if dist.get_rank() < 2:
        try:
            answer = [(compute(group), "")]
        except Exception as error:
            answer = [(None, first_line(error))]
    dist.broadcast_object_list(answer, src=0, device=distributed.device())
    return answer[0]


def worst(value: float, group: dist.ProcessGroup) -> float:
    """Return the largest value of a group's ranks; a collective."""
    largest = torch.tensor(value, device=distributed.device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.item()


def _within(config: PreTrainedConfig, bound: int) -> PreTrainedConfig:
    """Return a small configuration in which everything that limits attention is at most `bound` tokens.

    Lowering such an integer changes late tokens and leaves early tokens unchanged. Integers that change the weights'
    shapes are sizes, and those that scale positions also change early tokens.

    Args:
        config: of a small model, which is built and run once for every candidate.
        bound: tokens.
    """
    tokens = random_tokens(config, 1, bound + bound // 2)
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
        changed_by = (logits - expected).abs().amax(-1)[0] / expected.abs().max()
        if changed_by[: bound // 2].max() < LEAK[torch.float32] < changed_by[bound:].max():
            small = _with(small, place, bound)
    return small


def _larger(values: Json, bound: int, above: Place = ()) -> Iterator[Place]:
    """Yield the places of integers above `bound`, and of lists that contain one."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _larger(value, bound, (*above, name))
        elif _lowered(value, bound) != value:
            yield *above, name


def _lowered(value: object, bound: int) -> Any:
    if isinstance(value, list):
        return [_lowered(one, bound) for one in value]
    return min(value, bound) if isinstance(value, int) else value


def _with(config: PreTrainedConfig, place: Place, bound: int) -> PreTrainedConfig:
    """Return a copy in which the value at `place` is lowered to `bound`."""
    changed = copy.deepcopy(config)
    *above, name = place
    owner: object = changed
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
        options: Json = {
            "attn_implementation": "eager",
            "dtype": torch.float32,
            "trust_remote_code": remote_code.here(),
        }
        model = AutoModelForCausalLM.from_config(config, **options).eval()
    return model(input_ids=tokens, use_cache=False).logits
