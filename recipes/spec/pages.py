"""Find and list the recipes: a page is a module in `recipes/` that defines `SIZES`, its functions are the variants."""

import difflib
import importlib
import inspect
from pathlib import Path
from types import ModuleType

from recipes.spec.errors import UserError
from recipes.spec.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "_template"
"""The page to copy: not listed, and a recipe like any other."""


def families() -> list[str]:
    """Return the names of all pages, found by their `SIZES`."""
    modules = sorted(path.stem for path in (ROOT / "recipes").glob("[a-z]*.py"))
    return [name for name in modules if _defines_sizes(name)]


def _defines_sizes(name: str) -> bool:
    # Read as text: plain_loop.py stands beside the pages and imports torch.
    return "\nSIZES = " in (ROOT / "recipes" / f"{name}.py").read_text(encoding="utf-8")


def page(family: str) -> ModuleType:
    """Import one page."""
    return importlib.import_module(f"recipes.{family}")


def known_page(family: str) -> ModuleType:
    """Import the page that a person has named.

    Raises:
        UserError: there is none, with the nearest that there is.
    """
    known = families()
    if family not in (*known, TEMPLATE):
        raise UserError(_unknown("recipe", family, known))
    return page(family)


def variants(module: ModuleType) -> list[str]:
    """Return the names of a page's variants in the order in which they stand."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def find(recipe: str, variant: str) -> Recipe:
    """Return the recipe for `FAMILY[-SIZE]` and a variant; the size may be left out where there is one.

    Raises:
        UserError: unknown family, size or variant, with the nearest right one.
    """
    # A size may hold dashes (`30b-a3b`), a family never does.
    if "/" in recipe:
        raise UserError(
            f"unknown recipe {recipe!r}: a Hub id or a path is given as launch.py's model.path={recipe}, with the "
            "recipe of a model like it (launch.py --list)."
        )
    family, _, size = recipe.partition("-")
    module = known_page(family)
    if not size:
        if len(module.SIZES) > 1:
            raise UserError(f"{family} comes in several sizes; choose one of: {_names(family, module)}.")
        size = next(iter(module.SIZES))
    if size not in module.SIZES:
        raise UserError(_unknown(f"size of {family}", size, list(module.SIZES)))
    if variant not in variants(module):
        raise UserError(_unknown(f"variant of {family}", variant, variants(module)))
    return getattr(module, variant)(size)


def choices(recipe: str) -> str:
    """Return what there is to choose from of the family that a person has named, as a sentence.

    Raises:
        UserError: there is no such family.
    """
    family = recipe.partition("-")[0]
    module = known_page(family)
    return f"{recipe}: name a variant too: {', '.join(variants(module))}. Sizes: {_names(family, module)}."


def listing() -> list[Recipe]:
    """Return every recipe there is: each variant of each size of each family, in the order of the pages."""
    return [
        getattr(module, variant)(size)
        for module in map(page, families())
        for size in module.SIZES
        for variant in variants(module)
    ]


def about(thing: object) -> str:
    """Return the first line of a page's or a variant's docstring, without the page's own name."""
    line = (inspect.getdoc(thing) or "").partition("\n")[0]
    return line.removeprefix(f"{getattr(thing, '__name__', '').rpartition('.')[2]}: ")


def human(parameters: int) -> str:
    """Return a parameter count as the pages and the index show it: `8.03B`, `124.44M`."""
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"


def _names(family: str, module: ModuleType) -> str:
    return ", ".join(f"{family}-{size}" for size in module.SIZES)


def _unknown(what: str, name: str, known: list[str]) -> str:
    close = [difflib.get_close_matches(name.lower(), known, n=1, cutoff=cutoff) for cutoff in (0.8, 0.5)]
    near = close[0] or [other for other in known if name.lower() in other.split("_")] or close[1]  # dpo_lora, not dora
    hint = f"did you mean {near[0]!r}? There" if near else "there"
    return f"unknown {what} {name!r}; {hint} are: {', '.join(known)}. (launch.py --list)"
