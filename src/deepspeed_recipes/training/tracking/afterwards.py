"""Updates the trackers after the ranks have ended: the reason of a failure, and the final report.

A rank that was killed or that hangs cannot report it, and report.html is written after the ranks have ended.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ...recipe.errors import first_line, redact
from ...recipe.run_folder import RunFolder, is_finished, read_json, read_recipe, write_json
from .writer import opened


def failed(run: RunFolder, reason: str | None, status: int) -> None:
    """End a run in its trackers, unless a rank has done so; `reason` is None if the user has ended it."""
    if not run.tracking.exists() or read_json(run.tracking)["ended"] is not None:
        return

    def end(writer: Any) -> None:
        if reason:
            writer.alert(f"the run ended with status {status}", redact(reason))
        writer.finish({}, status)

    _each(run, read_recipe(run).trackers, end)
    write_json(run.tracking, read_json(run.tracking) | {"ended": status})


def upload(run: RunFolder) -> None:
    """Add what only exists after the ranks to the W&B run of a finished run, if it is online or uploads artifacts."""
    if not is_finished(run):
        return
    recipe = read_recipe(run)

    def add(writer: Any) -> None:
        writer.upload(run)
        writer.finish({}, 0)

    online = run.tracking.exists() and read_json(run.tracking).get("online")
    _each(run, ["wandb"] if (recipe.wandb.artifacts or online) and "wandb" in recipe.trackers else [], add)


def _each(run: RunFolder, names: Sequence[str], action: Callable[[object], None]) -> None:
    """Run `action` in each tracker; an error is reported, and never fails the command."""
    for name in names:
        try:
            action(opened(name, read_recipe(run), run, read_json(run.deepspeed) if run.deepspeed.exists() else {}))
        except Exception as error:
            print(f"tracking={name}: {type(error).__name__}: {redact(first_line(error))}", flush=True)
