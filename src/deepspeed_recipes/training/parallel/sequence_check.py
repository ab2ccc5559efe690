"""Checks on a shrunken model that a model's code trains the same over sequence-parallel ranks."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...recipe.errors import UserError, first_line
from ...recipe.layout import RankPosition
from ...recipe.recipe import Layout, Recipe
from .. import distributed
from ..data.collate import Collator
from ..model import packing_check
from ..model.attention import needs_boundaries
from ..model.load import load_config
from . import sequence

PAIR = Layout(sequence=2)
"""The layout that is checked; a larger size only has to divide the heads too."""


def check(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse sequence parallelism where it would train a different model; takes about a second; a collective.

    Raises:
        UserError: the model's heads cannot be divided, or its code computes something different.
    """
    size = recipe.layout.sequence
    config = load_config(recipe).get_text_config()
    if not getattr(config, "num_attention_heads", None):
        raise UserError(
            f"layout.sequence={size}: {config.model_type} has no attention heads that ranks could share; its layers "
            "carry a state along the sequence. Leave layout.sequence out."
        )
    heads = config.num_attention_heads // recipe.layout.tensor
    if heads % size:  # the launcher may not have had a Hub model's dimensions
        raise UserError(f"layout.sequence={size}: each rank's {heads} attention heads are not divisible by {size}.")
    error = difference_over_two(config, tokenizer, recipe.model.attention)
    if error is not None:
        raise UserError(
            f"layout.sequence={size}: {config.model_type} with model.attention={recipe.model.attention} trains "
            f"differently over several ranks ({error}); use layout.sequence=1."
        )


def difference_over_two(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, attention: str) -> str | None:
    """Return an error message, or None if two ranks compute the same; ranks 0 and 1 compute, all get the result."""
    group = dist.new_group([0, 1])
    error = None
    if dist.get_rank() < 2:
        try:
            off = difference(draft_of(config, tokenizer, attention), group)
            allowed = packing_check.LEAK[packing_check.check_dtype(attention)]
            error = None if off < allowed else f"a shrunken model differs by {off:.0e}"
        except Exception as failed:  # a model's own code may raise anything
            error = f"on a shrunken model: {first_line(failed)}"
    answer = [error]
    dist.broadcast_object_list(answer, src=0, device=distributed.device())
    return answer[0]


def draft_of(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, attention: str) -> torch.nn.Module:
    """Return a random draft without dropout, so that it computes the same in training as in evaluation."""
    certain = copy.deepcopy(config)
    for name, value in certain.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(certain, name, 0.0)
    return packing_check.draft_of(certain, tokenizer, attention, packing_check.check_dtype(attention))


def difference(model: torch.nn.Module, group: dist.ProcessGroup) -> float:
    """Return how far logits, loss and gradients over two ranks are from those on one, each as a share of the largest.

    Args:
        model: a draft, the same on both ranks; without dropout.
        group: the two ranks.
    """
    sequence.attend(model, group)
    return max(_difference(model, batch, group) for batch in (_batch(model, True), _batch(model, False)))


def _batch(model: torch.nn.Module, packed: bool) -> dict[str, Any]:
    """Return two sequences, one of them of two documents if `packed`."""
    generator = torch.Generator().manual_seed(0)
    width = sum(packing_check.LENGTHS)
    sequences = [
        {
            "input_ids": tokens,
            "labels": tokens,
            "seq_lengths": list(packing_check.LENGTHS) if packed and not index else [width],
        }
        for index, tokens in enumerate(torch.randint(5, model.config.vocab_size, (2, width), generator=generator))
    ]
    batch = Collator(0, multiple=8 * PAIR.sequence, boundaries=needs_boundaries(model))(sequences)
    inputs = {name: value for name, value in batch.items() if name not in ("tokens", "squared_lengths")}
    return {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in inputs.items()}


def _difference(model: torch.nn.Module, batch: dict[str, Any], group: dist.ProcessGroup) -> float:
    rank = dist.get_rank(group)
    count = (batch["labels"][:, 1:] != -100).sum()
    whole = _computed(model.eval(), batch, count)
    part = _computed(model.train(), sequence.cut(batch, RankPosition(0, 0, rank, 0), PAIR), count)
    for value in part[1:]:
        dist.all_reduce(value, group=group)
    whole[0] = whole[0].chunk(PAIR.sequence, dim=1)[rank]
    offs = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in zip(part, whole, strict=True)])
    dist.all_reduce(offs, op=dist.ReduceOp.MAX, group=group)
    return offs.max().nan_to_num(torch.inf).item()


def _computed(model: torch.nn.Module, batch: dict[str, Any], count: torch.Tensor) -> list[torch.Tensor]:
    """Return logits, loss, and all gradients in one tensor."""
    model.zero_grad()
    output = model(**batch, num_items_in_batch=count)
    output.loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [output.logits.detach(), output.loss.detach(), torch.cat([grad.flatten() for grad in gradients])]
