"""The held-out examples of a run, as its own evaluation had them, or those of another file."""

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import torch.distributed as dist
from datasets import Dataset

from ...recipe import pages
from ...recipe.errors import UserError
from ...recipe.recipe import Recipe, names
from ...training.data import load, sources
from ...training.model_folder.portable import own_path

METRICS = ("exact_match", "loss", "preference_accuracy", "accuracy", "recall_at_1")
"""What can be measured here: the first two of models that write, then of models that prefer or score, that classify,
and that embed."""


@dataclass(frozen=True)
class HeldOut:
    """Examples, and how they are judged."""

    metric: str
    source: str
    """Where they come from, for a person to read."""
    examples: Dataset
    recipe: Recipe
    """For the form, the lengths, and how answers are generated."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Be the only rank: what training measures, it measures over all ranks."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def read(recipe: Recipe | None, file: Path | None, metric: str | None, limit: int | None) -> HeldOut:
    """Return the held-out examples.

    Args:
        recipe: of the run; None: only models of other origins are compared.
        file: other examples than the run's.
        metric: another metric than the run's.
        limit: how many of them, from the first; None: all.

    Raises:
        UserError: there are none, they cannot be read, or the metric cannot be measured here.
    """
    if recipe is None:
        if file is None:
            raise UserError("no run is named, so its held-out examples are unknown; add --data FILE.")
        recipe = pages.find("tiny", "full")
    if file is not None:
        validation = str(_existing(str(file)))
        recipe = replace(recipe, data=replace(recipe.data, path=validation, validation=validation, streaming=False))
    found = metric or recipe.metric
    if found not in METRICS:
        raise UserError(f"metric {found}: not measured here; choose --metric {' or '.join(METRICS)}.")
    data = replace(recipe.data, path=_located(recipe.data.path), validation=_located(recipe.data.validation))
    recipe = replace(recipe, data=data)
    datasets.disable_progress_bars()
    with contextlib.redirect_stdout(io.StringIO()):  # what a run says of its data
        if data.validation:
            examples = sources.mix(sources.read(data.validation, recipe), None, recipe.seed)
        else:
            examples = load.read_examples(recipe)[1]
    if examples is None:
        raise UserError("this run held out no examples; name some with --data FILE.")
    chosen = examples.select(range(min(limit or len(examples), len(examples))))
    return HeldOut(found, data.validation or f"a share of {data.path}", chosen, recipe)


def _located(paths: str | None) -> Any:
    return ",".join(_existing(name) for name in names(paths)) if paths else paths


def _existing(name: str) -> str:
    """Return a path that a recipe names as it is on this machine.

    Raises:
        UserError: it is a file that is not here; the record of an export names its author's files without folders.
    """
    found = str(own_path(name) or name)
    if Path(found).suffix and not Path(found).exists():
        raise UserError(f"{name}: no such file; name the held-out examples with --data FILE.")
    return found
