"""The model in a folder, from the folder's own files: its head, an adapter's base model, and whether its code may run.

An adapter's base model, which `complete.finish` names without a path of this machine, is found again.
"""

import re
import time
from pathlib import Path, PurePath
from typing import Literal

from ...recipe.errors import UserError
from ...recipe.files import Json, without_attention
from ...recipe.run_folder import RunFolder, read_json, read_recipe
from .record import own_path

ADAPTER = "adapter_config.json"
QUANTIZATION = "base_quantization.json"
"""File next to an adapter that was trained on a quantised base model: how to quantise it again."""
FURTHER_TOKEN = "further_token.safetensors"
"""File next to an adapter with the head for a further token that was trained with it, named as in the base model."""
KEY = "base_model_name_or_path"
EXPECTED = "expected.json"
"""File of a folder that holds what the trained model answered (see `expected.py`)."""
TRIES = 3
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def config_of(folder: Path) -> Json:
    """Return the content of a folder's config.json without its attention implementation; empty if it has none."""
    file = folder / "config.json"
    config = read_json(file, {})
    if not (isinstance(config, dict) and isinstance(config.get("text_config") or {}, dict)):
        raise UserError(f"{file}: not a Hugging Face config.json, which is one JSON object.")
    return without_attention(config)


def is_hub_id(name: str) -> bool:
    """Return whether a portable name is one of the Hub's, `OWNER/NAME`, and not a file of the project."""
    return bool(_HUB_ID.fullmatch(name)) and own_path(name) is None


def check_reachable(path: str) -> None:
    """Refuse the Hub id of a model if its weights are not cached here and the Hub does not answer, after `TRIES`.

    A download tries each file for half a minute, and would print every attempt of every rank. What the Hub answers,
    such as that there is no such model, is reported where the model is loaded.
    """
    if Path(path).is_dir():
        return
    import huggingface_hub as hub  # takes half a second
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    for left in reversed(range(TRIES)):
        try:
            cached = [hub.try_to_load_from_cache(path, f"model.safetensors{end}") for end in ("", ".index.json")]
            if not any(isinstance(file, str) for file in cached):
                hub.get_hf_file_metadata(hub.hf_hub_url(path, "config.json"), timeout=10)
            return
        except (HfHubHTTPError, HFValidationError):
            return
        except Exception as error:  # httpx's, of which each version of huggingface_hub has its own
            if not left or isinstance(error, hub.errors.OfflineModeIsEnabled):
                raise UserError(
                    f"model.path={path}: no network, and not in the cache; download it elsewhere and give its folder "
                    "as model.path=FOLDER."
                ) from error
            time.sleep(2)


def find(adapter: Path) -> Path:
    """Return the folder or the Hub id of an adapter's base model, which its adapter_config.json has to name."""
    name = read_json(adapter / ADAPTER).get(KEY)
    if not isinstance(name, str) or not name:
        raise UserError(f"{adapter / ADAPTER}: {KEY}={name}: write the folder or the Hub id of its base model there.")
    if own := own_path(name):
        return own
    if PurePath(name).is_absolute():
        places = [Path(name)]
    else:  # relative to the adapter or, from other tools, to the folder in which they ran: one above the adapter
        places = [(folder / name).resolve() for folder in (adapter, *adapter.resolve().parents)]
    found = next((place for place in places if (place / "config.json").is_file()), None)
    if found is None and (name.startswith(".") or PurePath(name).is_absolute()):
        if not places[0].is_dir():
            raise UserError(
                f"{adapter / ADAPTER}: the base model {name} does not exist ({places[0]}); correct {KEY}, or name the "
                "base model yourself (ds-recipes generate BASE_MODEL --adapter DIR)."
            )
        found = places[0]
    return found or Path(name)


def located(name: str) -> Path:
    """Return the folder of a recipe's model, whose path may be portable; a Hub id is returned unchanged."""
    return own_path(name) or Path(name)


Head = Literal["vocabulary", "vision", "scores", "none"]
"""Logits over the vocabulary; logits of a model with a vision tower; scores of a sequence, a reward or its classes; or
none, as in an embedding model."""
PROVENANCE = "provenance.json"
"""File of an export that has more than was trained: what was trained, and digests of what is the base model's."""
DRAFTS = (
    "predicts further tokens (MTP) and stays the base model's: a server that drafts with it gives the same answers "
    "but more slowly, since fewer drafts are accepted the more the training has changed"
)
"""The consequence for a server of a head that was not trained, after its name."""
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""Files with the settings of an image processor."""
TASKS: dict[str, Head] = {"SEQ_CLS": "scores", "FEATURE_EXTRACTION": "none"}
"""The head of an adapter's model, by PEFT's task type."""
LABELS = "labels.json"
"""File next to a classifier's adapter with the names of its classes; config.json of a whole model has `id2label`."""


def head_of(folder: Path) -> Head:
    """Return the head of the model in a folder, or of the model that its adapter is for.

    Of a whole checkpoint whose text part was trained it is that part's.
    """
    if (folder / ADAPTER).exists():
        if sees(folder):
            return "vision"
        return TASKS.get(str(read_json(folder / ADAPTER).get("task_type")), "vocabulary")
    if (folder / PROVENANCE).exists():
        trained: Head = read_json(folder / PROVENANCE)["head"]
        return trained
    names = config_of(folder).get("architectures") or ()
    if any(name.endswith("ForSequenceClassification") for name in names):
        return "scores"
    if sees(folder) and any(name.endswith("ForConditionalGeneration") for name in names):
        return "vision"
    headless = any(name.endswith("Model") and not name.endswith("LMHeadModel") for name in names)
    return "none" if headless else "vocabulary"


def sees(folder: Path) -> bool:
    """Return whether a folder has the settings of an image processor."""
    return any((folder / name).exists() for name in PROCESSORS)


def labels_of(folder: Path) -> list[str]:
    """Return the names of a classifier's classes in the order of its outputs; empty for any other model."""
    if (folder / LABELS).exists():
        return [str(name) for name in read_json(folder / LABELS)]
    names = (config_of(folder).get("id2label") if head_of(folder) == "scores" else None) or {}
    return [str(names[key]) for key in sorted(names, key=int)] if len(names) > 1 else []


_PERMITTED = {"here": False}


def permit_remote_code() -> None:
    """Permit the code of every model that this process loads, as requested by its recipe or command line."""
    _PERMITTED["here"] = True


def remote_code_permitted() -> bool:
    """Return whether this process has the permission; without an explicit value transformers prompts the user."""
    return _PERMITTED["here"]


def may_run_code(folder: str | Path) -> bool:
    """Return whether the code of the model in a folder may run, by this process's recipe or by that of its run.

    Only the recipe in a run's folder counts, not its copy in an export's `training/`.
    """
    if remote_code_permitted():
        return True
    runs = map(RunFolder, Path(folder).resolve().parents[:2])
    return any(run.recipe.exists() and read_recipe(run).model.trust_remote_code for run in runs)
