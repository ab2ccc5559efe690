"""Finds how a model's matrices are split: by transformers' plan where it is proven, else by trying a shrunken model.

The candidates are read off the graph of the model's operations. A pair is a row layer and the column layers before it:
all linear layers whose outputs reach its input, if they reach no other row layer. Each rank then computes a share of
the operations between them: some of attention's heads, or a part of a feed-forward layer's width. Whether these can be
shared is found only by trying: `split`.
"""

import copy
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ...recipe.compatibility import TENSOR_PARALLEL_TYPES, refusal
from ...recipe.recipe import Recipe
from ..console import say
from ..model import draft, probe
from ..model.load import load_config
from . import tensor

LENGTH = 48
"""Tokens per compared sequence."""


_found: dict[str, Mapping[str, str]] = {}
"""Results by a model's path: found before ZeRO-3 shards every new model, and used afterwards."""


@dataclass(frozen=True, order=True)
class Pair:
    """Layers that are split together, by their names in a decoder layer."""

    columns: tuple[str, ...]
    row: str
    between: tuple[str, ...]
    """Modules whose weights every rank holds whole and uses for its own share only, such as the norms of heads."""
    sizes: tuple[str, ...] = ()
    """Numbers of heads and widths that the code between the layers may read off the module: `self_attn.num_heads`."""


def styles(recipe: Recipe) -> Mapping[str, str]:
    """Return how the linear layers in a decoder layer are split, by name; a collective the first time.

    A model of which no layer can be split is refused with its layers.
    """
    config = load_config(recipe).get_text_config()
    if config.model_type in TENSOR_PARALLEL_TYPES:
        return tensor.plan(config)
    path = recipe.model.path
    if path not in _found:
        _check_heads(config, recipe.layout.tensor)
        # Ranks 0 and 1 try all pairs, and all ranks get the result.
        answer, reason = probe.on_two_ranks(lambda group: split(config, recipe.model.attention, group))
        found, rest = answer or ({}, [])
        if not found:
            raise refusal("no layers to split", kind=config.model_type, error=reason or ", ".join(rest))
        whole = f"; whole on every rank: {', '.join(rest)}" if rest else ""
        layers = [name for name, style in found.items() if style not in (tensor.WHOLE, tensor.SHARE)]
        say(f"tensor parallelism of {config.model_type}: {', '.join(layers)}{whole}")
        _found[path] = found
    return _found[path]


def _check_heads(config: PreTrainedConfig, size: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)  # also where the configuration maps another name to it
        if heads and heads % size:
            raise refusal("heads of a type", size=size, heads=heads, name=name)


def split(config: PreTrainedConfig, attention: str, group: dist.ProcessGroup) -> tuple[dict[str, str], list[str]]:
    """Return the styles of the layers that can be split over the group's two ranks, and the linear layers that cannot.

    Each pair is tried alone, so that a pair that cannot be split, such as a fused projection, does not prevent others.
    """
    tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
    whole = probe.draft_of(config, tokenizer, attention)
    found, rest = pairs(whole)
    right: list[Pair] = []
    for pair in sorted(found):
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
    return probe.worst(off, group) < probe.LEAK[torch.float32]


def difference(whole: PreTrainedModel, found: Mapping[str, str], group: dist.ProcessGroup) -> float:
    """Return how far logits and gradients of a split copy are from the model's, each relative to its largest value."""
    part = copy.deepcopy(whole)
    tensor.shard(part, found, group)
    layers = tensor.layers(part)
    tokens = probe.random_tokens(whole.config, 2, LENGTH)
    expected, gradients = probe.computed(whole, tokens)
    logits, parts = probe.computed(part, tokens)
    offs = [probe.off(logits, expected)]
    # The gradient of a key's bias is zero except for rounding.
    least = 1e-3 * max(gradient.abs().max().item() for gradient in gradients.values())
    for name, gradient in parts.items():
        owner, _, own = name.rpartition(".")
        split_up = owner in layers and gradient.shape != gradients[name].shape
        joined = tensor.gathered(layers[owner], own, gradient) if split_up else gradient
        offs.append(probe.off(joined, gradients[name], least))
    return max(offs)


def pairs(model: PreTrainedModel) -> tuple[set[Pair], set[str]]:
    """Return the pairs in a draft's decoder layers, and the linear layers of none; makes one forward pass."""
    seen = _outputs(model)
    names = {node: name for name, (_, node) in seen.items()}
    before = {name: _reached(node, names) for name, (node, _) in seen.items()}
    after: dict[str, set[str]] = {}
    for name, (linears, _) in before.items():
        for linear in linears:
            after.setdefault(linear, set()).add(name)
    owners = {value: name.rpartition(".")[0] for name, value in model.named_parameters()}
    found, split = set(), set()
    for row, (columns, weights) in before.items():
        inside = _layer(row) is not None and all(_layer(column) == _layer(row) for column in columns)
        if columns and inside and all(after[column] == {row} for column in columns):
            between = sorted({owners[weight] for weight in weights if weight in owners})
            names_inside = (tuple(sorted(map(inner, columns))), inner(row), tuple(map(inner, between)))
            found.add(Pair(*names_inside, _sizes(model, sorted(columns))))
            split |= {inner(row), *map(inner, columns)}
    return found, {inner(name) for name in seen if _layer(name)} - split


def _sizes(model: PreTrainedModel, columns: list[str]) -> tuple[str, ...]:
    owner = columns[0].rpartition(".")[0]
    values = {getattr(model.config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    values |= {model.get_submodule(column).out_features for column in columns}
    numbers = {name: value for name, value in vars(model.get_submodule(owner)).items() if type(value) is int}
    return tuple(inner(f"{owner}.{name}") for name, value in sorted(numbers.items()) if value in values)


def inner(name: str) -> str:
    """Return a module's name in its decoder layer: `mlp.up_proj` for `model.layers.0.mlp.up_proj`."""
    return re.sub(r"^.*?\.\d+\.", "", name)


def _layer(name: str) -> str | None:
    found = re.match(r"^.*?\.\d+\.", name)
    return found[0] if found else None


def _outputs(model: PreTrainedModel) -> dict[str, tuple[Any, Any]]:
    """Return the place of each linear layer in the graph: the operations that made its input and its output."""
    seen: dict[str, tuple[object, object]] = {}

    def listen(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            seen[name] = (inputs[0].grad_fn, output.grad_fn)

        return hook

    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    handles = [module.register_forward_hook(listen(name)) for name, module in linears.items()]
    with torch.enable_grad():
        model(input_ids=torch.arange(5, 29)[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def _reached(node: object, names: dict[object, str]) -> tuple[set[str], set[torch.Tensor]]:
    """Return the linear layers whose outputs reach a node without passing another layer, and the weights on the way."""
    linears: set[str] = set()
    weights: set[torch.Tensor] = set()
    for one in nodes(node, names):
        if one in names:
            linears.add(names[one])
        elif hasattr(one, "variable"):
            weights.add(one.variable)
    return linears, weights


def nodes(root: Any, last: Container[Any] = ()) -> Iterator[Any]:
    """Yield each node of autograd's graph once, from `root` towards the weights, but none behind those in `last`."""
    visited, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        if node not in last:
            waiting += [following for following, _ in node.next_functions]
