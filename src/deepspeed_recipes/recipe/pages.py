"""Finds and lists the recipes: a page is a file that defines `SIZES`; its functions are its variants.

A page also inherits the variants of `variants.INHERITED` that start from one of its own variants.

All pages are loaded by their path. A page in `recipes/` is named by its family, any other page by its file:
`llama3-8b`, `my/page.py-8b`.
"""

import difflib
import functools
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from . import bounds
from .dimensions import NEEDED, check_sizes, size_of
from .errors import UserError, first_line
from .files import JsonView, text_of
from .project import PAGES
from .recipe import Model, Recipe
from .variants import INHERITED, Inherited, ruled_out

TEMPLATE = "_template"
"""The page to copy. It is not listed, and otherwise a recipe like any other."""


def families() -> list[str]:
    """Return the names of all pages of the project, found by their `SIZES`."""
    return [path.stem for path in sorted(PAGES.glob("*.py")) if _is_family(path.stem)]


@functools.cache
def _is_family(name: str) -> bool:
    path = PAGES / f"{name}.py"
    return name.isidentifier() and name[0].islower() and path.is_file() and _defines_sizes(path)


def _defines_sizes(path: Path) -> bool:
    # Read as text: plain_loop.py is in the same folder and imports torch, and a user's file may not be a page.
    return re.search(r"^SIZES\b", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE) is not None


@functools.cache
def page(family: str) -> ModuleType:
    """Load one page of the project."""
    return _load(PAGES / f"{family}.py", family)


def _load(path: Path, family: str) -> ModuleType:
    """Load and check a page; a page outside the project may import the modules next to it."""
    if path.parent != PAGES and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a file next to it must not hide an installed package
    # Not in sys.modules: pages of two folders may have the same name.
    found = importlib.util.spec_from_file_location(family, path)
    assert found is not None and found.loader is not None, path
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ImportError) and "relative import" in str(error):
            raise UserError(
                f"{_line_of(path, error)}: this page imports from the package's old location in recipes/.\n"
                "Write `from deepspeed_recipes.recipe import ...` instead of `from .spec...`, as recipes/_template.py "
                "does."
            ) from error
        raise UserError(_broken(path, error)) from error
    _check(module, path)
    return module


def _check(module: ModuleType, path: Path) -> None:
    """Refuse tables of a page that cannot be used: its sizes, what it leaves out, and its licences."""
    sizes = module.SIZES
    if not isinstance(sizes, dict) or not sizes or not _own(module):
        raise UserError(f"{path}: a page needs at least one size in SIZES, and one function that returns a Recipe.")
    for size, model in sizes.items():
        where = f"{path}: SIZES[{size!r}]"
        if not isinstance(size, str) or not re.fullmatch(r"[\w.-]+", size):
            raise UserError(f"{where}: a size is named by a text of letters, digits, dots, dashes and underscores.")
        if not isinstance(model, Model):
            raise UserError(f"{where} has to be a Model, not {type(model).__name__}.")
        bounds.check(model, f"{where}.")
        if model.config:
            _check_config(model.config, f"{where}.config")
    without, licence = getattr(module, "WITHOUT", {}), getattr(module, "LICENCE", None) or {}
    for table, stated, known, usual in (
        ("WITHOUT", without, INHERITED, {"qlora": "the reason"}),
        ("LICENCE", {} if isinstance(licence, str) else licence, sizes, dict.fromkeys(sizes, "MIT")),
    ):
        if not isinstance(stated, Mapping) or not all(isinstance(one, str) for one in stated.values()):
            raise UserError(f"{path}: {table}={bounds.shown(repr(stated))}: must be a dict such as {usual}.")
        if wrong := [name for name in stated if name not in known]:
            raise UserError(f"{path}: {table}: {_unknown('name', str(wrong[0]), list(known))}")


def _check_config(config: JsonView, where: str) -> None:
    """Refuse dimensions that are missing, for which transformers would take another model's, or impossible."""
    text = text_of(config)
    if not isinstance(config.get("model_type"), str) or not isinstance(text, Mapping):
        raise UserError(f"{where}: needs the model_type and the dimensions, as in the model's config.json.")
    check_sizes(text, where)
    if missing := [key for key in NEEDED if size_of(text, key) is None]:
        raise UserError(f"{where}: has no {missing[0]}; copy it from the model's config.json.")


def split(recipe: str) -> tuple[str, str]:
    """Return the page's name and the size, or `""` without a size: `llama3-8b`, `Qwen2.5-VL-7B`, `my/page.py-8b`.

    A size may contain dashes (`30b-a3b`), a family never does, and a file ends in `.py`.
    """
    outside = re.fullmatch(r"(.+\.py)(?:-([^/]+))?", recipe)
    if outside:
        return outside[1], outside[2] or ""
    if "/" not in recipe:
        words = recipe.lower().split("-")
        for count in range(len(words), 1, -1):
            if _is_family(name := "_".join(words[:count]).replace(".", "_")):
                return name, "-".join(words[count:])
    family, _, size = recipe.partition("-") if "/" in recipe else recipe.lower().partition("-")
    return family.replace(".", "_"), size


def known_page(name: str) -> ModuleType:
    """Import the page that the user has named, by its family or its file."""
    if not name.endswith(".py"):
        if not _is_page(name):
            raise UserError(_unknown("recipe", name, families()))
        return page(name)
    path = Path(name).expanduser().resolve()
    if path.parent == PAGES and _is_page(path.stem):
        return page(path.stem)
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    if not _defines_sizes(path):
        raise UserError(f"{path}: not a recipe page, since it defines no SIZES; start from a copy of _template.py.")
    family = re.sub(r"\W+", "_", path.stem).strip("_") or "page"  # names the run's folder: no dash, no blank
    return _load(path, family)


def _is_page(name: str) -> bool:
    """Return True if a page of the project has this name. Reads one file, whereas `families` reads all."""
    return name == TEMPLATE or _is_family(name)


def _broken(path: Path, error: BaseException) -> str:
    """Return the line at which a page failed, and the error."""
    what = first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, SystemExit):
        what = f"sys.exit({error.code!r}): a page may not end the command"
    return f"{_line_of(path, error)}: {what}"


def _line_of(path: Path, error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else lines[-1:] and lines[-1]
    return f"{path}{f':{line}' if line else ''}"


def family_of(module: ModuleType) -> str:
    """Return the family's name: the page's own, in letters, digits and underscores."""
    return module.__name__


def _is_outside(module: ModuleType) -> bool:
    return Path(str(module.__file__)).parent != PAGES


def name(module: ModuleType) -> str:
    """Return a page's name as typed, without a size."""
    return str(module.__file__) if _is_outside(module) else family_of(module)


def page_of(recipe: Recipe) -> ModuleType:
    """Import a recipe's page."""
    return known_page(recipe.page or recipe.family)


def typed(recipe: Recipe) -> str:
    """Return a recipe's name as typed for the launcher, without its variant."""
    return f"{recipe.page or recipe.family}-{recipe.size}"


def variants(module: ModuleType) -> list[str]:
    """Return the names of a page's variants: its own functions in the page's order, then those that it inherits."""
    own = _own(module)
    missing = without(module)
    inherited = [
        name for name, one in INHERITED.items() if name not in own and name not in missing and one.start in own
    ]
    return [*own, *inherited]


def _own(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def without(module: ModuleType) -> dict[str, str]:
    """Return the variants that a page does not inherit, each with the reason: by its `WITHOUT` or its models."""
    return ruled_out(module.SIZES) | getattr(module, "WITHOUT", {})


def variant(module: ModuleType, name: str) -> Callable[[str], Recipe] | Inherited:
    """Return a variant of a page: the page's own function, or the inherited variant."""
    return getattr(module, name) if name in _own(module) else INHERITED[name]


def licence(module: ModuleType, size: str) -> str | None:
    """Return the licence of a size's weights from the page's `LICENCE`, one for all sizes or one per size, or None."""
    stated = getattr(module, "LICENCE", None)
    return stated.get(size) if isinstance(stated, dict) else stated


@functools.cache
def build(module: ModuleType, size: str, variant: str) -> Recipe:
    """Return one recipe of a page, with its identity filled in; an error is reported with its line."""
    outside = _is_outside(module)
    try:
        recipe = _unnamed(module, size, variant)
        if not isinstance(recipe, Recipe):
            raise TypeError(f"a variant returns a Recipe, not {type(recipe).__name__}")
        file = str(module.__file__) if outside else ""
        return replace(recipe, family=family_of(module), size=size, variant=variant, page=file)
    except (Exception, SystemExit) as error:
        if not outside and isinstance(error, UserError):
            raise
        path = Path(str(module.__file__))
        raise UserError(f"{_broken(path, error)} (in {variant}({size!r}))") from error


def _unnamed(module: ModuleType, size: str, name: str) -> Recipe:
    """Return one recipe of a page, from its own function or an inherited variant, without its identity."""
    found = variant(module, name)
    return found.change(_unnamed(module, size, found.start)) if isinstance(found, Inherited) else found(size)


def find(recipe: str, variant: str) -> Recipe:
    """Return the recipe for `FAMILY[-SIZE]` or `PATH/TO/page.py[-SIZE]` and a variant.

    The size may be left out if the page has only one.
    """
    name, size = split(recipe)
    if not (name.endswith(".py") or _is_page(name)) and ("/" in recipe or Path(recipe, "config.json").is_file()):
        raise UserError(
            f"unknown recipe {recipe!r}: write auto before a Hub id or a model's folder, to use the recipe of the "
            f"nearest model: ds-recipes launch auto {recipe} {variant}"
        )
    module = known_page(name)
    if not size:
        if len(module.SIZES) > 1:
            raise UserError(f"{name} comes in several sizes; choose one of: {_sizes(module)}.")
        size = next(iter(module.SIZES))
    if size not in module.SIZES:
        elsewhere = [f"{other}-{size}" for other in families() if size in page(other).SIZES]
        hint = f"\nRecipes with this size: {', '.join(elsewhere)}." if elsewhere else ""
        raise UserError(_unknown(f"size of {name}", size, list(module.SIZES)) + hint)
    if variant not in variants(module):
        reason = without(module).get("qlora" if variant.startswith("qlora") else variant)
        if reason:
            raise UserError(f"{name} has no {variant}: {reason}.")
        raise UserError(_unknown(f"variant of {name}", variant, variants(module)))
    return build(module, size, variant)


def is_own_model(recipe: Recipe) -> bool:
    """Return True if a recipe's model is its page's own; otherwise the model borrows the recipe."""
    return find(typed(recipe), recipe.variant).model.path == recipe.model.path


def choices(recipe: str) -> str:
    """Return the variants and sizes of the page that the user has named, as a sentence."""
    module = known_page(split(recipe)[0])
    return f"{recipe}: name a variant too: {', '.join(variants(module))}. Sizes: {_sizes(module)}."


def recipes(module: ModuleType) -> list[Recipe]:
    """Return every variant of each size of a page."""
    return [build(module, size, variant) for size in module.SIZES for variant in variants(module)]


def listing() -> list[Recipe]:
    """Return every recipe of the project, in the order of the pages."""
    return [recipe for module in map(page, families()) for recipe in recipes(module)]


def about(thing: object) -> str:
    """Return the first line of a page's or a variant's docstring, without the page's own name."""
    line = (inspect.getdoc(thing.change if isinstance(thing, Inherited) else thing) or "").partition("\n")[0]
    return line.removeprefix(f"{Path(str(thing.__file__)).stem}: ") if isinstance(thing, ModuleType) else line


def human(parameters: int) -> str:
    """Return a parameter count for display: `8.03B`, `124.44M`."""
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"


def _sizes(module: ModuleType) -> str:
    return ", ".join(f"{name(module)}-{size}" for size in module.SIZES)


def _unknown(what: str, name: str, known: list[str]) -> str:
    close = [difflib.get_close_matches(name.lower(), known, n=1, cutoff=cutoff) for cutoff in (0.8, 0.5)]
    begun = [other for other in known if name.lower() in other.split("_")]  # dpo: dpo_lora or dpo_full, not dora
    near = close[0] or begun or close[1]
    hint = f"did you mean {' or '.join(map(repr, near))}? There" if near else "there"
    return f"unknown {what} {name!r}; {hint} are: {', '.join(known)}. (ds-recipes launch --list)"
