"""Trackio: on this machine in TRACKIO_DIR, or in the Hugging Face Space in TRACKIO_SPACE_ID."""

import contextlib
import io
import shlex
from collections.abc import Mapping, Sequence

import trackio
from trackio.sqlite_storage import SQLiteStorage

from ...recipe.files import JsonView
from ...recipe.recipe import Recipe
from ...recipe.run_folder import RunFolder
from .writer import ANSWERS, run_id, settings, tags


class Run:
    """A run in Trackio; a restarted one is continued."""

    def __init__(self, recipe: Recipe, run: RunFolder, deepspeed_config: JsonView) -> None:
        self.project = recipe.wandb.project
        name = f"{recipe.name}-{run_id(run)}"
        config = settings(recipe, deepspeed_config) | {"tags": tags(recipe)}
        options = {"name": name, "group": recipe.wandb.group, "config": config, "resume": "allow"}
        with contextlib.redirect_stdout(io.StringIO()):  # it prints five lines about itself
            known = name in SQLiteStorage.get_runs(self.project)
            last = SQLiteStorage.get_last_step(self.project, name) if known else None
            self.live = trackio.init(self.project, embed=False, **options)
        self.last = -1 if last is None else last
        self.step = max(self.last, 0)

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add numbers of a step."""
        self.step = step
        self.live.log(dict(numbers), step=step)

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Add the answers as a table."""
        import pandas

        self.live.log(
            {"answers": trackio.Table(dataframe=pandas.DataFrame(rows, columns=list(ANSWERS)))}, step=self.step
        )

    def alert(self, title: str, text: str) -> None:
        """Send an alert."""
        with contextlib.redirect_stdout(io.StringIO()):
            self.live.alert(title=title, text=text, level=trackio.AlertLevel.ERROR)

    def finish(self, summary: JsonView, status: int) -> str:
        """Send the remaining records."""
        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()
        return f"Trackio      trackio show --project {shlex.quote(self.project)}"
