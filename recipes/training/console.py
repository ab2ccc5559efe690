"""What a person sees while the model trains: a bar on a terminal, a line per logged step elsewhere."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from recipes.training import world


def say(text: str = "") -> None:
    """Print on rank 0, above a progress bar if there is one."""
    if world.is_first():
        encoding = sys.stdout.encoding or "utf-8"
        tqdm.write(text.encode(encoding, "replace").decode(encoding), file=sys.stdout)
        sys.stdout.flush()


def marked(pieces: Sequence[tuple[str, bool]]) -> str:
    """Return text with the parts that are learned in colour, or between « and » where there is no colour."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    if not console.is_terminal or console.no_color:
        return "".join(f"«{text}»" if learned else text for text, learned in pieces)
    with console.capture() as captured:
        console.print(Text.assemble(*((text, "green" if learned else "dim") for text, learned in pieces)), end="")
    return captured.get()


def duration(seconds: float) -> str:
    """Return seconds as `1:05` or `2:03:20`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def shown(path: Path) -> str:
    """Return a path as the user would type it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


class Progress(TrainerCallback):
    """A progress bar over the optimizer steps."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the bar."""
        if world.is_first():
            shown = sys.stdout.isatty()
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                unit="step",
                disable=not shown,
                dynamic_ncols=True,
            )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance it."""
        if self.bar is not None:
            self.bar.update(1)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close it."""
        if self.bar is not None:
            self.bar.close()


def step_line(record: dict[str, Any], last_step: int) -> str:
    """Return one logged step as a line; `record` is an object of metrics.jsonl."""
    norm = record["grad_norm"]
    speed = record["tokens_per_second"]
    left = record["seconds"] / record["step"] * (last_step - record["step"])
    return (
        f"step {record['step']:>{len(str(last_step))}}/{last_step}  loss {record['loss']:.4f}  "
        f"lr {record['learning_rate']:.1e}  grad norm {'-' if norm is None else format(norm, '.2f')}  "
        f"{speed:,.0f} tokens/s  {duration(left)} left"
    )
