"""Writes a quantised copy of a trained model, compares it with the original, and refuses too large a loss."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...machine import children
from ...recipe.errors import UserError
from ...training.model_folder import base_model, complete, record
from ..serve import environment
from .compared import Comparison, Original, lost
from .kinds import KINDS, Kind

COMPRESS = Path(__file__).with_name("compress.py")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json")
"""Files that a quantised model has its own version of; all others in the folder are copied."""


@dataclass(frozen=True)
class Written:
    """The result of `write`."""

    kind: Kind
    before: int
    """Size of the original's weights, in bytes."""
    after: int
    comparison: Comparison | None
    """The comparison, or None if no held-out examples are known."""


def kind_of(name: str) -> Kind:
    """Return the kind with this name.

    Raises:
        UserError: there is no such kind.
    """
    if name not in KINDS:
        raise UserError(f"--quantize {name}: choose {', '.join(KINDS)}.")
    return KINDS[name]


def check(source: Path, output: Path, kind: Kind) -> None:
    """Refuse a model that cannot be quantised, before anything is loaded.

    Raises:
        UserError: no model, a model without a language model's head, an output in use, or no quantiser installed.
    """
    complete.check_smaller(source, output, "--quantize")
    if kind.quantizer == "llm-compressor":
        environment.require("llmcompressor", f"--quantize {kind.name}")


def write(source: Path, output: Path, kind: Kind, original: Original, say: Callable[[str], None]) -> Written:
    """Write a quantised copy of the model in `source`, completely or not at all.

    Args:
        source: a whole model, or an adapter, which is merged first.
        output: a new or empty folder.
        kind: the kind of quantised model.
        original: measures the model before and after, and provides the sequences for calibration.
        say: prints progress.

    Raises:
        UserError: the model cannot be quantised, or has lost more than is allowed.
    """
    from ...training import export

    output.parent.mkdir(parents=True, exist_ok=True)
    with children.scratch(output.name + ".", inside=output.parent) as place:
        whole, part = source, place / "part"
        if (source / base_model.ADAPTER).exists():
            whole = place / "merged"
            export.write(source, whole, merge=True)
        say(f"quantising to {kind.title} with {kind.quantizer}")
        _copy(whole, part)
        _quantise(whole, part, kind, original, place)
        comparison = original.compared(whole, part, say)
        result = Written(kind, size(whole), size(part), comparison)
        if comparison and (reason := lost(comparison)):
            raise UserError(f"--quantize {kind.name}: {reason} Nothing was written; {_instead(kind)}")
        complete.of_quantized(part, output, recorded(result))
        export.move(part, output)
    return result


def size(folder: Path) -> int:
    """Return the size of a folder's weights, in bytes."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def recorded(written: Written) -> dict[str, Any]:
    """Return the entry for `training/results.json`."""
    kind, comparison = written.kind, written.comparison
    found: dict[str, Any] = {
        "kind": kind.name,
        "title": kind.title,
        "quantizer": kind.quantizer,
        "loads_in": kind.loads_in,
    }
    found |= {"bytes_before": written.before, "bytes_after": written.after}
    return found | (comparison.recorded() if comparison else {})


def _copy(whole: Path, part: Path) -> None:
    """Copy everything except the weights, their index and config.json."""
    part.mkdir()
    own = {file.name for pattern in WEIGHTS for file in whole.glob(pattern)}
    for file in sorted(whole.iterdir()):
        if file.is_file() and file.name not in own and file.suffix in (".json", ".jinja", ".model", ".txt", ".md"):
            shutil.copy2(file, part)
    if (whole / record.FOLDER).is_dir():
        shutil.copytree(whole / record.FOLDER, part / record.FOLDER)


def _quantise(whole: Path, part: Path, kind: Kind, original: Original, place: Path) -> None:
    """Write the quantised weights and their config.json into `part`."""
    written = place / "quantised"
    if kind.quantizer == "bitsandbytes":
        from .with_bitsandbytes import save

        save(whole, written, kind.scheme)
    else:
        _compress(whole, written, kind, original, place)
    for pattern in WEIGHTS:
        for file in written.glob(pattern):
            shutil.move(file, part)


def _compress(whole: Path, written: Path, kind: Kind, original: Original, place: Path) -> None:
    python = environment.require("llmcompressor", f"--quantize {kind.name}")
    words = [str(python), str(COMPRESS), str(whole), str(written), kind.scheme]
    if kind.calibrated:
        file = place / "calibration.json"
        file.write_text(json.dumps(original.calibration(whole)), encoding="utf-8")
        words.append(str(file))
    log = place / "log.txt"
    with log.open("wb") as out:
        # Started in `place`, since llm-compressor leaves a log folder in its working directory.
        done = children.run(words, stdout=out, stderr=subprocess.STDOUT, cwd=place, env=environment.variables())
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise UserError(
            f"--quantize {kind.name}: llm-compressor cannot quantise this model: {lines[-1] if lines else 'no output'}"
        )


def _instead(kind: Kind) -> str:
    wider = {"int4": "int8 or fp8 lose less", "nf4": "int8-bitsandbytes loses less"}.get(kind.name)
    more = "--allow-drop 5 accepts five points"
    return f"{wider}, and {more}." if wider else f"{more}."


def describe(written: Written) -> list[str]:
    """Return the lines to print: the sizes, and the comparison with the original."""
    mib = 2**20
    lines = [
        f"{written.before / mib:,.1f} -> {written.after / mib:,.1f} MiB of weights; loads in {written.kind.loads_in}"
    ]
    return lines + (written.comparison.lines() if written.comparison else ["not measured: no held-out examples known"])
