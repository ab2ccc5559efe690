"""Lint DeepSpeed JSON and accelerate's YAML: find what stops a run or is silently ignored, with a fix for each.

    ds-recipes check configs/zero3.json my_config.json --world-size 8 --gpu-memory 80
    ds-recipes check configs/accelerate/fsdp2.yaml      # for accelerate launch, with the JSON that the file names

Exit status: 0 if no file has errors (warnings are possible); 1 if there are errors; 2 if a file cannot be read. The
command imports neither torch nor DeepSpeed unless --deepspeed also checks with DeepSpeed itself.
"""

import argparse
import contextlib
import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..config import edits, lint
from ..config.accelerate import lint as accelerate
from ..config.lint import Report, ask_deepspeed, describe, judge
from ..config.read import Document, Unreadable, Unwritable, located, parse, read
from ..config.resolve import Numbers, Unresolvable, resolve
from ..config.rule import Config, Facts, Finding, hidden_size, model_config
from ..config.rules import hf_trainer
from ..recipe import files
from ..recipe.errors import UserError
from ..recipe.files import JsonView
from .main import Parser


def main(words: Sequence[str] | None = None) -> int:
    """Check every file and return the exit status."""
    arguments = parser().parse_intermixed_args(words)
    given: dict[str, object] = {"deepspeed": (arguments.trainer or "hf") == "hf", **dict(arguments.argument)}
    for pair in hf_trainer.EXCLUSIVE:
        if all(map(given.get, pair)):
            raise UserError(f"--argument: {' and '.join(pair)} exclude each other in TrainingArguments; leave one out.")
    facts = Facts(
        trainer=arguments.trainer or "hf",
        world_size=arguments.world_size,
        model=model_config(arguments.model) if arguments.model else None,
        gpus_per_node=arguments.gpus_per_node,
        gpu_memory_gib=arguments.gpu_memory,
        lora=arguments.lora,
        sequence_parallel_size=arguments.sequence_parallel,
        pipeline_stages=arguments.pipeline,
        arguments=dict(arguments.argument),
    )
    if arguments.format == "text":
        for name, _ in arguments.argument:
            if name not in hf_trainer.ARGUMENTS:
                print(f"--argument {name}: ignored; the Trainer does not compare it with the file")
    reports: list[Report] = []
    for file in arguments.files:
        if Path(file).suffix not in accelerate.SUFFIXES:
            reports.append(check(file, facts, arguments))
            continue
        try:
            document = accelerate.read(Path(file))
        except Unreadable as error:
            reports.append(unreadable(file, error, arguments))
            continue
        _refuse_arguments(file, document.value)
        findings, json_file = accelerate.judge(document, Path(file))
        findings = [*findings, *_compared(document, facts)]
        if arguments.format == "text":
            show(file, findings, None)
        reports.append(Report(file, tuple(findings)))
        if json_file:  # the DeepSpeed file that accelerate's names, for its ranks
            ranks = document.value.get("num_processes")
            known = ranks if isinstance(ranks, int) and ranks > 0 else None
            shared = int(Config.of(document).number("parallelism_config", "parallelism_config_sp_size") or 1)
            shared = max(shared, facts.sequence_parallel_size)
            of_yaml = replace(facts, world_size=facts.world_size or known, sequence_parallel_size=shared)
            reports.append(check(str(json_file), of_yaml, arguments))
    if arguments.format == "json":
        print(json.dumps([report.as_json() for report in reports], indent=2, default=str))
    elif arguments.format == "sarif":
        print(json.dumps(lint.sarif(reports), indent=2))
    elif arguments.format == "github" and any(report.findings or report.stopped for report in reports):
        print("\n".join(lint.annotations(reports)))
    return max(report.status for report in reports)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = Parser("check", __doc__)
    result.add_argument("files", nargs="+", metavar="FILE", help="a path, or the name of a file in configs/")
    result.add_argument(
        "--format",
        choices=("text", "json", "sarif", "github"),
        default="text",
        help="output format: text, JSON, SARIF 2.1.0, or annotations for GitHub Actions",
    )
    result.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    result.add_argument("--fix", action="store_true", help="apply the safe fixes to the file and show the diff")
    result.add_argument(
        "--trainer",
        choices=("hf", "plain"),
        help="reader of the config: the Hugging Face Trainer (default) or plain DeepSpeed",
    )
    result.add_argument("--world-size", type=positive(int), metavar="N", help="number of ranks")
    result.add_argument("--gpus-per-node", type=positive(int), metavar="N", help="number of ranks on each node")
    result.add_argument("--gpu-memory", type=positive(float), metavar="GIB", help="memory of one GPU")
    result.add_argument("--model", metavar="PATH", help="the model's config.json or its folder")
    result.add_argument("--lora", action="store_true", help="LoRA adapters are trained")
    result.add_argument(
        "--sequence-parallel", type=positive(int), default=1, metavar="N", help="sequence-parallel ranks (default 1)"
    )
    result.add_argument("--pipeline", type=positive(int), default=1, metavar="N", help="pipeline stages (default 1)")
    result.add_argument(
        "--argument",
        action="append",
        type=argument,
        default=[],
        metavar="NAME=VALUE",
        help="one of your TrainingArguments, which the Trainer compares with the config; repeatable",
    )
    result.add_argument("--deepspeed", action="store_true", help="also check with DeepSpeed's config class (4 s)")
    return result


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return an argument type for numbers above 0."""

    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < 2**53:
            raise ValueError
        return value

    number.__name__ = "number above 0"
    return number


def argument(text: str) -> tuple[str, object]:
    """Return the name and value of a TrainingArguments field from NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError
    found: object = value
    with contextlib.suppress(ValueError):
        found = {"True": True, "False": False}[value] if value in ("True", "False") else json.loads(value)
    whole = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps")
    wanted = "true or false" if name.startswith(("fp16", "bf16")) else "a whole number" if name in whole else "a number"
    kinds = {"true or false": (bool,), "a whole number": (int,), "a number": (int, float)}[wanted]
    if name in hf_trainer.ARGUMENTS and type(found) not in kinds:
        raise argparse.ArgumentTypeError(f"{text}: must be {wanted}")
    return name, found


argument.__name__ = "NAME=VALUE"


def _refuse_arguments(file: str, values: JsonView) -> None:
    """Refuse a file of TrainingArguments, most of whose keys would be unknown."""
    named = {"output_dir", "per_device_train_batch_size", "num_train_epochs", "model_name_or_path", "max_grad_norm"}
    if len(named & values.keys()) > 1 and not any(str(key).startswith("zero_") for key in values):
        raise UserError(f"{file}: TrainingArguments, not a configuration; ds-recipes launch --from {file} reads them.")


def _compared(document: Document, facts: Facts) -> list[Finding]:
    """Return the values in accelerate's YAML that the Trainer compares with its arguments, and that differ."""
    inside = document.value.get("deepspeed_config")
    if not isinstance(inside, dict) or facts.trainer != "hf" or not facts.arguments:
        return []
    config = {name: inside[name] for name in ("gradient_accumulation_steps", "gradient_clipping") if name in inside}
    if (precision := document.value.get("mixed_precision")) in ("bf16", "fp16"):
        config[precision] = {"enabled": True}
    found = [one for one in judge(config, facts) if one.rule == "fixed-for-trainer" and one.severity == "error"]
    return [replace(one, fix="write the same value in both") for one in found]


def check(file: str, facts: Facts, arguments: argparse.Namespace) -> Report:
    """Check one file, after the safe fixes with --fix, print the findings in text format, and return them."""
    try:
        document = read(located(file))
        _refuse_arguments(file, document.value)
        if arguments.fix:
            fixed, left = edits.fix(document, lambda changed: judge(changed, facts), arguments.trainer == "hf")
            if fixed != document.text:
                files.write_bytes(located(file), fixed.encode())
            if arguments.format == "text":
                before, after = document.text.splitlines(), fixed.splitlines()
                lines = difflib.unified_diff(before, after, file, f"{file} (fixed)", lineterm="")
                for line in [*lines, *(f"{file}: {sentence}" for sentence in left)]:
                    print(line)
            document = parse(fixed)
    except Unreadable as error:
        return unreadable(file, error, arguments)
    except OSError as error:
        what = f"it cannot be written ({error.strerror}); leave out --fix, or copy it to a place that you may write to"
        return unreadable(file, Unwritable(what), arguments)
    findings = judge(document, facts)
    objection = ask(document, facts) if arguments.deepspeed else None
    if arguments.format == "text":
        show(file, findings, objection)
    return Report(file, tuple(findings), asked=arguments.deepspeed, objection=objection)


def unreadable(file: str, error: Unreadable, arguments: argparse.Namespace) -> Report:
    """Report a file that is not a JSON object, or that cannot be fixed."""
    if arguments.format == "text":
        print(f"{file}:{error.line}:{error.column}: {error.stopped}: {error.what}")
    return Report(file, stopped=error)


def ask(document: Document, facts: Facts) -> str | None:
    """Return DeepSpeed's error message, or None; a template is first filled with the Trainer's defaults."""
    config = document.value
    if '"auto"' in json.dumps(config) and facts.trainer == "hf":
        fp16 = document.value.get("fp16")
        half = isinstance(fp16, dict) and fp16.get("enabled") is True
        width = hidden_size(facts.model or {}) or 4096
        numbers = Numbers(world_size=facts.world_size or 1, hidden_size=width, precision="fp16" if half else "bf16")
        try:
            config = resolve(config, numbers)
        except Unresolvable:
            return None  # this needs the numbers of a real run; the rules have already reported their findings
    return ask_deepspeed(config, facts.world_size or 1)


def show(file: str, findings: list[Finding], objection: str | None) -> None:
    """Print findings as text."""
    if findings:
        print("\n".join(describe(finding, file) for finding in findings))
    if objection:
        print(f"{file}: DeepSpeed rejects it: {objection}")
    errors = sum(finding.severity == "error" for finding in findings) + (objection is not None)
    warnings = sum(finding.severity == "warning" for finding in findings)
    print(f"{file}: {errors or 'no'} error{'s' * (errors != 1)}, {warnings or 'no'} warning{'s' * (warnings != 1)}")
