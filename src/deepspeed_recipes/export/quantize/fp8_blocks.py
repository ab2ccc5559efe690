"""FP8 in blocks, as DeepSeek and Qwen publish it: e4m3 weights and `weight_scale_inv` for each block of 128 x 128.

File by file, so that no model class is needed and only one file is in memory.
"""

import re
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ...recipe.errors import UserError
from ...recipe.run_folder import read_json, write_json
from ...training.model_folder import base_model, weights

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max
LINEAR = re.compile(r"\.layers\.\d+\.(?!.*(mamba|linear_attn|mixer|conv)).*(proj\w*|w[123]|fc\d|dense\w*)\.weight$")
"""Names of the weights that are quantised: of attention and MLPs, not of routers, which choose by small margins."""


def write(whole: Path, folder: Path) -> None:
    """Write the weights of `whole` in FP8, and its config.json, to `folder`.

    Refuses models that stack their experts in one tensor, and those without layers of whole blocks.
    """
    folder.mkdir()
    held = weights.tensors(whole)
    if stacked := [name for name, one in held.items() if len(one.shape) == 3 and "experts" in name]:
        raise UserError(f"{whole}: {stacked[0]} stacks experts, which FP8 in blocks cannot scale; use --gguf q8_0.")
    chosen = {name for name, one in held.items() if len(one.shape) == 2 and LINEAR.search(name)}
    if not chosen:
        raise UserError(f"{whole}: has no linear layer that FP8 in blocks can hold; use --gguf q8_0.")
    if uneven := sorted(name for name in chosen if any(side % BLOCK for side in held[name].shape)):
        raise UserError(
            f"{whole}: {uneven[0]} {list(held[uneven[0]].shape)} is not a multiple of {BLOCK} on each side, and "
            "transformers reads whole blocks only; use --quantize int8 (of an MoE model int4)."
        )
    places: dict[str, str] = {}
    for file in weights.files(whole):
        written = {}
        with safe_open(file, "pt") as opened:
            names: list[str] = list(opened.keys())
            for name in names:
                weight = opened.get_tensor(name)
                if name in chosen:
                    weight, written[f"{name}_scale_inv"] = quantized(weight)
                written[name] = weight
        save_file(written, folder / file.name, {"format": "pt"})
        places |= dict.fromkeys(written, file.name)
    if (whole / weights.INDEX).exists():
        write_json(folder / weights.INDEX, read_json(whole / weights.INDEX) | {"weight_map": places})
    others = (name for name, one in held.items() if len(one.shape) > 1 and name not in chosen)
    config = dict(base_model.config_of(whole))
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in others),
    }
    write_json(folder / "config.json", config)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in e4m3, and the fp32 factor of each block, by which it is multiplied to get the matrix back."""
    blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rows, 128, columns, 128]
    scale = blocks.abs().amax((1, 3)).clamp(min=torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    small = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return small.to(torch.float8_e4m3fn).contiguous(), scale
