"""Lints a DeepSpeed config: finds settings that stop a run or have no effect, with a fix for each.

Needs neither torch nor DeepSpeed (about 0.1 s); `ask_deepspeed` also runs DeepSpeed's own check (about 4 s).
"""

import copy
import os
from collections.abc import Mapping
from pathlib import Path

from ..recipe.files import Json
from .read import Document, read
from .rule import Config, Facts, Finding, Hit, dotted, model_config, shown
from .rules import RULES


def lint(
    path_or_dict: str | Path | Json,
    *,
    world_size: int | None = None,
    gpus_per_node: int | None = None,
    model: str | Path | Json | None = None,
    gpu_memory_gib: float | None = None,
    trainer: str = "hf",
    lora: bool = False,
    sequence_parallel_size: int = 1,
    pipeline_stages: int = 1,
    arguments: Mapping[str, object] | None = None,
) -> list[Finding]:
    """Return all findings, errors first, in the order of the file.

    Args:
        path_or_dict: the config.
        world_size: number of ranks.
        gpus_per_node: number of ranks on each node.
        model: a `config.json`, its folder or its content.
        gpu_memory_gib: memory of one GPU.
        trainer: "hf" (transformers' Trainer, TRL, accelerate: they fill "auto") or "plain" (deepspeed.initialize).
        lora: whether adapters are trained.
        sequence_parallel_size: ranks that share a sequence.
        pipeline_stages: stages of a pipeline.
        arguments: TrainingArguments by their names, with which the Trainer compares the config.

    Rules that need an argument which is None are skipped.

    Raises:
        UserError: the config is not a JSON object (`read.Unreadable`), or the model's config cannot be read.
    """
    facts = Facts(
        trainer="plain" if trainer == "plain" else "hf",
        world_size=world_size,
        gpus_per_node=gpus_per_node,
        model=model if isinstance(model, dict) or model is None else model_config(model),
        gpu_memory_gib=gpu_memory_gib,
        lora=lora,
        sequence_parallel_size=sequence_parallel_size,
        pipeline_stages=pipeline_stages,
        arguments=arguments,
    )
    document = path_or_dict if isinstance(path_or_dict, dict) else read(path_or_dict)
    return judge(document, facts)


def judge(config: Document | Json, facts: Facts) -> list[Finding]:
    """Return the findings for a parsed file, or for a dictionary, which has no line numbers."""
    seen = Config.of(config) if isinstance(config, Document) else Config(config)
    places = {(problem.key, problem.what): (problem.line, problem.column) for problem in reversed(seen.problems)}
    findings = []
    for rule in RULES:
        for hit in rule.check(seen, facts):
            line, column = places.get((hit.path, hit.what)) or place(seen, hit)
            severity, fix = hit.severity or rule.severity, hit.fix or rule.fix
            at = dotted(hit.path)
            findings.append(Finding(rule.id, severity, at, line, column, hit.value, hit.what, fix, hit.edits))
    return sorted(findings, key=lambda finding: (finding.severity != "error", finding.line or 0))


def place(config: Config, hit: Hit) -> tuple[int | None, int | None]:
    """Return the line and column of a hit's key, or of the nearest enclosing key."""
    path = hit.path
    while path:
        if path in config.places:
            return config.places[path]
        path = path[:-1]
    return None, None


def ask_deepspeed(config: Json, world_size: int = 1) -> str | None:
    """Return the first lines of DeepSpeed's objection to a config without "auto", or None if it accepts the config.

    Imports DeepSpeed and torch. The config class reads the number of ranks from torch.distributed, which is not
    initialised here, so batch sizes are checked for one rank: `train_batch_size` is divided by `world_size` first.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    config = copy.deepcopy(config)
    train = config.get("train_batch_size")
    if isinstance(train, int) and world_size > 1 and train % world_size == 0:
        config["train_batch_size"] = train // world_size
    try:
        DeepSpeedConfig(config)
    except Exception as error:  # any exception is a rejection
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {' '.join(lines[:3])}"
    return None


def describe(finding: Finding, file: str = "") -> str:
    """Return one finding as two lines of text for a terminal."""
    place = ":".join(str(part) for part in (file, finding.line, finding.column) if part not in ("", None))
    value = "" if finding.value is None else shown(finding.value)
    what = " = ".join(part for part in (finding.key, value) if part)
    head = ": ".join(part for part in (place, finding.severity, what, finding.what) if part)
    return f"{head} [{finding.rule}]\n    fix: {finding.fix}"


def first_error(findings: list[Finding], file: str = "") -> str | None:
    """Return the first error as text with the number of others, or None if there is none."""
    errors = [finding for finding in findings if finding.severity == "error"]
    more = f"\n({len(errors) - 1} more; ds-recipes check shows them)" if len(errors) > 1 else ""
    return describe(errors[0], file) + more if errors else None
