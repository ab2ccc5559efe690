"""Guards against NaNs and loss spikes: a loss or gradient norm that is not finite, and a loss that jumps.

This needs no extra reads from the GPU. DeepSpeed checks on every rank whether an update is finite before it applies it,
and the loss is checked when it is fetched for the log. Only when a number is bad does each rank search for the
sequences that caused it.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from transformers import TrainerCallback, TrainerControl, TrainerState

from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.recipe import Recipe
from ...recipe.run_folder import RunFolder, read_jsonl
from .. import distributed, upstream
from ..console import say
from ..data import collate, updates
from ..parallel.pipeline import stage

WINDOW, DEVIATIONS = 2 * updates.SPIKE_LOGS, 6
"""Settings of the spike guard, as in OLMo-core's `SkipStepOptimizer`; it waits until half a window is full."""
SKIPS = 10
"""Updates skipped in a row after which `on_nan=skip` ends the run: by then the model itself is beyond repair."""
SHOWN = 20
"""Maximum number of sequence numbers in a message."""


class Rewind(Exception):
    """The run has to resume from its newest checkpoint; the launcher does that."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of this rank since the last log."""

    step: int
    numbers: Sequence[int]
    """Numbers of its sequences in the training data."""
    loss: torch.Tensor


class LossGuard(TrainerCallback):
    """Ends the run, skips an update or rewinds, as set by `on_nan` and `on_spike`; names step, rank and sequences."""

    engine: DeepSpeedEngine
    """Set by `watch`."""

    def __init__(self, recipe: Recipe, run: RunFolder) -> None:
        self.recipe = recipe
        self.run = run
        self.seen: list[MicroBatch] = []
        self.last_finite: torch.Tensor | None = None
        self.skipped = 0
        self.groups: list[str] = []
        self.said_no_gradient = False
        self.losses = deque((record["loss"] for record in read_jsonl(run.metrics)), maxlen=WINDOW)

    def watch(self, engine: DeepSpeedEngine) -> None:
        """Watch an engine that has not trained yet, and refuse weights with which every loss is NaN."""
        self.engine = engine
        self.model = engine.module
        if self.recipe.layout.pipeline > 1:
            self.model = stage(engine.module).model
        self._refuse_damaged(0)
        if self.recipe.on_nan == "skip" and not hasattr(engine.optimizer, "overflow"):
            raise UserError(
                "on_nan=skip: without ZeRO, in fp32, DeepSpeed applies an update before it is checked; use "
                "deepspeed=zero1.json, or on_nan=rewind."
            )
        upstream.before_refused_updates(engine, lambda: self.groups.extend(not_finite(engine)))

    def keep(self, step: int, numbers: Sequence[int], loss: torch.Tensor) -> torch.Tensor:
        """Keep a micro-batch until the next log, and return the loss to log for it.

        Under `on_nan=skip` a loss that is not finite is replaced by the previous finite loss, on the device.
        """
        self.seen.append(MicroBatch(step, numbers, loss))
        if self.recipe.on_nan != "skip":
            return loss
        before = torch.zeros_like(loss) if self.last_finite is None else self.last_finite
        self.last_finite = torch.where(torch.isfinite(loss), loss, before)
        return self.last_finite

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Act if DeepSpeed has refused an update; in fp16 this is how it finds its loss scale."""
        refused = self.recipe.precision != "fp16" and getattr(self.engine.optimizer, "overflow", False)
        self.skipped = self.skipped + 1 if refused else 0
        if refused:
            self._bad_number(state.global_step, "gradient norm", skippable=self.skipped <= SKIPS)

    def on_log(self, args: object, state: TrainerState, control: TrainerControl, logs: Json, **_: object) -> None:
        """Check the numbers that were fetched for the log; they are the same on every rank."""
        if not logs or "loss" not in logs:
            return
        norm = logs.get("grad_norm")
        if norm is not None and not math.isfinite(norm):
            logs["grad_norm"] = None  # JSON cannot express it
            if self.recipe.precision != "fp16" and not self.skipped:
                self._bad_number(state.global_step, "gradient norm", skippable=False)
        if not math.isfinite(logs["loss"]):
            self._bad_number(state.global_step, "loss", skippable=False)
        if norm == 0 and not self.said_no_gradient:
            self.said_no_gradient = True
            why = "the model is already certain of every answer in it, or the loss depends on no trained weight"
            if self.recipe.method.rollouts:
                why = (
                    "all answers of a group got the same reward, or none, in every group. If this continues, check "
                    "that the reward function does not always return the same number, raise grpo.temperature or "
                    "grpo.group_size, or use other prompts"
                )
            say(
                f"warning: step {state.global_step}: the gradient norm is 0, so this update teaches the model nothing: "
                f"{why}."
            )
        enough = len(self.losses) >= updates.SPIKE_LOGS
        if enough and logs["loss"] > statistics.fmean(self.losses) + DEVIATIONS * statistics.stdev(self.losses):
            numbers = sorted(set(distributed.items_of_all([number for seen in self.seen for number in seen.numbers])))
            where = (
                f"step {state.global_step}: the loss jumped to {logs['loss']:.4f}, from "
                f"{statistics.fmean(self.losses):.4f} on average; sequences since the last log: {listed(numbers)}"
            )
            if self.recipe.on_spike != "warn":
                self._act("on_spike", where, numbers)
            say(where)
        self.losses.append(logs["loss"])
        self.seen.clear()

    def _bad_number(self, step: int, what: str, skippable: bool) -> None:
        """Act on a number that is not finite; a collective."""
        mine = [seen for seen in self.seen if not math.isfinite(seen.loss.item())]
        steps = distributed.items_of_all([seen.step for seen in mine])
        if steps:
            what, step = "loss", min(steps)
        if not steps or self.recipe.layout.pipeline > 1:  # no single loss to blame, or one for all micro-batches
            mine = self.seen
        found = distributed.items_of_all([(dist.get_rank(), list(seen.numbers)) for seen in mine if seen.step == step])
        groups = sorted(set(distributed.items_of_all(self.groups)))
        self.groups.clear()
        numbers = sorted({number for _, listing in found for number in listing})
        if self.skipped:  # an update that was applied has spread NaN to all weights
            self._refuse_damaged(step)
        where = (
            f"step {step}: the {what} is not finite on rank {listed([*{rank for rank, _ in found}])}, "
            f"sequences {listed(numbers)} of the training data"
            + (f"; gradients of {', '.join(groups)}" if groups else "")
        )
        if self.recipe.on_nan == "skip" and skippable:
            say(f"{where}: this update is skipped")
            self.seen.clear()
            return
        self._act("on_nan", where, numbers)

    def _refuse_damaged(self, step: int) -> None:
        """Refuse weights that are not finite before an update, whichever sequences it has; a collective.

        Of an embedding some rows may be: only sequences with these tokens, which are named then, have a loss of NaN.
        """
        if not (broken := damaged(self.model)):
            return
        more = f" and {len(broken) - 1} more weights" if len(broken) > 1 else ""
        named = f"{broken[0]}{more} of model.path={self.recipe.model.path}"
        if damaged(self.model, looked_up=False):
            when = f"before step {step}, from an update or from the start" if step else "before the first step"
            raise UserError(
                f"{named}: holds NaN or infinity {when}, so every loss would be NaN;\n"
                "copy or download the model again, or resume from an earlier checkpoint."
            )
        if not step:
            say(f"warning: {named}: holds NaN or infinity; the loss of sequences with these tokens is NaN")

    def _act(self, key: str, where: str, numbers: Sequence[int]) -> NoReturn:
        if getattr(self.recipe, key) == "rewind":
            if distributed.is_first():
                collate.leave_out(self.run, numbers)
            dist.barrier()
            raise Rewind(f"{where}: resuming from the newest checkpoint without them")
        own = f"correct loss={self.recipe.loss}, " if self.recipe.loss else ""
        raise UserError(f"{where}.\nInspect these sequences, {own}lower learning_rate, or add --resume {key}=rewind.")


def damaged(model: torch.nn.Module, looked_up: bool = True) -> list[str]:
    """Return the names of the weights that are not finite on some rank; a collective.

    Without `looked_up`, embeddings that are not also the head are left out.
    """
    held = {}
    for place, module in model.named_modules(remove_duplicate=False):
        if looked_up or "Embedding" not in type(module).__name__:
            for name, part in module.named_parameters(place, recurse=False):
                shard = getattr(part, "ds_tensor", part)
                # The bytes of 4-bit weights are stored as numbers that mean nothing.
                if "4bit" not in type(part).__name__ and getattr(shard, "final_location", None) != "nvme":
                    held[name] = shard
    held = {name: shard for name, shard in held.items() if shard.numel() and shard.dtype.itemsize > 1}
    # `isfinite` of a whole weight would take several times its memory.
    largest = [torch.linalg.vector_norm(shard.detach(), math.inf).float().cpu() for shard in held.values()]
    finite = torch.stack(largest).isfinite().tolist() if held else []
    return sorted(set(distributed.items_of_all([name for name, one in zip(held, finite, strict=True) if not one])))


def listed(numbers: Sequence[int]) -> str:
    """Return numbers separated by commas; only the first `SHOWN` of a longer list."""
    ordered = sorted(numbers)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return (", ".join(map(str, ordered[:SHOWN])) or "unknown") + more


def not_finite(engine: DeepSpeedEngine) -> list[str]:
    """Return those groups of this rank's gradients, such as `group 0 of 2 (model.embed_tokens.weight and 14 more)`.

    Must be called before DeepSpeed discards the gradients (`upstream.before_refused_updates`).
    """
    optimizer, bad = engine.optimizer, set()
    sub_groups = getattr(optimizer, "sub_group_to_group_id", {})  # ZeRO-3 cuts groups into smaller ones
    flat = getattr(optimizer, "single_partition_of_fp32_groups", None)
    flat = getattr(optimizer, "fp32_partitioned_groups_flat", []) if flat is None else flat
    for index in range(len(flat)):
        held = optimizer.averaged_gradients.get(index) or [flat[index].grad]  # the latter under offload
        if any(gradient is not None and not torch.isfinite(gradient).all() for gradient in held):
            bad.add(sub_groups.get(index, index))
    found = []
    for index in sorted(bad):
        if hasattr(optimizer, "bit16_groups"):
            members = set(optimizer.bit16_groups[index])
        else:
            groups = enumerate(optimizer.fp16_groups)
            members = {one for sub, group in groups if sub_groups[sub] == index for one in group}
        names = [name for name, parameter in engine.module.named_parameters() if parameter in members]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        which = f"group {index} of {len(optimizer.optimizer.param_groups)}"
        found.append(f"{which} ({names[0]}{more})" if names else which)
    return found
