"""Every recipe as it resolves, and every override key: what users rely on while the code behind it moves.

`python -m tests.test_pinned` writes both files again after a change that is meant; review their diff.
"""

import json
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.overrides import override_keys
from deepspeed_recipes.recipe.project import SAMPLES
from deepspeed_recipes.recipe.recipe import Data, Layout, Lora, Model, Recipe

RECIPES = Path(__file__).with_name("pinned") / "recipes.txt"
KEYS = Path(__file__).with_name("pinned") / "override_keys.txt"
PLAIN = Recipe(
    model=Model(path=""), data=Data(path=""), deepspeed="", learning_rate=1.0,
    global_batch_size=1, sequence_length=8,
)  # fmt: skip
"""Every field of a recipe at its default; those without one differ in every recipe, and are always written."""


def changed(value: Any, plain: Any) -> dict[str, Any]:
    """Return the fields in which `value` differs from `plain`, those of nested dataclasses alike."""
    found = {}
    for name in (field.name for field in fields(value)):
        mine, other = getattr(value, name), getattr(plain, name)
        if mine == other:
            continue
        found[name] = changed(mine, other) if is_dataclass(mine) and is_dataclass(other) else mine
    return {name: asdict(part) if is_dataclass(part) else part for name, part in found.items()}


def line(recipe: Recipe) -> str:
    """Return a recipe's name and what it sets, without its model, which all variants of its size share."""
    name = f"{recipe.family}-{recipe.size}"
    model = pages.page(recipe.family).SIZES[recipe.size]
    method = recipe.method
    sets = changed(replace(recipe, method=PLAIN.method), PLAIN) | {"model": changed(recipe.model, model)}
    if method != PLAIN.method:
        settings = changed(method, type(method)())
        sets |= {"method": method.name, **({method.name: settings} if settings else {})}
    if recipe.lora:
        sets["lora"] = changed(recipe.lora, Lora(rank=1))
    left_out = ("family", "size", "variant")
    written = json.dumps({key: value for key, value in sorted(sets.items()) if key not in left_out}, default=str)
    return f"{name} {recipe.variant} {written}".replace(str(SAMPLES), "samples")


def model_line(recipe: Recipe) -> str:
    """Return the model that the variants of a size share."""
    model = changed(pages.page(recipe.family).SIZES[recipe.size], Model(path=""))
    return f"{recipe.family}-{recipe.size} MODEL {json.dumps(model, sort_keys=True)}".replace(str(SAMPLES), "samples")


def recipes() -> list[str]:
    """Return a line for each model, and one for each recipe, in the order of their names."""
    listed = pages.listing()
    return sorted({*map(model_line, listed), *map(line, listed)})


def keys() -> list[str]:
    """Return every key that the command line takes."""
    return sorted(override_keys())


def test_every_recipe_resolves_as_pinned():
    pinned = RECIPES.read_text(encoding="utf-8").splitlines()
    assert len(pinned) > 1300 and recipes() == pinned


def test_the_command_line_takes_the_pinned_keys():
    pinned = KEYS.read_text(encoding="utf-8").splitlines()
    assert len(pinned) > 100 and keys() == pinned


def test_a_line_shows_each_change():
    layout = changed(Layout(tensor=8), Layout())
    assert layout == {"tensor": 8}
    assert changed(Model(path="a", config={"x": 1}), Model(path="a")) == {"config": {"x": 1}}


if __name__ == "__main__":
    RECIPES.write_text("\n".join(recipes()) + "\n", encoding="utf-8")
    KEYS.write_text("\n".join(keys()) + "\n", encoding="utf-8")
