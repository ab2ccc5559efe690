"""Shows the results: two tables on the terminal, a JSON object, and reports for the libraries' projects."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..recipe.files import Json
from .defects import Defect
from .prove import Finding

COLOURS = {"equal": "green", "absent": "green", "present": "yellow", "different": "bold red", "failed": "bold red"}
STACK = ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl")
SCRIPT, REPORT = "reproduce.py", "report.md"


def terminal(console: Console, environment: Json, techniques: Sequence[Finding], defects: Sequence[Finding]) -> None:
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
    """Return a text with its brackets escaped for rich."""
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


def status(techniques: Sequence[Finding]) -> int:
    """Return the exit status: 1 if a technique trains something else, or fails."""
    return int(any(one.state in ("different", "failed") for one in techniques))


def data(environment: Json, techniques: Sequence[Finding], defects: Sequence[Finding], seconds: float) -> Json:
    """Return everything as JSON."""
    return {
        "environment": dict(environment),
        "techniques": [one.as_json() for one in techniques],
        "defects": [one.as_json() for one in defects],
        "seconds": round(seconds, 1),
        "status": status(techniques),
    }


def reports(folder: Path, environment: Json, defects: Sequence[tuple[Defect, Finding]]) -> list[Path]:
    """Write a report and its script for every defect that is present, each in its own folder; return the folders."""
    written = []
    for defect, finding in defects:
        if finding.state == "present":
            own = folder / defect.name
            own.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(defect.path, own / SCRIPT)
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

    {defect.command(SCRIPT)}

```python
{defect.path.read_text(encoding="utf-8").rstrip()}
```
"""
