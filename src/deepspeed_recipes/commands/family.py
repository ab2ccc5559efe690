"""The tables that `list FAMILY` prints: a family's sizes, its variants, and the hardware that they need."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ..planning.model_profile.lookup import profile_of
from ..planning.search.extremes import GPU, LARGEST, SINGLE, smallest_unchanged
from ..recipe import pages
from ..recipe.errors import UserError, first_line
from ..recipe.project import PACKAGE
from ..recipe.recipe import Model, Recipe

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


def text(module: ModuleType) -> str:
    """Return the description of a family: its first line, and the tables of sizes, variants and hardware."""
    known = pages.variants(module)
    recipes = {name: [pages.build(module, size, name) for size in module.SIZES] for name in known}
    about = [(name, pages.about(pages.variant(module, name))) for name in known]
    blocks = [
        f"{pages.family_of(module)}: {pages.about(module)}",
        _table([SIZES, *(size_row(module, size) for size in module.SIZES)]),
        _table([VARIANTS, *(_variant(name, of_sizes) for name, of_sizes in recipes.items())]),
        _table(about),
        _hardware(list(module.SIZES), recipes),
    ]
    return "\n\n".join(blocks)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def size_row(module: ModuleType, size: str) -> tuple[str, ...]:
    """Return a size's row of the first table, in the order of `SIZES`."""
    model: Model = module.SIZES[size]
    dimensions = (NONE, NONE, NONE)
    try:
        profile = profile_of(model.config)
        dimensions = (str(len(profile.layers)), str(profile.hidden_size), str(profile.attention_heads))
    except UserError:  # the model has to be profiled first, and the training stack is not installed
        pass
    context = (model.config.get("text_config") or model.config).get("max_position_embeddings")
    path = Path(model.path)
    weights = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else model.path
    counts = (pages.human(model.parameters), f"{context:,}" if context else NONE)
    return (size, *dimensions, *counts, pages.licence(module, size) or NONE, weights)


def _variant(name: str, recipes: Sequence[Recipe]) -> tuple[str, ...]:
    """Return a variant's row, which names the sizes if they have different DeepSpeed files."""
    method, adapters = recipes[0].method.name, recipes[0].lora is not None
    sizes: dict[str, list[str]] = {}
    for recipe in recipes:
        sizes.setdefault(recipe.deepspeed, []).append(recipe.size)
    files = [f"{file} ({', '.join(own)})" if len(sizes) > 1 else file for file, own in sizes.items()]
    return name, METHODS.get(method, method.upper()), "adapters" if adapters else "all weights", ", ".join(files)


def _hardware(sizes: Sequence[str], recipes: dict[str, list[Recipe]]) -> str:
    """Return the table of the smallest hardware for each variant and size, with an explanation of its cells."""
    try:
        rows = [(name, *map(_smallest, of_sizes)) for name, of_sizes in recipes.items()]
    except UserError as error:
        return f"  No hardware is predicted: {first_line(error)}"
    meaning = (
        f"  Predicted, not measured: the smallest hardware on which each variant fits, one {' or '.join(SINGLE)},\n"
        f"  or several {GPU}; {NONE}: not on {LARGEST:,}. ds-recipes plan shows other GPUs, the memory and the speed.\n"
    )
    return meaning + "\n" + _table([("variant", *sizes), *rows])


def _smallest(recipe: Recipe) -> str:
    plan = smallest_unchanged(recipe)
    return f"{plan.setup.world_size} x {plan.cluster.gpu.name}" if plan else NONE
