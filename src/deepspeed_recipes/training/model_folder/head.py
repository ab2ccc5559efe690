"""Detects the head of the model in a folder from the folder's own files."""

from pathlib import Path
from typing import Literal

from ...recipe.run_folder import read_json
from .base_model import ADAPTER, config_of

Head = Literal["vocabulary", "vision", "scores", "none"]
"""Logits over the vocabulary; logits of a model with a vision tower; scores of a sequence, a reward or its classes; or
none, as in an embedding model."""
PROVENANCE = "provenance.json"
"""File of an export that has more than was trained: what was trained, and digests of what is the base model's."""
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""Files with the settings of an image processor."""
TASKS: dict[str, Head] = {"SEQ_CLS": "scores", "FEATURE_EXTRACTION": "none"}
"""The head of an adapter's model, by PEFT's task type."""
LABELS = "labels.json"
"""File next to a classifier's adapter with the names of its classes; config.json of a whole model has `id2label`."""


def of_folder(folder: Path) -> Head:
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
    names = (config_of(folder).get("id2label") if of_folder(folder) == "scores" else None) or {}
    return [str(names[key]) for key in sorted(names, key=int)] if len(names) > 1 else []
