"""Tensor parallelism: splits a decoder's matrices over ranks, and joins them again for saving.

`styles` finds how a model's matrices are split: by transformers' plan where it is proven, else by trying a shrunken
model. The candidates are read off the graph of the model's operations. A pair is a row layer and the column layers
before it: all linear layers whose outputs reach its input, if they reach no other row layer. Each rank then computes a
share of the operations between them: some of attention's heads, or a part of a feed-forward layer's width. Whether
these can be shared is found only by trying: `split`.
"""

import copy
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject import layers as autotp
from deepspeed.module_inject import set_autotp_mode
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, TensorParallel_Layer
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import groups
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ...recipe.compatibility import TENSOR_PARALLEL_TYPES, refusal
from ...recipe.recipe import Recipe
from .. import upstream
from ..console import say
from ..model import draft, probe, transforms
from ..model.load import load_config

WHOLE = "replicated_with_grad_allreduce"
"""Style of a weight that every rank holds whole and uses for its own heads only."""
SHARE = "share"
"""Style of a number of heads or a width that is divided over the ranks."""
STYLES = ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input", WHOLE)
"""Styles of a Hugging Face plan that `shard` supports; the others are for experts and latent attention."""


def plan(config: PreTrainedConfig) -> dict[str, str]:
    """Return how each linear layer of a decoder layer is split, by its name in it (`self_attn.q_proj: colwise`).

    Raises ValueError if transformers has no plan for this architecture, or one that splits what `shard` cannot.
    """
    planned = config.get_text_config().base_model_tp_plan or {}
    # transformers 5.17 plans the embeddings too.
    whole = {pattern: style for pattern, style in planned.items() if pattern.startswith("layers.*.")}
    styles = set(whole.values())
    if not whole or not styles <= set(STYLES):
        raise ValueError(f"{config.model_type}: no plan, or unknown styles {sorted(styles - set(STYLES))}")
    return {pattern.removeprefix("layers.*."): style for pattern, style in whole.items()}


def shard(module: torch.nn.Module, styles: Mapping[str, str], group: dist.ProcessGroup) -> None:
    """Keep this rank's part of the linear layers of `module` that are in `styles`; only its use is a collective.

    `module` is one or more whole decoder layers, the same on all ranks of `group`, which must read the same sequences.
    Heads and feed-forward width must be multiples of the group's size.
    """
    set_autotp_mode(training=True)  # otherwise DeepSpeed freezes the layers that it replaces
    for name, style in _matches(module, styles):
        linear = module.get_submodule(name)
        if style == WHOLE:
            for parameter in linear.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(_summed_over(group))
            continue
        for part, own in _parts(linear, style):
            path = f"{name}.{part}".rstrip(".")
            module.set_submodule(path, _split(module.get_submodule(path), own, group))
    for path in [path for path, style in styles.items() if style == SHARE]:
        owner, _, number = path.rpartition(".")
        for name, _ in _matches(module, {owner: SHARE}):
            transforms.divide_number(module.get_submodule(name), number, group.size())


def _matches(module: torch.nn.Module, styles: Mapping[str, str]) -> list[tuple[str, str]]:
    names = [name for name, _ in module.named_modules()]
    return [(name, style) for name in names for end, style in styles.items() if f".{name}".endswith(f".{end}")]


def _parts(linear: torch.nn.Module, style: str) -> list[tuple[str, str]]:
    """Return which matrices of a layer are split and how: its own, and one of each adapter's two.

    Where the layer's outputs are split, the adapter's B is split; where its inputs are split, the adapter's A. The
    other matrix stays whole, since each rank has its whole inputs and whole gradients.
    """
    if not isinstance(linear, LoraLayer):
        return [("", style)]
    split = {"colwise": linear.lora_B, "rowwise": linear.lora_A}.get(style, {})
    matrix = "lora_B" if style == "colwise" else "lora_A"
    return [("base_layer", style), *((f"{matrix}.{name}", style) for name in split)]


def _split(linear: torch.nn.Linear, style: str, group: dist.ProcessGroup) -> TensorParallel_Layer:
    size = group.size()
    width = linear.in_features if style.startswith("rowwise") else linear.out_features
    if width % size:
        raise refusal("width of a layer", size=size, width=width)
    # Weights that ZeRO-3 has sharded over all ranks are replaced by ordinary ones; ZeRO-3 shards the parts again.
    sharded = [(name, value) for name, value in linear.named_parameters(recurse=False) if is_zero_param(value)]
    with GatheredParameters([value for _, value in sharded]):
        for name, value in sharded:
            whole = torch.nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
            linear.register_parameter(name, whole)
    if style == "rowwise":
        return LinearAllreduce(linear, group)
    if style == "rowwise_split_input":
        splitting = getattr(autotp, "LinearAllreduceWithReplicatedInput", None)
        if splitting is None:
            raise refusal("split inputs")
        return splitting(linear, group)
    return LinearLayer(linear, group, gather_output=style == "colwise_gather_output")


def shard_model(model: PreTrainedModel | PeftModel, size: int, styles: Mapping[str, str]) -> None:
    """Split a model over groups of `size` ranks in DeepSpeed's place, so that its AutoTP finds nothing to do.

    AutoTP would also split the output head, whose weight is read by everything that computes a loss without whole
    logits. It mistakes PEFT's layer for the linear layer in it, and replaces it by a layer without adapters. And it
    refuses plans in which a layer splits whole inputs, though it has a layer for that. `test_autotp_loses_adapters` and
    `test_autotp_splits_the_head` fail once AutoTP can be used. The model is whole on every rank, or sharded by ZeRO-3.
    """
    if isinstance(model, PeftModel):
        for parameter in model.parameters():
            if parameter.requires_grad:  # each rank has initialised it at random
                dist.broadcast(parameter.data, 0)
    groups._init_tp_mesh_device(tensor_model_parallel_size=size)
    shard(model, styles, groups.get_tensor_model_parallel_group())
    upstream.mark_as_split(model)


def _summed_over(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a hook that sums a gradient over the group, in which each rank has the part of its own heads."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        whole = gradient.contiguous()
        dist.all_reduce(whole, group=group)
        return whole

    return hook


def layers(module: torch.nn.Module) -> dict[str, TensorParallel_Layer]:
    """Return the layers that are split over ranks, by name; empty without tensor parallelism."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, TensorParallel_Layer)}


@torch.no_grad()
def whole_state(module: torch.nn.Module, keep: bool = True, frozen: bool = True) -> dict[str, torch.Tensor]:
    """Return the state dict of the unsplit module, on the host; a collective that gathers one layer at a time.

    `module` is as `shard` leaves it, its weights not sharded by ZeRO-3. Ranks that only take part do not `keep` it and
    return nothing; `frozen=False` omits weights that are not trained.
    """
    split = layers(module)
    state: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not frozen and not value.requires_grad:
            continue
        owner, _, own = name.rpartition(".")
        same = first.setdefault(value.data_ptr(), name)
        if same in state:
            state[name] = state[same]  # keep tied weights tied, or a checkpoint would hold both
            continue
        whole = gathered(split[owner], own, value) if owner in split else value
        if keep:
            state[name] = whole.detach().cpu()
    return state


def gathered(layer: TensorParallel_Layer, name: str, part: torch.Tensor) -> torch.Tensor:
    """Return the whole of `part`, which is `layer`'s weight or bias on this rank; a collective.

    DeepSpeed's own gathering replaces the parameter by the whole weight, and afterwards by a copy of the part, which is
    detached from the flat buffer in which ZeRO-1 and 2 update it.
    """
    copy = torch.nn.Parameter(part.clone(), requires_grad=False)
    if name == "weight" or not isinstance(layer, LinearAllreduce):  # its bias is whole on every rank
        layer.gather_params([copy])
    return copy.detach()


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
        return plan(config)
    path = recipe.model.path
    if path not in _found:
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None)  # also where the configuration maps another name to it
            if heads and heads % recipe.layout.tensor:
                raise refusal("heads of a type", size=recipe.layout.tensor, heads=heads, name=name)
        # Ranks 0 and 1 try all pairs, and all ranks get the result.
        answer, reason = probe.on_two_ranks(lambda group: split(config, recipe.model.attention, group))
        found, rest = answer or ({}, [])
        if not found:
            raise refusal("no layers to split", kind=config.model_type, error=reason or ", ".join(rest))
        whole = f"; whole on every rank: {', '.join(rest)}" if rest else ""
        layers = [name for name, style in found.items() if style not in (WHOLE, SHARE)]
        say(f"tensor parallelism of {config.model_type}: {', '.join(layers)}{whole}")
        _found[path] = found
    return _found[path]


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
        found |= dict.fromkeys(pair.between, WHOLE) | dict.fromkeys(pair.sizes, SHARE)
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
    shard(part, found, group)
    whole_layers = layers(part)
    tokens = probe.random_tokens(whole.config, 2, 48)
    expected, gradients = probe.computed(whole, tokens)
    logits, parts = probe.computed(part, tokens)
    offs = [probe.off(logits, expected)]
    # The gradient of a key's bias is zero except for rounding.
    least = 1e-3 * max(gradient.abs().max().item() for gradient in gradients.values())
    for name, gradient in parts.items():
        owner, _, own = name.rpartition(".")
        split_up = owner in whole_layers and gradient.shape != gradients[name].shape
        joined = gathered(whole_layers[owner], own, gradient) if split_up else gradient
        offs.append(probe.off(joined, gradients[name], least))
    return max(offs)


def pairs(model: PreTrainedModel) -> tuple[set[Pair], set[str]]:
    """Return the pairs in a draft's decoder layers, and the linear layers of none; makes one forward pass."""
    seen: dict[str, tuple[object, object]] = {}  # the operations that made a layer's input and its output

    def listen(name: str, _: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen[name] = (inputs[0].grad_fn, output.grad_fn)

    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    handles = [module.register_forward_hook(partial(listen, name)) for name, module in linears.items()]
    with torch.enable_grad():
        model(input_ids=torch.arange(5, 29)[None], use_cache=False)
    for handle in handles:
        handle.remove()
    # Linear layers and weights whose output reaches a layer's input directly.
    names = {output: name for name, (_, output) in seen.items()}
    before: dict[str, tuple[set[str], set[torch.Tensor]]] = {}
    after: dict[str, set[str]] = {}
    for name, (node, _) in seen.items():
        passed = list(nodes(node, names))
        reached = {names[one] for one in passed if one in names}
        before[name] = reached, {one.variable for one in passed if one not in names and hasattr(one, "variable")}
        for linear in reached:
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
    return found, {inner(name) for name in before if _layer(name)} - split


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
