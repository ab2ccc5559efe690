"""Weights & Biases: one W&B run per run folder, however often it was restarted.

W&B has no reader for its offline records: 0.31 only uploads them, in a program written in Go. Only these files show
which records a killed process had written. The format is LevelDB's log
(https://github.com/google/leveldb/blob/main/doc/log_format.md) after a header of 7 bytes, with protocol buffers in it.
"""

import contextlib
import os
import shlex
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
import wandb

from ...machine import children
from ...recipe.files import Json, JsonView
from ...recipe.project import display
from ...recipe.recipe import Recipe
from ...recipe.run_folder import RunFolder, read_json
from ...report import run_data, write
from ..console import say
from .writer import ANSWERS, over_tokens, run_id, settings, tags

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


Mode = Literal["online", "offline", "disabled"]

REPORT = "report"
"""Type of the artifact with report.html; the export's type is `model`."""


class Run:
    """A run in W&B, and its parts: every start of the run is a part, which offline has its own folder."""

    def __init__(self, recipe: Recipe, run: RunFolder, deepspeed_config: JsonView) -> None:
        """Start the W&B run, or continue it; offline if the service cannot be reached."""
        self.artifacts, self.examples = recipe.wandb.artifacts, recipe.wandb.examples
        # A sweep's agent names the run itself.
        self.id = os.environ.get("WANDB_RUN_ID") or run_id(run)
        self.folder = run.path / "wandb"
        recorded = last_step(self.folder, self.id)
        mode: Mode = recipe.wandb.mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):  # this machine has no API key
            mode = "offline"
        config = settings(recipe, deepspeed_config)
        try:
            self.live = self._started(mode, recipe, run, config)
        except wandb.errors.CommError:
            wandb.teardown()  # otherwise it still holds the run's id
            self.live = self._started("offline", recipe, run, config)
        self.online = not self.live.offline
        self.last = max(recorded, self.live.starting_step - 1 if self.online else -1)
        self.live.define_metric("tokens", hidden=True)
        self.live.define_metric("by_tokens/*", step_metric="tokens")
        self.live.define_metric("held_out/loss", summary="min")

    def _started(self, mode: Mode, recipe: Recipe, run: RunFolder, config: Json) -> Any:
        if (local := Path("wandb", "settings")).exists():
            say(f"{local.absolute()}: ignored; set WANDB_BASE_URL, or wandb.entity and wandb.project of the run")
        place = run.path.absolute()
        with contextlib.chdir(place):  # a file of the current folder would choose where the key and the run are sent
            return wandb.init(
                mode=mode,
                id=self.id,
                resume="allow",
                project=recipe.wandb.project,
                entity=recipe.wandb.entity,
                group=recipe.wandb.group,
                job_type=recipe.wandb.job_type,
                name=recipe.wandb.name or recipe.name,
                tags=tags(recipe),
                config=config,
                dir=place,
                # The ranks' output is not sent: wandb takes it before the run's own logs have redacted it.
                settings=wandb.Settings(silent=True, console="off"),
            )

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add numbers to a step; W&B writes the step when the next one begins."""
        self.live.log({**numbers, **over_tokens(numbers)}, step=step)

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Add the answers to the newest step."""
        self.live.log({"answers": wandb.Table(columns=list(ANSWERS), data=[list(row) for row in rows])})

    def alert(self, title: str, text: str) -> None:
        """Send an alert, which W&B forwards as the user has chosen, and store its text with the run."""
        self.live.alert(title=title, text=text, level="ERROR")
        self.live.summary["alert"] = f"{title}: {text}"

    def upload(self, run: RunFolder) -> None:
        """Add the report and, if the recipe uploads artifacts, the export; and the launcher's results.

        These are the prediction and the measurement, and where the time of the recorded steps went.
        """
        summary = read_json(run.summary)
        found = {key: summary[key] for key in ("predicted", "measured") if any((summary.get(key) or {}).values())}
        if (verdict := run.profile / "verdict.json").exists():
            profile = read_json(verdict)
            shares = profile["ranks"][0]["shares"]
            found["profile"] = {key: profile[key] for key in ("step_seconds", "words", "change")} | {"shares": shares}
        self.live.summary.update(found)
        models = [("model", run.export)] if self.artifacts else []
        with children.scratch() as place:
            page = run.report_page
            if page.exists() and not self.examples:
                page = place / page.name
                write.html(page, write.document(run_data.read(run.path), texts=False))
            for kind, path in (*models, (REPORT, page)):
                if path.exists():
                    artifact = wandb.Artifact(f"run-{self.id}-{kind}", type=kind)
                    artifact.add_dir(str(path)) if path.is_dir() else artifact.add_file(str(path))
                    self.live.log_artifact(artifact)

    def finish(self, summary: JsonView, status: int) -> str:
        """Close the W&B run; return its address, or the command that uploads it."""
        self.live.summary.update(dict(summary))
        if self.online:
            line = self.live.url
        else:
            folder, pattern = Path(self.live.dir).parent, f"offline-run-*-{self.id}"
            several = self.artifacts or len(list(folder.parent.glob(pattern))) > 1  # artifacts are a part that follows
            parts = pattern if several else shlex.quote(folder.name)  # the shell expands a pattern that is not quoted
            line = f"wandb sync {shlex.quote(display(folder.parent))}/{parts}"
        self.live.finish(exit_code=status)
        wandb.teardown()  # returns when the last record is on the disk; finish() does not wait for that
        return f"W&B          {line}"
