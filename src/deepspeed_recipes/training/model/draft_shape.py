"""Numbers of heads and experts in a draft's model; standard library only, so that the launcher can check layouts."""

HEADS = 4
"""Attention heads of a draft; as many query heads share a key/value head as in the original."""
EXPERTS = 4
"""Experts per layer of a draft's MoE model."""


def key_value_heads(heads: int, shared: int) -> int:
    """Return a draft's number of key/value heads: the original's ratio to its `heads`, but two if it has two or more.

    With a single one, a draft could not be trained with tensor parallelism.
    """
    return min(shared, max(2, HEADS * shared // heads))
