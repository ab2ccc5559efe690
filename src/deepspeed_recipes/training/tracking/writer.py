"""The interface of every tracker, how it is opened, and what the launcher reports to it after the ranks have ended.

A rank that was killed or that hangs cannot report it, and report.html is written after the ranks have ended. Without
torch, since the launcher imports this.
"""

import contextlib
import importlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...recipe import files
from ...recipe.conversions import to_dict
from ...recipe.errors import first_line, redact, redacted
from ...recipe.files import Json, JsonView
from ...recipe.recipe import Recipe
from ...recipe.run_folder import RunFolder, is_finished, read_json, read_recipe, write_json

MODULES = {"wandb": "weights_and_biases", "tensorboard": "tensorboard", "mlflow": "mlflow", "trackio": "trackio"}
"""The module of each tracker; a tracker's library is imported only where it is used."""

ANSWERS = ("prompt", "expected", "before", "after")
"""The columns of the table of answers."""


class Writer(Protocol):
    """A run in one tracker, through the tracker's own library."""

    last: int
    """The newest step from earlier starts of the run in the tracker, or -1 if there is none."""

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add numbers of a step."""

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Add the answers before and after training, with the columns `ANSWERS`."""

    def alert(self, title: str, text: str) -> None:
        """Report an error with its reason."""

    def finish(self, summary: JsonView, status: int) -> str:
        """End the run with an exit status; return a line for the last screen."""


def opened(name: str, recipe: Recipe, run: RunFolder, deepspeed_config: JsonView) -> Writer:
    """Return the run in a tracker, started or continued."""
    module = importlib.import_module(f".{MODULES[name]}", __package__)
    return module.Run(recipe, run, deepspeed_config)


def settings(recipe: Recipe, deepspeed_config: JsonView) -> Json:
    """Return a run's settings for a tracker, without credentials."""
    return redacted({"recipe": to_dict(recipe), "deepspeed": dict(deepspeed_config)})


def run_id(run: RunFolder) -> str:
    """Return the id of the run in the trackers, which the run folder stores."""
    if not run.wandb_id.exists():
        files.write_text(run.wandb_id, uuid.uuid4().hex[:8] + "\n")
    return run.wandb_id.read_text(encoding="utf-8").strip()


def numbers_of(row: JsonView) -> dict[str, float]:
    """Return the numbers in a record that a tracker can draw: everything numeric except the step.

    Those of a layer get names of their own, such as `layers/model.layers.0/grad_norm`.
    """
    layers = row.get("layers") or {}
    by_layer = {f"layers/{name}/{key}": value for name, one in layers.items() for key, value in one.items()}
    found = {**row, **by_layer}
    return {key: value for key, value in found.items() if key != "step" and isinstance(value, int | float)}


def over_tokens(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the losses under a second name, for charts over the number of tokens."""
    return {f"by_tokens/{key}": numbers[key] for key in ("loss", "held_out/loss") if key in numbers}


def tags(recipe: Recipe) -> list[str]:
    """Return a run's tags: family, method and DeepSpeed file, and the recipe's own tags."""
    own = [redact(tag.strip()) for tag in (recipe.wandb.tags or "").split(",") if tag.strip()]
    return list(dict.fromkeys([recipe.family, recipe.method.name, Path(recipe.deepspeed).stem, *own]))


def failed(run: RunFolder, reason: str | None, status: int) -> None:
    """End a run in its trackers, unless a rank has done so; `reason` is None if the user has ended it."""
    if not run.tracking.exists() or read_json(run.tracking)["ended"] is not None:
        return
    recipe = read_recipe(run)
    for name in recipe.trackers:
        with _reporting(name):
            writer = opened(name, recipe, run, read_json(run.deepspeed, {}))
            if reason:
                writer.alert(f"the run ended with status {status}", redact(reason))
            writer.finish({}, status)
    write_json(run.tracking, read_json(run.tracking) | {"ended": status})


def upload(run: RunFolder) -> None:
    """Add what only exists after the ranks to the W&B run of a finished run, if it is online or uploads artifacts."""
    if not is_finished(run):
        return
    recipe = read_recipe(run)
    online = run.tracking.exists() and read_json(run.tracking).get("online")
    if (recipe.wandb.artifacts or online) and "wandb" in recipe.trackers:
        with _reporting("wandb"):
            writer: Any = opened("wandb", recipe, run, read_json(run.deepspeed, {}))
            writer.upload(run)
            writer.finish({}, 0)


@contextlib.contextmanager
def _reporting(name: str) -> Iterator[None]:
    """Print an error of a tracker, which never fails the command."""
    try:
        yield
    except Exception as error:
        print(f"tracking={name}: {type(error).__name__}: {redact(first_line(error))}", flush=True)
