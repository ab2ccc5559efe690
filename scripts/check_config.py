"""Lint DeepSpeed JSON: what stops a run, what is silently ignored or done differently, and the fix for each.

python scripts/check_config.py configs/zero3.json my_config.json --world-size 8 --gpu-memory 80
Exit status 0: loads and is sane (warnings may be shown); 1: errors; 2: a file cannot be read.
Imports neither torch nor DeepSpeed unless --deepspeed asks DeepSpeed itself as well.
"""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from recipes.zero_config.lint import ask_deepspeed, describe, fix, judge  # noqa: E402
from recipes.zero_config.read import Document, Unreadable, located, read  # noqa: E402
from recipes.zero_config.resolve import Numbers, Unresolvable, hidden_size, resolve  # noqa: E402
from recipes.zero_config.rule import Facts, Finding, model_config  # noqa: E402


def main(words: Sequence[str] | None = None) -> int:
    """Check every file and return the exit status."""
    arguments = parser().parse_args(words)
    try:
        facts = known(arguments)
    except (OSError, ValueError) as error:
        print(f"--model {arguments.model}: cannot be read as a model's config.json ({error})", file=sys.stderr)
        return 2
    reports = [check(file, facts, arguments) for file in arguments.files]
    if arguments.json:
        print(json.dumps(reports, indent=2, default=str))
    return max(report["status"] for report in reports)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("files", nargs="+", metavar="FILE")
    result.add_argument("--json", action="store_true", help="print findings as JSON")
    result.add_argument("--fix", action="store_true", help="apply the safe fixes to the file and show the diff")
    result.add_argument("--trainer", choices=("hf", "plain"), default="hf", help="who reads the config (hf)")
    result.add_argument("--world-size", type=positive(int), help="number of ranks")
    result.add_argument("--gpu-memory", type=positive(float), metavar="GIB", help="memory of one GPU")
    result.add_argument("--model", metavar="PATH", help="the model's config.json or its folder")
    result.add_argument("--lora", action="store_true", help="adapters are trained")
    result.add_argument("--sequence-parallel", type=positive(int), default=1, metavar="N")
    result.add_argument("--pipeline", type=positive(int), default=1, metavar="N", help="pipeline stages")
    result.add_argument("--deepspeed", action="store_true", help="ask DeepSpeed's config class too (4 s)")
    return result


def positive(kind: type):
    """Return an argument type for numbers above 0."""

    def number(text: str) -> int | float:
        value = kind(text)
        if not 0 < value < 2**53:
            raise ValueError
        return value

    number.__name__ = "number above 0"
    return number


def known(arguments: argparse.Namespace) -> Facts:
    """Return the facts of the command line. Raises OSError and ValueError for the model's config."""
    return Facts(
        trainer=arguments.trainer,
        world_size=arguments.world_size,
        model=model_config(arguments.model) if arguments.model else None,
        gpu_memory_gib=arguments.gpu_memory,
        lora=arguments.lora,
        sequence_parallel_size=arguments.sequence_parallel,
        pipeline_stages=arguments.pipeline,
    )


def check(file: str, facts: Facts, arguments: argparse.Namespace) -> dict:
    """Judge one file, print what there is to say, and return it as data."""
    try:
        document = read(located(file))
        if arguments.fix:
            document = repair(file, document, facts, arguments)
    except Unreadable as error:
        return unreadable(file, error, arguments)
    except OSError as error:
        return unreadable(file, Unreadable(f"cannot be written: {error.strerror}"), arguments)
    findings = judge(document, facts)
    refusal = ask(document, facts) if arguments.deepspeed else None
    wrong = refusal is not None or any(finding.severity == "error" for finding in findings)
    if not arguments.json:
        show(file, findings, refusal)
    report = {"file": file, "status": int(wrong), "findings": [finding.as_json() for finding in findings]}
    return {**report, "deepspeed": refusal} if arguments.deepspeed else report


def unreadable(file: str, error: Unreadable, arguments: argparse.Namespace) -> dict:
    """Report a file that is no JSON object."""
    if not arguments.json:
        print(f"{file}:{error.line}:{error.column}: cannot be read: {error.what}")
    return {"file": file, "status": 2, "line": error.line, "column": error.column, "what": error.what}


def ask(document: Document, facts: Facts) -> str | None:
    """Return DeepSpeed's objection; a template is filled with the Trainer's defaults first."""
    config = document.value
    if '"auto"' in json.dumps(config) and facts.trainer == "hf":
        fp16 = document.value.get("fp16")
        precision = "fp16" if isinstance(fp16, dict) and fp16.get("enabled") is True else "bf16"
        width = hidden_size(facts.model or {}) or 4096
        world = facts.world_size or 1
        try:
            config = resolve(config, Numbers(world_size=world, hidden_size=width, precision=precision))
        except Unresolvable:
            return None  # the numbers of a real run are needed: the rules have said what they know
    return ask_deepspeed(config, facts.world_size or 1)


def repair(file: str, document: Document, facts: Facts, arguments: argparse.Namespace) -> Document:
    """Apply the safe fixes to the file, show the diff, and return what the file is now.

    A file with a key given twice stays as it is: which of the two is meant, its author has to say.
    """
    fixed = fix(document.value, judge(document, facts))
    undecided = any(problem.kind in ("duplicate", "not-a-number") for problem in document.problems)
    if undecided or (fixed == document.value and not document.problems):
        return document
    path = Path(file)
    before = path.read_text(encoding="utf-8")
    after = json.dumps(fixed, indent=2, ensure_ascii=False) + "\n"
    path.write_text(after, encoding="utf-8")
    if not arguments.json:
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), file, f"{file} (fixed)", lineterm="")
        print("\n".join(lines))
    return read(file)


def show(file: str, findings: list[Finding], refusal: str | None) -> None:
    """Print findings for people."""
    for finding in findings:
        print(describe(finding, file))
    if refusal:
        print(f"{file}: DeepSpeed refuses it: {refusal}")
    errors = sum(finding.severity == "error" for finding in findings) + (refusal is not None)
    warnings = sum(finding.severity == "warning" for finding in findings)
    print(f"{file}: {_count(errors, 'error')}, {_count(warnings, 'warning')}")


def _count(number: int, name: str) -> str:
    return f"{number or 'no'} {name}{'s' * (number != 1)}"


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.stderr.reconfigure(errors="backslashreplace")
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
