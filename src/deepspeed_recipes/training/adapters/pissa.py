"""PiSSA (Meng et al. 2024, arXiv:2404.02948): adapters that start as a weight's largest singular values.

The initial adapters are subtracted from the weights, so the frozen model differs from the model in the files. The
export is therefore an ordinary adapter of twice the rank on that model: the trained adapter minus the initial one.
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
    """Make PEFT's fast decomposition draw the same numbers on every rank, and again when a run is resumed."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def remember(model: PeftModel) -> None:
    """Store the adapters' current values next to them, in buffers that no checkpoint contains."""
    for layer in _layers(model).values():
        for side in SIDES:
            weight = getattr(layer, side)[model.active_adapter].weight
            layer.register_buffer(f"start_{side}", weight.detach().clone(), persistent=False)


def export(model: PeftModel, folder: Path) -> None:
    """Convert the adapter in `folder` into an adapter of twice the rank on the unchanged base model.

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
