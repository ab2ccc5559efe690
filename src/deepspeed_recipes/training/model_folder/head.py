"""What the model in a folder has on top of its layers, from what the folder says of itself."""

from pathlib import Path
from typing import Literal

from ...recipe.run_folder import read_json
from .base_model import ADAPTER, config_of

Head = Literal["vocabulary", "vision", "scores", "none"]
"""Logits over the vocabulary; the same of a model with a vision tower; scores of a sequence, a reward or its classes;
nothing, as an embedding model has it."""
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""Where a folder keeps what its model makes of pictures."""
TASKS: dict[str, Head] = {"SEQ_CLS": "scores", "FEATURE_EXTRACTION": "none"}
"""What PEFT's task types say of an adapter's model."""
LABELS = "labels.json"
"""Beside a classifier's adapter: the names of its classes, which a whole model's config.json holds as `id2label`."""


def of_folder(folder: Path) -> Head:
    """Return the head of the model that a folder holds, or that its adapter is for."""
    if (folder / ADAPTER).exists():
        if sees(folder):
            return "vision"
        return TASKS.get(str(read_json(folder / ADAPTER).get("task_type")), "vocabulary")
    names = config_of(folder).get("architectures") or ()
    if any(name.endswith("ForSequenceClassification") for name in names):
        return "scores"
    if sees(folder) and any(name.endswith("ForConditionalGeneration") for name in names):
        return "vision"
    headless = any(name.endswith("Model") and not name.endswith("LMHeadModel") for name in names)
    return "none" if headless else "vocabulary"


def sees(folder: Path) -> bool:
    """Return whether a folder says what its model makes of pictures."""
    return any((folder / name).exists() for name in PROCESSORS)


def labels_of(folder: Path) -> list[str]:
    """Return the names of a classifier's classes in the order of its outputs; none of a reward model or another one."""
    if (folder / LABELS).exists():
        return [str(name) for name in read_json(folder / LABELS)]
    names = (config_of(folder).get("id2label") if of_folder(folder) == "scores" else None) or {}
    return [str(names[key]) for key in sorted(names, key=int)] if len(names) > 1 else []
