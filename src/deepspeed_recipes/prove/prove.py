"""Proves the techniques and runs the scripts for known defects, one after another, on this machine's ranks."""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from ..launching.command import rank_environment
from ..machine import children
from ..recipe.errors import UserError
from ..recipe.files import Json
from ..recipe.run_folder import RunFolder, read_json, write_json, write_recipe
from .defects import Defect, known
from .ranks import Ranks, read_logs
from .techniques import Kind, Technique

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

    def as_json(self) -> Json:
        """Return the finding as JSON-like data."""
        return asdict(self)


@dataclass(frozen=True)
class Workshop:
    """The ranks, their maximum number, and a folder."""

    ranks: Ranks
    most: int
    gpus: int
    folder: Path

    def environment(self) -> Json:
        """Return versions and hardware, in the form of a run folder's."""
        found: Json = read_json(self.folder / "environment.json")
        return found


@contextlib.contextmanager
def workshop(most: int, gpus: int) -> Iterator[Workshop]:
    """Yield ranks and a folder that is removed at the end; `gpus` is 0 for ranks on CPUs."""
    os.environ |= rank_environment(most, gpus)
    # Otherwise torch detects GPUs with CUDA's runtime, and no fork could use one afterwards; NVML detects them too.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with children.scratch("proof-") as folder, Ranks() as ranks:
        os.environ |= {"HF_DATASETS_CACHE": str(folder / "datasets"), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        yield Workshop(ranks, most, gpus, folder)


def prepare(shop: Workshop, techniques: Sequence[Technique]) -> None:
    """Create models and data, and train them with the plain loop.

    Raises:
        UserError: the plain loop failed, so nothing can be proven.
    """
    kinds: list[Kind] = ["dense"]
    kinds += sorted({one.kind for one in techniques if one.lacks(shop.most, shop.gpus) is None} - {"dense"})
    log = shop.folder / "prepare"

    def prepared() -> list[int]:
        return shop.ranks.run(_prepare, str(shop.folder), kinds, world_size=1, log=log, timeout=LIMIT)

    statuses = prepared()
    if any(statuses) and any(FORKED in text for text in read_logs(log)):
        shop.ranks.spawn()  # some library uses the GPU while it is imported
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
    lacking = None
    if shop.gpus and shop.most < defect.ranks:
        lacking = f"needs {defect.ranks} ranks"
    elif defect.only == "cpu" and shop.gpus:
        lacking = "shows on CPUs only"
    if lacking:
        return Finding(defect.name, "not tried", lacking)
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
    from ..training.environment import describe
    from .compare import make

    write_json(Path(folder) / "environment.json", describe())
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
