"""When the loss is computed in tiles, so that whole logits never exist."""

from .recipe import Recipe

PER_ENTRY = 14
"""Bytes that whole logits take at their peak per token and vocabulary entry: in bf16 and in fp32, and the gradients of
both; `tests/test_levers.py` counts them."""
LARGE = 2**30
"""Bytes of logits from which tiles are worth another product with the output matrix."""


def are_large(tokens: float, vocabulary: int) -> bool:
    """Return whether whole logits of so many tokens are worth avoiding."""
    return PER_ENTRY * tokens * vocabulary >= LARGE


def asked_for(recipe: Recipe) -> bool | None:
    """Return what a recipe says of tiles; None: it depends on the size."""
    if recipe.traits.whole_loss or recipe.layout.pipeline > 1 or recipe.router_aux_loss_coef or recipe.model.vision:
        return False  # these have no use for it, or none that is right: see `Recipe`
    return True if recipe.traits.teacher else recipe.tiled_loss


def tiles_loss(recipe: Recipe, vocabulary: int) -> bool:
    """Return whether a run computes its loss in tiles: what `tiled_loss` says, or where whole logits would be large.

    Args:
        recipe: of the run.
        vocabulary: entries of the model's.
    """
    asked = asked_for(recipe)
    tokens = recipe.micro_batch_size * recipe.sequence_length / recipe.layout.sequence
    return are_large(tokens, vocabulary) if asked is None else asked
