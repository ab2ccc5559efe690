"""Spots where the file is no strict JSON, though it can be understood."""

from collections.abc import Callable, Iterator

from recipes.zero_config.rule import FAILS_LATER, REJECTED, Config, Facts, Hit, Rule


def _problems(kind: str) -> Callable[[Config, Facts], Iterator[Hit]]:
    def check(config: Config, facts: Facts) -> Iterator[Hit]:
        for problem in config.problems:
            if problem.kind == kind:
                # DeepSpeed itself reads hjson, where these are no mistakes.
                mild = facts.trainer == "plain" and kind in ("comment", "trailing-comma", "missing-comma")
                yield Hit(problem.key, problem.value, problem.what, severity="warning" if mild else None)

    return check


RULES = (
    Rule(
        "duplicate-key",
        "error",
        REJECTED,
        "\"Duplicate keys in DeepSpeed config: ['...']\"; with the Trainer no message, the last one counts",
        "A key stands twice in one object.",
        "Remove one of the two.",
        _problems("duplicate"),
    ),
    Rule(
        "comment",
        "error",
        FAILS_LATER,
        '"json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes"',
        "The Trainer and accelerate read strict JSON, which has no comments.",
        "Remove the comments (`--fix` does), or keep them in a file beside it.",
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
        "The Trainer and accelerate read strict JSON. DeepSpeed itself takes the end of a line for a comma.",
        "Add the comma (`--fix` does).",
        _problems("missing-comma"),
    ),
    Rule(
        "not-a-number",
        "error",
        FAILS_LATER,
        "NaN or Infinity in the file; readers disagree about it",
        "JSON has finite numbers only.",
        'Write a finite number ("never" is 2147483647).',
        _problems("not-a-number"),
    ),
    Rule(
        "python-word",
        "error",
        FAILS_LATER,
        '"json.decoder.JSONDecodeError: Expecting value"',
        "True, False and None are Python.",
        "Write true, false, null (`--fix` does).",
        _problems("python-word"),
    ),
)
