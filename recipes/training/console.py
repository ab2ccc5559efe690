"""What rank 0 prints."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text
from tqdm import tqdm

from . import distributed


def say(text: str = "") -> None:
    """Print on rank 0, above a progress bar if there is one."""
    if distributed.is_first():
        encoding = sys.stdout.encoding or "utf-8"
        tqdm.write(text.encode(encoding, "replace").decode(encoding), file=sys.stdout)
        sys.stdout.flush()


def highlighted(pieces: Sequence[tuple[str, bool]]) -> str:
    """Return text with the parts in the loss in colour, or between « and » where there is no colour."""
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
