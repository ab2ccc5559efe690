"""Applies the safe edits of findings to the text of a file, and leaves every other byte unchanged."""

import copy
import json
from collections.abc import Callable, Iterable
from typing import Any

from .read import Document, Key, parse
from .rule import Edit, Finding, shown

MOST = 200
"""The most findings that are fixed in one run, since the text is parsed again after every edit."""
Judge = Callable[[Document], list[Finding]]


def fix(document: Document, judge: Judge, of_trainer: bool = False) -> tuple[str, list[str]]:
    """Return the text of the document with the safe edits applied, and a sentence for each finding left as it is.

    An edit is safe if `judge` finds no new error in the result. A file with a duplicate key, NaN or infinity is
    returned unchanged, since the intended value is unknown. The first "auto" is added only if the file is the Hugging
    Face Trainer's for certain.
    """
    unclear = [problem for problem in document.problems if problem.kind in ("duplicate", "not-a-number")]
    if unclear:
        why = {
            "duplicate": "the key appears twice; remove the value that you do not want",
            "not-a-number": "write the number that you mean",
        }
        return document.text, [f"line {problem.line}: not fixed: {why[problem.kind]}" for problem in unclear]
    before = judge(document)
    wanted = [finding for finding in before if finding.edits][:MOST]
    template = of_trainer or '"auto"' in json.dumps(document.value)
    renamed = _renamed(edit for finding in wanted for edit in finding.edits)
    fills = [
        finding
        for finding in wanted
        if not template and any(edit.value == "auto" and edit.path not in renamed for edit in finding.edits)
    ]
    now = [finding for finding in wanted if finding not in fills]
    text, words = document.text, {"True": "true", "False": "false", "None": "null"}
    for problem in sorted(document.problems, key=lambda problem: -problem.at):  # from the end: offsets before it stay
        at, end = problem.at, problem.at + len(str(problem.value))
        if problem.kind == "trailing-comma":
            text = text[:at] + text[at + 1 :]
        elif problem.kind == "missing-comma":
            text = text[:at] + "," + text[at:]
        elif problem.kind == "python-word":
            text = text[:at] + words[str(problem.value)] + text[end:]
    assert parse(text).value == document.value, "making strict JSON of the file changed it"
    text, dropped = _apply(text, now, judge, _errors(before))
    refused = 'the file has no "auto" yet, and without the Trainer it would no longer load; --trainer hf permits it'
    left = [f"`{finding.key}`: not fixed: {refused}" for finding in fills]
    left += [f"`{finding.key}`: not fixed: with it DeepSpeed would refuse the file" for finding in dropped]
    if document.comments:
        left.append("comments: not removed: move them to another file if the Trainer reads this file")
    return text, left


def _errors(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.rule, finding.key) for finding in findings if finding.severity == "error"}


def _apply(text: str, findings: list[Finding], judge: Judge, known: set[tuple[str, str]]) -> tuple[str, list[Finding]]:
    """Return the text with the findings' edits, and the findings whose edits would cause new errors.

    All edits are tried together, which nearly always works, and otherwise each half separately.
    """
    if not findings:
        return text, []
    edited = text
    edits = [edit for finding in findings for edit in finding.edits]
    renamed = _renamed(edits)
    for edit in edits:
        if edit.action != "set" or edit.path not in renamed:
            edited = edit_text(edited, edit)
    if _errors(judge(parse(edited))) <= known:
        return edited, []
    if len(findings) == 1:
        return text, findings
    half = len(findings) // 2
    text, first = _apply(text, findings[:half], judge, known)
    text, second = _apply(text, findings[half:], judge, known)
    return text, first + second


def _renamed(edits: Iterable[Edit]) -> set[Key]:
    """Return the keys that misspelt ones become: they are not missing, and their values stay."""
    return {(*edit.path[:-1], str(edit.value)) for edit in edits if edit.action == "rename"}


def edit_text(text: str, edit: Edit) -> str:
    """Return the text of a config with one edit; an edit that does not apply changes nothing."""
    document = parse(text)
    expected, name, span = copy.deepcopy(document.value), edit.path[-1], document.spans.get(edit.path)
    node: Any = expected
    for part in edit.path[:-1]:
        node = node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, dict) or (edit.action != "set" and name not in node):
        return text
    if edit.action == "set":
        node[name] = edit.value
        if expected == document.value:
            return text
        edited = text[: span.value] + _written(edit.value) + text[span.end :] if span else _insert(document, edit)
    elif edit.action == "remove":
        del node[name]
        edited = _remove(document, edit.path)
    else:
        if edit.value in node:
            return text
        items = [(edit.value if key == name else key, value) for key, value in node.items()]
        node.clear()
        node.update(items)
        assert span
        edited = text[: span.start] + _written(edit.value) + text[span.name_end :]
    assert parse(edited).value == expected, f"the edit {edit} of {shown(document.value)} went wrong"
    return edited


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _insert(document: Document, edit: Edit) -> str:
    """Return the text with a new last key in an object, indented like the key before it."""
    text, parent = document.text, document.spans[edit.path[:-1]]
    member = f"{_written(edit.path[-1])}: {_written(edit.value)}"
    last = _children(document, edit.path[:-1])[-1:]
    if not last:
        return text[: parent.value] + "{" + member + "}" + text[parent.end :]
    span = document.spans[last[0]]
    line = text.rfind("\n", 0, span.start) + 1
    indent = text[line : span.start]
    newline = "\r\n" if text[max(0, line - 2) : line] == "\r\n" else "\n"
    between = f",{newline}{indent}" if line > parent.value and not indent.strip() else ", "
    comma = _comma_after(document, span.end, parent.end)
    rest = text[span.end : comma] + text[comma + 1 :] if comma else text[span.end :]
    return text[: span.end] + between + member + rest


def _remove(document: Document, path: Key) -> str:
    """Return the text without a key and its comma; comments around the key stay."""
    text, span = document.text, document.spans[path]
    siblings = _children(document, path[:-1])
    comma = _comma_after(document, span.end, document.spans[path[:-1]].end)
    end = comma + 1 if comma else span.end
    start = span.start
    line = text.rfind("\n", 0, start) + 1
    after = text[end : _line_end(text, end)]
    if not text[line:start].strip() and not after.strip():  # alone on its lines
        start, end = line, min(len(text), _line_end(text, end) + 1)
    elif comma:
        end += len(after) - len(after.lstrip(" \t"))
    if comma is None and siblings[-1] == path and len(siblings) > 1:  # the last key: the comma before it goes too
        before = _comma_after(document, document.spans[siblings[-2]].end, span.start)
        if before is not None:
            kept = text[before + 1 : start]
            return text[:before] + (kept if kept.strip() or "\n" in kept else "") + text[end:]
    return text[:start] + text[end:]


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _children(document: Document, path: Key) -> list[Key]:
    node: Any = document.value
    for part in path:
        node = node[part]
    return [(*path, name) for name in node]


def _comma_after(document: Document, start: int, end: int) -> int | None:
    """Return the offset of the first comma between two offsets, ignoring comments, or None."""
    at = start
    while at < end:
        if comment := document.comments.get(at):
            at = comment
        elif document.text[at] == ",":
            return at
        else:
            at += 1
    return None
