"""Reads off the graph of a model's operations which linear layers of an unknown architecture can be split.

A pair is a row layer and the column layers before it: all linear layers whose outputs reach its input, if they reach
no other row layer. Each rank then computes a share of the operations between them: some of attention's heads, or a
part of a feed-forward layer's width. Whether these can be shared is found only by trying: `tensor_check`.
"""

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True, order=True)
class Pair:
    """Layers that are split together, by their names in a decoder layer."""

    columns: tuple[str, ...]
    row: str
    between: tuple[str, ...]
    """Modules whose weights every rank holds whole and uses for its own share only, such as the norms of heads."""
    sizes: tuple[str, ...] = ()
    """Numbers of heads and widths that the code between the layers may read off the module: `self_attn.num_heads`."""


def pairs(model: PreTrainedModel) -> tuple[set[Pair], set[str]]:
    """Return the pairs in a model's decoder layers, and the linear layers that belong to none.

    Args:
        model: a draft with every kind of layer; it makes one forward pass.
    """
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
    seen: dict[str, tuple[Any, Any]] = {}

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


def _reached(node: Any, names: dict[Any, str]) -> tuple[set[str], set[torch.Tensor]]:
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
