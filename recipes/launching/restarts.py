"""A run that goes on by itself: from its newest whole checkpoint, with the ranks that are left.

DeepSpeed's elasticity was removed in 0.19. This is smaller: the run ends, and starts again as `--resume` does, with a
universal checkpoint in between where the number of ranks is another one. The global batch stays what it was.
"""

import sys
import time
from collections.abc import Callable

from recipes.launching.supervise import Ended
from recipes.spec import limits, run_folder
from recipes.spec.errors import UserError
from recipes.spec.recipe import Recipe
from recipes.spec.run_folder import COMPLETE, REWIND, RunFolder, append_jsonl
from recipes.training import preflight, universal
from recipes.zero_config.sharding import sharding

REWINDS = 10
"""How often a run may go back on its own wish; `--max-restarts` counts those that something else has ended."""


def check(recipe: Recipe, most: int) -> None:
    """Refuse restarts that would have nothing to start from.

    Raises:
        UserError: names the key and the fix.
    """
    if most < 0:
        raise UserError(f"--max-restarts {most}: at least 0.")
    if most and not recipe.save_steps:
        raise UserError(f"--max-restarts {most}: nothing to restart from with save_steps=0; add save_steps=100.")


def keep_going(
    recipe: Recipe, run: RunFolder, ranks: int, most: int, start: Callable[[int], Ended], available: Callable[[], int]
) -> int:
    """Start the run, and again after each bad end, `most` times; return the last exit status.

    Args:
        recipe: as it runs.
        run: its folder, made ready for the first start.
        ranks: to start with.
        most: how many restarts there may be.
        start: runs that many ranks to their end.
        available: says how many ranks could be started now.

    Raises:
        UserError: there is no checkpoint to restart from, or no number of ranks that could.
    """
    asked, restarts, rewinds = ranks, 0, 0
    while True:
        ended = start(ranks)
        if ended.cause:
            print(f"launch.py: {ended.cause}", file=sys.stderr, flush=True)
        if ended.asked or ended.status in (0, 2):
            return ended.status
        if ended.status == REWIND:
            rewinds += 1
            if rewinds > REWINDS:
                raise UserError(f"gone back {REWINDS} times: the rows are not the cause; lower learning_rate.")
        elif restarts == most:
            return ended.status
        else:
            restarts += 1
        checkpoint = run_folder.newest_checkpoint(run)
        if checkpoint is None:
            raise UserError(
                f"nothing to restart from: {run.checkpoints} holds no whole checkpoint yet; lower save_steps "
                f"(now {recipe.save_steps})."
            )
        ranks = possible(recipe, run, min(asked, available()))  # more than before, when a host is back
        make_ready(recipe, run, ranks)
        count = f"restart {restarts} of {most}" if ended.status != REWIND else "going back"
        print(f"{count}: from {checkpoint} with {ranks} ranks", flush=True)
        step = run_folder.step_of(checkpoint)
        append_jsonl(run.restarts, {"time": time.time(), "cause": ended.cause, "from_step": step, "ranks": ranks})


def possible(recipe: Recipe, run: RunFolder, most: int) -> int:
    """Return the largest number of ranks, at most `most`, that the run can go on with.

    Raises:
        UserError: none can; with the reason for the largest.
    """
    kind, reason = sharding(recipe.deepspeed), None
    for ranks in range(most, 0, -1):
        try:
            limits.check(preflight.with_dimensions(recipe), ranks, kind)
            universal.check(recipe, run, kind, ranks)
        except UserError as error:
            reason = reason or error
        else:
            return ranks
    raise reason or UserError("nothing to restart on: no GPU is left.")


def make_ready(recipe: Recipe, run: RunFolder, ranks: int) -> None:
    """Give the newest checkpoint a form that these ranks can load, and forget the steps after it.

    Raises:
        UserError: no room for the other form, or DeepSpeed cannot convert it.
    """
    checkpoint = run_folder.newest_checkpoint(run)
    if universal.is_needed(recipe.layout, run, ranks):
        written_by = run_folder.read_json(checkpoint / COMPLETE)["world_size"]
        print(f"{checkpoint} was written by {written_by} ranks: converting it for {ranks}", flush=True)
        universal.convert(checkpoint)
    run_folder.forget_after(run, checkpoint)
