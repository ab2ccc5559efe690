"""The bytes of a model's states on each rank: parameters, gradients, and what the optimizer keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a weight and of its gradient."""


@dataclass(frozen=True)
class States:
    """Bytes on one rank at the end of a backward pass, before its gradients are reduced.

    Buffers, activations, and what the optimizer's step takes for a moment are not counted.
    """

    parameters: float
    gradients: float
    optimizer: float
    """Adam's two moments in fp32, and the weights in fp32 that it changes."""
    host: float
    """On the CPU, whatever it is; 0 without offloading."""

    @property
    def total(self) -> float:
        """Wherever they are."""
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
    accumulation: int = 1,
) -> States:
    """Return what one rank holds of a model that Adam trains, as DeepSpeed 0.19.8 does by default.

    Args:
        parameters: in all.
        trainable: of them.
        stage: of ZeRO, 0 to 3.
        ranks: data parallel.
        precision: "fp32", "bf16" or "fp16".
        offload: the optimizer's states are on the CPU (stages 2 and 3).
        accumulation: micro-batches per step.
    """
    width = WIDTH[precision]
    held = width * parameters / (ranks if stage == 3 else 1)
    gradients = width * trainable / (ranks if stage >= 2 else 1)
    # Without ZeRO, Adam changes fp32 weights in place; every other optimizer keeps an fp32 copy of what it changes.
    kept = (8 if stage == 0 and precision == "fp32" else 12) * trainable / (ranks if stage else 1)
    if offload:
        # Beside fp32 gradients for Adam lie those that came from the GPU, and at stage 2 the sum of the earlier ones.
        copies = 2 if stage == 2 and accumulation > 1 else 1
        return States(held, 0, 0, kept + 4 * trainable / ranks + copies * gradients)
    return States(held, gradients, kept, 0)


def held_parameters(
    layers: Sequence[float], split: Sequence[float], before: float, after: float, tensor: int, stages: Sequence[range]
) -> list[float]:
    """Return how many parameters a rank of each pipeline stage has, of a model whose layers are spread over ranks.

    Sequence parallelism changes nothing: its ranks have the whole model.

    Args:
        layers: parameters of each layer.
        split: of them, those in matrices that tensor parallelism splits.
        before: of the embedding, which the first stage has.
        after: of the norm and the head, which the last has; a tied head is the embedding once more.
        tensor: ranks that a matrix is split over.
        stages: the layers of each stage, as `spec.layout.balanced` gives them; one range without a pipeline, in which
            a tied head counts for nothing.
    """
    own = [whole - part + part / tensor for whole, part in zip(layers, split, strict=True)]
    held = [sum(own[index] for index in stage) for stage in stages]
    held[0] += before
    held[-1] += after
    return held


def mixture_bytes(dense: float, routed: float, stage: int, ranks: int, precision: str, expert_ranks: int) -> States:
    """Return what one rank holds of a mixture, all of it trained, whose routed experts are spread over ranks.

    Args:
        dense: parameters that every rank has.
        routed: parameters of all experts.
        stage: of ZeRO, 1 to 3.
        ranks: data parallel.
        precision: as in `state_bytes`.
        expert_ranks: that the experts of a layer are spread over; what each has is sharded over `ranks / expert_ranks`.
    """
    own = routed / expert_ranks
    return state_bytes(dense, dense, stage, ranks, precision) + state_bytes(
        own, own, stage, ranks // expert_ranks, precision
    )
