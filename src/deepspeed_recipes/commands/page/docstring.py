"""Checks a page's docstring: its first line, its tables against the dimensions and the recipes, its commands."""

import inspect
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from ...planning.model_profile.lookup import profile_of
from ...recipe import deepspeed_file, overrides, pages
from ...recipe.errors import UserError
from ...recipe.project import CONFIGS, PACKAGE
from ...recipe.recipe import Model

LAUNCH = re.compile(r"^ *(?:python scripts/launch\.py|[\w-]+ launch) (.+)$", re.MULTILINE)
"""A command of a docstring: of a checkout, or of an installed package."""
PLACEHOLDER = "TODO"
"""What the template has wherever the author has to write something."""
SIZES = ["size", "layers", "hidden", "heads", "parameters", "context", "licence", "weights"]
VARIANTS = ["variant", "method", "trains", "DeepSpeed"]
"""The columns of the two tables of a docstring; a page with measurements has one more."""
METHODS = {
    "pretrain": "raw text",
    "reward": "reward",
    "simpo": "SimPO",
    "classify": "classes",
    "embed": "pairs",
    "distill": "distill",
}
"""How the table names a method that is not an acronym."""
TOLERANCE = 0.01
"""Tolerance between the published number of parameters and that which the dimensions give."""


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
    checks = (_placeholders, _first_lines, _sizes, _variants, _commands)
    return [problem for check in checks for problem in check(module)]


def _placeholders(module: ModuleType) -> Iterator[str]:
    lines = inspect.getsource(module).splitlines()
    for number, line in enumerate(lines, start=1):
        if PLACEHOLDER in line:
            yield f"line {number}: replace the {PLACEHOLDER}: {line.strip()}"


def _first_lines(module: ModuleType) -> Iterator[str]:
    name = Path(str(module.__file__)).stem
    if not (module.__doc__ or "").startswith(f"{name}: "):
        yield f"the docstring has to begin with the page's name, `{name}: `, and say what the family is"
    for thing in (module, *(getattr(module, variant) for variant in pages.variants(module))):
        line = pages.about(thing)
        if len(line) <= 20 or not line.endswith((".", ".)")):
            yield f"{thing.__name__}: the first line of the docstring, which --list shows, is not a sentence: {line!r}"


def _table(module: ModuleType, columns: list[str]) -> dict[str, list[str]]:
    """Return the rows of the docstring's table whose header begins with `columns`, by their first cells."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in (module.__doc__ or "").splitlines()]
    start = next((index for index, cells in enumerate(lines) if cells[: len(columns)] == columns), len(lines))
    stop = next((index for index in range(start, len(lines)) if lines[index] == [""]), len(lines))
    return {cells[0]: cells for cells in lines[start + 1 : stop]}


def _sizes(module: ModuleType) -> Iterator[str]:
    rows = _table(module, SIZES)
    yield from _missing("sizes", SIZES, list(module.SIZES), rows)
    for size, model in module.SIZES.items():
        if size not in rows:
            continue
        said = dict(zip(SIZES, rows[size], strict=False))
        said["weights"] = said.get("weights", "").partition(" ")[0]
        for column, right in _facts(model).items():
            if said.get(column) != right:
                yield f"{size}: the table says {column} {said.get(column)}, but it is {right}"
        counted = profile_of(model.config).parameters
        if abs(counted - model.parameters) > TOLERANCE * model.parameters:
            yield f"{size}: parameters={model.parameters:,}, but its dimensions give {counted:,}"


def _facts(model: Model) -> dict[str, str]:
    """Return the right values of the table for a size, by column."""
    profile = profile_of(model.config)
    context = (model.config.get("text_config") or model.config).get("max_position_embeddings")
    path = Path(model.path)
    weights = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else model.path
    return {
        "layers": str(len(profile.layers)),
        "hidden": str(profile.hidden_size),
        "heads": str(profile.attention_heads),
        "parameters": pages.human(model.parameters),
        "context": f"{context:,}" if context else "-",
        "weights": weights,
    }


def _variants(module: ModuleType) -> Iterator[str]:
    rows = _table(module, VARIANTS)
    yield from _missing("variants", VARIANTS, pages.variants(module), rows)
    for recipe in pages.recipes(module):
        cells = rows.get(recipe.variant, [])
        if len(cells) < len(VARIANTS):
            continue
        _, method, trains, deepspeed = cells[: len(VARIANTS)]
        stage = deepspeed_file.read(CONFIGS / recipe.deepspeed).stage
        if _stage(deepspeed, recipe.size) != stage:
            yield f"{recipe.variant}: the table says {deepspeed!r}, but {recipe.size} has ZeRO-{stage}"
        if ("adapters" in trains) != (recipe.lora is not None):
            yield f"{recipe.variant}: the table says that it trains {trains!r}, but its recipe does not"
        if method != METHODS.get(recipe.method, recipe.method.upper()):
            yield f"{recipe.variant}: the table says {method!r}, but its method is {recipe.method}"


def _stage(cell: str, size: str) -> int | None:
    """Return the ZeRO stage that a cell like `ZeRO-2 (1b, 3b), ZeRO-3` gives a size."""
    parts = [(int(stage), sizes.split(", ")) for stage, sizes in re.findall(r"ZeRO-(\d)(?: \(([^)]*)\))?", cell)]
    named = [stage for stage, sizes in parts if size in sizes]
    rest = [stage for stage, sizes in parts if sizes == [""]]
    return next(iter([*named, *rest]), None)


def _missing(what: str, columns: list[str], known: list[str], rows: dict[str, list[str]]) -> Iterator[str]:
    if list(rows) != known:
        head = "  ".join(columns)
        yield f"the table of {what} ({head}) has {', '.join(rows) or 'no rows'}; the page has {', '.join(known)}"


def _commands(module: ModuleType) -> Iterator[str]:
    """Check the run line and the change line: each names this page, and the launcher accepts it."""
    doc = module.__doc__ or ""
    commands = [shlex.split(line, comments=True) for line in LAUNCH.findall(doc)]
    if len(commands) < 2 or not any("=" in word for word in commands[1]):
        yield "the docstring needs a command that runs the page, and one that changes a setting with key=value"
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
