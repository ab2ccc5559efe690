"""Proves the techniques and runs the scripts for known defects, one after another, on this machine's ranks."""

import json
import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table

from ..launching.command import rank_count, rank_environment, visible_gpus
from ..machine import children, ops
from ..recipe import deepspeed_file, files
from ..recipe.errors import UserError
from ..recipe.files import Json
from ..recipe.project import CONFIGS, require
from ..recipe.run_folder import RunFolder, read_json, write_json, write_recipe
from . import defects
from .defects import SCRIPT, Defect, known
from .ranks import Ranks, read_logs
from .techniques import TECHNIQUES, Kind, Technique

FORKED = "in forked subprocess"
"""Part of PyTorch's error for a GPU that the process has already used before the fork."""
REFUSED = 2
"""Exit status of ranks whose output explains why this stack cannot train a recipe."""
LIMIT = 240
"""Time limit in seconds for one technique or defect, in case it hangs."""
State = Literal["equal", "different", "failed", "present", "absent", "not tried"]


@dataclass(frozen=True)
class Finding:
    """The result of a technique or a known defect."""

    name: str
    state: State
    detail: str
    ranks: int = 0
    seconds: float = 0.0
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    """For a technique: `found`, its distance from the plain loop, and `allowed`."""


@dataclass(frozen=True)
class Workshop:
    """The ranks, their maximum number, and a folder."""

    ranks: Ranks
    most: int
    gpus: int
    folder: Path


def prepare(shop: Workshop, techniques: Sequence[Technique]) -> None:
    """Create models and data, and train them with the plain loop."""
    kinds: list[Kind] = ["dense"]
    kinds += sorted({one.kind for one in techniques if one.lacks(shop.most, shop.gpus) is None} - {"dense"})
    log = shop.folder / "prepare"
    prepared = partial(shop.ranks.run, _prepare, str(shop.folder), kinds, world_size=1, log=log, timeout=LIMIT)
    statuses = prepared()
    if any(statuses) and any(FORKED in text for text in read_logs(log)):
        # Some library uses the GPU while it is imported: ranks are new processes that import everything from now on.
        shop.ranks.context = multiprocessing.get_context("spawn")
        statuses = prepared()
    if any(statuses):
        raise UserError(f"--prove: the plain loop itself failed: {why(read_logs(log), statuses)}")


def prove(shop: Workshop, technique: Technique) -> Finding:
    """Train with a technique, and compare it with the plain loop."""
    if lacking := technique.lacks(shop.most, shop.gpus):
        return Finding(technique.name, "not tried", lacking)
    begun, count = time.monotonic(), technique.ranks(shop.most)
    run, log = RunFolder(shop.folder / technique.name / "run"), shop.folder / technique.name / "log"
    run.path.mkdir(parents=True)
    model = shop.folder / ("mixture" if technique.kind == "mixture" else "dense")
    write_recipe(run, technique.recipe(model, shop.folder / "train.jsonl", count))
    result = shop.folder / technique.name / "compared.json"
    statuses = shop.ranks.run(technique.train, str(run.path), world_size=count, log=log, timeout=LIMIT)
    if not any(statuses):
        reference = str(shop.folder / f"{technique.kind}.pt")
        log = log.with_name("compared")
        statuses = shop.ranks.run(_compare, str(run.path), reference, technique.kind, str(result),
                                  world_size=1, log=log, timeout=LIMIT)  # fmt: skip
    seconds = time.monotonic() - begun
    if any(statuses):
        state: State = "not tried" if set(statuses) == {REFUSED} else "failed"
        return Finding(technique.name, state, why(read_logs(log), statuses), count, seconds)
    numbers = read_json(result)
    return Finding(technique.name, *judged(**numbers), count, seconds, numbers)


def judged(found: dict[str, float], allowed: dict[str, float]) -> tuple[State, str]:
    """Return whether the differences are within the bounds, and a line about them."""
    words = {"loss": "loss", "grad_norm": "gradient norm", "weights": "weights"}
    wrong = [key for key in allowed if not found[key] <= allowed[key]]
    if not wrong:
        return "equal", f"loss to {found['loss']:.0e}, gradient norm to {found['grad_norm']:.0e}"
    says = [
        f"{words[key]} off by {found[key]:.1e}" if key != "weights" else f"weights off by {found[key]:.0f} x the bound"
        for key in wrong
    ]
    return "different", "; ".join(says)


def look_for(shop: Workshop, defect: Defect) -> Finding:
    """Run a defect's script on ranks."""
    if shop.gpus and shop.most < defect.ranks:
        return Finding(defect.name, "not tried", f"needs {defect.ranks} ranks")
    if defect.only == "cpu" and shop.gpus:
        return Finding(defect.name, "not tried", "shows on CPUs only")
    begun, folder = time.monotonic(), shop.folder / defect.name
    folder.mkdir()
    result = folder / "measured.json"
    statuses = shop.ranks.run(
        _measure, defect.name, str(result), world_size=defect.ranks, log=folder / "log", timeout=LIMIT
    )
    seconds = time.monotonic() - begun
    if any(statuses):
        return Finding(defect.name, "failed", why(read_logs(folder / "log"), statuses), defect.ranks, seconds)
    measured = read_json(result)
    state: State = "present" if measured["present"] else "absent"
    return Finding(defect.name, state, measured["observed"], defect.ranks, seconds)


def why(logs: list[str], statuses: list[int]) -> str:
    """Return why ranks refused, or the last line of their output that looks like an error, or how they ended."""
    lines = [line.strip() for log in logs for line in log.splitlines()]
    if set(statuses) == {REFUSED}:
        return next((line for line in reversed(lines) if line), "refused")[:300]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|launch\.py:|error:", line)]
    return errors[-1][:300] if errors else f"the ranks ended with exit statuses {statuses} (negative: by that signal)"


def _prepare(folder: str, kinds: list[Kind]) -> None:
    from ..training.distributed import describe_environment
    from .compare import make

    write_json(Path(folder) / "environment.json", describe_environment())
    make(folder, kinds)


def _compare(run: str, reference: str, kind: Kind, output: str) -> None:
    from .compare import compare

    compare(run, reference, kind, output)


def _measure(name: str, output: str) -> None:
    """Run the script of a known defect; on every rank."""
    os.chdir(Path(output).parent)
    (defect,) = (one for one in known() if one.name == name)
    found: Json = {"__name__": name}
    exec(defect.script, found)
    present, observed = found[name]()
    if os.environ["RANK"] == "0":
        write_json(Path(output), {"present": bool(present), "observed": observed})


Named = TypeVar("Named", Technique, defects.Defect)


def run(only: str | None, asked: int | None, result_file: str | None, reports: Path | None) -> int:
    """Run the proofs and the scripts for defects, show the results, and return the exit status.

    `only` are names with commas, None for all; `asked` ranks, None for one on each GPU. `result_file` gets the result
    as JSON, `-` is the screen; the folder `reports` gets a report of each defect that is found.
    """
    techniques, looked_for = chosen(only)
    gpus = visible_gpus()
    ranks = rank_count(asked, gpus)
    require("deepspeed")
    if reports is not None:
        files.check_writable("--reports", reports, folder=True)
    begun, to_screen = time.monotonic(), result_file == "-"
    console = Console(stderr=to_screen)
    os.environ |= rank_environment(ranks, gpus)
    # Otherwise torch detects GPUs with CUDA's runtime, and no fork could use one afterwards; NVML detects them too.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with children.scratch("proof-") as folder, Ranks() as forks, console.status("preparing") as status:
        os.environ |= {"HF_DATASETS_CACHE": str(folder / "datasets"), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        shop = Workshop(forks, ranks, gpus, folder)
        compile_ops(techniques, gpus)
        prepare(shop, techniques)
        proven = [prove(shop, technique) for technique in announced(status, techniques)]
        found = [look_for(shop, defect) for defect in announced(status, looked_for)]
        environment = read_json(folder / "environment.json")
    environment |= {"ranks": ranks, "backend": "nccl" if gpus else "gloo"}
    if not to_screen:
        packages = [f"{name} {environment['packages'][name]}" for name in STACK if name in environment["packages"]]
        where = f"{ranks} ranks on {', '.join(sorted(set(environment['gpus']))) or 'CPU'}, {environment['backend']}"
        console.print(f"{', '.join(packages)}; {where}", highlight=False)
        if proven:
            console.print(_table("technique", "compared with the plain loop", proven))
        if found:
            console.print(_table("known defect", "observed, without the recipes", found))
        console.print(summary(proven, found), highlight=False)
    for defect, finding in zip(looked_for, found, strict=True):
        if reports and finding.state == "present":
            own = reports / defect.name
            own.mkdir(parents=True, exist_ok=True)
            (own / SCRIPT).write_text(defect.script, encoding="utf-8")
            (own / REPORT).write_text(report(defect, finding, environment), encoding="utf-8")
            console.print(f"report: {own}", highlight=False, soft_wrap=True)
    result = {
        "environment": dict(environment),
        "techniques": [asdict(one) for one in proven],
        "defects": [asdict(one) for one in found],
        "seconds": round(time.monotonic() - begun, 1),
        "status": exit_status(proven),
    }
    if to_screen:
        print(json.dumps(result, indent=2))
    elif result_file:
        write_json(Path(result_file), result)
    return exit_status(proven)


def chosen(only: str | None) -> tuple[Sequence[Technique], Sequence[defects.Defect]]:
    """Return the techniques and defects named in `only`, or all if it is None."""
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
REPORT = "report.md"
STACK = ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl")


def _table(kind: str, detail: str, findings: Sequence[Finding]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(kind, no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column(detail, overflow="fold")
    for one in findings:
        coloured = f"[{COLOURS.get(one.state, 'dim')}]{one.state}[/]"
        table.add_row(one.name, coloured, one.detail.replace("[", "\\["))  # no markup in what was observed
    return table


def summary(techniques: Sequence[Finding], defects: Sequence[Finding]) -> str:
    """Return the verdict in a line."""
    tried = [one for one in techniques if one.state != "not tried"]
    wrong = [one.name for one in tried if one.state != "equal"]
    parts = []
    if wrong:
        parts.append(f"{', '.join(wrong)}: not what plain PyTorch trains")
    elif tried:
        left = len(techniques) - len(tried)
        all_of = f"all {len(tried)} techniques train" if tried[1:] else f"{tried[0].name} trains"
        parts.append(f"{all_of} what plain PyTorch trains" + f" ({left} not tried)" * bool(left))
    present = sum(one.state == "present" for one in defects)
    looked = sum(one.state in ("present", "absent") for one in defects)
    if looked:
        parts.append(f"{present} of {looked} known defects are in this stack; the recipes avoid or work around them")
    return "; ".join(parts) + "." if parts else "nothing was tried."


def exit_status(techniques: Sequence[Finding]) -> int:
    """Return the exit status: 1 if a technique trains something else, or fails."""
    return int(any(one.state in ("different", "failed") for one in techniques))


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
