"""The trackers by name, what each needs, and the settings of Weights & Biases."""

import difflib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import UserError, redact

NAMES = ("wandb", "tensorboard", "mlflow", "trackio")
"""Each tracker, its Python module and its package are called the same."""


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases, on rank 0."""

    mode: Literal["online", "offline", "disabled"] = "online"
    """`online` falls back to `offline` when the machine has no API key."""
    project: str = "deepspeed-recipes"
    """The project that the run belongs to, in Trackio too; of MLflow the experiment."""
    entity: str | None = None
    """The user or team that owns the project; None: W&B's default for the key."""
    group: str | None = None
    """Runs of one group are shown together; a sweep sets it."""
    job_type: str | None = None
    """What a run is within its group, such as `train`."""
    tags: str | None = None
    """Further tags, with commas, beside the family, the method and the DeepSpeed file."""
    artifacts: bool = False
    """After the run, add its export and report.html to the W&B run as artifacts."""
    examples: bool = False
    """Show held-out examples with their answers in every tracker, and examples of the data in the report among the
    artifacts. Without it no text of the data leaves the run folder."""


def check(chosen: Sequence[str]) -> None:
    """Refuse a tracker that does not exist, or that is named twice.

    Raises:
        UserError: names the nearest.
    """
    for name in chosen:
        if name not in NAMES:
            near = difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UserError(f"tracking={redact(name)}: no such tracker.{hint} Choose from {', '.join(NAMES)}, or none.")
        if chosen.count(name) > 1:
            raise UserError(f"tracking={','.join(chosen)}: {name} is named twice.")


def check_installed(chosen: Sequence[str]) -> None:
    """Refuse a tracker whose library is not installed.

    Raises:
        UserError: says how to install it.
    """
    for name in chosen:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"tracking={name}: {name} is not installed; pip install {name}, or leave it out.")
