"""Formats findings for other programs: JSON, SARIF, and annotations of GitHub Actions."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..recipe.files import Json
from .read import Unreadable
from .rule import Finding, Severity, shown
from .rules import RULES

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_UNREADABLE = "unreadable"


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
        what = f"cannot be read: {report.stopped.what}"
        yield _Note(_UNREADABLE, "error", report.stopped.line, report.stopped.column, what)
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
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
