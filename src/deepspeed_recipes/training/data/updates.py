"""Computes the number of optimizer updates before training, and the settings that give enough of them.

Standard library only.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from ...recipe.errors import counted
from ...recipe.files import Json
from ...recipe.layout import data_parallel_size
from ...recipe.recipe import PerEpoch, Recipe, Schedule, changed

FEW = (0.05, 500)
"""Upper limits of `data.validation_share=auto`: a share of the examples, and a number."""
ENOUGH = 12
"""Fewest updates without a warning: with fewer a run learns little, since Adam spends its first on the warm-up."""
SPIKE_LOGS = 64
"""Logged losses with which `on_spike` compares the next one, at least."""

GOOD = 50
"""Updates that `suited` aims at for small data."""
SMALLEST = 8
"""Examples of a batch below which gradients are so noisy that more epochs are better than more batches."""
POINTS, MEASURED = 20, 10
"""Logged steps and evaluations of a run by `suited`, at least."""


@dataclass(frozen=True)
class Size:
    """Size of a dataset."""

    examples: int
    documents: int
    """Number of training documents: without packing, one sequence each."""
    sequences: int
    tokens: int | None
    """Tokens in all sequences, or None where the method's own trainer tokenizes."""
    estimated: bool = False
    """The numbers are extrapolated from the first examples of large files."""

    def of(self, recipe: Recipe) -> int:
        """Return the number of sequences in a recipe that packs documents or does not."""
        return self.sequences if recipe.packs else self.documents


def per_epoch(sequences: int, global_batch_size: int) -> int:
    """Return the updates of an epoch; the last may have fewer sequences."""
    return -(-sequences // global_batch_size)


def in_all(recipe: Recipe, sequences: int) -> int:
    """Return the updates of a run, as the Trainer counts them."""
    return recipe.max_steps or math.ceil(recipe.epochs * per_epoch(sequences, recipe.global_batch_size))


def in_steps(recipe: Recipe, size: Size | None) -> Recipe:
    """Return the recipe with `save_steps` and `eval_steps` as numbers of steps, where they are parts of an epoch."""

    def number(value: int | PerEpoch | None) -> int | None:
        if not isinstance(value, str):
            return value
        assert size is not None, "a stream, which the recipe refuses"
        parts = int(value.partition("/")[2] or 1)
        return max(1, per_epoch(size.sequences, recipe.global_batch_size) // parts)

    return replace(recipe, save_steps=number(recipe.save_steps) or 0, eval_steps=number(recipe.eval_steps))


def starts_at_zero(schedule: Schedule) -> bool:
    """Return whether transformers' warm-up begins at a rate of 0, a step that `rate_schedule` leaves out."""
    return schedule.warmup > 0 and schedule.kind not in ("constant", "cosine_warmup_with_min_lr")


def phase(schedule: Schedule, share: float, steps: int) -> int:
    """Return the number of steps of the warm-up or of the fall; `share` is a share of all steps, or the number."""
    return int(share) if share >= 1 else math.ceil((steps + starts_at_zero(schedule)) * share)


def warmup(recipe: Recipe, steps: int) -> int:
    """Return the first update at the full learning rate, or 0 without a warm-up."""
    schedule = recipe.schedule
    return 0 if schedule.kind == "constant" else phase(schedule, schedule.warmup, steps)


def table(recipe: Recipe, size: Size) -> list[str]:
    """Return the sizes of a run as a table of two lines."""
    steps = in_all(recipe, size.sequences)
    columns = {
        "examples": size.examples,
        "sequences": size.sequences,
        "tokens": "-" if size.tokens is None else size.tokens,
        "steps per epoch": per_epoch(size.sequences, recipe.global_batch_size),
        "steps in all": steps,
        "warm-up steps": warmup(recipe, steps),
    }
    cells = [(name, value if isinstance(value, str) else f"{value:,}") for name, value in columns.items()]
    rows = zip(*((name.rjust(len(value)), value.rjust(len(name))) for name, value in cells), strict=True)
    return ["  ".join(row) for row in rows]


def left_out(recipe: Recipe, size: Size) -> list[str]:
    """Return lines about what a run does not reach: the rest of the data, the learning rate after the warm-up."""
    epoch, steps = per_epoch(size.sequences, recipe.global_batch_size), in_all(recipe, size.sequences)
    lines = []
    if steps < epoch:
        key = f"epochs={recipe.epochs:g}" if recipe.max_steps is None else f"max_steps={recipe.max_steps}"
        all_of_it = "epochs=1" if recipe.max_steps is None else f"max_steps={epoch}"
        lines.append(
            f"{key}: {steps} of an epoch's {epoch} updates, so about {1 - steps / epoch:.0%} of the training data is "
            f"not used; {all_of_it} uses all of it"
        )
    return [*lines, *unreached(recipe, steps)]


def unreached(recipe: Recipe, steps: int) -> list[str]:
    """Return warnings about what lies behind a run's last step: the full rate, evaluations, an early stop."""
    lines, patience, every = [too_long(recipe, steps)], recipe.early_stopping, recipe.steps_between_evaluations
    if patience and isinstance(every, int) and patience * every >= steps:
        lines.append(
            f"warning: early_stopping={patience}: {steps} steps with an evaluation every {every} end before it can; "
            f"set eval_steps={max(1, steps // (4 * patience))}"
        )
    elif isinstance(every, int) and every > steps and (recipe.data.validation or recipe.data.validation_share):
        key = "eval_steps" if recipe.eval_steps else "save_steps"
        lines.append(f"{key}={every}: with {steps} steps in all, the run is evaluated only before and after training")
    if recipe.on_spike != "warn" and steps <= SPIKE_LOGS * recipe.logging_steps:
        lines.append(
            f"warning: on_spike={recipe.on_spike}: needs {SPIKE_LOGS} logged losses to compare with, and {steps} steps "
            f"with logging_steps={recipe.logging_steps} give fewer, so it never acts"
        )
    return [line for line in lines if line]


def too_long(recipe: Recipe, steps: int) -> str | None:
    """Return a warning about a warm-up, or a fall after it, that is longer than the run's `steps`, or None."""
    schedule, rising = recipe.schedule, warmup(recipe, steps)
    if rising > steps:
        return (
            f"warning: schedule.warmup={schedule.warmup:g}: the learning rate rises for {rising} updates and "
            f"the run has {steps}, so it never reaches {recipe.learning_rate:g}; use schedule.warmup=0.1."
        )
    fall, left = phase(schedule, schedule.decay, steps), steps + starts_at_zero(schedule) - rising
    if schedule.kind == "warmup_stable_decay" and fall > left:
        return (
            f"warning: schedule.decay={schedule.decay:g}: a fall of {fall} updates is longer than the run, which has "
            f"{steps}, so the learning rate falls as soon as the warm-up ends; use schedule.decay=0.1."
        )
    return None


def advice(recipe: Recipe, size: Size, world_size: int) -> str | None:
    """Return a warning about the number of updates and how to fix it, or None.

    A run whose `max_steps` sets few updates gets no warning.
    """
    epoch, steps = per_epoch(size.sequences, recipe.global_batch_size), in_all(recipe, size.sequences)
    if size.sequences >= recipe.global_batch_size and _enough(recipe, size.sequences):
        return None
    what = f"{counted(size.examples, 'example')} in {counted(size.sequences, 'sequence')}: "
    what += f"{counted(epoch, 'update')} per epoch, {steps} in all"
    if size.sequences < recipe.global_batch_size:
        what += f"; a global batch is {recipe.global_batch_size} sequences"
    least = 1  # sequences with which the method trains: some drop those that fill no whole step or pass
    if recipe.method.rollouts or recipe.method.embeds:
        least = recipe.global_batch_size
    elif recipe.method.examples == "judged answers":
        least = recipe.micro_batch_size * data_parallel_size(recipe.layout, world_size)
    if recipe.max_steps is not None and size.sequences >= least:
        return f"warning: {what}."
    ways: list[dict[str, int | bool]] = []
    if batch := _batch(recipe, size.sequences, world_size):
        ways.append(batch)
    if recipe.packing and size.documents > size.sequences and (unpacked := changed(recipe, packing=False)):
        if size.documents >= recipe.global_batch_size and _enough(unpacked, size.documents):
            ways.append({"packing": False})
        elif batch := _batch(unpacked, size.documents, world_size):
            ways.append({"packing": False, **batch})
    if recipe.max_steps is None:
        smaller = _batch(recipe, size.sequences, world_size, lambda *_: True) if size.sequences < least else {}
        if smaller or size.sequences >= least:
            batch_size = smaller.get("global_batch_size", recipe.global_batch_size)
            ways.append({**smaller, "epochs": math.ceil(ENOUGH / per_epoch(size.sequences, batch_size))})
    use = ", or ".join(" ".join(f"{key}={str(value).lower()}" for key, value in way.items()) for way in ways)
    return f"warning: {what}. This teaches a model little; use {use}." if use else f"warning: {what}."


def suited(recipe: Recipe, size: Size, world_size: int, given: Collection[str]) -> Recipe:
    """Return the recipe with a batch, epochs and logging that give its data enough updates and a curve.

    Preferred is, in this order: packing, a large batch, few epochs. Without packing a batch has at least `SMALLEST`
    examples if three epochs of them suffice. The keys that the user has `given` stay; `size` is as far as it is known
    before tokenizing.
    """
    best = recipe
    if "max_steps" not in given and recipe.max_steps is None:
        found = [(in_all(one, size.of(one)), one) for one in _suited(recipe, size, world_size, given)]
        enough = [one for least in (GOOD, GOOD // 2) for steps, one in found if steps >= least]
        best = enough[0] if enough else max(found, key=lambda one: one[0], default=(0, recipe))[1]
    steps = in_all(best, size.of(best))
    changes: Json = {}
    if "logging_steps" not in given:
        changes["logging_steps"] = max(1, min(best.logging_steps, steps // POINTS))
    measured = best.data.validation or best.data.validation_share
    if measured and "eval_steps" not in given and steps >= MEASURED:
        changes["eval_steps"] = steps // MEASURED
    return replace(best, **changes)


def _suited(recipe: Recipe, size: Size, world_size: int, given: Collection[str]) -> Iterator[Recipe]:
    """Yield recipes with other batches and epochs, the best first."""
    ranks = data_parallel_size(recipe.layout, world_size)
    ways = [recipe]
    if recipe.packs and "packing" not in given and size.documents > size.sequences:
        ways += filter(None, [changed(recipe, packing=False)])
    few, more = ([recipe.epochs],) * 2 if "epochs" in given else (sorted({recipe.epochs, 2.0, 3.0}), range(4, 11))
    for one, epochs, alone in [(one, few, True) for one in ways] + [(one, more, False) for one in reversed(ways)]:
        for micro in sorted({one.micro_batch_size, one.method.least_micro_batch}, reverse=True):
            if micro != one.micro_batch_size and "micro_batch_size" in given:
                continue
            unit = micro * ranks
            least = SMALLEST if alone and not one.packs else 1
            batch = one.global_batch_size if "global_batch_size" in given else one.global_batch_size // unit * unit
            while batch >= max(unit, least):
                fits = {"global_batch_size": batch, "micro_batch_size": micro}
                yield from filter(None, (changed(one, **fits, epochs=float(e)) for e in epochs if e >= one.epochs))
                batch = 0 if "global_batch_size" in given else batch // 2 // unit * unit


def _enough(recipe: Recipe, sequences: int) -> bool:
    return recipe.max_steps is not None or in_all(recipe, sequences) >= ENOUGH


def _batch(
    recipe: Recipe, sequences: int, world_size: int, suits: Callable[[Recipe, int], bool] = _enough
) -> dict[str, int | bool]:
    """Return the largest global batch that gives enough updates, and a smaller micro-batch where it needs one.

    `suits` is another condition on the recipe and the sequences.
    """
    ranks = data_parallel_size(recipe.layout, world_size)
    for micro in sorted({recipe.micro_batch_size, recipe.method.least_micro_batch}, reverse=True):
        unit = micro * ranks
        for batch in range(min(recipe.global_batch_size, sequences) // unit * unit, 0, -unit):
            smaller_batch = changed(recipe, global_batch_size=batch, micro_batch_size=micro)
            if smaller_batch and suits(smaller_batch, sequences):
                smaller = {"micro_batch_size": micro} if micro != recipe.micro_batch_size else {}
                return {"global_batch_size": batch, **smaller}
    return {}
