"""Reads what W&B has recorded offline: W&B syncs these files and has no reader of its own.

A record that a killed process has not written yet is not in them, which nobody else knows. The format is LevelDB's log
(https://github.com/google/leveldb/blob/main/doc/log_format.md) after a header of 7 bytes, with protocol buffers in it.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def last_step(folder: Path, run_id: str) -> int:
    """Return the newest step in the offline parts of a run; -1: none."""
    files = folder.glob(f"offline-run-*-{run_id}/*.wandb")
    steps = (record.history.step.num for file in files for record in records(file) if record.HasField("history"))
    return max(steps, default=-1)
