"""The trackers of a run, on rank 0 of the world: what is recorded when, and what happens if a run ends early."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from ...recipe.errors import first_line, redact
from ...recipe.files import Json
from ...recipe.recipe import Recipe
from ...recipe.run_folder import RunFolder, read_json, read_jsonl, read_recipe, write_json
from .. import distributed
from ..console import say
from .writer import Writer, numbers_of, opened

PLACE = ("time", "node", "rank", "step")
"""Keys of a sample with its time and place."""
OF_RANK = ("gpu_", "pcie_", "nvlink_")
"""Prefixes of readings that a rank takes of its own GPU; all others are of its node."""
TAIL = 4096
"""Bytes at the end of a file that contain its newest sample, which has about 600."""


@dataclass
class Trackers:
    """The trackers in the recipe; none on other ranks.

    A run that resumes from a checkpoint logs the steps after it once more. A tracker has every step once: steps that it
    already has are not sent again, and missing steps are sent from the run's own logs. Both starts train a step on the
    same sequences, even in a rewind, which excludes only later sequences.

    A tracker that fails is dropped for the rest of the run: a run never ends because of its dashboard.
    """

    run: RunFolder
    writers: dict[str, Writer] = field(default_factory=dict)
    tokens: float = 0
    """Number of tokens trained on, as last logged: the second axis of values that are logged without it."""

    def begin(self, recipe: Recipe, deepspeed_config: Json) -> None:
        """Start or continue the run in every tracker, and report the cause of a restart."""
        if not distributed.is_first() or not recipe.trackers:
            return
        for name in recipe.trackers:
            with self._attempt(name):
                writer = self.writers[name] = opened(name, recipe, self.run, deepspeed_config)
                for step, numbers in logged(self.run):
                    if step > writer.last:
                        writer.record(step, numbers)
        self.tokens = max((row["tokens"] for row in read_jsonl(self.run.metrics)), default=0)
        before = read_json(self.run.tracking, {}).get("begun", time.time())
        write_json(self.run.tracking, {"begun": time.time(), "ended": None})
        for row in read_jsonl(self.run.restarts):
            if row["time"] > before and row["cause"]:
                self.alert(f"{recipe.name}: restarted from step {row['from_step']}", row["cause"])

    def record(self, row: Json) -> None:
        """Send one object of metrics.jsonl, or of evaluations.jsonl with its keys under `held_out/`."""
        self.tokens = row.get("tokens", self.tokens)
        numbers = numbers_of(row) | {"tokens": self.tokens} | other_nodes(self.run)
        for name, writer in list(self.writers.items()):
            if row["step"] > writer.last:
                with self._attempt(name):
                    writer.record(row["step"], numbers)

    def alert(self, title: str, text: str) -> None:
        """Report an error in every tracker."""
        for name, writer in list(self.writers.items()):
            with self._attempt(name):
                writer.alert(title, redact(text))

    def failed(self, reason: str, status: int) -> None:
        """End the run with the reason for which it cannot continue; the launcher does this where no rank can."""
        self.alert(f"the run ended with status {status}", reason)
        self.end({}, status)

    def end(self, summary: Json, status: int = 0) -> list[str]:
        """Close the run in every tracker; return lines for the last screen on how to view it."""
        rows, lines = [] if status or not self.writers else answers(self.run), []
        for name, writer in list(self.writers.items()):
            if rows:
                with self._attempt(name):
                    writer.table(rows)
            with self._attempt(name):  # also of a tracker whose table has failed
                lines.append(redact(writer.finish(summary, status)))  # MLflow's address may have a password
        if self.writers:
            online = getattr(self.writers.get("wandb"), "online", False)
            write_json(self.run.tracking, read_json(self.run.tracking) | {"ended": status, "online": online})
        self.writers.clear()
        return lines

    @contextlib.contextmanager
    def _attempt(self, name: str) -> Iterator[None]:
        """Drop a tracker with which a `with` block fails."""
        try:
            yield
        except Exception as error:
            self.writers.pop(name, None)
            about = f"{type(error).__name__}: {redact(first_line(error))}"
            say(f"tracking={name} is off from here, training continues: {about}")


def logged(run: RunFolder) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the numbers that a run has logged for each step, including held-out data, in the trackers' form."""
    held_out = [
        {key if key == "step" else f"held_out/{key}": value for key, value in row.items()}
        for row in read_jsonl(run.evaluations)
        if "exported" not in row  # repeats the evaluation of an earlier step
    ]
    rows = sorted([*read_jsonl(run.metrics), *held_out], key=lambda row: row["step"])
    tokens: float = 0
    for step, group in groupby(rows, key=lambda row: row["step"]):
        numbers = {key: value for row in group for key, value in numbers_of(row).items()}
        tokens = numbers.setdefault("tokens", tokens)
        yield step, numbers


def answers(run: RunFolder) -> list[list[str]]:
    """Return the questions answered before and after training, with both answers, if these may be uploaded."""
    if not run.recipe.exists() or not read_recipe(run).wandb.examples:
        return []
    found: dict[tuple[str, str], list[str]] = {}
    for row in read_jsonl(run.answers):
        found.setdefault((row["prompt"], row["expected"]), []).append(row["answer"])
    return [[*asked, given[0], given[-1]] for asked, given in found.items() if len(given) > 1]


def other_nodes(run: RunFolder) -> dict[str, float]:
    """Return the newest readings of every other node, e.g. `nodes/worker-1/cpu_utilization`.

    W&B samples only the first rank's node by itself. Readings of a GPU also have its rank's number:
    `nodes/worker-1/rank-8/gpu_utilization`. Units as in system.jsonl.
    """
    found: dict[str, float] = {}
    for path in sorted(run.ranks.glob(run.system_of("*").name)):
        try:
            with path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
                lines = file.read().decode().splitlines(keepends=True)
        except OSError:  # a temporary error of a shared file system
            continue
        whole = [line for line in lines if line.startswith("{") and line.endswith("}\n")]
        sample = json.loads(whole[-1]) if whole else {}
        if sample.get("node", socket.gethostname()) == socket.gethostname():
            continue
        for name in sample.keys() - set(PLACE):
            rank = f"rank-{sample['rank']}/" if name.startswith(OF_RANK) else ""
            found[f"nodes/{sample['node']}/{rank}{name}"] = sample[name]
    return found
