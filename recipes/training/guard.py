"""Numbers that no model recovers from: a loss or a gradient norm that is not finite, and a loss that jumps.

Nothing is fetched from the GPU for this. Whether an update was finite DeepSpeed has found out before it applied it, on
every rank; the loss is looked at where it is fetched for the log. Only then, when a number is bad, is each rank asked
which of its rows it came from.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from recipes.spec.errors import UserError
from recipes.spec.recipe import Recipe
from recipes.spec.run_folder import RunFolder, read_jsonl
from recipes.training import gradient_groups, row_numbers, world
from recipes.training.console import say

WINDOW, DEVIATIONS = 128, 6
"""Of the spike guard, as OLMo-core's `SkipStepOptimizer` has them; it judges nothing before half a window is full."""
SKIPS = 10
"""Updates left out in a row, after which `on_nan=skip` ends the run: the model itself is beyond repair by then."""
SHOWN = 20
"""Row numbers that a message lists."""


class Rewind(Exception):
    """The run has to go on from its newest checkpoint; the launcher does that."""


@dataclass(frozen=True)
class Seen:
    """A micro-batch of this rank since the last log."""

    step: int
    rows: Sequence[int]
    loss: torch.Tensor


class Guard(TrainerCallback):
    """Ends the run, leaves an update out or goes back, as `on_nan` and `on_spike` say; names step, rank and rows."""

    def __init__(self, recipe: Recipe, run: RunFolder) -> None:
        self.recipe = recipe
        self.run = run
        self.trainer: Any = None
        self.engine: Any = None
        self.seen: list[Seen] = []
        self.last_finite: torch.Tensor | None = None
        self.skipped = 0
        self.groups: list[str] = []
        self.losses = deque((row["loss"] for row in read_jsonl(run.metrics)), maxlen=WINDOW)

    def watch(self, trainer: Trainer) -> None:
        """Keep what `trainer` trains on until the next log; call when everything else has changed `training_step`."""
        self.trainer = trainer
        step = trainer.training_step
        row_numbers.add(trainer, self.run)

        def watched(model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
            rows = inputs.pop(row_numbers.KEY)
            loss = step(model, inputs, num_items_in_batch)
            self.seen.append(Seen(trainer.state.global_step + 1, rows, loss))
            return self._finite(loss) if self.recipe.on_nan == "skip" else loss

        trainer.training_step = watched

    def _finite(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to log: of a micro-batch that was left out, the one before it. Computed on the device."""
        before = torch.zeros_like(loss) if self.last_finite is None else self.last_finite
        self.last_finite = torch.where(torch.isfinite(loss), loss, before)
        return self.last_finite

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse what this engine cannot do."""
        self.engine = self.trainer.deepspeed
        if self.recipe.on_nan == "skip" and not hasattr(self.engine.optimizer, "overflow"):
            raise UserError(
                "on_nan=skip: without ZeRO, in fp32, DeepSpeed applies an update before anybody has looked at it; take "
                "deepspeed=zero1.json, or on_nan=rewind."
            )
        gradient_groups.remember(self.engine, self.groups)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Act where DeepSpeed has refused an update, which in fp16 is how it finds its loss scale."""
        refused = self.recipe.precision != "fp16" and getattr(self.engine.optimizer, "overflow", False)
        self.skipped = self.skipped + 1 if refused else 0
        if refused:
            self._bad_number(state.global_step, "gradient norm", skippable=self.skipped <= SKIPS)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Look at the numbers that were fetched for the log, on every rank the same."""
        if not logs or "loss" not in logs:
            return
        norm = logs.get("grad_norm")
        if norm is not None and not math.isfinite(norm):
            logs["grad_norm"] = None  # JSON has no word for it
            if self.recipe.precision != "fp16" and not self.skipped:
                self._bad_number(state.global_step, "gradient norm", skippable=False)
        if not math.isfinite(logs["loss"]):
            self._bad_number(state.global_step, "loss", skippable=False)
        if is_spike(logs["loss"], self.losses):
            self._spike(state.global_step, logs["loss"])
        self.losses.append(logs["loss"])
        self.seen.clear()

    def _bad_number(self, step: int, what: str, skippable: bool) -> None:
        """Act on a number that is not finite; a collective."""
        mine = [seen for seen in self.seen if not math.isfinite(seen.loss.item())]
        steps = gather([seen.step for seen in mine])
        if steps:
            what, step = "loss", min(steps)
        if not steps or self.recipe.layout.pipeline > 1:  # nobody's loss is to blame, or one for all micro-batches
            mine = self.seen
        found = gather([(dist.get_rank(), list(seen.rows)) for seen in mine if seen.step == step])
        groups = sorted(set(gather(self.groups)))
        self.groups.clear()
        rows = sorted({row for _, numbers in found for row in numbers})
        where = (
            f"step {step}: the {what} is not finite on rank {listed({rank for rank, _ in found})}, rows {listed(rows)} "
            f"of the training data" + (f"; gradients of {', '.join(groups)}" if groups else "")
        )
        if self.recipe.on_nan == "skip" and skippable:
            say(f"{where}: this update is left out")
            self.seen.clear()
            return
        self._act("on_nan", where, rows)

    def _spike(self, step: int, loss: float) -> None:
        """Act on a loss that has jumped; a collective."""
        rows = sorted(set(gather([row for seen in self.seen for row in seen.rows])))
        where = (
            f"step {step}: the loss jumped to {loss:.4f}, from {statistics.fmean(self.losses):.4f} on average; rows "
            f"since the last log: {listed(rows)}"
        )
        if self.recipe.on_spike == "warn":
            say(where)
        else:
            self._act("on_spike", where, rows)

    def _act(self, key: str, where: str, rows: Sequence[int]) -> None:
        if getattr(self.recipe, key) == "rewind":
            if world.is_first():
                row_numbers.leave_out(self.run, rows)
            dist.barrier()
            raise Rewind(f"{where}: going back to the newest checkpoint, on without them")
        raise UserError(f"{where}.\nLook at these rows, lower learning_rate, or go on with --resume {key}=rewind.")


def is_spike(loss: float, before: Sequence[float]) -> bool:
    """Return whether a loss stands out from those before it."""
    if len(before) < WINDOW // 2:
        return False
    return loss > statistics.fmean(before) + DEVIATIONS * statistics.stdev(before)


def gather(mine: Sequence[Any]) -> list[Any]:
    """Return the items of all ranks, in the order of the ranks; a collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(mine))
    return [item for items in everyone for item in items]


def listed(numbers: Sequence[int]) -> str:
    """Return numbers with commas, the first of many."""
    ordered = sorted(numbers)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return (", ".join(map(str, ordered[:SHOWN])) or "unknown") + more
