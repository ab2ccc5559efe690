"""Makes a smaller model from a larger model's weights, as an initial student: fewer layers, narrower feed-forward.

This works on the files: tensors keep their names and their dtype, and no model is built until the result is checked.
The smaller model writes nonsense until it is trained, but learns far faster than from random weights (Sanh et al. 2019,
arXiv:1910.01108, for layers; Muralidharan et al. 2024, arXiv:2407.14679, for both).
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from ..machine import children
from ..recipe.errors import UserError, first_line
from ..recipe.files import Json, JsonView, text_of
from ..recipe.layout import per_layer
from ..training.export import move
from ..training.model_folder import complete, weights
from ..training.model_folder.base_model import config_of

INDEX = "model.safetensors.index.json"
COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "generation_config.json",
)
"""Files that a smaller model shares with the larger one."""
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*")
NUMBERED = re.compile(r"^(.+?)\.(\d+)\.(.+)$")
"""A tensor of a layer: the list of layers, the layer's number, and the rest of the name."""
INPUTS, OUTPUT, BOTH = ("gate_proj.weight", "up_proj.weight"), "down_proj.weight", "gate_up_proj.weight"
"""The matrices of a gated feed-forward layer, by the ends of their names; some models store the first two as one."""
HIDDEN = (
    "--hidden: every layer reads and adds to one stream of that width, and the weights do not show which of its "
    "directions matter, only data does; use --layers and --intermediate."
)


@dataclass(frozen=True)
class Shrunken:
    """The sizes of the smaller model."""

    layers: list[int]
    """The numbers of the layers that were kept."""
    intermediate: int
    before: int
    """Parameters of the larger model."""
    after: int


def shrink(source: str, output: Path, layers: int | None, intermediate: int | None) -> Shrunken:
    """Write a model with a part of another model's layers and feed-forward neurons into a new or empty folder.

    `layers` are kept evenly spaced, including the first and the last. `intermediate` is the new width of the
    feed-forward layers, each of which keeps the neurons whose weights have the largest norms. None keeps all.
    """
    folder = Path(source)
    if not folder.is_dir():
        try:
            wanted = ["config.json", INDEX, "*.safetensors", *COPIED, *LICENCES]
            folder = Path(snapshot_download(source, allow_patterns=wanted))
        except Exception as error:  # the Hub's client raises its own, its transport's, and ValueError for a bad name
            raise UserError(f"{source}: no such folder, and not on the Hub: {first_line(error)}") from error
    elif not (folder / "config.json").is_file():
        raise UserError(f"{source}: this folder has no config.json; give a Hugging Face model folder.")
    weights.check_intact(folder)
    config = config_of(folder)
    sizes = text_of(config)
    complete.check(folder, output)
    kept, width = _chosen(source, sizes, layers, intermediate)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: has no .safetensors file; pickled weights are not read, since they can run code.")
    state = {name: tensor for file in files for name, tensor in load_file(file).items()}
    before = _count(state)
    state = _with_layers(source, state, sizes["num_hidden_layers"], kept)
    if width < (sizes.get("intermediate_size") or 0):
        state = _narrowed(source, state, width)
    stated = {**_computed_kinds(folder), **sizes}
    listed = per_layer(stated, sizes["num_hidden_layers"])  # lists with an entry per layer
    changed = {**sizes, **{name: [stated[name][number] for number in kept] for name in listed}}
    changed |= {"num_hidden_layers": len(kept)} | ({"intermediate_size": width} if width else {})
    config = config | {"text_config": changed} if sizes is not config else changed
    output.parent.mkdir(parents=True, exist_ok=True)
    with children.scratch(f"{output.name[:100]}.", inside=output.parent) as place:
        part = place / "part"
        part.mkdir()
        for pattern in (*COPIED, *LICENCES):
            for file in folder.glob(pattern):
                shutil.copy(file, part)
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_torch_state_dict(state, part)
        _check(source, part)
        move(part, output)
    return Shrunken(kept, width, before, _count(state))


def _chosen(source: str, sizes: JsonView, layers: int | None, intermediate: int | None) -> tuple[list[int], int]:
    """Return the numbers of the layers to keep, and the width of the feed-forward layers, 0 if they have none."""
    depth, width = sizes.get("num_hidden_layers"), sizes.get("intermediate_size")
    if depth is None:
        raise UserError(f"{source}: its config.json has no num_hidden_layers, which shrink needs; use another model.")
    kept = list(range(depth))
    if layers is not None:
        if not 2 <= layers <= depth:
            raise UserError(
                f"--layers {layers}: the model has {depth} layers; keep between 2 (the first and the last) and {depth}."
            )
        kept = [round(index * (depth - 1) / (layers - 1)) for index in range(layers)]
    if intermediate is None:
        return kept, width or 0
    if width is None or any("expert" in name and size for name, size in sizes.items()):
        raise UserError(f"--intermediate {intermediate}: {source} has no plain feed-forward layers; leave it out.")
    if not 1 <= intermediate <= width:
        raise UserError(f"--intermediate {intermediate}: the model's is {width}; choose a number from 1 to {width}.")
    return kept, intermediate


def _computed_kinds(folder: Path) -> Json:
    """Return the lists that say of what kind each layer is, if layers differ, as transformers computes them.

    Configurations such as Gemma 2's have no list: every second layer attends to a window. By the numbers of the smaller
    model other layers would.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    except (OSError, ValueError, KeyError):  # explained when the result is loaded
        return {}
    found = {name: getattr(config, name, None) for name in ("layer_types", "no_rope_layers")}
    return {name: kinds for name, kinds in found.items() if kinds and len({*kinds}) > 1}


def _count(state: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in state.values())


def _with_layers(
    source: str, state: Mapping[str, torch.Tensor], count: int, kept: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the tensors of the kept ones of `count` layers, newly numbered, and all tensors outside the layers."""
    found: dict[str, set[int]] = {}
    for name in state:
        if match := NUMBERED.match(name):
            found.setdefault(match[1], set()).add(int(match[2]))
    names = [name for name, numbers in found.items() if numbers == set(range(count))]
    if len(names) != 1:
        raise UserError(
            f"{source}: its files have {len(names)} lists of {count} layers, and shrink only supports decoders with "
            "exactly one; choose another model."
        )
    layers = names[0]
    numbers, result = {old: new for new, old in enumerate(kept)}, {}
    for name, tensor in state.items():
        match = NUMBERED.match(name)
        if match is None or match[1] != layers:
            result[name] = tensor
        elif int(match[2]) in numbers:
            result[f"{layers}.{numbers[int(match[2])]}.{match[3]}"] = tensor
    return result


def _narrowed(source: str, state: dict[str, torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """Return the tensors with `width` neurons in every feed-forward layer.

    A neuron is a row of the gate, the same row of the up projection and the same column of the down projection. Neurons
    are ranked by the product of the three norms, which bounds what a neuron can add to the stream.
    """
    outputs = [name for name in state if name.endswith(OUTPUT)]
    result = dict(state)
    for name in outputs:
        part = name.removesuffix(OUTPUT)
        fused = f"{part}{BOTH}" in state
        names = [f"{part}{BOTH}"] if fused else [f"{part}{one}" for one in INPUTS]
        if not all(one in state for one in names) or any(
            f"{part}{one}.bias" in state for one in ("down_proj", "up_proj")
        ):
            outputs = []
            break
        gate, up = state[names[0]].chunk(2) if fused else (state[one] for one in names)
        norms = gate.float().norm(dim=1) * up.float().norm(dim=1) * state[name].float().norm(dim=0)
        best = norms.topk(width).indices.sort().values
        smaller = [torch.cat([gate[best], up[best]])] if fused else [gate[best], up[best]]
        result |= dict(zip(names, smaller, strict=True)) | {name: state[name][:, best].contiguous()}
    if not outputs:
        raise UserError(
            f"--intermediate {width}: {source} has no gated feed-forward layers (gate, up and down projection without "
            "biases); leave it out."
        )
    return result


def _check(source: str, output: Path) -> None:
    """Load the written model with plain transformers."""
    try:
        logging.disable_progress_bar()
        _, about = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True, trust_remote_code=False)
        problems = [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in about[kind]]
        why = ", ".join(map(str, problems[:3]))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        problems, why = [error], first_line(error)
    if problems:
        raise UserError(f"{source}: what is left of it is not a model that transformers loads: {why}")
