"""Lints a DeepSpeed config: finds what stops a run or has no effect, with a fix for each; formats findings.

Findings become text, JSON, SARIF or annotations of GitHub Actions. Needs neither torch nor DeepSpeed (about 0.1 s);
`ask_deepspeed` also runs DeepSpeed's own check (about 4 s).
"""

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..recipe.files import Json
from .read import Document, Unreadable, read
from .rule import Config, Facts, Finding, Hit, Severity, dotted, model_config, shown
from .rules import RULES


def lint(config: str | Path | Json, *, model: str | Path | Json | None = None, **known: Any) -> list[Finding]:
    """Return all findings, errors first, in the order of the file; raise `read.Unreadable` for what is no JSON object.

    `config` is a file or its content, `model` is a `config.json`, its folder or its content, and `known` are the other
    fields of `Facts`. Rules that need a fact which is None are skipped.
    """
    facts = Facts(model=model if isinstance(model, dict) or model is None else model_config(model), **known)
    return judge(config if isinstance(config, dict) else read(config), facts)


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


def first_error(findings: list[Finding], file: str = "", arguments: str = "") -> str | None:
    """Return the first error as text with the number of others, or None if there is none.

    `arguments` are those with which `ds-recipes check` finds the others.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    shows = f"ds-recipes check {arguments or file} shows {'it' if len(errors) == 2 else 'them'}"
    more = f"\n({len(errors) - 1} more; {shows})" if len(errors) > 1 else ""
    return describe(errors[0], file) + more if errors else None


@dataclass(frozen=True)
class Report:
    """The linter's result for one file."""

    file: str
    findings: tuple[Finding, ...] = ()
    stopped: Unreadable | None = None
    """The reason why the file cannot be read, or None."""
    asked: bool = False
    """True if DeepSpeed itself has checked the config, too."""
    objection: str | None = None
    """DeepSpeed's own error message for the config, or None."""

    @property
    def status(self) -> int:
        """The exit status: 0, 1 for errors, 2 for a file that cannot be read."""
        if self.stopped:
            return 2
        return int(self.objection is not None or any(finding.severity == "error" for finding in self.findings))

    def as_json(self) -> Json:
        """Return the report as `--format json` prints it."""
        if self.stopped:
            at = {"line": self.stopped.line, "column": self.stopped.column}
            return {"file": self.file, "status": 2, **at, "what": self.stopped.what}
        report = {"file": self.file, "status": self.status, "findings": [item.as_json() for item in self.findings]}
        return {**report, "deepspeed": self.objection} if self.asked else report


@dataclass(frozen=True)
class _Note:
    """A message at a position in a file."""

    rule: str
    severity: Severity
    line: int
    column: int
    text: str


def _notes(report: Report) -> Iterator[_Note]:
    if report.stopped:
        what = f"{report.stopped.stopped}: {report.stopped.what}"
        yield _Note("unreadable", "error", report.stopped.line, report.stopped.column, what)
    for finding in report.findings:
        value = "" if finding.value is None else f" = {shown(finding.value)}"
        key = f"{finding.key}{value}: " if finding.key else ""
        text = f"{key}{finding.what}; {finding.fix}"
        yield _Note(finding.rule, finding.severity, finding.line or 1, finding.column or 1, text)
    if report.objection:
        yield _Note("deepspeed", "error", 1, 1, f"DeepSpeed rejects it: {report.objection}")


def annotations(reports: list[Report]) -> list[str]:
    """Return a workflow command for each finding, which GitHub Actions shows at the line in the pull request."""
    lines = []
    for report in reports:
        for note in _notes(report):
            place = f"file={_property(report.file)},line={note.line},col={note.column}"
            lines.append(f"::{note.severity} {place},title={_property(note.rule)}::{_data(note.text)}")
    return lines


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def sarif(reports: list[Report]) -> Json:
    """Return the findings as a SARIF 2.1.0 log, which code scanners and editors read."""
    notes = [(report.file, note) for report in reports for note in _notes(report)]
    known = {rule.id: f"{rule.cause} {rule.fix}" for rule in RULES}
    used = sorted({note.rule for _, note in notes})
    rules = [{"id": name, "shortDescription": {"text": known.get(name, name)}} for name in used]
    results = [
        {
            "ruleId": note.rule,
            "level": note.severity,
            "message": {"text": note.text},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": file.replace("\\", "/")},
                        "region": {"startLine": note.line, "startColumn": note.column},
                    }
                }
            ],
        }
        for file, note in notes
    ]
    driver = {"name": "deepspeed-recipes", "rules": rules}
    runs = [{"tool": {"driver": driver}, "results": results}]
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": runs}
