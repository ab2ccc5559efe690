"""Finds how a model's matrices are split: by transformers' plan where it is proven, else by trying a shrunken model."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ...recipe.errors import UserError, first_line
from ...recipe.limits import TENSOR_PARALLEL_TYPES
from ...recipe.recipe import Recipe
from .. import distributed
from ..console import say
from ..model import draft, packing_check
from ..model.load import load_config
from . import tensor, tensor_graph
from .tensor_graph import Pair

LENGTH = 48
"""Tokens per compared sequence."""
_found: dict[str, Mapping[str, str]] = {}
"""Results by a model's path: found before ZeRO-3 shards every new model, and used afterwards."""


def styles(recipe: Recipe) -> Mapping[str, str]:
    """Return how the linear layers in a decoder layer are split, by name; a collective the first time.

    Raises:
        UserError: no layer can be split; the message lists the layers.
    """
    config = load_config(recipe).get_text_config()
    if config.model_type in TENSOR_PARALLEL_TYPES:
        return tensor.plan(config)
    path = recipe.model.path
    if path not in _found:
        _check_heads(config, recipe.layout.tensor)
        _found[path] = _find(config, recipe.model.attention)
    return _found[path]


def _check_heads(config: PreTrainedConfig, size: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)  # also where the configuration maps another name to it
        if heads and heads % size:
            raise UserError(f"layout.tensor={size}: the model's {heads} {name} are not divisible by {size}.")


def _find(config: PreTrainedConfig, attention: str) -> dict[str, str]:
    """Return the styles of all pairs that two ranks compute correctly; ranks 0 and 1 try, all get the result."""
    group = dist.new_group([0, 1])
    answer: list[tuple[dict[str, str], list[str], str]] = [({}, [], "")]
    if dist.get_rank() < 2:
        try:
            answer = [(*split(config, attention, group), "")]
        except Exception as error:  # a model's own code may raise anything
            answer = [({}, [], first_line(error))]
    dist.broadcast_object_list(answer, src=0, device=distributed.device())
    found, rest, reason = answer[0]
    if not found:
        raise UserError(
            f"layout.tensor: none of the layers of {config.model_type} can be split "
            f"({reason or ', '.join(rest)}); use layout.tensor=1."
        )
    whole = f"; whole on every rank: {', '.join(rest)}" if rest else ""
    layers = [name for name, style in found.items() if style not in (tensor.WHOLE, tensor.SHARE)]
    say(f"tensor parallelism of {config.model_type}: {', '.join(layers)}{whole}")
    return found


def split(config: PreTrainedConfig, attention: str, group: dist.ProcessGroup) -> tuple[dict[str, str], list[str]]:
    """Return the styles of the layers that can be split over the group's two ranks, and the linear layers that cannot.

    Each pair is tried alone, so that a pair that cannot be split, such as a fused projection, does not prevent others.
    """
    tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
    whole = packing_check.draft_of(config, tokenizer, attention, torch.float32)
    pairs, rest = tensor_graph.pairs(whole)
    right: list[Pair] = []
    for pair in sorted(pairs):
        tried = (replace(pair, sizes=()), pair)  # most code computes the number of heads from its input's shape
        working = next((one for one in tried if _is_right(whole, [one], group)), None)
        if working:
            right.append(working)
        else:
            rest |= {*pair.columns, pair.row}
    if right and not _is_right(whole, right, group):
        raise ValueError(f"{', '.join(pair.row for pair in right)} are correct one by one, but not together")
    return _styles(right), sorted(rest)


def _styles(pairs: Iterable[Pair]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        found |= dict.fromkeys(pair.columns, "colwise") | {pair.row: "rowwise"}
        found |= dict.fromkeys(pair.between, tensor.WHOLE) | dict.fromkeys(pair.sizes, tensor.SHARE)
    return found


def _is_right(whole: PreTrainedModel, pairs: Iterable[Pair], group: dist.ProcessGroup) -> bool:
    try:
        off = difference(whole, _styles(pairs), group)
    except Exception:  # an operation between the layers does not fit a share of the heads
        off = torch.inf
    worst = torch.tensor(off, device=distributed.device())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return worst.item() < packing_check.LEAK[torch.float32]


def difference(whole: PreTrainedModel, found: Mapping[str, str], group: dist.ProcessGroup) -> float:
    """Return how far logits and gradients of a split copy are from the model's, each relative to its largest value."""
    part = copy.deepcopy(whole)
    tensor.shard(part, found, group)
    layers = tensor.layers(part)
    expected, gradients = _computed(whole)
    logits, parts = _computed(part)
    offs = [_off(logits, expected)]
    # The gradient of a key's bias is zero except for rounding.
    least = 1e-3 * max(gradient.abs().max().item() for gradient in gradients.values())
    for name, gradient in parts.items():
        owner, _, own = name.rpartition(".")
        split_up = owner in layers and gradient.shape != gradients[name].shape
        joined = tensor.gathered(layers[owner], own, gradient) if split_up else gradient
        offs.append(_off(joined, gradients[name], least))
    return max(offs)


def _off(one: torch.Tensor, other: torch.Tensor, least: float = 1e-9) -> float:
    """Return the largest difference relative to the largest value, which is at least `least`; infinity for NaN."""
    return ((one - other).abs().max() / other.abs().max().clamp(min=least)).nan_to_num(torch.inf).item()


def _computed(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, model.config.vocab_size, (2, LENGTH), generator=generator)
    model.zero_grad()
    output = model(input_ids=tokens.to(model.device), labels=tokens.to(model.device))
    output.loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return output.logits.detach(), gradients
