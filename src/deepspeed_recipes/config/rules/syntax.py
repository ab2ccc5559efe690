"""Rules about syntax: files that are not strict JSON but can still be understood."""

from collections.abc import Callable, Iterator

from ..rule import FAILS_LATER, REJECTED, Config, Facts, Hit, Rule


def _problems(kind: str) -> Callable[[Config, Facts], Iterator[Hit]]:
    def check(config: Config, facts: Facts) -> Iterator[Hit]:
        for problem in config.problems:
            if problem.kind == kind:
                # DeepSpeed itself reads hjson, which allows these.
                mild = facts.trainer == "plain" and kind in ("comment", "trailing-comma", "missing-comma")
                yield Hit(problem.key, problem.value, problem.what, severity="warning" if mild else None)

    return check


RULES = (
    Rule(
        "duplicate-key",
        "error",
        REJECTED,
        "\"Duplicate keys in DeepSpeed config: ['...']\"; with the Trainer no message, and the last one counts",
        "A key appears twice in one object.",
        "Remove one of them.",
        _problems("duplicate"),
    ),
    Rule(
        "comment",
        "error",
        FAILS_LATER,
        '"json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes"',
        "The Trainer and accelerate read strict JSON, which has no comments.",
        "Remove the comments, or move them to another file (`--fix` leaves them).",
        _problems("comment"),
    ),
    Rule(
        "trailing-comma",
        "error",
        FAILS_LATER,
        '"json.decoder.JSONDecodeError: Illegal trailing comma before end of object"',
        "The Trainer and accelerate read strict JSON.",
        "Remove the comma (`--fix` does).",
        _problems("trailing-comma"),
    ),
    Rule(
        "missing-comma",
        "error",
        FAILS_LATER,
        "\"json.decoder.JSONDecodeError: Expecting ',' delimiter\"",
        "The Trainer and accelerate read strict JSON; for DeepSpeed itself the end of a line is as good as a comma.",
        "Add the comma (`--fix` does).",
        _problems("missing-comma"),
    ),
    Rule(
        "not-a-number",
        "error",
        FAILS_LATER,
        "NaN or Infinity in the file; readers treat it differently",
        "JSON has only finite numbers.",
        'Write a finite number (2147483647 for "never").',
        _problems("not-a-number"),
    ),
    Rule(
        "python-word",
        "error",
        FAILS_LATER,
        '"json.decoder.JSONDecodeError: Expecting value"',
        "True, False and None are Python, not JSON.",
        "Write true, false, null (`--fix` does).",
        _problems("python-word"),
    ),
)
