"""Prints on rank 0, hides messages of libraries that users cannot act on, and keeps each rank's output in a log.

The last lines of a rank that died show why.
"""

import contextlib
import faulthandler
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text
from tqdm import tqdm

from ..recipe.errors import printable, redact
from ..recipe.run_folder import RunFolder
from . import distributed

NOISE = {
    "accelerate.accelerator": ["Gradient accumulation steps mismatch"],  # the Trainer's doing, and DeepSpeed is right
    "DeepSpeed": [
        "Pipeline parallelism does not support overlapped communication",  # so DeepSpeed turns it off
        "ds_autotp_parsed' attribute already exists",
        "AutoTP: ",  # the weights that it leaves whole
        "AutoEP: ",  # "2.5 overrides 2.5"
        "MPU is not provided",
        "**** You are using ZeRO with an untested optimizer",  # tests/parity/test_optimizers.py does
    ],
    # TRL's ORPO and CPO map a method of the trainer, which datasets cannot hash: it computes again what it would cache.
    "datasets.fingerprint": ["Parameter '"],
    "bitsandbytes.backends.cpu.ops": ["Failed to load CPU gemm_4bit_forward"],  # a kernel from the Hub, for speed
}
"""Beginnings of messages that a user cannot act on, by the logger that prints them."""

WARNINGS = {
    "torch": [
        "`torch.distributed.",  # collectives have new names, and DeepSpeed calls the old ones
        "barrier(): using the device under current context",  # `distributed.start` has set it to the rank's device
    ],
    "dill": ["Cannot locate reference to ", "Cannot pickle "],  # likewise
    "peft": ["fan_in_fan_out is set to False"],  # of GPT-2
    "trl": ["You are importing from 'trl.experimental'"],  # tests cover parity with it, and its version is pinned
}
"""Beginnings of Python warnings, by the package that issues them."""


def leave_out_noise() -> None:
    """Hide the messages in `NOISE` and the warnings in `WARNINGS`."""

    def is_shown(record: logging.LogRecord) -> bool:
        text = re.sub(r"^\[(Rank|RANK) \d+\] ", "", record.getMessage())  # DeepSpeed's
        return not text.startswith(tuple(NOISE[record.name]))

    for name in NOISE:
        logging.getLogger(name).addFilter(is_shown)
    for beginning in chain.from_iterable(WARNINGS.values()):
        warnings.filterwarnings("ignore", message=re.escape(beginning))


def say(text: str) -> None:
    """Print on rank 0, above a progress bar if there is one."""
    if distributed.is_first():
        encoding = sys.stdout.encoding or "utf-8"
        tqdm.write(text.encode(encoding, "replace").decode(encoding), file=sys.stdout)
        sys.stdout.flush()


def show(examples: Iterable[Sequence[tuple[str, bool]]]) -> None:
    """Print examples with the parts in the loss coloured, or between « and » where colours are not supported."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for example in examples:
        pieces = [(printable(text), learned) for text, learned in example]
        if not console.is_terminal or console.no_color:
            say("example: " + "".join(f"«{text}»" if learned else text for text, learned in pieces))
            continue
        with console.capture() as captured:
            console.print(Text.assemble(*((text, "green" if learned else "dim") for text, learned in pieces)), end="")
        say(f"example: {captured.get()}")


def keep_log(run: RunFolder) -> None:
    """Copy this rank's output from Python to its log, and its stack if it crashes.

    Output of native libraries is not copied: a pipe would buffer it, and lose it when the process is killed.
    """
    run.ranks.mkdir(parents=True, exist_ok=True)
    log = (run.ranks / f"rank-{os.environ['RANK']}.log").open("a", encoding="utf-8", errors="replace", buffering=1)
    sys.stdout, sys.stderr = Tee(sys.stdout, log), Tee(sys.stderr, log)
    faulthandler.enable(log)


def keep_from_screen(error: BaseException) -> None:
    """Write an error's traceback to this rank's log only: on the screen it would follow the reason of another rank."""
    stream = sys.stderr
    traceback.print_exception(error, file=stream.log if isinstance(stream, Tee) else stream)


class Tee:
    """A stream that also writes to a log."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self.stream = stream
        self.log = log

    def write(self, text: str) -> int:
        """Write `text`; a progress bar, which overwrites itself, does not go into the log."""
        if not text.startswith("\r"):
            with contextlib.suppress(OSError):  # a full disk must not end the run
                self.log.write(redact(text))
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
