"""The tensors of a base model that a run does not load, such as a vision tower: its export gets them from the base.

The export is then the whole checkpoint again, in the base model's own class. `provenance.json` has the digest of every
tensor that was copied, and `check` compares the folder with it.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.modeling_utils import str_to_torch_dtype
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import cached_file

from ...recipe import quantization
from ...recipe.files import Json, JsonView
from ...recipe.run_folder import read_json, write_json
from ..model_folder import base_model, dequantized, weights
from ..model_folder.base_model import PROCESSORS, PROVENANCE, Head
from ..model_folder.record import portable_path
from . import heads, load, stored

_DTYPES = {dtype: name for name, dtype in str_to_torch_dtype.items()}
"""safetensors' names of dtypes."""
PREFIX = "base_model.model."
"""PEFT's, before the name of a module."""
_IF_THERE: Json = {
    f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")
}
"""Arguments with which `cached_file` returns None for a file that does not exist."""
_OF_PROCESSOR = (*PROCESSORS, "video_preprocessor_config.json", "generation_config.json")
_OF_FOLDER = {
    *("architectures", "auto_map", "dtype", "model_type", "quantization_config", "tie_word_embeddings"),
    *("transformers_version", "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
}
"""Keys that describe the folder or its class, tokens that the Trainer copies from the tokenizer (those of
generation_config.json count), and the cache, which training turns off."""


def add(folder: Path, path: str, head: Head, trusted: bool) -> list[str]:
    """Turn an export of the trained part of a model into the whole checkpoint, and return the names of what was added.

    The trained tensors get the names that the base has for them. What the run did not load is copied tensor by tensor,
    the base's configuration is kept but for what training changed, and its processor's settings are added. Raises
    RuntimeError if the folder does not have the tensors of the base (`path`) afterwards; `trusted` is whether the
    model's own code may run.
    """
    base = stored.folder_of(path)
    if base is None or head not in ("vocabulary", "vision"):
        return []
    held, written = weights.unquantized(weights.tensors(base)), weights.tensors(folder, "export")
    further = [name.removesuffix("eh_proj.weight") for name in written if name.endswith(".eh_proj.weight")]
    if not further and all(name in written or name.endswith(stored.RECOMPUTED) for name in held):
        trained_as = (base_model.config_of(folder).get("architectures") or [""])[0]
        with_tower = trained_as.endswith("ForConditionalGeneration")  # text was trained in the whole model's class
        if head == "vocabulary" and with_tower and _add_processor(folder, path):
            record = {"base": portable_path(str(base)), "trained_as": trained_as, "head": head}
            write_json(folder / PROVENANCE, record | {"parts": [], "dequantized": None, "untouched": {}})
        return []
    model, mapping = _outline(base, head, trusted)
    known = model.state_dict()
    places = stored.loaded_as(held, model, mapping)
    names = _names(stored.loaded_as(written, model, mapping), places)
    left = [
        name
        for name, place in places.items()
        if place not in known and name not in names.values() and not place.endswith(stored.RECOMPUTED)
    ]
    # Published files repeat the model's ends for the head for a further token.
    ends = zip(heads.SHARED, (model.get_input_embeddings(), model.get_output_embeddings()), strict=True)
    twice = {start + copy: f"{_name(model, end)}.weight" for copy, end in ends for start in further}
    copies = {name: of for name, of in twice.items() if name in left}
    left = [name for name in left if name not in copies]
    if untrained := [name for name in left if name.startswith(tuple(further))]:
        raise RuntimeError(f"{folder}: {untrained[0]}{weights.more(untrained)} of a trained head is not in the export")
    digests: dict[str, str] = {}
    if left or copies or any(name != new for name, new in names.items()):
        digests = _rewrite(folder, base, names, left, copies)
    if not left and not further:  # all of the model is trained
        return []
    config = read_json(folder / "config.json")
    _write_config(folder, base, head, trusted)
    _add_processor(folder, path)
    # Without the outline of its head, the base has more than is left.
    parts = [part for part in stored.check(str(base), model, mapping) if f"{part}." not in further]
    provenance = {
        "base": portable_path(str(base)),
        "trained_as": (config.get("architectures") or [type(model).__name__])[0],
        "head": head,
        "parts": parts,
        "mtp": [part for part in stored.MTP[str(base)] if part in parts],
        "further_token": [start.removesuffix(".") for start in further],
        "dequantized": quantization.title(base_model.config_of(base)),
        "untouched": digests,
    }
    write_json(folder / PROVENANCE, provenance)
    check(folder)
    return left


def size(path: str) -> int:
    """Return the bytes of what a run has not loaded of its base model, after `stored.check`."""
    base, parts = stored.folder_of(path), stored.NOT_LOADED.get(path)
    if base is None or not parts:
        return 0
    held = weights.unquantized(weights.tensors(base))
    inside = tuple(f"{part}." for part in parts)
    return bytes_of({name: one for name, one in held.items() if name.startswith(inside)})


def bytes_of(tensors: Mapping[str, weights.Tensor]) -> int:
    """Return the bytes of tensors in files."""
    widths = {dtype: torch.empty(0, dtype=one).element_size() for one, dtype in _DTYPES.items()}
    return sum(math.prod(one.shape) * widths[one.dtype] for one in tensors.values())


def name_adapter(folder: Path, path: str, head: Head, trusted: bool) -> None:
    """Name the weights of an adapter for the text part as they are named in the base's whole class, if it has one.

    Servers load a base in the class of its config.json, and PEFT and vLLM leave out, without an error, what has other
    names. The whole class then has the adapter too, and `export.with_adapter` maps the names for the text part. The
    arguments are as for `add`.
    """
    base = stored.folder_of(path)
    if base is None or head != "vocabulary":
        return
    config = load.config_of(base, trusted)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return
    text, _ = _outline(base, head, trusted)
    if type(text.config) is type(config):  # transformers has one class for both
        return
    whole, _ = _outline(base, "vision", trusted)
    ours, theirs = (f"{PREFIX}{_name(model, model.get_decoder())}." for model in (text, whole))
    file = folder / "adapter_model.safetensors"
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in weights.header(file)}
        if any(name.startswith(theirs) for name in tensors):
            return
        renamed = {re.sub(f"^{re.escape(ours)}", theirs, name): tensor for name, tensor in tensors.items()}
        _write(file.with_suffix(".part"), renamed)
    file.with_suffix(".part").rename(file)
    written = read_json(folder / base_model.ADAPTER)
    if isinstance(targets := written["target_modules"], list):  # the ends of names are the same in both classes
        written["target_modules"] = [target.removeprefix(ours.removeprefix(PREFIX)) for target in targets]
    inside, prefix = _name(whole, whole.get_decoder()), whole.base_model_prefix
    beside = [name for name, _ in whole.base_model.named_children() if f"{prefix}.{name}" != inside]
    others = rf"{prefix}\.({'|'.join(beside)})\..*"
    outside = [name for name, _ in whole.named_modules() if re.fullmatch(others, name)]
    ends = tuple(f".{target}" for target in written["target_modules"] or () if isinstance(targets, list))
    if isinstance(targets, str) or any(f".{name}".endswith(ends) for name in outside):
        written["exclude_modules"] = others  # PEFT would add adapters to the tower as well, which do nothing
    kind = type(whole)
    written["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    write_json(folder / base_model.ADAPTER, written)


def _name(model: PreTrainedModel, module: torch.nn.Module) -> str:
    return next(name for name, one in model.named_modules() if one is module)


def _add_processor(folder: Path, path: str) -> bool:
    """Copy the base's settings of its processor, which servers need to load it; return whether it has any."""
    # Loading the text part from the Hub has not fetched these files.
    found = {name: cached_file(path, name, **_IF_THERE) for name in _OF_PROCESSOR}
    for name, file in found.items():
        if file and not (folder / name).exists():
            shutil.copy2(file, folder / name)
    return any(found[name] for name in PROCESSORS)


def check(folder: Path) -> None:
    """Compare the tensors that an export has from its base with their digests; RuntimeError if one differs."""
    if not (folder / PROVENANCE).exists():
        return
    expected = read_json(folder / PROVENANCE)["untouched"]
    found = {}
    for file in weights.files(folder, "export"):
        with safe_open(file, "pt") as opened:
            for name in expected.keys() & weights.header(file).keys():
                found[name] = hashlib.sha256(_bytes(opened.get_tensor(name))).hexdigest()
    if wrong := [name for name in expected if found.get(name) != expected[name]]:
        raise RuntimeError(
            f"{folder}: {wrong[0]}{weights.more(wrong)} should be the base model's, unchanged, but "
            f"{'differs' if wrong[0] in found else 'is missing'} ({PROVENANCE})"
        )


def _outline(base: Path, head: Head, trusted: bool) -> tuple[PreTrainedModel, dict[str, str] | None]:
    """Return the trained model without weights, and the names with which it is loaded from the base."""
    config = load.config_of(base, trusted)
    part = load.text_part(config) if head == "vocabulary" else {}
    with torch.device("meta"):
        model = heads.CLASSES[head].from_config(part.get("config", config), trust_remote_code=trusted)
    return model, part.get("key_mapping")


def _names(written: Mapping[str, str], held: Mapping[str, str]) -> dict[str, str]:
    """Return the base's name of each tensor of an export; both sides map a tensor to the weight that it becomes.

    Several tensors of the base, such as those of experts, may become one weight.
    """
    groups: dict[str, tuple[list[str], list[str]]] = {place: ([], []) for place in written.values()}
    for side, names in enumerate((written, held)):
        for name in sorted(names):
            if names[name] in groups:
                groups[names[name]][side].append(name)
    found = {name: name for name in written}
    for ours, theirs in groups.values():
        if len(ours) == len(theirs):  # not so for a head that merging has separated from the embedding
            found |= dict(zip(ours, theirs, strict=True))
    return found


def _rewrite(
    folder: Path, base: Path, names: Mapping[str, str], left: list[str], copies: Mapping[str, str]
) -> dict[str, str]:
    """Rename an export's tensors, add `copies` of them and those of the base, and return the digests of these.

    File by file, so that the disk needs room for one file more than the export.
    """
    digests: dict[str, str] = {}
    parts: list[Path] = []
    for file in weights.files(folder, "export"):
        parts.append(folder / f"part-{len(parts):05d}")
        held = weights.header(file)
        twice = {copy: of for copy, of in copies.items() if of in held}
        if not twice and all(names[name] == name for name in held):
            file.rename(parts[-1])
            continue
        with safe_open(file, "pt") as opened:
            chosen = {names[name]: name for name in held} | twice
            _write(parts[-1], {name: opened.get_tensor(of) for name, of in chosen.items()})
        file.unlink()
    block = quantization.block_of(base_model.config_of(base)) or {}
    tensors = dequantized.state(base, block, torch.bfloat16)
    stored_in = weights.in_parts(weights.tensors(base))[0]
    for file in weights.files(base):
        first = {name: next(iter(stored_in.get(name, {"weight": name}).values())) for name in left}
        if mine := [name for name in left if first[name] in weights.header(file)]:
            parts.append(folder / f"part-{len(parts):05d}")
            digests |= _write(parts[-1], {name: tensors[name] for name in mine})
    index: dict[str, str] = {}
    size = 0
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else weights.WHOLE
        index |= dict.fromkeys(weights.header(part), name)
        size += part.stat().st_size
        part.rename(folder / name)
    if len(parts) > 1:
        write_json(folder / weights.INDEX, {"metadata": {"total_size": size}, "weight_map": index})
    return digests


def _write(file: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Write a safetensors file tensor by tensor, each in memory alone, and return the digests of their bytes."""
    # safetensors aligns tensors by writing the widest dtypes first.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: Json = {"__metadata__": {"format": "pt"}}
    digests, end = {}, 0
    for name in order:
        one = tensors[name]
        start, end = end, end + one.numel() * one.element_size()
        header[name] = {"dtype": _DTYPES[one.dtype], "shape": list(one.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as written:
        written.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            content = _bytes(tensors[name])
            written.write(content)
            digests[name] = hashlib.sha256(content).hexdigest()
    return digests


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview((tensor.contiguous()).view(-1).view(torch.uint8).numpy())


def _write_config(folder: Path, base: Path, head: Head, trusted: bool) -> None:
    """Replace an export's config.json by the base's, with the values that training changed."""
    whole, trained = base_model.config_of(base), base_model.config_of(folder)
    for one in (whole, *(part for part in whole.values() if isinstance(part, dict))):
        one.pop("quantization_config", None)
    config = load.config_of(base, trusted)
    loaded = config.get_text_config() if head == "vocabulary" else config
    at = next((key for key in whole if loaded is not config and getattr(config, key, None) is loaded), None)
    part = whole[at] if at else whole
    _change(part, json.loads(loaded.to_json_string(use_diff=False)), trained)
    for key in {"dtype", "torch_dtype"} & whole.keys():
        whole[key] = trained["dtype"]
    tied = bool(trained.get("tie_word_embeddings", config.tie_word_embeddings))
    if tied != bool(config.tie_word_embeddings):
        whole["tie_word_embeddings"] = part["tie_word_embeddings"] = tied
    write_json(folder / "config.json", whole)


def _change(config: Json, before: JsonView, trained: JsonView) -> None:
    """Set in the base's configuration what training changed."""
    for key, value in trained.items():
        old = before.get(key, value)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and isinstance(config.get(key), dict):
            _change(config[key], old, value)
        elif key not in _OF_FOLDER and value != old:
            config[key] = value
