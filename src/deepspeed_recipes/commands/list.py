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

from ..recipe import pages
from ..recipe.files import Json
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
    """Return every family with its sizes and variants, or one family's tables, or every recipe as JSON.

    Args:
        as_json: return JSON with every recipe's settings instead of text.
        only: the page to list, by its family or its file, or None for all of the project's pages.
    """
    module = pages.known_page(pages.split(only)[0]) if only else None
    modules = [module] if module else list(map(pages.page, pages.families()))
    if as_json:
        return json.dumps([entry(recipe) for module in modules for recipe in pages.recipes(module)], indent=2)
    if module:
        from . import family  # importing the planner takes longer than listing everything

        return family.text(module)
    lines = []
    for module in modules:
        lines += [f"{pages.family_of(module)}: {pages.about(module)}", f"  {'sizes':<13} {', '.join(module.SIZES)}"]
        lines += [f"  {name:<13} {pages.about(pages.variant(module, name))}" for name in pages.variants(module)]
    return "\n".join(lines)


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
