"""The index of recipes, generated from the pages: `python -m recipes.spec.index` writes `recipes/README.md`.

It also writes what was measured into the pages' tables of variants.
"""

from recipes.spec import measured, pages

PATH = pages.ROOT / "recipes" / "README.md"

HEAD = """# Recipes

One page per model family; every size and variant is one command. This table is generated from the pages
(`python -m recipes.spec.index`); `python scripts/launch.py --list` says when to choose which variant.

    python scripts/launch.py FAMILY-SIZE VARIANT                       # fine-tune
    python scripts/launch.py FAMILY-SIZE VARIANT --draft max_steps=5   # a shrunken model: no download, no GPU
    python scripts/launch.py FAMILY-SIZE VARIANT data.path=FILE        # on your data

Every variant has been trained for three steps, resumed and exported as a draft on two CPU ranks (`make test-all`).
Smallest hardware is the planner's answer for `lora`, or `full` where there is none; a dash until there is a planner.
Measured is what `python scripts/benchmark.py` found for the command, per GPU; a dash where nobody has run it.

| family | sizes | variants | smallest hardware | measured | command |
|---|---|---|---|---|---|
"""


def main() -> None:
    """Write the index, and the pages' measured columns."""
    PATH.write_text(render(), encoding="utf-8")
    for family in pages.families():
        path = pages.ROOT / "recipes" / f"{family}.py"
        path.write_text(with_measured(path.read_text(encoding="utf-8"), family), encoding="utf-8")


COLUMN = "peak GPU memory"


def with_measured(text: str, family: str) -> str:
    """Return a page's text with what was measured in the last column of its table of variants."""
    found = measured.recipes()
    module = pages.page(family)
    lines = text.split("\n")
    head = next((index for index, line in enumerate(lines) if line.endswith(COLUMN)), None)
    if head is None:
        return text
    for index, line in enumerate(lines[head + 1 :], head + 1):
        variant = line.split()[:1]
        if not variant:
            break
        names = {size: f"{family}-{size}-{variant[0]}" for size in module.SIZES}
        known = ", ".join(f"{size} {found[name].peak_gib:.1f}" for size, name in names.items() if name in found)
        lines[index] = line[: lines[head].index(COLUMN)] + (f"{known} GiB" if known else "-")
    return "\n".join(lines)


def render() -> str:
    """Return the index as Markdown."""
    return HEAD + "".join(_row(family) for family in pages.families()) + TAIL


def _row(family: str) -> str:
    module = pages.page(family)
    sizes = ", ".join(f"{size} ({pages.human(model.parameters)})" for size, model in module.SIZES.items())
    variants = pages.variants(module)
    first = "lora" if "lora" in variants else variants[0]
    command = f"`python scripts/launch.py {family}-{next(iter(module.SIZES))} {first}`"
    seen = measured.recipes().get(f"{family}-{next(iter(module.SIZES))}-{first}", "-")
    return f"| [{family}]({family}.py) | {sizes} | {', '.join(variants)} | - | {seen} | {command} |\n"


TAIL = """
Beside the pages: [`_template.py`](_template.py), to copy for a family of your own, and
[`plain_loop.py`](plain_loop.py), the whole thing flat in one file without this project.
"""

if __name__ == "__main__":
    main()
