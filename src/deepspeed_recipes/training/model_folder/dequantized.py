"""Published quantised weights (FP8, MXFP4, compressed-tensors) as ordinary ones, each dequantised when it is used.

transformers would build its own layers for them, whole on every rank under ZeRO-3. Here it gets a state dict, shards
the model as ever, and reads each weight at the moment it copies it: neither a rank nor the disk holds a second copy.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils._pytree import tree_map
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ...recipe.errors import UserError
from ...recipe.files import Json, JsonView
from . import weights


class Dequantized(torch.Tensor):
    """A weight that is computed from its quantised parts in each operation on it, and not kept."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> "Dequantized":
        """Return a weight of this shape and dtype; `make` computes it."""
        made: Dequantized = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        return made

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> None:
        self.make = make

    @classmethod
    def __torch_dispatch__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: JsonView | None = None,
    ) -> object:
        """Run an operation on the dequantised weights."""
        given = tree_map(lambda one: one.make() if isinstance(one, cls) else one, (args, kwargs or {}))
        return function(*given[0], **given[1])


def state(folder: Path, block: JsonView, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return all weights of a model's folder by their names without quantisation, each with the scales that it needs.

    `block` is the `quantization_config` of its config.json.
    """
    places: Json = {}
    for file in weights.files(folder):
        opened = safe_open(file, "pt")
        places |= dict.fromkeys(weights.header(file), opened)
    held = weights.tensors(folder)
    quantized, rest = weights.in_parts(held)
    found = {name: places[name].get_tensor(name) for name in rest}
    for name, parts in quantized.items():

        def make(name: str = name, parts: Mapping[str, str] = parts) -> torch.Tensor:
            read = {role: places[part].get_tensor(part) for role, part in parts.items()}
            return _dequantized(name, read, block).to(dtype)

        shapes = {role: held[part].shape for role, part in parts.items()}
        if "blocks" in shapes:
            experts, rows, groups, width = shapes["blocks"]
            shape: tuple[int, ...] = (experts, groups * width * 2, rows)
        elif "packed" in shapes:
            shape = tuple(places[parts["shape"]].get_tensor(parts["shape"]).tolist())
        else:
            shape = shapes["weight"]
            _blocks(name, shape, shapes["scale"], block)
        found[name] = Dequantized(shape, dtype, make)
    return found


def _dequantized(name: str, parts: Mapping[str, torch.Tensor], block: JsonView) -> torch.Tensor:
    if "blocks" in parts:
        return convert_moe_packed_tensors(parts["blocks"], parts["scales"])
    if "packed" in parts:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig

        layer = name.removesuffix(".weight")
        for scheme in QuantizationConfig.model_validate(dict(block)).config_groups.values():
            patterns = [one[3:] for one in scheme.targets if one.startswith("re:")]  # the others are names or classes
            if {"Linear", layer} & set(scheme.targets) or any(re.match(pattern, layer) for pattern in patterns):
                break
        else:
            raise UserError(f"{name}: packed, but no group of its quantization_config targets {layer}.")
        held = {f"weight_{role}": part for role, part in parts.items()}
        compressor: Any = BaseCompressor.get_value_from_registry("pack-quantized")
        return compressor.decompress(held, scheme)["weight"]
    weight, scale = parts["weight"].float(), parts["scale"]
    # Exponents alone, in a byte: the scale is a power of two.
    scale = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    if "zero_point" in parts:
        weight = weight - _spread(name, parts["zero_point"].float(), weight.shape, block)
    return weight * _spread(name, scale, weight.shape, block)


def _spread(name: str, scale: torch.Tensor, shape: torch.Size, block: JsonView) -> torch.Tensor:
    """Return scales of blocks in a shape that multiplies the weight's."""
    if scale.numel() == 1:
        return scale.reshape(())
    rows, columns = _blocks(name, tuple(shape), tuple(scale.shape), block)
    scale = scale[..., None] if scale.dim() == len(shape) - 1 else scale
    return scale.repeat_interleave(rows, -2)[..., : shape[-2], :].repeat_interleave(columns, -1)[..., : shape[-1]]


def _blocks(name: str, shape: tuple[int, ...], scale: tuple[int, ...], block: JsonView) -> tuple[int, int]:
    """Return the rows and columns that share one scale."""
    if not scale or set(scale) == {1}:
        return shape[-2], shape[-1]
    grid = (*scale, 1) if len(scale) == len(shape) - 1 else scale
    stated = block.get("weight_block_size") or (None, None)
    sizes = []
    for length, count, size in zip(shape[-2:], grid[-2:], stated, strict=True):
        size = size if size and -(-length // size) == count else -(-length // count)
        if -(-length // size) != count:
            raise UserError(f"{name}: its scales have the shape {list(scale)}, which does not fit {list(shape)}.")
        sizes.append(size)
    return sizes[0], sizes[1]
