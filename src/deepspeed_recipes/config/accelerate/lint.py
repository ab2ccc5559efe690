"""Reads and lints accelerate's YAML, and finds the DeepSpeed file that it names."""

import contextlib
from pathlib import Path
from typing import Any

from ..lint import place
from ..read import MAX_BYTES, Document, Key, Problem, Unreadable
from ..read import read as read_json
from ..rule import Config, Finding, Hit, dotted
from . import keys, rules

SUFFIXES = (".yaml", ".yml")


def read(path: Path) -> Document:
    """Parse the file at `path`, with the line of each key; raise `Unreadable` unless it is YAML and a mapping.

    Of two equal keys the last counts, as in accelerate.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        if len(text) > MAX_BYTES:
            raise Unreadable(f"larger than {MAX_BYTES // 2**20} MiB, which no such file is")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode):
            raise Unreadable("expected keys with values, one `key: value` per line")
        places: dict[Key, tuple[int, int]] = {}
        problems: list[Problem] = []
        _walk(root, (), places, problems, set())
        return Document(yaml.safe_load(text), places, tuple(problems), text, {}, {})
    except OSError as error:
        raise Unreadable(error.strerror or str(error), file=str(path)) from None
    except UnicodeDecodeError:
        raise Unreadable("not UTF-8 text", file=str(path)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise Unreadable(f"not YAML: {getattr(error, 'problem', None) or error}", line, column, str(path)) from None
    except Unreadable as error:
        raise Unreadable(error.what, error.line, error.column, str(path)) from None


def _walk(node: Any, path: Key, places: dict[Key, tuple[int, int]], problems: list[Problem], open_: set[int]) -> None:
    """Record the position of each key in `places`, and duplicate keys in `problems`."""
    import yaml

    if id(node) in open_:
        raise Unreadable("an alias (*) contains itself", node.start_mark.line + 1, node.start_mark.column + 1)
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        key, mark = (*path, str(name.value)), name.start_mark
        if key in places:
            what = f"`{name.value}` appears twice (first on line {places[key][0]}); accelerate uses the last value"
            problems.append(Problem("duplicate", key, mark.line + 1, mark.column + 1, None, what, mark.index))
        places[key] = (mark.line + 1, mark.column + 1)
        _walk(value, key, places, problems, open_ | {id(node)})


def judge(document: Document, path: Path) -> tuple[list[Finding], Path | None]:
    """Return the findings, errors first, and the DeepSpeed file that the YAML names, or None if it does not exist."""
    config = Config.of(document)
    file = rules.referenced(config, path.parent)
    found = [
        Finding("accelerate-duplicate", "error", dotted(one.key), one.line, one.column, None, one.what, "remove one")
        for one in document.problems
    ]
    hits: list[tuple[str, Hit]] = []
    if rules.sagemaker(config):  # has other keys, for which it has its own rule
        hits = [("accelerate-environment", hit) for hit in rules.environment(config, path.parent)]
    else:
        hits = [(name, hit) for name, rule in rules.RULES.items() for hit in rule(config, path.parent)]
        with contextlib.suppress(Unreadable):  # the caller checks the JSON as a file of its own
            json = Config.of(read_json(file)) if file else None
            if file or not config.has(keys.DEEPSPEED_KEYS, "deepspeed_config_file"):
                hits += [("accelerate-stage", hit) for hit in rules.stage(config, json)]
    for rule, hit in hits:
        line, column = place(config, hit)
        severity = hit.severity or "error"
        found.append(Finding(rule, severity, dotted(hit.path), line, column, hit.value, hit.what, hit.fix))
    return sorted(found, key=lambda finding: (finding.severity != "error", finding.line or 0)), file
