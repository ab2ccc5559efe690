"""Tiling for long sequences: computes the loss and the feed-forward layers for some of the tokens at a time.

Both process each token by itself, so tiles change only the memory in use and not the result: whole logits (12 to 14
bytes per token and vocabulary entry) and whole feed-forward activations never exist. Each tile is computed again in
the backward pass. The idea is that of Arctic long sequence training (Bekman et al. 2025, arXiv:2506.13996).
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from ...recipe.errors import UserError
from ...recipe.recipe import Recipe
from .. import upstream

COLUMNS = 8192
"""Vocabulary entries in a tile of logits: 2 bytes per token and entry at 4,096 tokens, where TRL's own 32,768 hold 8
without Triton; a matrix product of 4,096 x 8,192 still fills a GPU."""


def tile_loss(model: PreTrainedModel) -> None:
    """Make `model` compute its loss without whole logits, wherever it is given labels; before adapters are added.

    Uses TRL's fused head, which supports every architecture's logit scales and soft caps. If the batch has the labelled
    tokens and their labels (`data.collate.labelled_only`), logits of the other tokens are never computed.
    """
    upstream.narrow_loss_tiles(COLUMNS)
    upstream.score_every_token()
    add_fused_lm_head(model)
    fused = model.forward

    @functools.wraps(fused)
    def forward(*arguments: Any, labelled: torch.Tensor | None = None, **inputs: Any) -> Any:
        if labelled is None:
            return fused(*arguments, **inputs, fused_lm_head=inputs.get("labels") is not None)
        with _only(labelled, model.base_model):
            return fused(*arguments, **inputs, fused_lm_head=True)

    model.forward = forward


@contextlib.contextmanager
def _only(places: torch.Tensor, backbone: torch.nn.Module) -> Iterator[None]:
    """Make the decoder return only the hidden states of these tokens, [1, places, width], to the head."""

    def select(_: torch.nn.Module, __: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1).index_select(0, places)[None]
        return output

    handle = backbone.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()


def tile_feed_forward(model: PreTrainedModel, tiles: int) -> None:
    """Make every layer's feed-forward part compute a sequence in `tiles` pieces, keeping only their inputs and outputs.

    Raises:
        UserError: the layers have no such part, or one that routes tokens to experts.
    """
    for part in _feed_forward(model, "tiled_mlp=true"):
        part.forward = functools.partial(_in_tiles, part.forward, tiles)


def recompute_feed_forward(model: PreTrainedModel) -> None:
    """Make every layer keep the input of its feed-forward part, and compute the rest again in the backward pass.

    Raises:
        UserError: the layers have no such part, or one that routes tokens to experts.
    """
    for part in _feed_forward(model, "gradient_checkpointing=feed_forward"):
        part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)


def _feed_forward(model: PreTrainedModel, asked: str) -> list[torch.nn.Module]:
    parts = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    if not parts or any(name.endswith(".experts") for part in parts for name, _ in part.named_modules(prefix=".")):
        raise UserError(
            f"{asked}: not for {model.config.model_type}, whose layers have "
            f"{'experts, which already get parts of the tokens' if parts else 'no module named mlp'}; leave it out."
        )
    return parts


def _in_tiles(forward: Any, tiles: int, *inputs: torch.Tensor) -> torch.Tensor:
    """Return forward(*inputs), all of them [sequences, length, width].

    The number of tiles is fixed, with empty tiles for short sequences: under ZeRO-3 all ranks must compute the same
    number, whatever the length of their sequences.
    """
    parts = zip(*(one.tensor_split(tiles, dim=1) for one in inputs), strict=True)
    outputs = [checkpoint(forward, *(one.contiguous() for one in part), use_reentrant=False) for part in parts]
    return torch.cat(outputs, dim=1)


def tiles(recipe: Recipe, hidden: int) -> int:
    """Return the number of tiles of a sequence: each is about as long as the model is wide, as in the paper."""
    return max(2, math.ceil(recipe.sequence_length / recipe.layout.sequence / hidden))
