"""The servers and their commands: vLLM if it is installed, otherwise transformers' own (`one_model.py`)."""

import importlib.util
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...machine import system
from ...recipe.compatibility import EXPERT_COUNTS
from ...recipe.errors import UserError
from ...recipe.files import text_of
from ...recipe.project import python_path
from ...recipe.run_folder import read_json
from ...training.model_folder import base_model
from ...training.model_folder.base_model import ADAPTER, config_of
from . import environment
from .served import Served

ENGINES = ("auto", "vllm", "transformers")
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum LoRA ranks that vLLM can be started with."""
NOT_IN_VLLM = (
    *("trainable_token_indices", "modules_to_save", "use_dora", "bias", "lora_bias"),
    *("layer_replication", "alora_invocation_tokens", "use_bdlora", "use_qalora"),
)
"""Settings of adapter_config.json that vLLM 0.32 does not load: rows of new tokens, whole modules, DoRA and others."""
UNSET: tuple[object, ...] = (None, False, "none", [], {})
"""Values with which they change nothing."""
TRANSFORMERS_ONLY = (
    *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids"),
    *("no_repeat_ngram_size", "min_length", "min_new_tokens", "sequence_bias", "stop_strings"),
    "exponential_decay_length_penalty",
)
"""Settings of generation_config.json that change an answer, and that vLLM 0.32 does not read."""
MIXED = "--enable-mixed-moe-lora-format"
WEB = ("fastapi", "uvicorn", "openai", "multipart")
"""Packages that `transformers serve` imports in addition to transformers."""


@dataclass(frozen=True)
class Engine:
    """A server to start."""

    title: str
    names: tuple[str, ...]
    """The names that requests may give."""
    command: tuple[str, ...]
    variables: Mapping[str, str]
    """The complete environment of the server's process."""
    start_in: Path | None = None
    """The server's working directory, or None for the current one."""


@dataclass(frozen=True)
class Split:
    """The devices over which a server splits a model: ranks within each layer, times stages of layers."""

    tensor: int = 1
    pipeline: int = 1


def check_split(engine: str, served: Served, split: Split) -> None:
    """Refuse a split that the server or the model cannot have."""
    text = text_of(config_of(served.model))
    heads, layers = text.get("num_attention_heads") or text.get("n_head"), text.get("num_hidden_layers")
    for option, size in (("--tensor-parallel", split.tensor), ("--pipeline-parallel", split.pipeline)):
        if size < 1:
            raise UserError(f"{option} {size}: must be at least 1.")
        if size > 1 and engine != "vllm":
            raise UserError(f"{option} {size}: only vLLM splits a model; {environment.how()}")
    if heads and heads % split.tensor:
        sizes = [str(size) for size in range(2, heads + 1) if heads % size == 0]
        raise UserError(f"--tensor-parallel {split.tensor}: the model has {heads} heads; use {', '.join(sizes[:5])}.")
    if layers and layers < split.pipeline:
        raise UserError(f"--pipeline-parallel {split.pipeline}: the model has only {layers} layers.")
    if split.pipeline > 1 and not _on_gpu():
        raise UserError(
            f"--pipeline-parallel {split.pipeline}: vLLM 0.32 has no stages on CPUs (its second fails at the first "
            "answer); use --tensor-parallel."
        )
    if _on_gpu() and (gpus := _gpus()) < split.tensor * split.pipeline:
        raise UserError(
            f"--tensor-parallel {split.tensor} --pipeline-parallel {split.pipeline}: needs "
            f"{split.tensor * split.pipeline} GPUs, and this machine has {gpus}."
        )


def choose(engine: str, served: Served) -> str:
    """Return the engine, which for `auto` is vLLM if it is installed and can serve the model."""
    groups = (config_of(served.model).get("quantization_config") or {}).get("config_groups") or {}
    packed = any((group.get("weights") or {}).get("num_bits") == 4 for group in groups.values())  # 4-bit weights
    runs = not packed or has_packed_kernels()
    adapts = not (served.adapters and has_experts(served.model)) or _on_gpu()
    held = {one.folder: read_json(one.folder / ADAPTER) for one in served.adapters}
    unread = [(folder, name) for folder, one in held.items() for name in NOT_IN_VLLM if one.get(name) not in UNSET]
    if engine == "auto":
        can = runs and adapts and not unread
        engine = "vllm" if can and environment.python("vllm") else "transformers"
    if engine == "vllm":
        if unread:
            folder, name = unread[0]
            raise UserError(
                f"{folder}: an adapter with {name}, which vLLM does not load; merge it first (ds-recipes export "
                f"{folder} --merge --output DIR), or use --engine transformers."
            )
        if not adapts:
            folder = served.adapters[0].folder
            raise UserError(
                f"{folder}: an adapter of a model with experts, for which vLLM has kernels on GPUs only; merge "
                f"it first (ds-recipes export {folder} --merge --output DIR), or use --engine transformers."
            )
        environment.require("vllm", "--engine vllm")
        if not runs:
            raise UserError(
                f"{served.model}: vLLM's kernels for 4-bit weights need a GPU or a processor with AVX-512; use "
                "--engine transformers, or export with --quantize int8."
            )
        return engine
    missing = [package for package in WEB if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(
            f'transformers serve needs {", ".join(missing)}: pip install "deepspeed-recipes[serve]"; or use vLLM: '
            f"{environment.how()}"
        )
    if len(served.adapters) > 1:
        raise UserError(f"transformers serve serves only one model; several adapters need vLLM: {environment.how()}")
    return engine


def unread_settings(engine: str, served: Served) -> list[str]:
    """Return the settings of the model's generation_config.json that would change an answer and that vLLM ignores."""
    places = (folder / "generation_config.json" for folder in (served.tokenizer, served.model))
    file = next((place for place in places if place.is_file()), None)
    found = read_json(file) if engine == "vllm" and file else {}
    return [name for name in TRANSFORMERS_ONLY if found.get(name) not in UNSET]


def build(engine: str, served: Served, host: str, port: int, place: Path, split: Split = Split()) -> Engine:
    """Return the server of a model: vLLM's, or `transformers serve`, which serves an adapter as a merged model.

    `engine` is as `choose` returns it, and `place` an empty folder that lives as long as the server.
    """
    if engine == "vllm":
        server = vllm(served, host, port, split)
    else:
        beside = place / "models"
        beside.mkdir()
        if served.adapters:
            from ...training import export  # takes seconds, and vLLM needs none of it

            export.write(served.adapters[0].folder, beside / served.asked, merge=True)
        else:
            (beside / served.asked).symlink_to(served.model)
        server = transformers(served.asked, beside, host, port)
    trusted = base_model.may_run_code(served.model) or any(
        base_model.may_run_code(one.folder) for one in served.adapters
    )
    return replace(server, command=(*server.command, "--trust-remote-code")) if trusted else server


def vllm(served: Served, host: str, port: int, split: Split = Split()) -> Engine:
    """Return vLLM's server; requests name the model or one of its adapters."""
    python = environment.require("vllm", "--engine vllm")
    words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", host, "--port", str(port)]
    words += ["--model", str(served.model), "--served-model-name", served.name, "--tokenizer", str(served.tokenizer)]
    config = config_of(served.model)
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype == "float32" and config.get("quantization_config"):
        # No 4-bit kernel supports fp32, and no 8-bit kernel does on GPUs and on processors with AMX (vLLM 0.32).
        dtype = "bfloat16"
    words += ["--dtype", dtype] if dtype else []  # by default vLLM would round fp32 weights to 16 bits
    if (served.tokenizer / "chat_template.jinja").exists():
        words += ["--chat-template", str(served.tokenizer / "chat_template.jinja")]
    if served.adapters:
        widest = max(adapter.rank for adapter in served.adapters)
        rank = next((rank for rank in LORA_RANKS if rank >= widest), None)
        if rank is None:
            raise UserError(
                f"an adapter has rank {widest}, and vLLM supports at most {LORA_RANKS[-1]}; merge the adapter "
                "(ds-recipes export --merge)."
            )
        words += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(len(served.adapters))]
        modules = [f"{adapter.name}={adapter.folder}" for adapter in served.adapters]
        for at, adapter in enumerate(served.adapters):
            if read_json(adapter.folder / ADAPTER).get("target_parameters"):
                # vLLM 0.32 expects a matrix per expert, or is told that the experts' are stacked, as PEFT stores them.
                modules[at] = json.dumps({"name": adapter.name, "path": str(adapter.folder), "is_3d_lora_weight": True})
                words += [] if MIXED in words else [MIXED]
        words += ["--lora-modules", *modules]
        if (served.tokenizer / "generation_config.json").exists():  # the adapter's answers end otherwise
            words += ["--generation-config", str(served.tokenizer)]
    words += ["--tensor-parallel-size", str(split.tensor)] if split.tensor > 1 else []
    words += ["--pipeline-parallel-size", str(split.pipeline)] if split.pipeline > 1 else []
    variables = _variables(environment.variables())
    if not _on_gpu():
        words.append("--enforce-eager")  # compiling takes minutes
        # vLLM 0.32's kernel for CPUs rotates queries with a dimension of their own for heads, such as LFM2's, wrongly.
        words += ["--compilation-config", '{"custom_ops": ["-rotary_embedding"]}']
        variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        if (ranks := split.tensor * split.pipeline) > 1:  # by default vLLM wants a NUMA node for each rank
            cores = sorted(os.sched_getaffinity(0))
            shares = [",".join(map(str, cores[at::ranks] or cores)) for at in range(ranks)]
            variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(shares))
    names = (*(adapter.name for adapter in served.adapters), served.name)
    return Engine("vLLM", names, tuple(words), variables)


def transformers(name: str, place: Path, host: str, port: int) -> Engine:
    """Return `transformers serve` of the whole model in `place`, which holds nothing else.

    The server is started there and names a model by its path, so `name` is both its folder and its name in requests.
    """
    if "@" in name:
        raise UserError(f"{name}: transformers reads text after an @ as a revision; name the model with --name NAME.")
    words = (sys.executable, "-m", "deepspeed_recipes.export.serve.one_model", name, host, str(port))
    return Engine("transformers serve", (name,), words, _variables(os.environ | python_path({})), place)


def _variables(found: dict[str, str]) -> dict[str, str]:
    """Return variables with which a server uses no network and loads nothing on request."""
    closed = dict.fromkeys(("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE"), "0")
    return {**found, **closed, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def has_experts(model: Path) -> bool:
    """Return True if a model is a mixture of experts: on a CPU vLLM 0.32 has no adapters for it, even for attention."""
    text = text_of(config_of(model))
    return any((text.get(name) or 0) > 1 for name in EXPERT_COUNTS)


def has_packed_kernels() -> bool:
    """Return True if vLLM has 4-bit kernels for this machine: 0.32 has `cpu_gemm_wna16` for AVX-512, not for AVX2."""
    if _on_gpu() or platform.machine() != "x86_64":
        return True
    return "avx512f" in system.cpu_flags()


def _on_gpu() -> bool:
    return _gpus() > 0


def _gpus() -> int:
    import torch

    return int(torch.cuda.device_count())
