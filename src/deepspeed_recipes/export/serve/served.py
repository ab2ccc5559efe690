"""The model that a server serves: a whole model, or one or more adapters on their base model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.run_folder import read_json
from ...training.model_folder import base_model, record
from ..evaluate import candidates


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter, and its name in requests."""

    name: str
    folder: Path
    rank: int
    """The largest of its layers."""


@dataclass(frozen=True)
class Served:
    """A model with its tokenizer and adapters."""

    name: str
    """The model's name in requests, without an adapter."""
    model: Path
    """A whole model: a folder, or a Hub id."""
    tokenizer: Path
    """Folder of the tokenizer and chat template: the model's, or those with which the adapter was trained."""
    adapters: tuple[Adapter, ...] = ()

    @property
    def asked(self) -> str:
        """The name that the examples use: the first adapter's, or the model's."""
        return self.adapters[0].name if self.adapters else self.name


def _shared(folder: Path, base: Path) -> dict[str, object]:
    """Return settings that a server has once, an adapter's or its base model's, by the words for a differing one."""
    from ...training.model import generate  # imports torch, which --help does without

    templates = (place / "chat_template.jinja" for place in (folder, base))
    ends = generate.ends_in(folder if (folder / generate.FILE).is_file() else base)
    return {
        "another chat template": next((file.read_bytes() for file in templates if file.is_file()), b""),
        "other tokens at the end of an answer": {*ends},
    }


def find(name: Path, called: str | None, adapters: Sequence[str]) -> Served:
    """Return the model that the words of the command line name: a run, a checkpoint, a model folder or an adapter's.

    `called` is its name in requests, or None for the recipe's or the folder's; `adapters` of the same base model are
    NAME=FOLDER each.
    """
    from ...training.model_folder import card  # a second's import, which --help does without

    folder = model_folder(name)
    if card.look(folder).scores:
        raise UserError(f"{name}: outputs scores instead of text; serve a model that writes text.")
    held = record.read(folder)
    own = called or (held.recipe.name if held and name.resolve() != folder else folder.name)
    _check_name("--name", own)
    found = [_adapter(own, folder)] if (folder / base_model.ADAPTER).exists() else []
    for word in adapters:
        label, equals, path = word.partition("=")
        if not (label and equals and path):
            raise UserError(f"--adapter {word}: write NAME=FOLDER.")
        _check_name("--adapter", label)
        found.append(_adapter(label, model_folder(Path(path))))
    names = [adapter.name for adapter in found]
    if len(names) > len(set(names)):
        raise UserError(f"--adapter: two adapters are named {max(names, key=names.count)}; give each its own name.")
    if not found:
        return Served(own, folder, folder)
    base = whole(folder)
    for adapter in found:
        other = whole(adapter.folder)
        if other != base and (_identity(base) is None or _identity(other) != _identity(base)):
            raise UserError(f"--adapter {adapter.name}: its base model is {other}, but {base} is served; leave it out.")
        mine, first = _shared(adapter.folder, base), _shared(found[0].folder, base)
        if title := next((title for title in first if mine[title] != first[title]), ""):
            raise UserError(
                f"--adapter {adapter.name}: was trained with {title} than {found[0].name}, and a server has one for "
                "all its adapters; serve it on another port."
            )
    return Served("base" if own in names else own, base, found[0].folder, tuple(found))


def whole(folder: Path) -> Path:
    """Return the folder with the weights and config.json of a model or an adapter's base; a Hub id if it has none."""
    from ...training.model import stored  # imports torch, which --help does without

    if not (folder / base_model.ADAPTER).exists():
        return folder
    base = base_model.find(folder)
    return stored.folder_of(str(base)) or base


def _check_name(option: str, name: str) -> None:
    """Refuse a name that a server or a shell would take for an option, a path or several lines."""
    if "/" in name or name.startswith((".", "-")) or not name.isprintable() or len(name.encode()) > 200:
        raise UserError(f"{option} {name!r}: use a short name without a slash that begins with a letter or a digit.")


def model_folder(name: Path) -> Path:
    """Return the folder with the weights: a run's export or newest checkpoint, or the folder itself."""
    found = candidates.find(str(name), None).model
    if not isinstance(found, Path):
        raise UserError(f"{name}: already served; name a folder.")
    return found


def _adapter(name: str, folder: Path) -> Adapter:
    if not (folder / base_model.ADAPTER).exists():
        raise UserError(f"--adapter {name}: {folder} has no adapter ({base_model.ADAPTER}).")
    if (folder / base_model.QUANTIZATION).exists():
        raise UserError(
            f"{folder}: was trained on a 4-bit base model, and a server would add it to another base model; merge it "
            f"first: ds-recipes export {folder} --merge --output DIR."
        )
    config = read_json(folder / base_model.ADAPTER)
    if "r" not in config:
        kind = config.get("peft_type")
        raise UserError(f"{folder}: an adapter of PEFT's type {kind}, and servers apply LoRA; serve a merged copy.")
    return Adapter(name, folder, max(int(config["r"]), *(config.get("rank_pattern") or {}).values(), 1))


def _identity(model: Path) -> tuple[Json, dict[str, int]] | None:
    """Return the configuration and file sizes by which copies of a model are the same, or None if it is not here."""
    if not (model / "config.json").exists():
        return None
    return read_json(model / "config.json"), {file.name: file.stat().st_size for file in model.glob("*.safetensors")}
