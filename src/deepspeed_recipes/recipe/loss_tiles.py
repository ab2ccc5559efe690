"""Decides if the loss is computed in tiles, so that whole logits never exist."""

from .methods import Distill
from .recipe import Recipe

PER_ENTRY = 14
"""Bytes that whole logits take at their peak per token and vocabulary entry: in bf16 and in fp32, and the gradients of
both; `tests/test_levers.py` counts them."""
LARGE = 2**30
"""Size of whole logits, in bytes, above which tiles are worth another product with the output matrix."""


def are_large(tokens: float, vocabulary: int) -> bool:
    """Return True if whole logits of this many tokens are large enough to avoid."""
    return PER_ENTRY * tokens * vocabulary >= LARGE


def asked_for(recipe: Recipe) -> bool | None:
    """Return True or False if a recipe sets tiles on or off, or None if it depends on the size of the logits."""
    if recipe.method.whole_loss or recipe.layout.pipeline > 1 or recipe.router_aux_loss_coef or recipe.model.vision:
        return False  # tiles do not apply to these, or would compute a wrong loss: see `Recipe`
    if recipe.loss:
        return False  # the user's function reads whole logits
    return True if isinstance(recipe.method, Distill) else recipe.tiled_loss


def tiles_loss(recipe: Recipe, vocabulary: int) -> bool:
    """Return True if a run computes its loss in tiles: because of `tiled_loss`, or because whole logits are large."""
    asked = asked_for(recipe)
    tokens = recipe.micro_batch_size * recipe.sequence_length / recipe.layout.sequence
    return are_large(tokens, vocabulary) if asked is None else asked
