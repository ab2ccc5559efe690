"""List the recipes, their sizes and their variants, with a line on when to choose each.

    ds-recipes list              everything, to read
    ds-recipes list llama3       one family: its sizes, its variants, and the hardware that each is predicted to need
    ds-recipes list --json       every recipe as JSON: parameters, DeepSpeed file, layout

`ds-recipes launch` takes a name from the list: `ds-recipes launch llama3-8b lora`; the size may be left out if there is
only one.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..recipe import pages
from ..recipe.recipe import Recipe
from .main import Parser


def main(words: Sequence[str] | None = None) -> int:
    """Print the list.

    Raises:
        UserError: there is no such family.
    """
    parser = Parser("list", __doc__)
    parser.add_argument("family", nargs="?", metavar="FAMILY", help="e.g. llama3, or PATH/TO/page.py; default: all")
    parser.add_argument("--json", action="store_true", help="print every recipe as JSON")
    options = parser.parse_args(words)
    print(listing(options.json, options.family))
    return 0


def listing(as_json: bool, only: str | None = None) -> str:
    """Return every family with its sizes and variants, or the tables of one; as JSON, every recipe with its settings.

    Args:
        as_json: rather than text.
        only: the page to list, by its family or its file; None: all of the project's.
    """
    module = pages.known_page(pages.split(only)[0]) if only else None
    modules = [module] if module else list(map(pages.page, pages.families()))
    if as_json:
        return json.dumps([entry(recipe) for module in modules for recipe in pages.recipes(module)], indent=2)
    if module:
        from . import family  # the planner takes longer to import than everything takes to list

        return family.text(module)
    lines = []
    for module in modules:
        lines += [f"{pages.family_of(module)}: {pages.about(module)}", f"  {'sizes':<13} {', '.join(module.SIZES)}"]
        lines += [f"  {name:<13} {pages.about(pages.variant(module, name))}" for name in pages.variants(module)]
    return "\n".join(lines)


def entry(recipe: Recipe) -> dict[str, Any]:
    """Return one recipe of the JSON list."""
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
