"""PiSSA (Meng et al. 2024, arXiv:2404.02948): adapters that start as a weight's largest singular values.

What they take is taken out of the weight, so the frozen model is not the one in the files any more. The export is
therefore an ordinary adapter of twice the rank on that model: the trained one less the one that it started as.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from ...recipe.run_folder import read_json, write_json

SIDES = {"lora_A": 0, "lora_B": 1}
"""The parts of an adapter, and the dimension of each that is its rank."""


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Let PEFT's fast decomposition draw the same numbers on every rank, and again when a run is resumed."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def remember(model: PeftModel) -> None:
    """Keep what the adapters are now beside them, in buffers that no checkpoint holds."""
    for layer in _layers(model).values():
        for side in SIDES:
            weight = getattr(layer, side)[model.active_adapter].weight
            layer.register_buffer(f"start_{side}", weight.detach().clone(), persistent=False)


def export(model: PeftModel, folder: Path) -> None:
    """Change the adapter that was written to `folder` into one on the unchanged base model, of twice the rank.

    W + s (B A - B0 A0) = W + s [B, -B0] [A; A0], and the scale s, alpha / rank or alpha / sqrt(rank), stays the same.
    """
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    for name, layer in _layers(model).items():
        for side, dimension in SIDES.items():
            start = getattr(layer, f"start_{side}").to("cpu", weights[f"{name}.{side}.weight"].dtype)
            sign = -1 if side == "lora_B" else 1
            joined = torch.cat([weights[f"{name}.{side}.weight"], sign * start], dim=dimension)
            weights[f"{name}.{side}.weight"] = joined.contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    config = read_json(folder / "adapter_config.json")
    factor = math.sqrt(2) if config["use_rslora"] else 2
    doubled = {"r": 2 * config["r"], "lora_alpha": factor * config["lora_alpha"], "init_lora_weights": True}
    write_json(folder / "adapter_config.json", config | doubled)


def _layers(model: PeftModel) -> dict[str, LoraLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
