"""What a node's memory, its NVMe drives and a disk have to hold."""

from collections.abc import Callable, Sequence

from recipes.planning.parts import Part
from recipes.planning.setup import Setup
from recipes.planning.states import WIDTH, Moment, States

PROCESS = 3 * 2**30
"""A rank's Python with its libraries and CUDA's side of the host: assumed, since nobody has run this on a GPU yet."""
SWAPPED = 5 * 10**8
"""Elements of pinned memory on their way to NVMe, for weights: 5 buffers of 10^8 (deepspeed, offload_config.py)."""


def host_bytes(
    whole: Part, stages: Sequence[Part], setup: Setup, local: int, states: Callable[[Part, Setup, Moment], States]
) -> dict[str, float]:
    """Return the bytes that one node holds, by moment.

    Args:
        whole: the model without parallelism.
        stages: of the pipeline.
        setup: one way to train.
        local: ranks of the node.
        states: says what a rank has of what is trained.
    """
    width, base = WIDTH[setup.precision], local * PROCESS
    held = local * max(_held(part, setup, states(part, setup, "backward")) for part in stages)
    # Below ZeRO-3 every rank reads what it is going to hold, where AutoTP splits it the whole model, and 4-bit weights
    # straight to the GPU; at stage 3 the first rank reads everything, and the others get their shards.
    read = width * whole.parameters
    if setup.quantized:
        read = 0.0
    elif setup.stage < 3:
        read = local * width * (max(part.parameters for part in stages) if len(stages) > 1 else whole.parameters)
    # The first rank puts the weights together, or the adapters.
    written = width * (whole.adapters if setup.lora else whole.parameters)
    return {"loading": base + read, "training": base + held, "saving": base + held + written}


def _held(part: Part, setup: Setup, states: States) -> float:
    weights = WIDTH[setup.precision] * part.parameters / setup.zero_ranks
    sub_group = 16.0 * setup.sub_group_size  # NVMe: one at a time, with its gradients
    optimizer = {"none": 0.0, "cpu": states.host, "nvme": min(sub_group, states.host)}
    parameters = {"none": 0.0, "cpu": weights, "nvme": float(WIDTH[setup.precision] * SWAPPED)}
    return optimizer[setup.offload_optimizer] + parameters[setup.offload_parameters]


def swapped_bytes(part: Part, setup: Setup) -> float:
    """Return the bytes that one rank has on NVMe: fp32 weights and Adam's moments, and the weights themselves."""
    trained = part.adapters if setup.lora else part.parameters
    states = 12 * trained / setup.zero_ranks if setup.offload_optimizer == "nvme" else 0.0
    weights = WIDTH[setup.precision] * part.parameters / setup.zero_ranks
    return states + (weights if setup.offload_parameters == "nvme" else 0.0)
