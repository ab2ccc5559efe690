"""Model states on each rank, in bytes: parameters, gradients and optimizer states."""

from dataclasses import dataclass
from typing import Any, Literal

from .constants import COUNTS

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
    """Adam's two moments, and the fp32 weights that it updates."""
    host: float
    """All states in host memory; 0 without offloading."""

    @property
    def total(self) -> float:
        """Bytes on the GPU and on the host together."""
        return self.parameters + self.gradients + self.optimizer + self.host


def state_bytes(
    parameters: float,
    trainable: float,
    stage: int,
    ranks: int,
    precision: str,
    offload: bool = False,
    gradient_accumulation_steps: int = 1,
    moment: Moment = "backward",
    fp32_accumulation: bool = False,
    bf16_states: bool = False,
    sub_group: int = 10**9,
    moments: float = COUNTS.adam_moments,
    foreach: bool = False,
) -> States:
    """Return the states on one rank of a model that Adam trains with DeepSpeed 0.19.8, by ZeRO stage.

    `trainable` of the `parameters` are trained. Their optimizer states may be on the CPU (`offload`, stages 2 and 3) or
    in bf16 (`bf16_states`, stages 1 to 3), and have `moments` bytes in addition to the master weights. Gradients of
    bf16 weights may be accumulated in fp32 (`fp32_accumulation`, stages 1 to 3); stage 3 updates `sub_group` parameters
    at once. With `foreach`, as torch without `fused`, Adam holds the square roots of all second moments that it
    updates at once.
    """
    width = WIDTH[precision]
    wide = fp32_accumulation and width == 2
    held = width * parameters / (ranks if stage == 3 else 1)
    # Without ZeRO, Adam updates fp32 weights in place; all other optimizers hold an fp32 copy of what they update.
    unit = 6 if bf16_states else moments if stage == 0 and precision == "fp32" else 4 + moments
    kept = unit * trainable / (ranks if stage else 1)
    if offload:
        # In addition to Adam's fp32 gradients: those from the GPU, and at stage 2 the sum of earlier micro-batches.
        copies = 2 if stage == 2 and gradient_accumulation_steps > 1 else 1
        return States(held, 0, 0, kept + (4 + copies * width) * trainable / ranks)
    own = trainable / (ranks if stage else 1)
    accumulated = (4 if wide else width) * (trainable if stage < 2 else own)
    reduced = width * trainable if stage == 1 and wide else 0  # the gradients that were added to the fp32 sum
    allocated = accumulated if stage == 3 or (stage == 1 and wide) else 0.0
    gradients = {"backward": accumulated + reduced}
    gradients["forward"] = gradients["backward"] if gradient_accumulation_steps > 1 else allocated
    # Adam needs gradients in the type of its weights: others are flattened, then converted into a copy.
    converted = 0 if wide or bf16_states or width == 4 else 4
    if stage == 0:
        gradients["step"] = accumulated + converted * trainable
    elif stage == 3:
        update = ((4 if wide else width) + converted) * min(own, sub_group)
        gradients["step"] = accumulated + max(update, COUNTS.overflow_check * own if precision == "fp16" else 0)
    else:
        gradients["step"] = gradients["backward"] if wide else (2 * width + converted) * own
    if foreach and stage < 3:  # at stage 3 the fitted fragmentation, from such rows, already includes it
        gradients["step"] += (2 if bf16_states else 4) * own
    return States(held, gradients[moment], kept, 0)


def muon_bytes(stage: int, precision: str) -> float:
    """Return the bytes of Muon's momentum per weight of a matrix.

    One number, in fp32 without ZeRO, in the gradients' type with it (deepspeed 0.19.8, stage3.py,
    `_create_momentum_buffer`); at stages 1 and 2 also a copy that is being updated (stage_1_and_2.py,
    `_muon_staging_momentum`).
    """
    return 4.0 if stage == 0 else (1.0 if stage == 3 else 2.0) * WIDTH[precision]


def mixture_bytes(
    dense: float, routed: float, stage: int, ranks: int, precision: str, expert_ranks: int, **options: Any
) -> States:
    """Return the states on one rank of an MoE model with expert parallelism, all of whose weights are trained.

    Every rank has the `dense` parameters. A layer's `routed` experts are distributed over `expert_ranks`; each share is
    sharded over `ranks / expert_ranks` ranks. The other arguments are those of `state_bytes`.
    """
    own, copies = routed / expert_ranks, max(1, ranks // expert_ranks)
    shared = state_bytes(dense, dense, stage, ranks, precision, **options)
    experts = state_bytes(own, own, stage, copies, precision, **options)
    return States(*map(sum, zip(vars(shared).values(), vars(experts).values(), strict=True)))
