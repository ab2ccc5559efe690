"""Checks a page: placeholders, first lines, the number of parameters against the dimensions, and the commands."""

import inspect
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from ...planning.model_profile.lookup import profile_of
from ...recipe import overrides, pages
from ...recipe.errors import UserError

LAUNCH = re.compile(r"^ *(?:python scripts/launch\.py|[\w-]+ launch) (.+)$", re.MULTILINE)
"""A command in a docstring, as typed in a checkout or with an installed package."""
PLACEHOLDER = "TODO"
"""Marks the places of the template that the author has to fill in."""
TOLERANCE = 0.01
"""Relative tolerance between the published number of parameters and the number from the dimensions."""


def check_all(names: Sequence[str]) -> bool:
    """Print the problems of the pages `FAMILY` or `PATH/TO/page.py`, and return whether there are any.

    Raises:
        UserError: there is no such page.
    """
    found = [f"{name}: {problem}" for name in names for problem in problems(pages.known_page(name))]
    print(*found or [f"{', '.join(names)}: no problems"], sep="\n")
    return bool(found)


def problems(module: ModuleType) -> list[str]:
    """Return the problems of a page, one sentence each."""
    checks = (_placeholders, _first_lines, _parameters, _commands)
    return [problem for check in checks for problem in check(module)]


def _placeholders(module: ModuleType) -> Iterator[str]:
    lines = inspect.getsource(module).splitlines()
    for number, line in enumerate(lines, start=1):
        if PLACEHOLDER in line:
            yield f"line {number}: replace the {PLACEHOLDER}: {line.strip()}"


def _first_lines(module: ModuleType) -> Iterator[str]:
    name = Path(str(module.__file__)).stem
    if not (module.__doc__ or "").startswith(f"{name}: "):
        yield f"the docstring has to begin with the page's name, `{name}: `, and describe the family"
    things = {pages.family_of(module): module} | {one: pages.variant(module, one) for one in pages.variants(module)}
    for one, thing in things.items():
        line = pages.about(thing)
        if len(line) <= 20 or not line.endswith((".", ".)")):
            yield f"{one}: the first line of the docstring, which --list prints, is not a sentence: {line!r}"


def _parameters(module: ModuleType) -> Iterator[str]:
    for size, model in module.SIZES.items():
        counted = profile_of(model.config).parameters
        if abs(counted - model.parameters) > TOLERANCE * model.parameters:
            yield f"{size}: parameters={model.parameters:,}, but its dimensions give {counted:,}"


def _commands(module: ModuleType) -> Iterator[str]:
    """Check the run line and the change line: each names this page, and the launcher accepts it."""
    doc = module.__doc__ or ""
    commands = [shlex.split(line, comments=True) for line in LAUNCH.findall(doc)]
    if len(commands) < 2 or not any("=" in word for word in commands[1]):
        yield "the docstring needs a command that runs the page, and a command that sets a key with key=value"
    for recipe, variant, *changes in commands:
        page, size = pages.split(recipe)
        size = size or next(iter(module.SIZES))
        if Path(page).stem != Path(str(module.__file__)).stem:
            yield f"the command for {recipe} names another page"
            continue
        if size not in module.SIZES or variant not in pages.variants(module):
            yield f"the command for {recipe} {variant}: there is no such size or variant"
            continue
        try:
            overrides.apply(pages.build(module, size, variant), [change for change in changes if "=" in change])
        except UserError as error:
            yield f"the command for {recipe} {variant}: {error}"
