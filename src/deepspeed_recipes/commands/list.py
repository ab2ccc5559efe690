"""List the recipes, their sizes and their variants, with a line on when to choose each.

    ds-recipes list              every family as text
    ds-recipes list llama3       one family: its sizes, its variants, and the predicted hardware for each
    ds-recipes list --json       every recipe as JSON: parameters, DeepSpeed file, layout

`ds-recipes launch` takes a name from the list: `ds-recipes launch llama3-8b lora`; the size may be left out if there is
only one.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from ..recipe import pages
from ..recipe.errors import UserError, first_line
from ..recipe.files import Json, text_of
from ..recipe.project import PACKAGE
from ..recipe.recipe import Model, Recipe
from ..recipe.variants import Inherited
from .main import Parser

SIZES = ("size", "layers", "hidden", "heads", "parameters", "context", "licence", "weights")
VARIANTS = ("variant", "method", "trains", "DeepSpeed file")
METHODS = {
    "pretrain": "raw text",
    "reward": "reward",
    "simpo": "SimPO",
    "classify": "classes",
    "embed": "pairs",
    "distill": "distill",
}
"""Names in the table for methods that are not acronyms."""
NONE = "-"


def main(words: Sequence[str] | None = None) -> int:
    """Print the list."""
    parser = Parser("list", __doc__)
    parser.add_argument("family", nargs="?", metavar="FAMILY", help="e.g. llama3, or PATH/TO/page.py; default: all")
    parser.add_argument("--json", action="store_true", help="print every recipe as JSON")
    options = parser.parse_args(words)
    print(listing(options.json, options.family))
    return 0


def listing(as_json: bool, only: str | None = None) -> str:
    """Return every family with its sizes and variants, the tables of the page `only`, or every recipe as JSON."""
    module = pages.known_page(pages.split(only)[0]) if only else None
    modules = [module] if module else list(map(pages.page, pages.families()))
    if as_json:
        entries: list[Json] = []
        for module in modules:
            recipes, impossible = built(module)
            entries += [entry(recipe) for name in recipes for recipe in recipes[name]]
            entries += [
                {"recipe": f"{pages.name(module)}-{size}", "size": size, "variant": name, "impossible": why}
                for (name, size), why in impossible.items()
            ]
        return json.dumps(entries, indent=2)
    if module:
        return tables(module)
    lines = []
    for module in modules:
        lines += [f"{pages.family_of(module)}: {pages.about(module)}", f"  {'sizes':<13} {', '.join(module.SIZES)}"]
        lines += [f"  {name:<13} {pages.about(pages.variant(module, name))}" for name in pages.variants(module)]
    return "\n".join(lines)


def built(module: ModuleType) -> tuple[dict[str, list[Recipe]], dict[tuple[str, str], str]]:
    """Return a page's recipes by variant; and, by variant and size, why an inherited one is impossible."""
    recipes: dict[str, list[Recipe]] = {}
    impossible = {}
    for name in pages.variants(module):
        recipes[name] = []
        for size in module.SIZES:
            try:
                recipes[name].append(pages.build(module, size, name))
            except UserError as error:
                if not isinstance(pages.variant(module, name), Inherited):
                    raise
                cause = error.__cause__
                impossible[name, size] = first_line(cause if isinstance(cause, Exception) else error)
    return recipes, impossible


def entry(recipe: Recipe) -> Json:
    """Return a recipe's entry in the JSON list."""
    return {
        "recipe": pages.typed(recipe),
        "family": recipe.family,
        "size": recipe.size,
        "variant": recipe.variant,
        "about": pages.about(pages.variant(pages.page_of(recipe), recipe.variant)),
        "parameters": recipe.model.parameters,
        "config": recipe.deepspeed,
        "layout": asdict(recipe.layout),
    }


def tables(module: ModuleType) -> str:
    """Return the description of a family: its first line, and the tables of sizes, variants and hardware."""
    recipes, impossible = built(module)
    recipes = {name: of_sizes for name, of_sizes in recipes.items() if of_sizes}
    about = [(name, pages.about(pages.variant(module, name))) for name in recipes]
    variants = [VARIANTS]
    for name, of_sizes in recipes.items():
        sizes: dict[str, list[str]] = {}
        for recipe in of_sizes:
            sizes.setdefault(recipe.deepspeed, []).append(recipe.size)
        # The sizes are named if they have different files.
        files = [f"{file} ({', '.join(own)})" if len(sizes) > 1 else file for file, own in sizes.items()]
        first = of_sizes[0]
        method = METHODS.get(first.method.name, first.method.name.upper())
        variants.append((name, method, "adapters" if first.lora else "all weights", ", ".join(files)))
    blocks = [
        f"{pages.family_of(module)}: {pages.about(module)}",
        _table([SIZES, *(size_row(module, size) for size in module.SIZES)]),
        _table(variants),
        _table(about),
        _hardware(list(module.SIZES), recipes),
    ]
    if impossible:
        blocks.append(
            _table([(f"{name} of {size}", f"not possible: {why}") for (name, size), why in impossible.items()])
        )
    return "\n\n".join(blocks)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def size_row(module: ModuleType, size: str) -> tuple[str, ...]:
    """Return a size's row of the first table, in the order of `SIZES`."""
    from ..planning.model_profile.lookup import profile_of  # takes longer than listing everything

    model: Model = module.SIZES[size]
    dimensions = (NONE, NONE, NONE)
    try:
        profile = profile_of(model.config)
        dimensions = (str(len(profile.layers)), str(profile.hidden_size), str(profile.attention_heads))
    except UserError:  # the model has to be profiled first, and the training stack is not installed
        pass
    context = text_of(model.config).get("max_position_embeddings")
    path = Path(model.path)
    weights = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else model.path
    counts = (pages.human(model.parameters), f"{context:,}" if context else NONE)
    return (size, *dimensions, *counts, pages.licence(module, size) or NONE, weights)


def _hardware(sizes: Sequence[str], recipes: dict[str, list[Recipe]]) -> str:
    """Return the table of the smallest hardware for each variant and size, with an explanation of its cells."""
    from ..planning.search.extremes import GPU, LARGEST, SINGLE, smallest_unchanged

    def smallest(recipe: Recipe | None) -> str:
        plan = smallest_unchanged(recipe) if recipe else None
        return f"{plan.setup.world_size} x {plan.cluster.gpu.name}" if plan else NONE

    try:
        found = {name: {recipe.size: recipe for recipe in of_sizes} for name, of_sizes in recipes.items()}
        rows = [(name, *(smallest(known.get(size)) for size in sizes)) for name, known in found.items()]
    except UserError as error:
        return f"  No hardware is predicted: {first_line(error)}"
    meaning = (
        f"  Predicted, not measured: the smallest hardware on which each variant fits, one {' or '.join(SINGLE)},\n"
        f"  or several {GPU}; {NONE}: not on {LARGEST:,}. ds-recipes plan shows other GPUs, the memory and the speed.\n"
    )
    return meaning + "\n" + _table([("variant", *sizes), *rows])
