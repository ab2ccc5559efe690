"""Lint a YAML of accelerate's: its findings, and the DeepSpeed file that it names."""

from collections.abc import Iterator
from pathlib import Path

from ..lint import place
from ..read import Document, Unreadable
from ..read import read as read_json
from ..rule import Config, Finding, Hit, dotted
from . import rules


def judge(document: Document, path: Path) -> tuple[list[Finding], Path | None]:
    """Return the findings, errors first, and the DeepSpeed file; None: it names none that is there."""
    config = Config.of(document)
    file = rules.referenced(config, path.parent)
    found = [
        Finding("accelerate-duplicate", "error", dotted(one.key), one.line, one.column, None, one.what, "remove one")
        for one in document.problems
    ]
    for rule, hit in _hits(config, path.parent, file):
        line, column = place(config, hit)
        severity = hit.severity or "error"
        found.append(Finding(rule, severity, dotted(hit.path), line, column, hit.value, hit.what, hit.fix))
    return sorted(found, key=lambda finding: (finding.severity != "error", finding.line or 0)), file


def _hits(config: Config, folder: Path, file: Path | None) -> Iterator[tuple[str, Hit]]:
    if rules.sagemaker(config):  # other keys, which other rules are about
        for hit in rules.environment(config, folder):
            yield "accelerate-environment", hit
        return
    for name, rule in rules.RULES.items():
        for hit in rule(config, folder):
            yield name, hit
    try:
        json = Config.of(read_json(file)) if file else None
    except Unreadable:  # checked as a file of its own
        return
    if file or not config.has(rules.DEEPSPEED, "deepspeed_config_file"):
        for hit in rules.stage(config, json):
            yield "accelerate-stage", hit
