"""Expert parallelism (DeepSpeed's AutoEP): each rank holds some of the experts of an MoE layer."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import groups
from transformers import PreTrainedModel

from .. import distributed
from ..upstream import AutoEPMoELayer


def layers(model: torch.nn.Module) -> dict[str, AutoEPMoELayer]:
    """Return AutoEP's layers by name; empty without expert parallelism."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AutoEPMoELayer)}


def whole_state(model: PreTrainedModel, keys: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the state of the ordinary Hugging Face model on rank 0, and nothing on the others; a collective.

    Weights are gathered one by one and moved to the CPU: no rank's device ever holds more than one layer's experts.
    AutoEP's `w1` and `w3`, [local experts, feed-forward, hidden], are the gate and up projections, which transformers
    holds as one matrix, [experts, 2 x feed-forward, hidden]; `w2` is the down projection.

    Args:
        model: with AutoEP's layers.
        keys: the engine's `expert_parallel` block, which has transformers' names for the parts of a layer.
    """
    spread = layers(model)
    shared = {
        "shared_experts": keys.get("shared_experts_pattern", "shared_experts"),
        "shared_experts_gate": keys.get("shared_experts_gate_pattern", "shared_experts_gate"),
    }
    router = keys.get("router_pattern", "gate")
    experts = keys.get("expert_pattern", "experts")
    outwards, back = keys.get("expert_w1", "gate_up_proj"), keys.get("expert_w2", "down_proj")
    ordinary = _ordinary_names(model)
    state: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        layer = next((layer for layer in spread if name.startswith(f"{layer}.")), None)
        part, _, rest = name.removeprefix(f"{layer}.").partition(".")
        if layer is None:
            _keep(state, name, _unsharded(value))
        elif part in shared:
            _keep(state, f"{layer}.{shared[part]}.{rest}", _unsharded(value))
    for name, layer in spread.items():
        weights = (layer.experts.w1, layer.experts.w2, layer.experts.w3)
        gate, down, up = (_gather(weight, layer.ep_group_name) for weight in weights)
        _keep(state, f"{name}.{experts}.{outwards}", torch.cat([gate, up], dim=1))
        _keep(state, f"{name}.{experts}.{back}", down)
        for key, value in layer.router.state_dict(keep_vars=True).items():
            own = key.removeprefix("gate.")
            # AutoEP's router takes over the correction biases, which in MiniMax M2 belong to the block.
            place = f"{name}.{own}" if f"{name}.{own}" in ordinary else f"{name}.{router}.{own}"
            _keep(state, place, _unsharded(value))
    return state


def _ordinary_names(model: PreTrainedModel) -> set[str]:
    """Return the names in the state of the same model without AutoEP's layers."""
    with torch.device("meta"):
        return set(type(model)(model.config).state_dict())


def _keep(state: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    if distributed.is_first():
        state[name] = value.cpu()


def _unsharded(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight gathered from ZeRO-3's shards."""
    if not hasattr(weight, "ds_id"):
        return weight.detach()
    with GatheredParameters([weight]):
        return weight.detach().clone()


def _gather(weight: torch.Tensor, group_name: str) -> torch.Tensor:
    """Return all experts in order: rank r of the group holds the r-th equal share of them."""
    group = groups._get_expert_parallel_group(group_name)
    own = _unsharded(weight).contiguous()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts)


def separate_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module, size: int) -> None:
    """Move the experts to an optimizer group of their own, marked as DeepSpeed expects.

    The engine takes over the groups when it replaces the layers. An optimizer that DeepSpeed builds from its own
    configuration has such groups too, but decays norms and biases like matrices.

    Args:
        optimizer: the Trainer's, before the engine exists.
        model: the model whose parameters it updates.
        size: number of ranks that share the experts of a layer.
    """
    routed = {parameter for name, parameter in model.named_parameters() if ".experts." in name}
    group, *_ = [one for one in optimizer.param_groups if not routed.isdisjoint(one["params"])]
    spread = [parameter for parameter in group["params"] if parameter in routed]
    group["params"] = [parameter for parameter in group["params"] if parameter not in routed]
    optimizer.add_param_group({**group, "params": spread, "moe": True, "name": f"ep_size_{size}"})
