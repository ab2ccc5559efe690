"""Measures products, attention, memory, links, kernel launches and ZeRO-3's hooks, for `doctor --measure`.

    deepspeed --no_local_rank --num_gpus 2 --module deepspeed_recipes.benchmarks.probe FILE [WORD ...]

All ranks measure at the same time, as they also train at the same time and share cores, memory and links. Rank 0 writes
the medians over the ranks, in seconds, to `FILE`; `planning.cost.constants` turns them into constants.
"""

import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from ..machine import ops, system
from ..planning.hardware.machine_file import HEAD_WIDTH, NARROW_HEAD, median_of
from ..recipe.deepspeed_file import prefetch_size
from ..recipe.files import Json
from ..recipe.run_folder import write_json
from ..training import distributed, upstream
from ..training.console import leave_out_noise
from ..training.distributed import describe_environment
from ..training.model import attention

SIZES: dict[str, tuple[Any, Any]] = {
    "products": ((1024, 2048, 4096, 8192), (128, 256, 512, 1024)),
    "copy": (2**30, 2**26),
    "length": (4096, 256),
    "heads": (16, 8),
    "repeats": (10, 3),
    "steps": (20, 3),
    "warm_up": (3, 2),
    "calls": (10, 1),
    "message": (2**26, 2**22),
    "adam": (2**25, 2**23),
    "wide": (None, {"hidden": 256, "inner": 640, "heads": 8, "key_value_heads": 4, "sequences": 2, "length": 256}),
}
"""On a GPU and on a CPU: sides of square products, bytes of a copy, tokens and heads of attention; how often each is
timed, optimizer steps of the small models, and those before that are not counted, since ZeRO-3 records the order of its
modules in the first; calls queued at a time, so that a GPU does not wait for launches; bytes of a collective that is
bound by the link, parameters that the host's Adam updates, and the layer whose element-wise operations are measured on
a CPU; on a GPU they follow from the memory's bandwidth."""
LAYERS = (1, 7)
"""Layers of two Llamas 64 wide; their difference is a layer's cost on the host, since a GPU computes it in no time."""
LAYERS_WIDE = (1, 4)
NARROW, HUGE = (64, 128, 4, 2, 1, 8), (768, 2304, 12, 12, 1, 8)
"""Hidden and inner size, heads, heads of keys, sequences and tokens of these models."""
DTYPES = (torch.bfloat16, torch.float32)
STAGES = {"plain": None, "zero1": 1, "zero3": 3}
WEIGHTS = 9
"""Trained weights of a Llama layer."""
QUICK = {"repeats": (2, 2), "steps": (2, 2), "warm_up": (1, 1)}
"""Sizes for `doctor --measure --quick`, with which everything is measured, but less precisely."""
SMALL = 2**10
"""Bytes of a collective that is bound by latency."""
BETWEEN = 512
"""Side of the product before each collective on a CPU."""


def main(file: str, *words: str) -> None:
    """Measure, and write what was found to `file`: `collectives` alone, or all probes.

    With `threads`, a rank has so many; with `shared` too, `updates` are measured again with those, under `shared`.
    `quick` measures with fewer repetitions.
    """
    SIZES.update(QUICK if "quick" in words else {})
    threads = {name: int(number) for name, _, number in (word.partition("=") for word in words) if number}
    torch.set_num_threads(threads.get("threads", torch.get_num_threads()))
    leave_out_noise()
    gc.freeze()  # ZeRO-3 collects garbage whenever it starts, for 0.3 s if that includes all modules
    distributed.start()
    upstream.leave_out_step_of_zeros()
    upstream.compile_ops_once(Path(f"{file}.{os.environ['RANK']}.stack"))
    found: Json = {}
    took: dict[str, float] = {}
    # ZeRO-3 replaces `torch.nn.functional.linear` for good: what is measured without it comes first.
    probes = (products, attentions, copies, wide_layers, launches, collectives, host_adam, updates)
    for probe in [collectives] if "collectives" in words else probes:
        begun = time.monotonic()
        for name, seconds in probe().items():
            found[name] = median_of(distributed.of_all(seconds))
        took[probe.__name__] = time.monotonic() - begun
    if "shared" in threads:
        torch.set_num_threads(threads["shared"])
        found["shared"] = updates()
    if distributed.is_first():
        write_json(
            Path(file), {"environment": describe_environment(), "sizes": sizes(), "seconds": found, "took": took}
        )
    distributed.stop()


def dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes that are measured: without instructions for it, a CPU computes bf16 ten times as slowly."""
    return DTYPES if distributed.on_gpu() or system.computes_bf16() else DTYPES[1:]


def sizes() -> Json:
    """Return the sizes that suit the ranks' device."""
    found = {name: on_gpu if distributed.on_gpu() else on_cpu for name, (on_gpu, on_cpu) in SIZES.items()}
    return {name: size for name, size in found.items() if size}


def median_seconds(work: Callable[[], object]) -> float:
    """Return the median time of a call, including the work it queues on a GPU, after two warm-up rounds."""
    taken, calls = [], sizes()["calls"]
    if dist.is_initialized():
        dist.barrier()  # a rank that has finished earlier would be measured alone
    for _ in range(2 + sizes()["repeats"]):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        taken.append((time.perf_counter() - start) / calls)
    return statistics.median(taken[2:])


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if distributed.on_gpu():
        torch.cuda.synchronize()


def products() -> dict[str, dict[str, float]]:
    """Return the seconds of square matrix products: by dtype, and by size."""
    found = {}
    for dtype in dtypes():
        for size in sizes()["products"]:
            a, b = (torch.randn(size, size, device=distributed.device(), dtype=dtype) for _ in range(2))
            found[f"{size} {short(dtype)}"] = median_seconds(partial(torch.matmul, a, b))
    return {"products": found}


def attentions() -> dict[str, dict[str, float]]:
    """Return the seconds of causal attention, forward and both passes, by kernel; of one sequence."""

    def both_passes(forward: Callable[[], torch.Tensor], gradient: torch.Tensor) -> None:
        forward().backward(gradient)

    size, found = sizes(), {}
    for dtype in dtypes():
        for name, kernel in kernels(dtype).items():
            shape = (1, size["heads"], size["length"], NARROW_HEAD if name == "narrow" else HEAD_WIDTH)
            inputs = [
                torch.randn(shape, device=distributed.device(), dtype=dtype, requires_grad=True) for _ in range(3)
            ]
            forward = partial(kernel, *inputs)
            try:
                gradient = torch.randn_like(forward())
                found[f"{name} {short(dtype)} forward"] = median_seconds(forward)
                found[f"{name} {short(dtype)} both"] = median_seconds(partial(both_passes, forward, gradient))
            except RuntimeError:  # this GPU has no such kernel
                found.pop(f"{name} {short(dtype)} forward", None)
    return {"attention": found}


def kernels(dtype: torch.dtype) -> dict[str, Callable[..., torch.Tensor]]:
    """Return the attention kernels that are measured, by the names in `constants.json`."""

    def through(backend: SDPBackend) -> Callable[..., torch.Tensor]:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        return run

    if not distributed.on_gpu():
        # A CPU also spends time on each score, whatever the heads' width: two widths tell how much.
        return dict.fromkeys(("flash_2", "narrow"), partial(scaled_dot_product_attention, is_causal=True))
    if dtype is torch.float32:
        return {"efficient": through(SDPBackend.EFFICIENT_ATTENTION)}
    length = sizes()["length"]
    starts = attention.document_boundaries([[length]], length)["cu_seq_lens_q"].to(distributed.device())

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention.varlen(torch.nn.Module(), q, k, v, None, cu_seq_lens_q=starts, max_length_q=length)[0]

    return {
        "flash_2": varlen,
        "cudnn": through(SDPBackend.CUDNN_ATTENTION),
        "efficient": through(SDPBackend.EFFICIENT_ATTENTION),
    }


def copies() -> dict[str, float]:
    """Return the seconds of copies within the device's memory, and on a GPU from the host and to it."""
    size, device = sizes()["copy"], distributed.device()
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    found = {"copy": median_seconds(lambda: target.copy_(source))}
    if distributed.on_gpu():
        host = torch.empty(size // 4, pin_memory=True)
        found["from_host"] = median_seconds(lambda: target.copy_(host, non_blocking=True))
        found["to_host"] = median_seconds(lambda: host.copy_(source, non_blocking=True))
    return found


def launches() -> Json:
    """Return the host's time for a layer: by pass, in plain PyTorch, and under ZeRO-1 and -3."""
    one = torch.zeros(1, device=distributed.device())

    def thousand() -> None:
        for _ in range(1000):
            one.add_(1.0)

    # On a CPU, bf16 takes more operations.
    found = {} if distributed.on_gpu() else {"plain fp32": passes(None, torch.float32)}
    found |= {name: passes(stage) for name, stage in STAGES.items()}
    return {"operation": median_seconds(thousand) / 1000, **{f"layer {name}": one for name, one in found.items()}}


def passes(stage: int | None, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """Return the seconds of a layer's forward and backward pass, of a step per trained weight, and of the rest."""
    small, large = (_passes(layers, stage, dtype) for layers in LAYERS)
    layers = LAYERS[1] - LAYERS[0]
    found = {name: max(0.0, large[name] - small[name]) / layers for name in ("forward", "backward", "step")}
    rest = {f"rest {name}": max(0.0, small[name] - LAYERS[0] * each) for name, each in found.items()}
    return found | rest | {"step": found["step"] / WEIGHTS}


def wide_layers() -> Json:
    """Return the seconds of a wider layer's passes in plain PyTorch, by dtype; nothing on a GPU."""
    found = {}
    for dtype in () if distributed.on_gpu() else dtypes():
        small, large = (_passes(layers, None, dtype, [*sizes()["wide"].values()]) for layers in LAYERS_WIDE)
        for name in ("forward", "backward"):
            found[f"{short(dtype)} {name}"] = (large[name] - small[name]) / (LAYERS_WIDE[1] - LAYERS_WIDE[0])
    return {"wide": found} if found else {}


def updates() -> Json:
    """Return the seconds per parameter of gradients in the backward pass and of a step, by dtype and ZeRO stage.

    Only of a single CPU rank, which neither shards nor sends; the parameters do not fit into a CPU's caches.
    """
    found = {}
    for dtype in () if distributed.on_gpu() or dist.get_world_size() > 1 else dtypes():
        for name, stage in STAGES.items():
            narrow, wide = (_passes(2, stage, dtype, shape) for shape in (NARROW, HUGE))
            for which in ("backward", "step"):
                parameters = wide["parameters"] - narrow["parameters"]
                found[f"{short(dtype)} {name} {which}"] = max(0.0, wide[which] - narrow[which]) / parameters
    return {"parameter": found} if found else {}


def _passes(layers: int, stage: int | None, dtype: torch.dtype, shape: Sequence[int] = NARROW) -> dict[str, float]:
    """Return the median seconds of a small Llama's passes and step, and its number of parameters."""
    config = LlamaConfig(
        hidden_size=shape[0], intermediate_size=shape[1], num_hidden_layers=layers, num_attention_heads=shape[2],
        num_key_value_heads=shape[3], vocab_size=256, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(distributed.device(), dtype).train()
    parameters = sum(weight.numel() for weight in model.parameters())
    ids = torch.randint(256, shape[4:], device=distributed.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=not distributed.on_gpu())
    engine: DeepSpeedEngine = model
    if stage is not None:
        zero: Json = {"stage": stage}
        if not distributed.on_gpu():  # as training does, so that a layer is gathered at once, even if it is small
            layer = sum(weight.numel() for weight in model.model.layers[0].parameters())
            zero["stage3_prefetch_bucket_size"] = prefetch_size(config.hidden_size, layer)
            zero["stage3_param_persistence_threshold"] = 10 * config.hidden_size
            zero["reduce_bucket_size"] = 10**6
        settings = {
            "train_micro_batch_size_per_gpu": len(ids), "bf16": {"enabled": dtype == torch.bfloat16},
            "gradient_clipping": 1.0, "zero_optimization": zero, "zero_allow_untested_optimizer": True,
        }  # fmt: skip
        with quiet():
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    taken: dict[str, list[float]] = {"forward": [], "backward": [], "step": []}
    dist.barrier()
    for _ in range(sizes()["warm_up"] + sizes()["steps"]):
        marks = [time.perf_counter()]

        def mark(marks: list[float] = marks) -> None:
            wait()
            marks.append(time.perf_counter())

        loss = engine(input_ids=ids, labels=ids).loss
        mark()
        engine.backward(loss) if stage is not None else loss.backward()
        mark()
        if stage is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.step()
        mark()
        for name, start, end in zip(taken, marks, marks[1:], strict=False):
            taken[name].append(end - start)
    if stage is not None:
        engine.destroy()
    return {"parameters": parameters} | {
        name: statistics.median(times[sizes()["warm_up"] :]) for name, times in taken.items()
    }


@contextlib.contextmanager
def quiet() -> Any:
    """Silence DeepSpeed's messages about this small model."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def collectives() -> dict[str, float]:
    """Return the seconds of collectives over all ranks: of large and of small messages; nothing on one rank."""
    if (ranks := dist.get_world_size()) == 1:
        return {}
    found, seconds_of = {}, median_seconds if distributed.on_gpu() else after_products
    for name, size in (("large", sizes()["message"]), ("small", SMALL)):
        for dtype in DTYPES[: 1 if distributed.on_gpu() else 2]:
            message = torch.ones(size // dtype.itemsize, device=distributed.device(), dtype=dtype)
            part = message[: message.numel() // ranks].clone()
            suffix = f"{name} fp32" if dtype is torch.float32 else name
            found[f"all_reduce {suffix}"] = seconds_of(partial(dist.all_reduce, message))
            found[f"all_gather {suffix}"] = seconds_of(partial(dist.all_gather_into_tensor, message, part))
    return found


def after_products(collective: Callable[[], object]) -> float:
    """Return the mean seconds of a collective of CPU ranks that each follows a product, as in training.

    A rank that has computed waits for slower ones, and for a core: some take ten times as long as others, and in a
    tight loop none does.
    """
    taken, a = [], torch.randn(BETWEEN, BETWEEN)
    for _ in range(2 + 7 * sizes()["repeats"]):
        torch.matmul(a, a)
        start = time.perf_counter()
        collective()
        taken.append(time.perf_counter() - start)
    return statistics.mean(taken[2:])


def host_adam() -> dict[str, float]:
    """Return the seconds in which the host updates its parameters; nothing where the op has not been compiled."""
    if not ops.is_compiled("cpu_adam"):
        return {}
    weight = torch.zeros(sizes()["adam"], requires_grad=True)
    weight.grad = torch.ones(sizes()["adam"])
    with quiet():
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam([weight])
    return {"host_adam": median_seconds(optimizer.step)}


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name in recipes."""
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


if __name__ == "__main__":
    main(*sys.argv[1:])
