"""What the launcher tells the trackers when the ranks have gone: why they failed, and what the report has become.

A rank that was killed or that hangs tells nobody; and report.html is written after the ranks have ended.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ...recipe.errors import first_line, redact
from ...recipe.run_folder import RunFolder, read_json, read_recipe, write_json
from .writer import opened


def failed(run: RunFolder, reason: str | None, status: int) -> None:
    """End a run in the trackers that follow it, unless a rank has; `reason` is None where the user has ended it."""
    if not run.tracking.exists() or read_json(run.tracking)["ended"] is not None:
        return

    def end(writer: Any) -> None:
        if reason:
            writer.alert(f"the run ended with status {status}", redact(reason))
        writer.finish({}, status)

    _each(run, read_recipe(run).trackers, end)
    write_json(run.tracking, read_json(run.tracking) | {"ended": status})


def upload(run: RunFolder) -> None:
    """Add the export and the report of a run that has finished to its W&B run, where the recipe asks for it."""
    if not run.summary.exists() or read_json(run.summary).get("stopped"):
        return
    recipe = read_recipe(run)

    def add(writer: Any) -> None:
        writer.upload(run)
        writer.finish({}, 0)

    _each(run, ["wandb"] if recipe.wandb.artifacts and "wandb" in recipe.trackers else [], add)


def _each(run: RunFolder, names: Sequence[str], action: Callable[[Any], None]) -> None:
    """Do something in each tracker; one that fails is reported, and never fails the command."""
    for name in names:
        try:
            action(opened(name, read_recipe(run), run, read_json(run.deepspeed) if run.deepspeed.exists() else {}))
        except Exception as error:
            print(f"tracking={name}: {type(error).__name__}: {redact(first_line(error))}", flush=True)
