"""The held-out examples of a run, the same as in its own evaluation, or those of another file."""

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import torch.distributed as dist
from datasets import Dataset

from ...machine import system
from ...recipe import overrides, pages
from ...recipe.errors import UserError
from ...recipe.files import JsonView
from ...recipe.methods.texts import Sft
from ...recipe.own_code import is_own
from ...recipe.recipe import Recipe, names
from ...training.data import load, sources
from ...training.model_folder.record import own_path

METRICS = ("exact_match", "loss", "preference_accuracy", "accuracy", "recall_at_1")
"""The metrics: the first two for models that write text, then one each for models that prefer or score answers, for
classifiers and for embedding models."""

PREFERENCES = ("pairs", "judged answers")
"""Examples of the methods whose models answer like those of SFT."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out examples and their metric."""

    metric: str
    source: str
    """The examples' source, for display."""
    examples: Dataset
    recipe: Recipe
    """The recipe that sets the format, the lengths, and the generation of answers."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Make this process the only rank, since training's metrics are reduced over all ranks."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def read(
    recipe: Recipe | None, file: Path | None, metric: str | None, limit: int | None, settings: Sequence[str] = ()
) -> HeldOut:
    """Return the held-out examples, the first `limit` of them or all.

    A `recipe` is a run's, and `file` and `metric` are used instead of what it names; `settings` say how `file` is read.
    """
    if recipe is None:
        if file is None:
            raise UserError("no run is named, so its held-out examples are unknown; add --data FILE.")
        recipe = pages.find("tiny", "full")
    if file is not None:
        validation = str(_existing(str(file)))
        data = replace(recipe.data, path=validation, validation=validation, streaming=False, transform=None)
        recipe = overrides.apply(replace(recipe, data=data), settings)
    elif recipe.data.transform:
        raise UserError(
            f"data.transform={recipe.data.transform}: code that only a run folder names is not run; save the held-out "
            "examples as it returns them, and name them with --data FILE."
        )
    if metric in ("exact_match", "loss") and recipe.method.examples in PREFERENCES:
        recipe = replace(recipe, method=Sft())  # a model that was trained on preferences answers as any other
    found = metric or ("exact_match" if is_own(names(recipe.data.metric)[0]) else recipe.metric)
    if found not in METRICS:
        raise UserError(f"metric {found}: not supported; choose --metric {' or '.join(METRICS)}.")
    recipe = _located(recipe)
    data = recipe.data
    datasets.disable_progress_bars()
    system.check_cache()
    with contextlib.redirect_stdout(io.StringIO()):  # hides the lines that a run prints about its data
        try:
            read_from: list[sources.Source] = []
            if data.validation:
                read_from = sources.read(data.validation, recipe)
                examples = sources.mix(read_from, None, recipe.seed)
            else:
                examples = load.read_examples(recipe)[1]
        except UserError as error:
            if file is None or recipe.method.examples not in PREFERENCES:
                raise
            raise UserError(f"{error}\nFor conversations add --metric exact_match or loss.") from None
    for source in read_from:
        if source.skipped:
            skipped = f"{len(source.skipped)} examples are left out, by data.bad=skip:\n{source.skipped[0]}"
            print(f"{source.name}: {skipped}", file=sys.stderr)
        if file is not None and (unread := source.unread_line("")):
            print(unread, file=sys.stderr)
    if examples is None:
        raise UserError("this run held out no examples; name some with --data FILE.")
    chosen, origin = examples.select(range(min(limit or len(examples), len(examples)))), data.validation
    if recipe.method.examples == "conversations":
        # As in a run: a conversation without an answer that training teaches measures nothing.
        answers = [example["messages"][example["given"] :] for example in chosen]
        kept = [at for at, turns in enumerate(answers) if any(map(is_learned, turns))]
        if not kept:
            raise UserError(
                f"{origin or data.path}: all {len(chosen)} examples mark every answer as not learned (`train`: false), "
                "so there is nothing to measure; correct the flags, or name other examples with --data FILE."
            )
        if left := len(chosen) - len(kept):
            where = f"{origin or data.path}: {left} of {len(chosen)} examples"
            print(f"{where} are left out: no answer is learned", file=sys.stderr)
        chosen = chosen.select(kept)
    return HeldOut(found, origin or f"a share of {data.path}", chosen, recipe)


def trained_on(recipe: Recipe, examples: Dataset) -> int:
    """Return how many examples are in a run's training data; 0 if that is not on this machine, or code makes it."""
    if recipe.data.transform:
        return 0
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            training, _ = load.read_examples(_located(recipe))
    except UserError:
        return 0
    return sources.shared(training, examples) if isinstance(training, Dataset) else 0


def is_learned(turn: JsonView) -> bool:
    """Return whether a turn is an answer that training teaches."""
    return turn["role"] == "assistant" and turn.get("train") is not False


def _located(recipe: Recipe) -> Recipe:
    """Return a recipe whose data's paths are those of this machine."""
    data = recipe.data
    path = ",".join(map(_existing, names(data.path)))
    validation = data.validation and ",".join(map(_existing, names(data.validation)))
    return replace(recipe, data=replace(data, path=path, validation=validation))


def _existing(name: str) -> str:
    """Return a path from a recipe as it is on this machine.

    An export's record names its author's files without their folders: these do not exist here and are refused.
    """
    found = str(own_path(name) or name)
    if Path(found).suffix and not Path(found).exists():
        raise UserError(f"{name}: no such file; name the held-out examples with --data FILE.")
    return found
