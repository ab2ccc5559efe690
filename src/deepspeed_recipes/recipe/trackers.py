"""The names of the trackers, the check that they are installed, and the settings of Weights & Biases."""

import difflib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from .bounds import Several
from .errors import UserError, redact

NAMES = ("wandb", "tensorboard", "mlflow", "trackio")
"""Names of the trackers; each is also the name of its Python module and package."""


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases, on rank 0."""

    mode: Literal["online", "offline", "disabled"] = "online"
    """`online` falls back to `offline` when the machine has no API key."""
    project: str = "deepspeed-recipes"
    """Project of the run in W&B and Trackio; in MLflow, the experiment."""
    entity: str | None = None
    """User or team that owns the project. None uses W&B's default for the API key."""
    group: str | None = None
    """Group of the run; W&B shows the runs of a group together. A sweep sets this key."""
    job_type: str | None = None
    """Role of the run within its group, such as `train`."""
    tags: Annotated[str | None, Several()] = None
    """More tags, separated by commas, in addition to the family, the method and the DeepSpeed file."""
    artifacts: bool = False
    """After the run, add its export to the W&B run as an artifact, and report.html, which online runs always add."""
    examples: bool = False
    """Show held-out examples with their answers in every tracker, and examples of the data in the report that W&B gets.
    `false` keeps all text of the data in the run folder."""


def check(chosen: Sequence[str], wandb: Wandb) -> None:
    """Refuse a tracker that does not exist or that is named twice, and what W&B would refuse when the run starts.

    Raises:
        UserError: names the nearest tracker, or the key and what W&B allows.
    """
    for name in chosen:
        if name not in NAMES:
            near = difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UserError(f"tracking={redact(name)}: no such tracker.{hint} Choose from {', '.join(NAMES)}, or none.")
        if chosen.count(name) > 1:
            raise UserError(f"tracking={','.join(chosen)}: {name} is named twice.")
    if "wandb" not in chosen or wandb.mode == "disabled":
        return
    if len(wandb.project) > 128 or set(wandb.project) & set("/\\#?%:"):
        raise UserError(f"wandb.project={redact(wandb.project[:140])}: W&B allows 128 characters, and none of /\\#?%:.")
    for tag in (wandb.tags or "").split(","):
        if len(tag.strip()) > 64:
            raise UserError(f"wandb.tags: {redact(tag.strip()[:80])}: W&B allows 64 characters for each tag.")


def check_installed(chosen: Sequence[str]) -> None:
    """Refuse a tracker whose library is not installed.

    Raises:
        UserError: names the command that installs it.
    """
    for name in chosen:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"tracking={name}: {name} is not installed; pip install {name}, or leave it out.")
