"""`ds-recipes doctor --prove`: proves that this stack trains correctly."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.status import Status

from ..launching.command import rank_count, visible_gpus
from ..machine import ops
from ..recipe import deepspeed_file, files
from ..recipe.errors import UserError
from ..recipe.project import CONFIGS, require
from ..recipe.run_folder import write_json
from . import defects, prove, show
from .techniques import TECHNIQUES, Technique

Named = TypeVar("Named", Technique, defects.Defect)


def run(only: str | None, asked: int | None, result_file: str | None, reports: Path | None) -> int:
    """Run the proofs and the scripts for defects, show the results, and return the exit status.

    Args:
        only: the names of techniques and defects, or None for all.
        asked: the number of ranks, or None for one on each GPU.
        result_file: the file for the result as JSON, `-` for the screen, or None.
        reports: the folder for reports of the defects that are found, or None.

    Raises:
        UserError: more GPUs than this machine has, or an unknown name.
    """
    techniques, looked_for = chosen(only)
    gpus = visible_gpus()
    ranks = rank_count(asked, gpus)
    require("deepspeed")
    if reports is not None:
        files.check_writable("--reports", reports, folder=True)
    begun, to_screen = time.monotonic(), result_file == "-"
    console = Console(stderr=to_screen)
    proven: list[prove.Finding] = []
    found: list[prove.Finding] = []
    with prove.workshop(ranks, gpus) as shop, console.status("preparing") as status:
        compile_ops(techniques, gpus)
        prove.prepare(shop, techniques)
        for technique in announced(status, techniques):
            proven.append(prove.prove(shop, technique))
        for defect in announced(status, looked_for):
            found.append(prove.look_for(shop, defect))
        environment = shop.environment() | {"ranks": ranks, "backend": "nccl" if gpus else "gloo"}
    if not to_screen:
        show.terminal(console, environment, proven, found)
    if reports:
        for folder in show.reports(reports, environment, list(zip(looked_for, found, strict=True))):
            console.print(f"report: {folder}", highlight=False, soft_wrap=True)
    if result_file:
        result = show.data(environment, proven, found, time.monotonic() - begun)
        if to_screen:
            print(json.dumps(result, indent=2))
        else:
            write_json(Path(result_file), result)
    return show.status(proven)


def chosen(only: str | None) -> tuple[Sequence[Technique], Sequence[defects.Defect]]:
    """Return the techniques and defects named in `only`, or all if it is None.

    Raises:
        UserError: a name is neither.
    """
    known = {technique.name: technique for technique in TECHNIQUES}
    listed = {defect.name: defect for defect in defects.known()}
    if only is None:
        return TECHNIQUES, tuple(listed.values())
    names = [name.strip() for name in only.split(",") if name.strip()]
    if not names:
        raise UserError(f"--only {only}: names nothing to prove; choose among {', '.join([*known, *listed])}.")
    if unknown := [name for name in names if name not in known and name not in listed]:
        raise UserError(
            f"--only {only}: {unknown[0]!r} is neither a technique ({', '.join(known)}) nor a known defect "
            f"({', '.join(listed)})."
        )
    return [known[name] for name in names if name in known], [listed[name] for name in names if name in listed]


def compile_ops(techniques: Sequence[Technique], gpus: int) -> None:
    """Compile the ops that the ranks need, once and before they start."""
    files = [deepspeed_file.read(str(CONFIGS / config)) for config in {technique.config for technique in techniques}]
    by_itself = set() if gpus else {ops.SHARED_MEMORY}
    ops.prepare(sorted(by_itself.union(*map(ops.needed, files)), key=lambda op: op.name), os.environ)


def announced(status: Status, what: Sequence[Named]) -> Iterator[Named]:
    """Yield each item, and show its name while it runs."""
    for number, one in enumerate(what, 1):
        status.update(f"{one.name} ({number} of {len(what)})")
        yield one
