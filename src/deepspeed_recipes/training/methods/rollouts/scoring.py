"""Calls a run's reward functions with a time limit: one that hangs or crashes ends its example, not the run.

They run in a separate process next to the rank (`worker.py`), which is killed and restarted when an answer takes too
long. This is not a sandbox: the functions are the user's own code, and may do whatever the user may.
"""

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....machine import children
from ....recipe.errors import UserError
from ....recipe.files import Json
from ....recipe.methods import Grpo
from ....recipe.methods.grpo import reward_functions, weights_of
from ....recipe.recipe import Recipe
from ...console import say

START_SECONDS = 120.0
"""Time limit for the functions' file to import its modules."""
GRACE = 1.0
"""After an answer's time the worker ends itself; the rank waits this much longer."""
TRIED = 4
"""Examples on which the functions are tried before anything is loaded."""


class Scorer:
    """Scores one answer after another."""

    def __init__(self, recipe: Recipe) -> None:
        self.functions = reward_functions(recipe.reward)
        grpo = Grpo.of(recipe)
        self.weights = weights_of(recipe.reward, grpo.reward_weights)
        self.seconds = grpo.reward_seconds
        self.key = f"reward={recipe.reward}"
        self.process: subprocess.Popen[bytes] | None = None
        self.held = contextlib.ExitStack()
        self.said: set[str] = set()

    def total(self, scores: Sequence[float]) -> float:
        """Return the weighted sum of the functions' numbers for an answer."""
        return sum(weight * score for weight, score in zip(self.weights, scores, strict=True))

    def scores(self, answer: str, example: Json) -> list[float]:
        """Return each function's number for an answer; all are NaN if one of them returns none.

        The first failure of each kind is printed.
        """
        found = self.ask(answer, example)
        if isinstance(found, list):
            return found
        kind = found.partition(":")[0]
        if kind not in self.said:
            self.said.add(kind)
            say(f"warning: {self.key}: {found}. Such answers have no reward and are not learned from.")
        return [math.nan] * len(self.functions)

    def ask(self, answer: str, example: Json) -> list[float] | str:
        """Return each function's number, or an error message."""
        slow = f"took more than grpo.reward_seconds={self.seconds:g} for one answer"
        self._start()
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"answer": answer, "example": example}).encode() + b"\n")
            self.process.stdin.flush()
            reply = self._reply(self.seconds + GRACE)
        except (BrokenPipeError, EOFError):
            status = self.process.wait()
            self.close()
            ended = f"ended its process with {signal.Signals(-status).name if status < 0 else f'status {status}'}"
            return slow if status == -signal.SIGALRM else ended
        except TimeoutError:
            self.close()
            return slow
        wrong = [
            f"{function.name} {result}" if result.startswith("returned") else f"{function.name}: {result}"
            for function, result in zip(self.functions, reply, strict=True)
            if isinstance(result, str)
        ]
        return wrong[0] if wrong else reply

    def _start(self) -> None:
        if self.process is not None:
            return
        words = [sys.executable, str(Path(__file__).with_name("worker.py")), str(self.seconds)]
        started = children.running(  # kills also the processes that a function has started
            [*words, *map(str, self.functions)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # the GPU's memory is for the model
        )
        self.process = self.held.enter_context(started)
        try:
            refused = self._reply(START_SECONDS)
        except (EOFError, TimeoutError) as error:
            self.close()
            why = "its process ended" if isinstance(error, EOFError) else f"took more than {START_SECONDS:g} s"
            raise UserError(f"{self.key}: cannot be loaded: {why}.") from None
        if refused is not None:
            self.close()
            raise UserError(f"{self.key}: cannot be loaded: {refused}.")

    def _reply(self, seconds: float) -> Any:
        """Return the worker's next line."""
        assert self.process is not None and self.process.stdout is not None
        end, read = time.monotonic() + seconds, b""
        while not read.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(self.process.stdout.fileno(), 2**16)
            if not part:
                raise EOFError
            read += part
        return json.loads(read)

    def close(self) -> None:
        """End the worker and the processes that it has started."""
        if self.process is not None:
            self.held.close()
            for pipe in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            self.process = None


def example_of(row: Json) -> Json:
    """Return the example for a reward function: its fields, its prompt (turns, and text) and the expected answer."""
    turns, given = row["messages"], row["given"]
    expected = turns[given]["content"] if len(turns) > given else row["fields"].get("expected")
    return {**row["fields"], "prompt": turns[:given], "prompt_text": row.get("text"), "expected": expected}


def check(recipe: Recipe, rows: Sequence[Json]) -> None:
    """Try the reward functions on the expected answers of the first examples; some have to get a number."""
    scorer = Scorer(recipe)
    try:
        failures = []
        for row in rows[:TRIED]:
            example = example_of(row)
            found = scorer.ask(example["expected"] or "", example)
            if isinstance(found, list):
                return
            failures.append(found)
    finally:
        scorer.close()
    raise UserError(
        f"{scorer.key}: no number for any of the first {len(failures)} examples: {failures[0]}.\n"
        "A reward function is called as function(answer, example) and returns one number, or with lists, as TRL's."
    )
