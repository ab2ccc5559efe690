"""Rules about syntax: files that are not strict JSON but can still be understood."""

from collections.abc import Callable, Iterator

from ..rule import FAILS_LATER, REJECTED, Config, Facts, Hit, rule


def _problems(kind: str) -> Callable[[Config, Facts], Iterator[Hit]]:
    def check(config: Config, facts: Facts) -> Iterator[Hit]:
        for problem in config.problems:
            if problem.kind == kind:
                # DeepSpeed itself reads hjson, which allows these.
                mild = facts.trainer == "plain" and kind in ("comment", "trailing-comma", "missing-comma")
                yield Hit(problem.key, problem.value, problem.what, severity="warning" if mild else None)

    return check


_duplicate_key = rule("duplicate-key", "error", REJECTED)(_problems("duplicate"))
_comment = rule("comment", "error", FAILS_LATER)(_problems("comment"))
_trailing_comma = rule("trailing-comma", "error", FAILS_LATER)(_problems("trailing-comma"))
_missing_comma = rule("missing-comma", "error", FAILS_LATER)(_problems("missing-comma"))
_not_a_number = rule("not-a-number", "error", FAILS_LATER)(_problems("not-a-number"))
_python_word = rule("python-word", "error", FAILS_LATER)(_problems("python-word"))
