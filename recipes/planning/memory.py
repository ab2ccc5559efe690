"""What a GPU has to hold at the worst moment of a step, by what it is for; and a node and a disk with it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipes.planning import activations, host
from recipes.planning.anatomy import Anatomy
from recipes.planning.hardware import Cluster
from recipes.planning.parts import Part, parts
from recipes.planning.setup import Setup
from recipes.planning.states import WIDTH, Moment, States, mixture_bytes, state_bytes
from recipes.spec.recipe import Layout
from recipes.spec.run_folder import checkpoint_bytes

# Assumptions, all of them, until measured ones take their place: nobody has run these recipes on a GPU yet.
CONTEXT = 1.343e9
"""CUDA's context with PyTorch's kernels, as measured in Hugging Face's documentation (transformers, "Model training
anatomy": a tensor of one number makes 1,343 MB)."""
CUBLAS = 64 * 2**20
"""cuBLAS' workspaces: two of 32 MiB (pytorch/pytorch#144397)."""
NCCL = 2**30
"""Buffers of process groups, outside PyTorch's allocator: up to "a few GB" in the same thread, with many groups."""
FRAGMENTATION = 0.05
"""Share that PyTorch reserves beyond what it allocates. Without it "fits" would be said of what runs out of memory."""
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits: for every 64 of them a scale in 8 bits, for every 256 scales one in fp32
(arXiv:2305.14314)."""
REDUCED = 5 * 10**8
"""Gradients that are put in one piece to be reduced, without ZeRO (deepspeed, runtime/engine.py,
MEMORY_OPT_ALLREDUCE_SIZE)."""


@dataclass(frozen=True)
class Peak:
    """Bytes on one GPU at one moment."""

    moment: str
    """`loading`, `loss`, `backward` (of the last layers), `gradients` (the end of it), `step` or `saving`."""
    parts: Mapping[str, float]
    """By what they are for; nothing counts twice."""

    @property
    def total(self) -> float:
        """All together."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Memory:
    """What a plan has to hold, in bytes."""

    moments: tuple[Peak, ...]
    """Of the fullest GPU, in the order of a run."""
    stage: int
    """Of the pipeline: that GPU's."""
    host: Mapping[str, float]
    """Of one node, by moment."""
    nvme: float
    """Of one node."""
    checkpoint: int
    """On disk, one of them."""

    @property
    def worst(self) -> Peak:
        """The fullest moment of that GPU."""
        return max(self.moments, key=lambda moment: moment.total)


def peak(anatomy: Anatomy, setup: Setup, cluster: Cluster) -> Memory:
    """Return what training takes on the fullest GPU, on a node, on its NVMe drives, and on disk per checkpoint.

    Args:
        anatomy: knows the way in which `setup` trains: `trace.anatomy(config, lora)`.
        setup: one way to train.
        cluster: of which only the GPUs per node matter here.
    """
    stages = parts(anatomy, setup)
    each = [moments(anatomy, part, setup) for part in stages]
    fullest = max(range(len(each)), key=lambda index: max(moment.total for moment in each[index]))
    local = min(cluster.gpus_per_node, setup.world_size)
    whole = parts(anatomy, replace(setup, layout=Layout()))[0]
    return Memory(
        moments=each[fullest],
        stage=fullest,
        host=host.host_bytes(whole, stages, setup, local, states),
        nvme=local * max(host.swapped_bytes(part, setup) for part in stages),
        checkpoint=checkpoint_bytes(
            int(whole.parameters + whole.adapters),
            int(whole.adapters if setup.lora else whole.parameters),
            WIDTH[setup.precision],
        ),
    )


def moments(anatomy: Anatomy, part: Part, setup: Setup) -> tuple[Peak, ...]:
    """Return what a GPU of one pipeline stage holds at each moment of a run."""
    kinds = [kind for kind, _ in part.counts]
    waiting = part.in_flight * sum(number * activations.kept_bytes(kind, setup) for kind, number in part.counts)
    waiting += activations.mask_bytes(kinds, setup)
    backward = max(activations.backward_bytes(kind, setup) for kind in kinds)
    lowest = part.layers[0]
    first = activations.kept_bytes(lowest, setup) + activations.backward_bytes(lowest, setup)
    loss = activations.loss_bytes(anatomy, setup) if part.last else 0.0
    live, turning = _live(part, setup), _turning(part, setup)
    for_life, reducing = _buckets(part, setup)

    def at(moment: str, held: Mapping[str, float], **more: float) -> Peak:
        allocated = {**held, **more}
        runtime = CONTEXT + CUBLAS + (NCCL if setup.world_size > 1 else 0)
        return Peak(moment, {**allocated, "runtime": runtime, "fragmentation": FRAGMENTATION * sum(allocated.values())})

    forward = held_bytes(part, setup, "forward")
    return (
        at("loading", *_loaded(part, setup)),
        at("loss", forward, activations=waiting, logits=loss, live_parameters=turning, buckets=for_life),
        at("backward", forward, activations=waiting + backward, live_parameters=turning, buckets=reducing),
        at(
            "gradients",
            held_bytes(part, setup, "backward"),
            activations=first,
            live_parameters=live,
            buckets=reducing + _in_one_piece(part, setup),
        ),
        at("step", held_bytes(part, setup, "step"), buckets=for_life),
        at("saving", held_bytes(part, setup, "forward"), live_parameters=live, buckets=for_life),
    )


def held_bytes(part: Part, setup: Setup, moment: Moment) -> dict[str, float]:
    """Return the states on a GPU; what adapters need stands together."""
    found = states(part, setup, moment)
    frozen = 0.0
    if setup.lora or setup.preferences:  # DPO without adapters compares with a second model
        frozen = loaded_bytes(part, setup) / (setup.zero_ranks if setup.stage == 3 else 1)
    second = WIDTH[setup.precision] * part.parameters / setup.partition_size if setup.partition_size > 1 else 0.0
    on_gpu = setup.offload_parameters == "none"
    if setup.lora:
        adapters = found.gradients + found.optimizer + (found.parameters if on_gpu else 0)
        return {"parameters": (frozen if on_gpu else 0) + second, "adapters": adapters}
    weights = (found.parameters + frozen if on_gpu else 0) + second
    return {"parameters": weights, "gradients": found.gradients, "optimizer": found.optimizer}


def states(part: Part, setup: Setup, moment: Moment) -> States:
    """Return the states of what is trained, on one rank of a pipeline stage, and on the host where they are there."""
    way = (setup.stage, setup.zero_ranks, setup.precision)
    options: dict[str, Any] = {
        "offload": setup.offload_optimizer != "none",
        "accumulation": setup.accumulation,
        "moment": moment,
        "fp32_accumulation": setup.fp32_accumulation,
        "bf16_states": setup.bf16_states,
        "sub_group": setup.sub_group_size,
    }
    if setup.layout.expert > 1 and setup.lora is None:
        return mixture_bytes(part.parameters - part.routed, part.routed, *way, setup.layout.expert, **options)
    trained = part.adapters if setup.lora else part.parameters
    return state_bytes(trained, trained, *way, **options)


def loaded_bytes(part: Part, setup: Setup) -> float:
    """Return the bytes of a stage's weights as they are read, in 4 bits where they are to be."""
    quantized = part.linears if setup.quantized else 0
    return WIDTH[setup.precision] * (part.parameters - quantized) + NF4 * quantized


def _loaded(part: Part, setup: Setup) -> tuple[dict[str, float]]:
    """Return what is there once the weights are: under ZeRO-3 they are sharded one by one, but for 4-bit ones."""
    weights = loaded_bytes(part, setup)
    if setup.stage < 3 or setup.quantized:
        # Experts are spread on the host, before the rest goes to the GPU (deepspeed, engine.py, __init__).
        elsewhere = part.routed * (1 - 1 / setup.layout.expert)
        return ({"parameters": weights - WIDTH[setup.precision] * elsewhere},)
    # zero.Init puts shards that are offloaded where they will be (deepspeed, partition_parameters.py, remote_device).
    held = 0.0 if setup.offload_parameters != "none" else weights / setup.zero_ranks
    return ({"parameters": held, "live_parameters": WIDTH[setup.precision] * part.largest},)


def _live(part: Part, setup: Setup) -> float:
    """Return the bytes of weights that are whole for a moment, in the middle of the model.

    Under ZeRO-3 a layer, what is fetched ahead, and adapters too small to be sharded; and a matrix that is held in
    4 bits, once each for the forward and the backward pass.
    """
    width = WIDTH[setup.precision]
    largest = max(inputs * outputs for kind, _ in part.counts for inputs, outputs in kind.linears)
    whole = 2 * width * largest if setup.quantized else 0.0
    if setup.stage < 3:
        return whole
    ahead = 0.9 * part.hidden**2 if setup.prefetch_bucket_size is None else setup.prefetch_bucket_size
    threshold = 10 * part.hidden if setup.persistence_threshold is None else setup.persistence_threshold
    small = part.adapters if setup.lora and setup.lora.rank * part.hidden <= threshold else 0
    layer = max(part.largest, *(kind.parameters for kind, _ in part.counts))
    return whole + width * (min(layer + ahead, part.parameters) + small)


def _turning(part: Part, setup: Setup) -> float:
    """Return the bytes of weights that are whole between the forward and the backward pass.

    ZeRO-3 keeps what it is going to use again within `stage3_max_reuse_distance` parameters; with checkpointing a
    layer's are used once more in between (deepspeed, runtime/zero/partitioned_param_coordinator.py).
    """
    live = _live(part, setup)
    if setup.stage < 3:
        return live
    again = 3 if setup.gradient_checkpointing else 2
    passed, kept = 2.0 * part.after, float(part.after)
    for layer in reversed(part.layers):
        if passed >= setup.max_reuse_distance:
            break
        kept += layer.parameters
        passed += again * layer.parameters
    return max(live, WIDTH[setup.precision] * kept)


def _buckets(part: Part, setup: Setup) -> tuple[float, float]:
    """Return the bytes of the buffers in which gradients are collected: for life, and while they are reduced."""
    size = part.hidden**2 if setup.reduce_bucket_size is None else setup.reduce_bucket_size
    one = size * (4 if setup.fp32_accumulation else WIDTH[setup.precision])
    if setup.stage == 3:
        return one, 2 * one  # the buffer, and a copy in the order of the ranks
    if setup.stage == 0 or (setup.stage == 1 and setup.fp32_accumulation):
        return 0.0, 0.0
    return 0.0, one * (2 if setup.overlap_comm else 1)


def _in_one_piece(part: Part, setup: Setup) -> float:
    """Return the bytes of the copy that is reduced where there are no buckets: after the backward pass."""
    if setup.zero_ranks == 1 or not (setup.stage == 0 or (setup.stage == 1 and setup.fp32_accumulation)):
        return 0.0
    trained = part.adapters if setup.lora else part.parameters
    return min(trained, REDUCED) * (4 if setup.fp32_accumulation else WIDTH[setup.precision])
