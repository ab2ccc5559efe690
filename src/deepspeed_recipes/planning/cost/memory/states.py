"""Model states on each rank, in bytes: parameters, gradients, and what the optimizer holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

OVERFLOW_CHECK = 3
"""Bytes per gradient in fp16 while ZeRO-3 looks for infinities in all of a rank's at once: magnitudes, and whether each
is infinite (deepspeed, stage3.py, `has_overflow`; bf16 and fp32 are judged by their norms, one weight at a time)."""
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a weight and of its gradient."""

ADAM_MOMENTS = 8.0
"""Bytes of Adam's two moments per weight, in fp32."""
EIGHT_BIT = 2 + 8 / 256
"""The same in 8 bits, with two scales in fp32 for every 256 weights (bitsandbytes, optim/optimizer.py)."""

Moment = Literal["forward", "backward", "step"]
"""The end of a step's last forward pass, the end of its backward pass, and the peak of the optimizer step."""


@dataclass(frozen=True)
class States:
    """Bytes on one rank. Buffers, gathered weights and activations are not counted."""

    parameters: float
    gradients: float
    """During the optimizer step with the copies that it makes of them."""
    optimizer: float
    """Adam's two moments, and the fp32 weights that it updates."""
    host: float
    """All that is on the CPU; 0 without offloading."""

    @property
    def total(self) -> float:
        """On the GPU and on the host."""
        return self.parameters + self.gradients + self.optimizer + self.host

    def __add__(self, other: "States") -> "States":
        """Return the states of two parts of a model together."""
        return States(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.host + other.host,
        )


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
    moments: float = ADAM_MOMENTS,
    foreach: bool = False,
) -> States:
    """Return what one rank holds of a model that Adam trains with DeepSpeed 0.19.8.

    Args:
        parameters: in all.
        trainable: of them.
        stage: of ZeRO, 0 to 3.
        ranks: data-parallel ones.
        precision: "fp32", "bf16" or "fp16".
        offload: the optimizer's states are on the CPU (stages 2 and 3).
        gradient_accumulation_steps: micro-batches per step.
        moment: of the step.
        fp32_accumulation: gradients of bf16 weights are accumulated in fp32 (stages 1 to 3).
        bf16_states: master weights and moments are in bf16 (stages 1 to 3).
        sub_group: parameters that stage 3 updates at once.
        moments: bytes per trained weight that the optimizer keeps of earlier gradients.
        foreach: Adam holds the roots of what it updates at once, as torch's does without `fused`.
    """
    width = WIDTH[precision]
    wide = fp32_accumulation and width == 2
    held = width * parameters / (ranks if stage == 3 else 1)
    # Without ZeRO, Adam updates fp32 weights in place; all other optimizers hold an fp32 copy of what they update.
    unit = 6 if bf16_states else moments if stage == 0 and precision == "fp32" else 4 + moments
    kept = unit * trainable / (ranks if stage else 1)
    if offload:
        # Beside Adam's fp32 gradients are those that came from the GPU, and at stage 2 the sum of the earlier ones.
        copies = 2 if stage == 2 and gradient_accumulation_steps > 1 else 1
        return States(held, 0, 0, kept + (4 + copies * width) * trainable / ranks)
    own = trainable / (ranks if stage else 1)
    accumulated = (4 if wide else width) * (trainable if stage < 2 else own)
    reduced = width * trainable if stage == 1 and wide else 0  # beside their sum, those that were added to it
    allocated = accumulated if stage == 3 or (stage == 1 and wide) else 0.0
    gradients = {"backward": accumulated + reduced}
    gradients["forward"] = gradients["backward"] if gradient_accumulation_steps > 1 else allocated
    # Adam's gradients have its weights' type: what was accumulated in another is copied, and flattened before that.
    converted = 0 if wide or bf16_states or width == 4 else 4
    if stage == 0:
        gradients["step"] = accumulated + converted * trainable
    elif stage == 3:
        update = ((4 if wide else width) + converted) * min(own, sub_group)
        gradients["step"] = accumulated + max(update, OVERFLOW_CHECK * own if precision == "fp16" else 0)
    else:
        gradients["step"] = gradients["backward"] if wide else (2 * width + converted) * own
    if foreach and stage < 3:  # at stage 3 it is within what was fitted for fragmentation, on such rows
        gradients["step"] += (2 if bf16_states else 4) * own
    return States(held, gradients[moment], kept, 0)


def muon_bytes(stage: int, precision: str) -> float:
    """Return the bytes of Muon's momentum per weight of a matrix.

    Without ZeRO one number in fp32; at stage 3 one in the gradients' type (deepspeed 0.19.8, stage3.py,
    `_create_momentum_buffer`); at stages 1 and 2 such a one, and a copy that is being updated (stage_1_and_2.py,
    `_muon_staging_momentum`).
    """
    return 4.0 if stage == 0 else (1.0 if stage == 3 else 2.0) * WIDTH[precision]


def held_parameters(
    layers: Sequence[float], split: Sequence[float], before: float, after: float, tensor: int, stages: Sequence[range]
) -> list[float]:
    """Return how many parameters a rank of each pipeline stage holds.

    Sequence parallelism changes nothing: each of its ranks holds the whole model.

    Args:
        layers: parameters of each layer.
        split: of these, those in matrices that tensor parallelism splits.
        before: parameters of the embedding, on the first stage.
        after: parameters of norm and head, on the last stage; a tied head is the embedding once more.
        tensor: ranks that a matrix is split over.
        stages: the layers of each stage, as `recipe.layout.balanced` gives them; one range without a pipeline, where a
            tied head counts for nothing.
    """
    own = [whole - part + part / tensor for whole, part in zip(layers, split, strict=True)]
    held = [sum(own[index] for index in stage) for stage in stages]
    held[0] += before
    held[-1] += after
    return held


def mixture_bytes(
    dense: float, routed: float, stage: int, ranks: int, precision: str, expert_ranks: int, **options: Any
) -> States:
    """Return what one rank holds of a mixture of experts that is trained whole, with expert parallelism.

    Args:
        dense: parameters that every rank has.
        routed: parameters of all routed experts.
        stage: of ZeRO, 1 to 3.
        ranks: data-parallel ones.
        precision: as in `state_bytes`.
        expert_ranks: over which a layer's experts are distributed; each share is sharded over `ranks / expert_ranks`,
            and by none where there are more of them, as no layout of DeepSpeed's has.
        options: of `state_bytes`.
    """
    own = routed / expert_ranks
    return state_bytes(dense, dense, stage, ranks, precision, **options) + state_bytes(
        own, own, stage, max(1, ranks // expert_ranks), precision, **options
    )
