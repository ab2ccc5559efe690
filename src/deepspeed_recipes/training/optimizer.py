"""Creates the recipe's optimizer if it is not the Trainer's AdamW with one learning rate for all weights.

Muon (Jordan et al. 2024) learns at AdamW's rates (Liu et al. 2025, arXiv:2502.16982). DeepSpeed's optimizer
orthogonalises the updates where ZeRO still has whole gradients; its own `optimizer` block is not used, since it tags
weights only by their names and has one rate for all of them.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable

import torch
from torch import nn
from transformers import get_scheduler

from ..recipe.files import Json
from ..recipe.recipe import Recipe
from . import distributed
from .console import say
from .data import updates
from .model.load import whole_shape


def needed(recipe: Recipe) -> bool:
    """Return whether the recipe needs something other than the Trainer's AdamW with one rate for all weights."""
    several = recipe.layer_decay < 1 or (recipe.lora is not None and recipe.lora.plus_ratio != 1)
    return recipe.optimizer != "adamw" or several


def make(
    recipe: Recipe, model: torch.nn.Module, kind: type, decayed: Collection[str], options: Json
) -> torch.optim.Optimizer:
    """Return the optimizer for the weights of `model`; `kind` is the class that the Trainer would use.

    `decayed` are the names of the weights that are decayed, and `options` are AdamW's, including `lr`.
    """
    named = dict(model.named_parameters())
    shares = rate_shares(recipe, named)
    trained = {name: weight for name, weight in named.items() if weight.requires_grad}
    parts: list[Group] = []
    for decays, decay in ((True, recipe.weight_decay), (False, 0.0)):
        held = {name: weight for name, weight in trained.items() if (name in decayed) == decays}
        for share in sorted({shares[name] for name in held}):
            weights = [weight for name, weight in held.items() if shares[name] == share]
            parts.append({"params": weights, "weight_decay": decay, "lr": options["lr"] * share})
    parts.sort(key=lambda group: abs(group["lr"] - options["lr"]))  # the full rate first, which is logged
    if recipe.optimizer == "muon":
        return _muon(model, parts, **options)
    if recipe.optimizer == "adamw_8bit":
        # The Trainer's own option keeps embeddings' moments in 32 bits, and finds these only without ZeRO.
        from bitsandbytes.optim import AdamW8bit  # 45 MB per rank, so only where it is used

        return AdamW8bit(parts, **{name: options[name] for name in ("lr", "betas", "eps")})
    return kind(parts, **options)


LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
"""Matches the number of a layer in a weight's name, in transformers' decoders."""

Group = Json
"""A parameter group of an optimizer: `params`, and their options."""


def rate_shares(recipe: Recipe, names: Iterable[str]) -> dict[str, float]:
    """Return the share of the learning rate of each weight: by its layer, and by LoRA+.

    `names` are all weights of the model, including frozen ones, in its order: embeddings, layers, norm and head. LoRA+
    groups as PEFT's `create_loraplus_optimizer` does, except that PEFT takes every weight with one dimension for a B,
    and under ZeRO-3 every weight has one dimension.
    """
    known = list(names)
    layers = {name: int(found[1]) for name in known if (found := LAYER.search(name))}
    count = 1 + max(layers.values(), default=-1)
    first = next((index for index, name in enumerate(known) if name in layers), 0)
    # The steps from the head down to each weight; the last layer is one step below the head.
    below = {name: count - layers[name] for name in layers}
    below |= {name: count + 1 if index < first else 0 for index, name in enumerate(known) if name not in layers}
    shares = {name: recipe.layer_decay ** below[name] for name in known}
    if recipe.lora is not None and recipe.lora.plus_ratio != 1:
        for name in known:
            if "lora_embedding_" in name:
                shares[name] *= 1e-6 / recipe.learning_rate  # PEFT's `loraplus_lr_embedding`, whatever the others are
            elif "lora_B" in name or "lora_magnitude" in name or name.endswith(".bias"):
                shares[name] *= recipe.lora.plus_ratio
    return shares


def rate_schedule(recipe: Recipe, steps: int) -> Callable[[int], float]:
    """Return a function from the number of updates made to the share of the learning rate: transformers' schedule.

    A warm-up that begins at a rate of 0 is left out by its first step, of a schedule that is one step longer, so that
    both the first update and the last one learn: a run of a single step trains at the full rate.
    """
    chosen, kind = recipe.schedule, recipe.schedule.kind
    first, warmup = int(updates.starts_at_zero(chosen)), updates.warmup(recipe, steps)
    decay, rate = updates.phase(chosen, chosen.decay, steps), recipe.learning_rate
    steps += first
    options: dict[str, Json] = {
        "cosine_with_restarts": {"num_cycles": chosen.cycles},
        "cosine_with_min_lr": {"min_lr_rate": chosen.min_rate},
        "cosine_warmup_with_min_lr": {"min_lr_rate": chosen.min_rate},
        "polynomial": {"lr_end": chosen.min_rate * rate, "power": chosen.power},
        "inverse_sqrt": {"timescale": chosen.timescale},
        "warmup_stable_decay": {
            "num_decay_steps": min(decay, max(1, steps - warmup)),  # a longer fall would begin at a low rate
            "min_lr_ratio": chosen.min_rate,
            "decay_type": chosen.decay_type,
        },
    }
    of_one_weight = torch.optim.SGD([torch.zeros(1)], lr=rate)  # all groups have one shape, whatever their rates are
    if kind == "polynomial":  # transformers divides by the number of steps that remain
        warmup = min(warmup, steps - 1)
    found = get_scheduler(kind, of_one_weight, warmup, steps, options.get(kind))
    shape = found.lr_lambdas[0]
    return lambda step: float(shape(step + first))


AS_ADAMW = 0.2
"""Root mean square of AdamW's updates, also used for Muon's, so that both learn at one rate (arXiv:2502.16982)."""


def _muon(model: nn.Module, given: Iterable[Group], **options: object) -> torch.optim.Optimizer:
    """Return DeepSpeed's optimizer for groups that have their rates; `options` are AdamW's.

    Muon trains all matrices except embeddings and the head, also if ZeRO-3 shards them.
    """
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam  # compiles its kernels when it is imported

    if not distributed.on_gpu():
        torch.compiler.set_stance("force_eager")  # compiling these kernels for a CPU takes longer than they save
    ends = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    ends += [model.get_output_embeddings() or getattr(model, "score", None)]
    excluded = {weight for end in ends if end is not None for weight in end.parameters()}
    trained = [weight for weight in model.parameters() if weight.requires_grad and weight not in excluded]
    chosen = {weight for weight in trained if len(whole_shape(weight)) == 2}
    for weight in model.parameters():
        weight.use_muon = weight in chosen  # read by DeepSpeed's ZeRO
    adam = {name: options[name] for name in ("betas", "eps")}
    # DeepSpeed scales an update by sqrt(max(1, rows / columns)), so its root mean square is 1 / sqrt(columns) of the
    # intended one. The inverse factor in the rate makes it AdamW's, and is divided out of the decay.
    parts: list[Group] = []
    for group in given:
        widths = {weight: whole_shape(weight)[1] for weight in group["params"] if weight in chosen}
        rest = [weight for weight in group["params"] if weight not in chosen]
        if rest:
            parts.append({**group, "params": rest, "use_muon": False, **adam})
        for width in sorted(set(widths.values())):
            factor = AS_ADAMW * math.sqrt(width)
            own = {"lr": group["lr"] * factor, "weight_decay": group["weight_decay"] / factor, "momentum": 0.95}
            of_width = [weight for weight, columns in widths.items() if columns == width]
            parts.append({"params": of_width, "use_muon": True, **own})
    sizes = [sum(whole_shape(weight).numel() for weight in some) for some in (chosen, model.parameters())]
    say(f"optimizer=muon: {len(chosen)} matrices, {sizes[0] / sizes[1]:.0%} of the weights; AdamW has the others")
    return MuonWithAuxAdam(parts, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"fused": options["fused"]})
