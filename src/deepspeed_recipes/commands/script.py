"""Runs a page as a script: `python recipes/llama3.py 8b lora ...` is `launch llama3-8b lora ...`."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from ..recipe import pages
from ..recipe.errors import UserError
from . import launch


def main(words: Sequence[str]) -> int:
    """Run the launcher on the page named by the first of `words`, and return its exit status."""
    file, *rest = words
    module = pages.known_page(file)
    if not rest or rest[0] in ("-h", "--help"):
        print(overview(module, Path(file).name))
        return 0 if rest else 2
    sizes, variants = list(module.SIZES), pages.variants(module)
    first, second = [*rest, ""][:2]
    if first in variants and (second in sizes or len(sizes) > 1):
        raise UserError(f"{first}: the size comes before the variant; sizes are: {', '.join(sizes)}.")
    size = rest.pop(0) if first in sizes or second in variants or len(sizes) > 1 else sizes[0]
    if size not in sizes:
        near = get_close_matches(size, sizes, n=1)
        hint = f"did you mean {near[0]}? There" if near else "there"
        raise UserError(f"unknown size {size!r}; {hint} are: {', '.join(sizes)}.")
    return launch.main([f"{pages.name(module)}-{size}", *rest])


def overview(module: ModuleType, name: str) -> str:
    """Return the sizes and variants of a page, for its --help."""
    sizes = [f"  {size:<12} {pages.human(model.parameters)}, {model.path}" for size, model in module.SIZES.items()]
    variants = [f"  {variant:<12} {pages.about(pages.variant(module, variant))}" for variant in pages.variants(module)]
    usage = f"usage: python {name} {'SIZE ' if len(sizes) > 1 else ''}VARIANT [key=value ...] [--gpus N] [--draft] ..."
    more = "launch --help lists the options and the keys."
    return "\n".join([usage, "", pages.about(module), "", "sizes:", *sizes, "", "variants:", *variants, "", more])
