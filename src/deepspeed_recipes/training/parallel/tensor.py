"""Tensor parallelism: splits a decoder's matrices over ranks, and joins them again for saving."""

from collections.abc import Callable, Mapping

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
from transformers import PreTrainedConfig, PreTrainedModel

from ...recipe.compatibility import refusal
from .. import upstream
from ..model import transforms

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
    _gather(linear)
    if style == "rowwise":
        return LinearAllreduce(linear, group)
    if style == "rowwise_split_input":
        splitting = getattr(autotp, "LinearAllreduceWithReplicatedInput", None)
        if splitting is None:
            raise refusal("split inputs")
        return splitting(linear, group)
    return LinearLayer(linear, group, gather_output=style == "colwise_gather_output")


def _gather(linear: torch.nn.Linear) -> None:
    """Replace weights that ZeRO-3 has sharded over all ranks by ordinary ones; ZeRO-3 shards the parts again."""
    sharded = [(name, value) for name, value in linear.named_parameters(recurse=False) if is_zero_param(value)]
    if not sharded:
        return
    with GatheredParameters([value for _, value in sharded]):
        for name, value in sharded:
            whole = torch.nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
            linear.register_parameter(name, whole)


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
    """Return the state dict of an unsplit module, on the host; a collective that gathers one layer at a time.

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
