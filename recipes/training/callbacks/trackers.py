"""Tracking with Weights & Biases, on rank 0."""

import os
import shlex
import uuid
from pathlib import Path
from typing import Any

from ...spec.conversions import to_dict
from ...spec.project import display
from ...spec.recipe import Recipe
from ...spec.run_folder import RunFolder
from .. import distributed


class Tracker:
    """The W&B run of rank 0, or nothing."""

    def __init__(self, recipe: Recipe, run: RunFolder) -> None:
        """Decide the mode; W&B itself is started by `begin`."""
        self.recipe = recipe
        self.run = run
        self.mode = recipe.wandb.mode
        if self.mode == "online" and not has_key():
            self.mode = "offline"
        self.wandb: Any = None

    def begin(self, deepspeed_config: dict[str, Any]) -> None:
        """Start the W&B run, with the recipe and the resolved DeepSpeed configuration as its config."""
        if self.mode == "disabled" or not distributed.is_first():
            return
        import wandb  # takes a second, which runs without it do not wait for

        self.wandb = wandb.init(
            mode=self.mode,
            # One W&B run for one run folder, however often it was restarted; a sweep's agent names the run itself.
            id=os.environ.get("WANDB_RUN_ID") or run_id(self.run),
            resume="allow",
            project=self.recipe.wandb.project,
            name=self.recipe.name,
            tags=[self.recipe.family, self.recipe.method, Path(self.recipe.deepspeed).stem],
            config={"recipe": to_dict(self.recipe), "deepspeed": deepspeed_config},
            dir=self.run.path,
            settings=wandb.Settings(silent=True),
        )

    def record(self, numbers: dict[str, Any]) -> None:
        """Send one object of metrics.jsonl or evaluations.jsonl."""
        if self.wandb is not None:
            self.wandb.log({key: value for key, value in numbers.items() if key != "step"}, step=numbers["step"])

    def end(self, summary: dict[str, Any]) -> str | None:
        """Close the W&B run; return how to look at it, for the last screen."""
        if self.wandb is None:
            return None
        self.wandb.summary.update(summary)
        where = self.wandb.url if self.mode == "online" else f"wandb sync {self._parts()}"
        self.wandb.finish()
        return where

    def _parts(self) -> str:
        """Return the folder of the offline run, or a pattern for the folders of all its parts, one per restart.

        As typed in a shell, which expands the pattern where it is not quoted.
        """
        folder = Path(self.wandb.dir).parent
        pattern = f"offline-run-*-{self.wandb.id}"
        several = len(list(folder.parent.glob(pattern))) > 1
        return f"{shlex.quote(display(folder.parent))}/{pattern if several else shlex.quote(folder.name)}"


def run_id(run: RunFolder) -> str:
    """Return the id that W&B knows the run by, kept in the run folder."""
    if not run.wandb_id.exists():
        run.wandb_id.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
    return run.wandb_id.read_text(encoding="utf-8").strip()


def has_key() -> bool:
    """Return whether this machine has a W&B API key, without asking for one or showing it."""
    import wandb

    return wandb.login(prompt=False, verify=False)
