"""`ds-recipes doctor --prove`: proves that this stack trains correctly, and shows the results.

They are two tables on the terminal, a JSON object, and reports for the libraries' projects.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table

from ..launching.command import rank_count, visible_gpus
from ..machine import ops
from ..recipe import deepspeed_file, files
from ..recipe.errors import UserError
from ..recipe.files import Json
from ..recipe.project import CONFIGS, require
from ..recipe.run_folder import write_json
from . import defects, prove
from .defects import SCRIPT, Defect
from .prove import Finding
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
        print_findings(console, environment, proven, found)
    if reports:
        for folder in write_reports(reports, environment, list(zip(looked_for, found, strict=True))):
            console.print(f"report: {folder}", highlight=False, soft_wrap=True)
    if result_file:
        result = as_data(environment, proven, found, time.monotonic() - begun)
        if to_screen:
            print(json.dumps(result, indent=2))
        else:
            write_json(Path(result_file), result)
    return exit_status(proven)


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


COLOURS = {"equal": "green", "absent": "green", "present": "yellow", "different": "bold red", "failed": "bold red"}
STACK = ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl")
REPORT = "report.md"


def print_findings(
    console: Console, environment: Json, techniques: Sequence[Finding], defects: Sequence[Finding]
) -> None:
    """Print the stack, the tables and a summary line."""
    console.print(stack(environment), highlight=False)
    if techniques:
        console.print(_table("technique", "compared with the plain loop", techniques))
    if defects:
        console.print(_table("known defect", "observed, without the recipes", defects))
    console.print(summary(techniques, defects), highlight=False)


def _table(kind: str, detail: str, findings: Sequence[Finding]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(kind, no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column(detail, overflow="fold")
    for one in findings:
        table.add_row(one.name, f"[{COLOURS.get(one.state, 'dim')}]{one.state}[/]", _plain(one.detail))
    return table


def stack(environment: Json) -> str:
    """Return the versions and devices in a line."""
    packages = [f"{name} {environment['packages'][name]}" for name in STACK if name in environment["packages"]]
    where = ", ".join(sorted(set(environment["gpus"]))) or "CPU"
    return f"{', '.join(packages)}; {environment['ranks']} ranks on {where}, {environment['backend']}"


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def summary(techniques: Sequence[Finding], defects: Sequence[Finding]) -> str:
    """Return the verdict in a line."""
    tried = [one for one in techniques if one.state != "not tried"]
    wrong = [one.name for one in tried if one.state != "equal"]
    parts = []
    if wrong:
        parts.append(f"{', '.join(wrong)}: not what plain PyTorch trains")
    elif tried:
        left = len(techniques) - len(tried)
        parts.append(
            f"all {len(tried)} techniques train what plain PyTorch trains" + f" ({left} not tried)" * bool(left)
        )
    present = sum(one.state == "present" for one in defects)
    looked = sum(one.state in ("present", "absent") for one in defects)
    if looked:
        parts.append(f"{present} of {looked} known defects are in this stack; the recipes avoid or work around them")
    return "; ".join(parts) + "." if parts else "nothing was tried."


def exit_status(techniques: Sequence[Finding]) -> int:
    """Return the exit status: 1 if a technique trains something else, or fails."""
    return int(any(one.state in ("different", "failed") for one in techniques))


def as_data(environment: Json, techniques: Sequence[Finding], defects: Sequence[Finding], seconds: float) -> Json:
    """Return everything as JSON."""
    return {
        "environment": dict(environment),
        "techniques": [one.as_json() for one in techniques],
        "defects": [one.as_json() for one in defects],
        "seconds": round(seconds, 1),
        "status": exit_status(techniques),
    }


def write_reports(folder: Path, environment: Json, defects: Sequence[tuple[Defect, Finding]]) -> list[Path]:
    """Write a report and its script for every defect that is present, each in its own folder; return the folders."""
    written = []
    for defect, finding in defects:
        if finding.state == "present":
            own = folder / defect.name
            own.mkdir(parents=True, exist_ok=True)
            (own / SCRIPT).write_text(defect.script, encoding="utf-8")
            (own / REPORT).write_text(report(defect, finding, environment), encoding="utf-8")
            written.append(own)
    return written


def report(defect: Defect, finding: Finding, environment: Json) -> str:
    """Return a text for the project of the defect's library, in Markdown."""
    packages = environment["packages"]
    versions = [f"{name} {packages[name]}" for name in (defect.library, *packages) if name in packages]
    where = ", ".join(environment["gpus"]) or f"CPU ({environment['cpu']})"
    return f"""# {defect.title.rstrip(".")}

{defect.text}

**Observed:** {finding.detail}.

**Versions:** {", ".join(dict.fromkeys(versions))}, Python {environment["python"]}, on {where}.

**To reproduce,** with the script below, which needs nothing else:

    {defect.command}

```python
{defect.script.rstrip()}
```
"""
