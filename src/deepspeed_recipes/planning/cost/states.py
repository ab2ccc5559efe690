"""Model states on each rank, in bytes: parameters, gradients and optimizer states."""

from dataclasses import dataclass
from typing import Literal

from .constants import COUNTS
from .training_setup import TrainingSetup

WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a weight and of its gradient."""

Moment = Literal["forward", "backward", "step"]
"""The end of a step's last forward pass, the end of its backward pass, and the peak of the optimizer step."""


@dataclass(frozen=True)
class States:
    """Bytes on one rank. Buffers, gathered weights and activations are not counted."""

    parameters: float
    gradients: float
    """During the optimizer step, including the copies that it makes."""
    optimizer: float
    """The optimizer's moments, and the fp32 weights that it updates."""
    host: float
    """All states in host memory; 0 without offloading."""


def state_bytes(
    trained: float,
    setup: TrainingSetup,
    moment: Moment = "backward",
    ranks: int | None = None,
    matrices: float = 1.0,
) -> States:
    """Return the states on one rank of `trained` parameters, with DeepSpeed 0.19.8.

    ZeRO shards them over `ranks`, all that hold the same weights unless given. The share `matrices` of them is in
    matrices, which Muon trains; AdamW trains the others.
    """
    stage, width, ranks = setup.zero_stage, WIDTH[setup.precision], ranks or setup.zero_ranks
    wide = setup.fp32_accumulation and width == 2
    held = width * trained / (ranks if stage == 3 else 1)
    # Muon's momentum is in fp32 without ZeRO, in the gradients' type with it (stage3.py, `_create_momentum_buffer`); at
    # stages 1 and 2 there is also a copy that is being updated (stage_1_and_2.py, `_muon_staging_momentum`).
    of_muon = 4.0 if stage == 0 else (1.0 if stage == 3 else 2.0) * width
    moments = {
        "adamw": COUNTS.adam_moments,
        "adamw_8bit": COUNTS.eight_bit_moments,
        "muon": matrices * of_muon + (1 - matrices) * COUNTS.adam_moments,
    }[setup.optimizer]
    # Without ZeRO, Adam updates fp32 weights in place; all other optimizers hold an fp32 copy of what they update.
    unit = 6 if setup.bf16_states else moments if stage == 0 and setup.precision == "fp32" else 4 + moments
    own = trained / (ranks if stage else 1)
    kept = unit * own
    if setup.offload_optimizer != "none":
        # In addition to Adam's fp32 gradients: those from the GPU, and at stage 2 the sum of earlier micro-batches.
        copies = 2 if stage == 2 and setup.gradient_accumulation_steps > 1 else 1
        return States(held, 0, 0, kept + (4 + copies * width) * trained / ranks)
    accumulated = (4 if wide else width) * (trained if stage < 2 else own)
    reduced = width * trained if stage == 1 and wide else 0  # the gradients that were added to the fp32 sum
    allocated = accumulated if stage == 3 or (stage == 1 and wide) else 0.0
    gradients = {"backward": accumulated + reduced}
    gradients["forward"] = gradients["backward"] if setup.gradient_accumulation_steps > 1 else allocated
    # Adam needs gradients in the type of its weights: others are flattened, then converted into a copy.
    converted = 0 if wide or setup.bf16_states or width == 4 else 4
    if stage == 0:
        gradients["step"] = accumulated + converted * trained
    elif stage == 3:
        update = ((4 if wide else width) + converted) * min(own, setup.sub_group_size)
        gradients["step"] = accumulated + max(update, COUNTS.overflow_check * own if setup.precision == "fp16" else 0)
    else:
        gradients["step"] = gradients["backward"] if wide else (2 * width + converted) * own
    if setup.software.foreach_adam and stage < 3:  # at stage 3 the fitted fragmentation, from such rows, includes it
        gradients["step"] += (2 if setup.bf16_states else 4) * own  # the square roots of all second moments
    return States(held, gradients[moment], kept, 0)
