"""Reads what W&B has recorded offline: W&B syncs these files and has no reader of its own.

A record that a killed process has not written yet is not in them, which nobody else knows. The format is LevelDB's log
(https://github.com/google/leveldb/blob/main/doc/log_format.md) after a header of 7 bytes, with protocol buffers in it.
"""

import contextlib
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

HEADER, BLOCK, PIECE = 7, 32768, struct.Struct("<IHB")
"""Bytes of the file's header and of a block, and the header of a piece: checksum, length and kind."""
COMPLETE = (1, 4)
"""Kinds of the pieces that end a record: whole, or its last."""


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a `.wandb` file, as `wandb_internal_pb2.Record`; one that is cut off ends them."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), HEADER, b""
    while at + PIECE.size <= len(data):
        left = BLOCK - at % BLOCK
        _, size, kind = PIECE.unpack_from(data, at) if left >= PIECE.size else (0, 0, 0)
        if kind == 0:  # the rest of a block that is too short for a piece
            at += left
            continue
        at += PIECE.size + size
        if at > len(data):
            return
        whole += data[at - size : at]
        if kind in COMPLETE:
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


WRITING = "wandb-core"
"""The process that writes for a run, and for a moment survives it."""
PATIENCE = 30
"""Seconds that a run waits for the writer of its last start."""


def last_step(folder: Path, run_id: str) -> int:
    """Return the newest step in the offline parts of a run, once nobody writes them any more; -1: none."""
    deadline = time.monotonic() + PATIENCE
    while is_written(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    files = folder.glob(f"offline-run-*-{run_id}/*.wandb")
    steps = (record.history.step.num for file in files for record in records(file) if record.HasField("history"))
    return max(steps, default=-1)


def is_written(folder: Path) -> bool:
    """Return whether a process of W&B still has a file in the folder open."""
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
            files = process.open_files() if process.info["name"] == WRITING else []
            if any(Path(file.path).is_relative_to(folder) for file in files):
                return True
    return False
