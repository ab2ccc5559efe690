"""The index of recipes, generated from the pages: `python -m recipes.spec.index` writes `recipes/README.md`."""

from recipes.spec import pages

PATH = pages.ROOT / "recipes" / "README.md"

HEAD = """# Recipes

One page per model family; every size and variant is one command. This table is generated from the pages
(`python -m recipes.spec.index`); `python scripts/launch.py --list` says when to choose which variant.

    python scripts/launch.py FAMILY-SIZE VARIANT                       # fine-tune
    python scripts/launch.py FAMILY-SIZE VARIANT --draft max_steps=5   # a shrunken model: no download, no GPU
    python scripts/launch.py FAMILY-SIZE VARIANT data.path=FILE        # on your data

Every variant has been trained for three steps, resumed and exported as a draft on two CPU ranks (`make test-all`).
Smallest hardware is the planner's answer for `lora`, or `full` where there is none; a dash until there is a planner.

| family | sizes | variants | smallest hardware | command |
|---|---|---|---|---|
"""


def main() -> None:
    """Write the index."""
    PATH.write_text(render(), encoding="utf-8")


def render() -> str:
    """Return the index as Markdown."""
    return HEAD + "".join(_row(family) for family in pages.families()) + TAIL


def _row(family: str) -> str:
    module = pages.page(family)
    sizes = ", ".join(f"{size} ({pages.human(model.parameters)})" for size, model in module.SIZES.items())
    variants = pages.variants(module)
    first = "lora" if "lora" in variants else variants[0]
    command = f"`python scripts/launch.py {family}-{next(iter(module.SIZES))} {first}`"
    return f"| [{family}]({family}.py) | {sizes} | {', '.join(variants)} | - | {command} |\n"


TAIL = """
Beside the pages: [`_template.py`](_template.py), to copy for a family of your own, and
[`plain_loop.py`](plain_loop.py), the whole thing flat in one file without this project.
"""

if __name__ == "__main__":
    main()
