"""Chooses the steps and ranks that a run records, estimates the size of their traces, and checks both beforehand."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...recipe.errors import UserError, counted
from ...recipe.layout import gradient_accumulation_steps
from ...recipe.recipe import Recipe
from ...recipe.run_folder import RunFolder

AUTO = "auto"
FIRST, LAST = 4, 6
"""Steps recorded by default. In step 1 ZeRO-3 determines the order of its fetches, step 2 still allocates buffers, and
step 3 serves for comparison."""
RAW_BYTES = 700_000
"""Size of torch's uncompressed trace per layer and micro-batch, forward and backward: 24 MB for 4 layers and 8
micro-batches of `tiny full` under ZeRO-3, 140 MB for twice as many with `layout.sequence=2` (torch 2.13.0, two CPU
ranks)."""
PACKED = 15
"""Compression ratio of the same traces."""
LAYERS = 32
"""Assumed number of layers if the model's dimensions are unknown until the ranks load it."""


def checked(recipe: Recipe, count: int, per_host: int, folder: Path) -> tuple[Recipe, str | None]:
    """Return the recipe with the steps and ranks to record, and a line that describes them, or None without --profile.

    Args:
        recipe: the recipe to run, with its model's dimensions if they are known.
        count: number of ranks.
        per_host: number of ranks on each host.
        folder: the run folder; its disk needs space for the traces.
    """
    asked = recipe.profile
    if asked.steps is None:
        return recipe, None
    chosen = ranks(asked.ranks, count, per_host)
    first, last = parse(asked.steps, recipe.max_steps)
    recorded = f"step {first}" if first == last else f"steps {first} to {last}"
    line = f"profile: {recorded} on {counted(len(chosen), 'rank')}"
    if not asked.nsys:
        config = recipe.model.config
        layers = config.get("num_hidden_layers") or config.get("n_layer") or LAYERS
        passes = gradient_accumulation_steps(recipe, count) * (last - first + 1) * len(chosen)
        raw = RAW_BYTES * (layers + 1) * passes
        free = shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free
        if raw > free:
            raise UserError(
                f"--profile: the traces need about {size(raw)} while they are written, and {folder} has {size(free)} "
                "left; record fewer steps (--profile 4:4) or ranks (profile.ranks=0)."
            )
        line += f"; the traces need about {size(raw)} while they are written, {size(raw / PACKED)} afterwards"
    # `auto` is kept: if the number of steps is not known yet, the ranks choose.
    steps = asked.steps if asked.steps == AUTO else f"{first}:{last}"
    return replace(recipe, profile=replace(asked, steps=steps, ranks=",".join(map(str, chosen)))), line


def words(arguments: Sequence[str]) -> list[str]:
    """Return the command line with a value after every `--profile`, which a recipe or a key=value may follow."""
    found = []
    for at, word in enumerate(arguments):
        following = arguments[at + 1] if at + 1 < len(arguments) else ""
        bare = word == "--profile" and not re.match(r"-?\d|:", following)
        found.append(f"--profile={AUTO}" if bare else word)
    return found


def parse(steps: str, last_step: int | None) -> tuple[int, int]:
    """Return the first and the last step of `FIRST:LAST`, of a single step, or of `auto`.

    `last_step` is the run's, or None if it is unknown until the ranks read the data.
    """
    if steps == AUTO:
        return (FIRST, LAST) if last_step is None else (min(FIRST, last_step), min(LAST, last_step))
    match = re.fullmatch(r"(\d{1,12})(?::(\d{1,12}))?", steps)
    if match is None:
        raise UserError(f"--profile {steps}: not FIRST:LAST; give the first and the last step, e.g. --profile 10:12.")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last:
        why = "steps are counted from 1" if first < 1 else "the last step comes before the first"
        raise UserError(f"--profile {steps}: {why}; e.g. --profile {max(1, min(first, last))}:{max(1, first, last)}.")
    if last_step is not None and last > last_step:
        room = f"{max(1, last_step - (last - first))}:{last_step}"
        raise UserError(
            f"--profile {steps}: the run has {last_step} steps; use --profile {room}, say, or a larger max_steps."
        )
    return first, last


def ranks(asked: str, count: int, per_host: int) -> tuple[int, ...]:
    """Return the ranks that record: `all`, numbers with commas, or `auto`.

    `auto` is all ranks on a single host, and the first rank of each of several.
    """
    if asked == "all" or (asked == AUTO and per_host >= count):
        return tuple(range(count))
    if asked == AUTO:
        return tuple(range(0, count, per_host))
    found = []
    for word in asked.split(","):
        if not re.fullmatch(r"\d{1,9}", word.strip()):
            raise UserError(f"profile.ranks={asked}: `{word}` is not a rank; give numbers with commas (0,1), or all.")
        found.append(int(word))
        if found[-1] >= count:
            raise UserError(f"profile.ranks={asked}: rank {found[-1]} does not exist; ranks are 0 to {count - 1}.")
    return tuple(sorted(set(found)))


def size(count: float) -> str:
    """Return a size in MB, or in GB from 1 GB on."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{max(1, count / 1e6):.0f} MB"


def check_nsys(gpus: int, engine: str | None) -> None:
    """Refuse a run that Nsight Systems cannot profile; `engine` is the option that starts the ranks elsewhere."""
    if engine:
        raise UserError(f"--nsys: profiles ranks that the launcher starts on this machine; remove --{engine}.")
    if shutil.which("nsys") is None:
        raise UserError(
            "--nsys: nsys is not on PATH; install Nsight Systems (https://developer.nvidia.com/nsight-systems), or use "
            "--profile without --nsys."
        )
    if not gpus:
        raise UserError(
            "--nsys: this machine has no GPU that Nsight Systems could profile; use --profile without --nsys."
        )


def nsys_command(run: RunFolder) -> list[str]:
    """Return the words to put before the launcher's command.

    nsys follows child processes. Recording begins with the first rank's `cudaProfilerStart`, which is called before the
    first step of `--profile`. `--capture-range-end=stop` lets the run continue after the last recorded step; by default
    nsys would end it.
    """
    return [
        *("nsys", "profile", "--trace=cuda,nvtx,osrt,cublas", "--sample=none", "--cpuctxsw=none"),
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true"),
        f"--output={run.profile / 'nsys'}",
    ]
