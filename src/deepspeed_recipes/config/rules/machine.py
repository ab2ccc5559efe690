"""Rules about the machine: GPU memory, NVMe folders, swap buffers, GPUDirect."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ...recipe.deepspeed_file import SWAPPED, swap_buffer_size
from ..rule import COSTS, FAILS_LATER, REJECTED, Config, Facts, Hit, dimension, rule

_ZERO = "zero_optimization"
_DEFAULT_BUCKET = 500_000_000  # elements; DeepSpeed's default for reduce_bucket_size and allgather_bucket_size
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "lustre", "ceph", "fuse.sshfs", "9p", "glusterfs")


@rule("bucket-too-large", "warning", COSTS)
def _buckets(config: Config, facts: Facts) -> Iterator[Hit]:
    """Check the reduce buckets: 2 bytes per element in bf16, 4 in fp32, and two buckets with overlap_comm."""
    if facts.gpu_memory_gib is None or config.stage not in (1, 2, 3):
        return
    path = (_ZERO, "reduce_bucket_size")
    value = config.get(*path, default=_DEFAULT_BUCKET)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    width = 2 if any(config.get(name, "enabled") in (True, "auto") for name in ("bf16", "fp16")) else 4
    overlap = config.on(_ZERO, "overlap_comm", default=config.stage == 3)
    copies = 2 if overlap or config.stage == 3 else 1
    gib = value * width * copies / 2**30
    if gib > facts.gpu_memory_gib:
        what = f"the buckets take {gib:.1f} GiB, and the GPU has {facts.gpu_memory_gib:g} GiB"
        yield Hit(path, config.get(*path), what, _smaller(facts), severity="error")
    elif gib > facts.gpu_memory_gib / 8:
        share = gib / facts.gpu_memory_gib
        what = f"the buckets take {gib:.1f} GiB, {share:.0%} of the GPU"
        yield Hit(path, config.get(*path), what, _smaller(facts))


def _smaller(facts: Facts) -> str:
    return 'write "auto"' if facts.trainer == "hf" else "write the square of the hidden size, or 5e7"


@rule("nvme-folder", "warning", FAILS_LATER)
def _nvme_folder(config: Config, facts: Facts) -> Iterator[Hit]:
    seen = set()
    for what in ("offload_optimizer", "offload_param"):
        path = (_ZERO, what, "nvme_path")
        folder = config.text(*path)
        if config.offload_device(what) != "nvme" or not folder or folder == "auto" or folder in seen:
            continue
        seen.add(folder)
        if trouble := _trouble(folder):
            yield Hit(path, folder, *trouble)


def _trouble(folder: str) -> tuple[str, str] | None:
    if "\0" in folder:
        return "not a path", "write a folder"
    existing = Path(os.path.abspath(folder))
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    if not os.path.isdir(existing):
        return f"{existing} is a file", "write a folder"
    if not os.access(existing, os.W_OK):
        return f"cannot be created: no permission to write in {existing}", "choose a folder that you may write"
    best, kind = "", ""  # of the file system: the longest mount point above the folder, and its type
    with contextlib.suppress(OSError):  # without /proc/mounts
        for line in Path("/proc/mounts").read_text(errors="replace").splitlines():
            parts = line.split()
            if len(parts) > 2 and len(parts[1]) >= len(best) and existing.is_relative_to(parts[1]):
                best, kind = parts[1], parts[2]
    if kind in _MEMORY_FILE_SYSTEMS:
        return f"is on {kind}, which is memory, so swapping there saves none", "choose a folder on a drive"
    if kind in _NETWORK_FILE_SYSTEMS:
        return (
            f"is on {kind}: every step reads and writes all states over the network",
            "choose a folder on a local drive",
        )
    return None


@rule("gds-without-cuda", "error", REJECTED)
def _gds(config: Config, facts: Facts) -> Iterator[Hit]:
    wanted = os.environ.get("DS_ACCELERATOR")
    cuda = wanted == "cuda" or (wanted is None and Path("/proc/driver/nvidia").exists())
    if config.get("aio", "use_gds") and not cuda:
        yield Hit(("aio", "use_gds"), True, "GPUDirect Storage needs CUDA, which this machine lacks")


@rule("swap-buffer-too-small", "error", FAILS_LATER)
def _swap_buffer(config: Config, facts: Facts) -> Iterator[Hit]:
    """Compare the largest parameter's shard with a buffer of the NVMe swapper (elements, default 1e8)."""
    model = facts.text_model
    vocabulary, hidden = dimension(model, "vocab_size"), dimension(model, "hidden_size")
    if config.offload_device("offload_param") != "nvme" or vocabulary is None:
        return
    size = config.number(_ZERO, "offload_param", "buffer_size")
    size = SWAPPED if size is None else size
    if hidden is not None and facts.world_size and vocabulary * hidden // facts.world_size > size:
        shard = vocabulary * hidden // facts.world_size
        path = (_ZERO, "offload_param", "buffer_size")
        what = f"the embedding's shard has {shard:,} elements, but a buffer only {int(size):,}"
        yield Hit(path, config.get(*path), what, f"write at least {swap_buffer_size(shard)}")
