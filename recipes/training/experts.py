"""Expert parallelism (DeepSpeed's AutoEP): each rank holds some of a mixture's experts; here they become whole."""

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups
from transformers import PreTrainedModel, Trainer


def layers(model: torch.nn.Module) -> dict[str, AutoEPMoELayer]:
    """Return AutoEP's layers by their names; none without expert parallelism."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AutoEPMoELayer)}


def whole_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the state of the ordinary Hugging Face model, its experts gathered from all ranks; a collective.

    AutoEP's `w1` and `w3`, [local experts, feed-forward, hidden], are the gate's and the up projection, which
    transformers holds as one, [experts, 2 x feed-forward, hidden]; `w2` is the down projection.
    """
    state = dict(model.state_dict())
    for name, layer in layers(model).items():
        for key in [key for key in state if key.startswith(f"{name}.")]:
            if not key.startswith(f"{name}.shared_experts"):
                del state[key]
        weights = (layer.experts.w1, layer.experts.w2, layer.experts.w3)
        gate, down, up = (_gather(weight.detach(), layer.ep_group_name) for weight in weights)
        state[f"{name}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        state[f"{name}.experts.down_proj"] = down
        for key, value in layer.router.state_dict().items():
            state[f"{name}.gate.{key.removeprefix('gate.')}"] = value
    return state


def _gather(weight: torch.Tensor, group_name: str) -> torch.Tensor:
    """Return all experts in order: rank r of the group holds the r-th equal share of them."""
    group = groups._get_expert_parallel_group(group_name)
    parts = [torch.empty_like(weight) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, weight.contiguous(), group=group)
    return torch.cat(parts)


def group_parameters(trainer: Trainer, size: int) -> None:
    """Make the Trainer's optimizer hold the experts in a group of their own, marked as DeepSpeed wants it.

    The engine takes over the groups when it replaces the layers. An optimizer that DeepSpeed builds from its own
    configuration has such groups too, but decays norms and biases like matrices.

    Args:
        trainer: before it has an optimizer.
        size: ranks that the experts of one layer are spread over.
    """
    create = trainer.create_optimizer

    def create_optimizer(model: Any = None) -> torch.optim.Optimizer:
        optimizer = create(model)
        routed = {parameter for name, parameter in trainer.model.named_parameters() if ".experts." in name}
        group, *_ = [one for one in optimizer.param_groups if not routed.isdisjoint(one["params"])]
        spread = [parameter for parameter in group["params"] if parameter in routed]
        group["params"] = [parameter for parameter in group["params"] if parameter not in routed]
        optimizer.add_param_group({**group, "params": spread, "moe": True, "name": f"ep_size_{size}"})
        return optimizer

    trainer.create_optimizer = create_optimizer


def gather_on_save(trainer: Trainer) -> None:
    """Make the Trainer's checkpoints hold ordinary Hugging Face weights too."""

    def get_state_dict(model: Any, unwrap: bool = True) -> dict[str, torch.Tensor]:
        return whole_state(model.module)

    trainer.accelerator.get_state_dict = get_state_dict
