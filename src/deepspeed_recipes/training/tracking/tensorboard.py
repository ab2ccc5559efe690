"""TensorBoard: event files in the run folder's `tensorboard/`."""

import json
import shlex
from collections.abc import Mapping, Sequence

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from ...recipe.files import JsonView
from ...recipe.project import display
from ...recipe.recipe import Recipe
from ...recipe.run_folder import RunFolder
from .writer import ANSWERS, over_tokens, settings


class Run:
    """A run in TensorBoard; each start of the run adds a file."""

    def __init__(self, recipe: Recipe, run: RunFolder, deepspeed_config: JsonView) -> None:
        self.folder = run.path / "tensorboard"
        self.last = last_step(self.folder) if self.folder.exists() else -1
        self.writer = SummaryWriter(str(self.folder))
        self.step = max(self.last, 0)
        if self.last < 0:
            for name, shown in settings(recipe, deepspeed_config).items():
                self._text(name, _as_code(shown))

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add numbers of a step, on the disk at once."""
        self.step = step
        for key, value in numbers.items():
            self.writer.add_scalar(key, value, step)
        for key, value in over_tokens(numbers).items():
            self.writer.add_scalar(key, value, numbers["tokens"])
        self.writer.flush()

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Add the answers as a table in text."""
        table = (ANSWERS, ["---"] * len(ANSWERS), *rows)
        cells = [[text.replace("|", "\\|").replace("\n", "<br>") for text in row] for row in table]
        self._text("answers", "\n".join(f"| {' | '.join(row)} |" for row in cells))

    def alert(self, title: str, text: str) -> None:
        """Add the reason as text."""
        self._text("alert", f"{title}\n\n{text}")

    def finish(self, summary: JsonView, status: int) -> str:
        """Close the file."""
        self._text("summary", _as_code({**summary, "exit_status": status}))
        self.writer.close()
        return f"TensorBoard  tensorboard --logdir {shlex.quote(display(self.folder))}"

    def _text(self, tag: str, text: str) -> None:
        self.writer.add_text(tag, text, self.step)
        self.writer.flush()


def last_step(folder: object) -> int:
    """Return the newest step of the losses in a folder of event files, or -1 if there is none."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 1}).Reload()
    drawn = [tag for tag in events.Tags()["scalars"] if not tag.startswith("by_tokens/")]
    return max((event.step for tag in drawn for event in events.Scalars(tag)), default=-1)


def _as_code(value: object) -> str:
    return "\n".join(f"    {line}" for line in json.dumps(value, indent=2, default=str).splitlines())
