"""Reads the headers of a folder's weight files; refuses damaged files, and models that no run can train.

Standard library only: the launcher reads the headers before it starts anything, which takes milliseconds.

transformers and its libraries leave out the name of a damaged file, ignore it, or fail with an error of their own kind.
"""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...recipe import quantization
from ...recipe.errors import FileUnusable, UserError, of_system
from ...recipe.files import JsonView, check_ends
from ...recipe.run_folder import read_json
from .base_model import ADAPTER, KEY, config_of

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""The safetensors dtypes that are plain weights; all others need scales, or a table."""
_PARTS = re.compile(
    r"[._:](scale_inv|weight_scale(_2|s)?|qweight|qzeros|absmax|SCB|quant_map|W_q|qdata)$|\.quant_state\."
    r"|\.weight(_packed|_zero_point|_g_idx|_format|\._data|\._scale)$|_proj_blocks$"
    r"|_proj\.(codes|codebooks|(res_)?(centroids|indices)(\.weight)?|dense_weights|tables)$"  # AQLM, VPTQ, SpQR, HIGGS
)
"""Names of scales, tables and packed weights in quantised formats."""
_OF_SERVING = re.compile(r"[._](activation_scale|(input|output)_(scale|zero_point)|[kqv]_scale)$")
"""Names of the scales of activations and of the key/value cache, which weights do not need."""
_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "consolidated*.pth")
_ENGINE = ("global_step*", "mp_rank_*", "zero_pp_rank_*", "bf16_zero_pp_rank_*", "latest", "*.distcp")
"""File names in checkpoints of DeepSpeed, FSDP and Megatron."""
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings|embeddings?)\.weight$")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a weight file."""

    dtype: str
    """Dtype in safetensors' notation: F32, BF16, F8_E4M3, I8, ..."""
    shape: tuple[int, ...]


def check(folder: Path, key: str = "model.path") -> None:
    """Refuse a folder whose weights cannot be trained, as far as its config.json and headers show.

    A folder that does not exist (a Hub id) is not checked.
    """
    if not folder.is_dir():
        return
    name = f"{key}={folder}"
    if (folder / ADAPTER).exists():
        base = read_json(folder / ADAPTER).get(KEY)
        raise UserError(
            f"{name}: an adapter, not a whole model; merge it first (ds-recipes export {folder} --merge "
            f"--output DIR) and name DIR, or name its base model ({base})."
        )
    config = config_of(folder)
    quantization.check(config, name)
    check_scales(config, tensors(folder, key), name)


def check_scales(config: JsonView, found: Mapping[str, Tensor], name: str) -> None:
    """Refuse quantised weights of which config.json does not say so: they would be read without their scales."""
    parts = [part for part in found if _PARTS.search(part)]
    if parts and not quantization.is_read(config):
        raise UserError(
            f"{name}: its weights are quantised ({parts[0]}{more(parts)}), though its config.json does not say so; "
            "name the unquantised model that they were made from."
        )
    left = in_parts(found)[1] if quantization.is_read(config) else found
    strange = [
        f"{part} is {tensor.dtype}"
        for part, tensor in found.items()
        if part in left and part.endswith((".weight", "_packed", "_blocks")) and tensor.dtype not in FLOATS
    ]
    if strange:
        raise UserError(
            f"{name}: {strange[0]}{more(strange)}, which are not weights without scales; name the unquantised model."
        )


def in_parts(held: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return the weights that are stored quantised, and the names of all other tensors but what serving alone reads.

    The tensors of each weight, by its name without quantisation, are `weight` and `scale`, maybe `zero_point`; `blocks`
    and `scales` of MXFP4; or `packed`, `scale`, `shape` and what else belongs to packed integers.
    """
    found: dict[str, dict[str, str]] = {}
    for name, tensor in held.items():
        if name.endswith("_blocks"):
            weight, roles = name.removesuffix("_blocks"), {"blocks": "_blocks", "scales": "_scales"}
        elif name.endswith("_packed"):
            weight = name.removesuffix("_packed")
            roles = {role: f"_{role}" for role in ("packed", "scale", "shape", "zero_point", "g_idx")}
        elif tensor.dtype == "I8" or tensor.dtype.startswith("F8_"):
            weight = name
            scale = "_scale_inv" if f"{name}_scale_inv" in held else "_scale"
            roles = {"weight": "", "scale": scale, "zero_point": "_zero_point"}
        else:
            continue
        parts = {role: weight + ending for role, ending in roles.items() if weight + ending in held}
        if {"scale", "scales"} & parts.keys():
            found[weight] = parts
    if not found:
        return {}, list(held)
    used = {part for parts in found.values() for part in parts.values()}
    return found, [name for name in held if name not in used and not _OF_SERVING.search(name)]


def unquantized(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a folder by the names that they have once they are dequantised."""
    found, rest = in_parts(held)
    return {name: Tensor("BF16", held[next(iter(parts.values()))].shape) for name, parts in found.items()} | {
        name: held[name] for name in rest
    }


def tensors(folder: Path, key: str = "model.path") -> dict[str, Tensor]:
    """Return every tensor in the files that transformers loads from a folder, by name."""
    found: dict[str, Tensor] = {}
    for file in files(folder, key):
        held = header(file)
        if twice := sorted(found.keys() & held.keys()):
            raise UserError(
                f"{file}: holds {twice[0]}{more(twice)}, as another file of the folder does, and they may differ; copy "
                "or download the folder again."
            )
        found |= held
    if twice := sorted(name for name in found if f"model.{name}" in found):
        raise UserError(
            f"{folder}: holds {twice[0]}{more(twice)}, and the same with model. before the name, of which transformers "
            "would load one without a word; remove the tensors that are not the model's."
        )
    index = folder / INDEX
    if index.exists():
        absent = [name for name in _weight_map(index) if name not in found]
        if absent:
            raise UserError(
                f"{index}: names {absent[0]}{more(absent)}, which none of its files holds; copy or download the "
                "folder again."
            )
    return found


def files(folder: Path, key: str = "model.path") -> list[Path]:
    """Return the weight files that transformers loads from a folder."""
    if (folder / WHOLE).exists():
        if (folder / INDEX).exists():
            raise UserError(
                f"{key}={folder}: holds two models, {WHOLE}, which transformers would load, and the files of {INDEX}; "
                "remove the model that is not needed."
            )
        return [folder / WHOLE]
    if not (folder / INDEX).exists():
        raise UserError(f"{key}={folder}: {_why_none(folder)}")
    names = sorted(set(_weight_map(folder / INDEX).values()))
    for name in names:
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise UserError(f"{folder / INDEX}: names the file {name!r}; only .safetensors files next to it are read.")
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: does not exist, but {INDEX} names it; copy or download it again.")
    return [folder / name for name in names]


def _weight_map(index: Path) -> Mapping[str, str]:
    content = read_json(index)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise UserError(f"{index}: has no weight_map from tensors to files; download it again.")
    return found


def _why_none(folder: Path) -> str:
    if any(True for pattern in _ENGINE for _ in folder.glob(pattern)):
        return (
            "a checkpoint of a training engine, which holds no Hugging Face weights; name the run's export, or write "
            "one first (ds-recipes export; of other projects DeepSpeed's zero_to_fp32.py)."
        )
    if any(True for pattern in _PICKLED for _ in folder.glob(pattern)):
        return (
            "the folder holds no .safetensors file; pickled weights (.bin, .pt) are not loaded, since they can run "
            "code. Save it with safetensors first."
        )
    others = sorted(file.name for pattern in ("*.safetensors", "*.gguf") for file in folder.glob(pattern))
    has = f", but {others[0]}{more(others)}" if others else ""
    return f"the folder holds no weights: neither {WHOLE} nor {INDEX}{has}."


def header(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file from its header: 8 bytes with its length, then JSON."""
    damaged = UserError(f"{file}: a .safetensors file is damaged or cut off; copy or download it again.")
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        if start == b"version ":
            raise UserError(f"{file}: Git LFS's pointer to the weights, not the weights; run `git lfs pull` there.")
        length = int.from_bytes(start, "little")
        if not 2 <= length <= size - 8:
            raise damaged
        try:
            content = json.loads(opened.read(length))
            held = {name: entry for name, entry in content.items() if name != "__metadata__"}
            found = {name: Tensor(entry["dtype"], tuple(entry["shape"])) for name, entry in held.items()}
            end = max((entry["data_offsets"][1] for entry in held.values()), default=0)
        except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise damaged from error
    if end != size - 8 - length:
        raise damaged
    return found


def embedding_rows(folder: Path) -> int | None:
    """Return the number of rows of the embeddings in a folder's files, or None if unknown."""
    rows = [one.shape[0] for name, one in tensors(folder).items() if len(one.shape) == 2 and EMBEDDING.search(name)]
    return max(rows, default=None)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model's folder holds the files of a tokenizer."""
    patterns = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tokenization*", "*.spm")
    return any(any(folder.glob(pattern)) for pattern in patterns)


def check_has_tokenizer(folder: Path) -> None:
    """Refuse a model's folder without a tokenizer, of which transformers makes an empty one."""
    if folder.is_dir() and not has_tokenizer(folder):
        raise UserError(
            f"{folder}: has no tokenizer, neither tokenizer.json nor tokenizer.model; copy the tokenizer's files from "
            "the model that it was made of."
        )


def check_tokens(folder: Path, tokens: Mapping[str, int], unwritten: Collection[str], name: str) -> None:
    """Refuse tokens without rows in the embeddings: an IndexError in the first step, on GPUs an assertion.

    No text and no template produces the `unwritten` ones. Gemma 3's text models have no row for the token that
    represents an image. `name` is the key and the folder or Hub id.
    """
    rows = embedding_rows(folder)
    count = max((number for token, number in tokens.items() if token not in unwritten), default=-1) + 1
    if rows is not None and count > rows:
        raise UserError(
            f"{name}: its tokenizer has {count:,} tokens and its embeddings {rows:,} rows; call the model's "
            "resize_token_embeddings and save it, or use the tokenizer that belongs to it."
        )


def more(names: Sequence[object], shown: int = 1) -> str:
    """Return " and N more" for a message that shows only the first of these names."""
    return f" and {len(names) - shown} more" if len(names) > shown else ""


_CHECKED = {
    "object": re.compile(
        r"(?:adapter_|generation_|tokenizer_|preprocessor_|processor_|video_preprocessor_)?config\.json|tokenizer\.json"
        r"|special_tokens_map\.json|added_tokens\.json|vocab\.json|base_quantization\.json"
        r"|.*\.safetensors\.index\.json"
    ),
    "template": re.compile(r".*\.jinja"),
    "text": re.compile(r"merges\.txt|vocab\.txt"),
    "weights": re.compile(r"(?:adapter_)?model(?:-\d+-of-\d+)?\.safetensors"),
    "binary": re.compile(r".*\.(?:model|tiktoken)"),
}
"""The names of the files that are checked, by what they hold."""
_AGAIN = "copy or download it again"


def check_intact(place: str | Path) -> None:
    """Refuse a folder with files of a model, an adapter or a tokenizer that cannot be used.

    Weights are checked by their headers. A Hub id is not checked.
    """
    folder = Path(place)
    if not folder.is_dir():
        return
    bad: list[UserError] = []
    for file in sorted(folder.iterdir()):
        try:
            _check_file(file)
        except UserError as error:
            text = str(error)
            bad.append(error if ";" in text else type(error)(f"{text.removesuffix('.')}; {_AGAIN}."))
        except OSError as error:
            bad.append(FileUnusable(of_system(error, file)))
    if len(bad) == 1:
        raise bad[0]
    if bad:
        shown = []
        for one in bad[:3]:  # `config.json (line 3: not JSON ...)`
            name, _, reason = str(one).removeprefix(f"{folder}{os.sep}").partition(";")[0].partition(":")
            reason = re.sub(r"^(?=\d+:)", "line ", reason.strip())
            shown.append(f"{name} ({reason})")
        raise UserError(
            f"{folder}: {len(bad)} files cannot be used: {', '.join(shown)}{more(bad, 3)}; copy or download them again."
        )


def _check_file(file: Path) -> None:
    kind = next((kind for kind, pattern in _CHECKED.items() if pattern.fullmatch(file.name)), None)
    if kind is None:
        return
    check_ends(file)
    if kind == "weights":
        header(file)
    elif kind in ("object", "binary"):
        with file.open("rb") as opened:
            start = opened.read(8)
        if start == b"version ":
            raise UserError(f"{file}: Git LFS's pointer, not the file; run `git lfs pull` there.")
        if kind == "object" and not isinstance(read_json(file), dict):
            raise UserError(f"{file}: not one JSON object; {_AGAIN}.")
        if not start:
            raise UserError(f"{file}: is empty; {_AGAIN}.")
    else:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{file}: not UTF-8 text; {_AGAIN}.") from None
        if not text.strip():
            raise UserError(f"{file}: is empty; {_AGAIN}, or remove it.")
    if kind == "template":
        import jinja2

        try:
            jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False).parse(text)
        except jinja2.TemplateSyntaxError as error:
            if "unknown tag" not in str(error):  # transformers adds {% generation %}
                reason = str(error.message).rstrip(".")
                raise UserError(f"{file}:{error.lineno}: not a template ({reason}); {_AGAIN}.") from None
