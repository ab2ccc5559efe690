"""`ds-recipes plan --serve REQUESTSxTOKENS`: the GPU memory that vLLM needs for a model, and the GPUs for it."""

import argparse
import json
import re
from dataclasses import dataclass

from rich.console import Console

from ...planning.cost.states import stage_ranges
from ...planning.hardware.cluster import Cluster
from ...planning.model_profile.profile import ModelProfile
from ...planning.search import strategies
from ...planning.table import columns, hardware_in_words
from ...recipe.errors import UserError
from ...recipe.gpus import GIB
from ...recipe.project import command
from ...recipe.recipe import Recipe
from .options import hardware_of, recipe_of

SHARE = 0.92
"""The share of a GPU that vLLM 0.32 takes by default (`--gpu-memory-utilization`)."""
FORMATS = {"bf16": 2.0, "int8 or fp8": 1.0, "int4": 0.5 + 2 / 128}
"""Bytes per weight in the decoder's linear layers and experts; int4 has a bf16 scale per 128 weights. The rest stays in
bf16."""
OPTIONS = ("tokens", "examples", "example_tokens", "price", "deadline", "write", "longest", "which_gpu", "explain")
"""Options of plans for the training of one model."""
OF_TRAINING = ("overrides", "sequence_length", "host_memory", "nvme", "network", "software")
"""Other settings that do not affect serving."""


@dataclass(frozen=True)
class Split:
    """A way to split a model over GPUs, as vLLM does it, and what each GPU then holds, in bytes."""

    tensor: int
    pipeline: int
    weights: float
    """On the fullest pipeline stage."""
    cache: float
    """For one request at its full length."""

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.tensor * self.pipeline

    def requests(self, hardware: Cluster) -> int:
        """Return how many requests of full length fit in the memory that the weights leave."""
        return max(0, int((SHARE * hardware.gpu.memory_gib * GIB - self.weights) / self.cache))


def answer(arguments: argparse.Namespace, console: Console) -> int:
    """Print weights, cache and GPUs by format of the weights, and return the exit status: 1 if no format fits."""
    given = next((name for name in (*OPTIONS, *OF_TRAINING) if getattr(arguments, name)), "")
    if given or arguments.method != "full":
        told = arguments.overrides[0] if given == "overrides" else f"--{(given or 'method').replace('_', '-')}"
        raise UserError(f"--serve and {told}: give one of them; --serve plans a server, not a training run.")
    requests, length = _asked(arguments.serve)
    recipe, _ = recipe_of(arguments)
    hardware = hardware_of(arguments)
    profile = strategies.plan_request(recipe, hardware).profile
    found = {name: _splits(profile, recipe, hardware, width, length) for name, width in FORMATS.items()}
    least = {
        name: next((split for split in splits if split.requests(hardware) >= requests), None)
        for name, splits in found.items()
    }
    if arguments.json:
        print(json.dumps({name: _as_json(found[name][0], least[name], hardware, requests) for name in found}, indent=2))
        return 0 if any(least.values()) else 1
    console.print(
        f"{recipe.family}-{recipe.size}, {profile.parameters / 1e9:,.1f}B, served by vLLM to {requests} requests of "
        f"{length:,} tokens at once, on {hardware_in_words(hardware)}"
    )
    rows = []
    for name, splits in found.items():
        whole, split = splits[0], least[name]
        last = split or splits[-1]
        row = {
            "weights in": name,
            "weights GiB": f"{whole.weights / GIB:,.1f}",
            "cache GiB": f"{requests * whole.cache / GIB:,.1f}",
            "GPUs": f"{split.gpus}" if split else f"more than {last.gpus}",
            "GiB per GPU": f"{(last.weights + requests * last.cache) / GIB:,.1f}",
            "requests that fit": f"{last.requests(hardware):,}",
        }
        rows.append(row)
    console.print(columns(rows, ("weights in",)))
    console.print(
        f"\nvLLM takes {SHARE:.0%} of a GPU and fills what the weights leave with the cache, in bf16 here "
        "(--kv-cache-dtype fp8 halves it). Its activations and CUDA graphs, some GiB, are not counted."
    )
    if any(not kind.attention_width for kind in profile.layer_kinds):
        console.print("Linear attention keeps a state of fixed size per request instead, which is not counted.")
    name, best = next(((name, split) for name, split in least.items() if split), ("", None))
    if best is None:
        return 1
    sizes = (("--tensor-parallel", best.tensor), ("--pipeline-parallel", best.pipeline))
    options = "".join(f" {option} {size}" for option, size in sizes if size > 1)
    smaller = "" if name == "bf16" else f", after {command('export')} RUN --quantize {name.split()[0]}"
    console.print(f"\n{command('serve')} RUN_OR_FOLDER{options}{smaller}", soft_wrap=True)
    return 0


def _asked(text: str) -> tuple[int, int]:
    """Return the number of requests and their length in tokens from `16x8k`."""
    found = re.fullmatch(r"([0-9]{1,7})\s*x\s*([0-9]{1,9})(k?)", text.strip().lower())
    requests, length = (int(found[1]), int(found[2]) * (1024 if found[3] else 1)) if found else (0, 0)
    if not requests or not length:
        raise UserError(
            f"--serve {text[:40]}: write the requests at once and their tokens, question and answer: --serve 16x8k."
        )
    return requests, length


def _splits(profile: ModelProfile, recipe: Recipe, hardware: Cluster, width: float, length: int) -> list[Split]:
    """Return the ways to split the model over the hardware, from one GPU up: tensor in a node, pipeline over nodes.

    A request's cache holds keys and values in bf16, or MLA's latent; a window bounds its tokens.
    """
    config = recipe.model.config
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"] if config.get("kv_lora_rank") else 0
    heads = profile.key_value_heads
    held = []  # the bytes of each layer's weights, with `width` per weight in linear layers and experts
    for layer in profile.layers:
        linear = sum(inputs * outputs for inputs, outputs in layer.linears)
        narrow = min(layer.parameters, linear + layer.expert_parameters)
        held.append(width * narrow + 2 * (layer.parameters - narrow))
    found = []
    for nodes in range(1, hardware.nodes + 1):
        for tensor in (1, 2, 4, 8, 16):
            if tensor > hardware.gpus_per_node or profile.attention_heads % tensor or nodes > len(profile.layers):
                continue
            stages = []
            for index, span in enumerate(stage_ranges(profile, nodes)):
                layers = [profile.layers[at] for at in span]
                outside = (0 if index else profile.embedding_parameters + profile.tower_parameters) + (
                    profile.head_parameters if index == nodes - 1 else 0
                )
                weights = 2 * outside + sum(held[at] for at in span)
                # A latent, and heads fewer than GPUs, are on each of them.
                spread = 1 if latent else min(tensor, heads)
                kept = ((layer, latent or profile.cached_per_token(layer)) for layer in layers if layer.attention_width)
                cache = sum(2 * elements * min(length, layer.window or length) for layer, elements in kept)
                stages.append((weights / tensor, cache / spread))
            found.append(Split(tensor, nodes, *(max(each) for each in zip(*stages, strict=True))))
    return sorted(found, key=lambda split: (split.gpus, split.pipeline))


def _as_json(whole: Split, split: Split | None, hardware: Cluster, requests: int) -> dict[str, object]:
    return {
        "weights_gib": whole.weights / GIB,
        "cache_gib": requests * whole.cache / GIB,
        "fits": split is not None,
        "tensor": split.tensor if split else None,
        "pipeline": split.pipeline if split else None,
        "gpu_gib": (split.weights + requests * split.cache) / GIB if split else None,
        "requests": split.requests(hardware) if split else 0,
    }
