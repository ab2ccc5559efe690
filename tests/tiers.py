"""Which cases of a large matrix `make test` takes; `make test-all` takes them all."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings


def tiered(cases: Iterable[Any], core: Collection[Any] | Callable[[Any], bool]) -> list[Any]:
    """Return cases as pytest parameters, those outside `core` marked `every`; a tuple is one value per name."""
    chosen = core if callable(core) else core.__contains__
    return [
        pytest.param(*(case if type(case) is tuple else (case,)), marks=() if chosen(case) else pytest.mark.every)
        for case in cases
    ]


def examples(count: int) -> int:
    """Return how many random examples a property is tried with: `count` in `make test-all`, else a quarter."""
    return count if settings.get_current_profile_name() == "all" else count // 4
