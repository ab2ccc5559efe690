"""Muon (Jordan et al. 2024) at AdamW's rates (Liu et al. 2025, arXiv:2502.16982), by DeepSpeed's optimizer.

DeepSpeed orthogonalises the updates where ZeRO still has whole gradients. Its own `optimizer` block is not used, since
it tags weights only by their names and has one rate for all of them.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .. import distributed
from ..console import say
from .rates import Group

MOMENTUM = 0.95
AS_ADAMW = 0.2
"""Root mean square of AdamW's updates, also used for Muon's, so that both learn at one rate (arXiv:2502.16982)."""


def matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights that Muon trains: all matrices except embeddings and the head, also if ZeRO-3 shards them."""
    ends = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    ends += [model.get_output_embeddings() or getattr(model, "score", None)]
    excluded = {weight for end in ends if end is not None for weight in end.parameters()}
    trained = [weight for weight in model.parameters() if weight.requires_grad and weight not in excluded]
    return {weight for weight in trained if len(shape(weight)) == 2}


def shape(weight: torch.Tensor) -> torch.Size:
    """Return the shape of a whole weight; under ZeRO-3 the tensor itself is empty."""
    return getattr(weight, "ds_shape", weight.shape)


def groups(given: Iterable[Group], chosen: set[nn.Parameter]) -> list[Group]:
    """Return the groups, each divided into Adam's weights and, by their widths, Muon's matrices.

    DeepSpeed scales an update by sqrt(max(1, rows / columns)), so its root mean square is 1 / sqrt(columns) of the
    intended one. The inverse factor in the rate makes it AdamW's, and is divided out of the decay.
    """
    found: list[Group] = []
    for group in given:
        widths = {weight: shape(weight)[1] for weight in group["params"] if weight in chosen}
        rest = [weight for weight in group["params"] if weight not in chosen]
        if rest:
            found.append({**group, "params": rest, "use_muon": False})
        for width in sorted(set(widths.values())):
            factor = AS_ADAMW * math.sqrt(width)
            own = {"lr": group["lr"] * factor, "weight_decay": group["weight_decay"] / factor, "momentum": MOMENTUM}
            of_width = [weight for weight, columns in widths.items() if columns == width]
            found.append({"params": of_width, "use_muon": True, **own})
    return found


def optimizer(model: nn.Module, given: Iterable[Group], **options: Any) -> torch.optim.Optimizer:
    """Return DeepSpeed's optimizer for groups that have their rates; `options` are AdamW's."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam  # compiles its kernels when it is imported

    if not distributed.on_gpu():
        torch.compiler.set_stance("force_eager")  # compiling these kernels for a CPU takes longer than they save
    chosen = matrices(model)
    for weight in model.parameters():
        weight.use_muon = weight in chosen  # read by DeepSpeed's ZeRO
    adam = {name: options[name] for name in ("betas", "eps")}
    parts = [group if group["use_muon"] else {**group, **adam} for group in groups(given, chosen)]
    sizes = [sum(math.prod(shape(weight)) for weight in some) for some in (chosen, model.parameters())]
    say(f"optimizer=muon: {len(chosen)} matrices, {sizes[0] / sizes[1]:.0%} of the weights; AdamW has the others")
    return MuonWithAuxAdam(parts, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"fused": options["fused"]})
