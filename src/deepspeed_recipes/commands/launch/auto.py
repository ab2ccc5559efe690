"""`ds-recipes launch auto MODEL`: borrows the recipe of the nearest page for a model without a page."""

from dataclasses import replace

from ...planning.search import model_recipe
from ...recipe import overrides, pages
from ...recipe.recipe import Recipe

TAKEN = ("learning_rate", "schedule.kind", "weight_decay", "global_batch_size", "sequence_length", "deepspeed")
ADAPTERS = ("lora.rank", "lora.alpha", "lora.target_modules")
"""Keys that are printed if the recipe has adapters."""


def borrow(model: str, variant: str) -> Recipe:
    """Return the recipe for a model's folder or Hub id with the model's dimensions: its own page's, or the nearest.

    If the model's architecture is not the page's, a test with a shrunken model decides if documents are packed.

    Raises:
        UserError: there is no such model, it is not a decoder, or no page of a similar model has the variant.
    """
    recipe = model_recipe.find(model, variant, to_launch=True)
    if recipe.packs and not _is_of_page(recipe) and not _keeps_documents_apart(recipe):
        return replace(recipe, packing=False)
    return recipe


def said(recipe: Recipe) -> str:
    """Return a text with the borrowed page, the settings that it provides, and its other variants."""
    page = pages.find(pages.typed(recipe), recipe.variant)
    kind, other = (one.model.config["model_type"] for one in (recipe, page))
    taken = overrides.as_typed(page, [*TAKEN, *(ADAPTERS if page.lora else ())])
    own = [change for change in overrides.differences(page, recipe) if not change.startswith("model.path=")]
    module = pages.page_of(page)
    lines = [
        f"auto: {recipe.model.path}, {kind} with {pages.human(recipe.model.parameters)} parameters, is trained as "
        f"{pages.typed(page)} {page.variant}, {other} with {pages.human(page.model.parameters)}",
        f"taken over: {' '.join(taken)}",
        *([f"its own: {' '.join(own)}"] if own else []),
        f"other variants: {', '.join(name for name in pages.variants(module) if name != page.variant)}",
    ]
    return "\n      ".join(lines)


def _is_of_page(recipe: Recipe) -> bool:
    """Return True if the model's architecture is the page's, with which packing is tested."""
    page = pages.find(pages.typed(recipe), recipe.variant)
    return bool(page.model.config["model_type"] == recipe.model.config["model_type"])


def _keeps_documents_apart(recipe: Recipe) -> bool:
    """Return True if packed documents stay apart in a shrunken model of this architecture."""
    from transformers import AutoConfig, AutoTokenizer  # takes seconds, and only `auto` needs it

    from ...training.model import attention, draft, packing_check

    config = AutoConfig.for_model(**recipe.model.config)
    tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
    try:
        # The last candidate is the implementation that a run uses if no faster one is correct.
        return packing_check.keeps_documents_apart(
            config, tokenizer, attention.candidates(recipe, config, on_gpu=False)[-1]
        )
    except Exception:  # a model's own code may raise any error; without packing the model may still train
        return False
