"""Reads W&B's offline records, since W&B has no reader for them: 0.31 only uploads them, in a program written in Go.

Only these files show which records a killed process had written. The format is LevelDB's log
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
"""Kinds of pieces that end a record: a whole record, or its last piece."""


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a `.wandb` file, as `wandb_internal_pb2.Record`, up to the first incomplete one."""
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
"""The process that writes for a run, and outlives it for a moment."""
PATIENCE = 30
"""Seconds that a run waits for the writer of its previous start."""


def last_step(folder: Path, run_id: str) -> int:
    """Return the newest step in the offline parts of a run once no process writes to them, or -1 if there is none."""
    deadline = time.monotonic() + PATIENCE
    while is_written(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    files = folder.glob(f"offline-run-*-{run_id}/*.wandb")
    steps = (record.history.step.num for file in files for record in records(file) if record.HasField("history"))
    return max(steps, default=-1)


def is_written(folder: Path) -> bool:
    """Return whether a process of W&B still has a file in the folder open."""
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):  # the process has just ended, or is another user's
            files = process.open_files() if process.info["name"] == WRITING else []
            if any(Path(file.path).is_relative_to(folder) for file in files):
                return True
    return False
