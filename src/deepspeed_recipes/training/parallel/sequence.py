"""Sequence parallelism (Ulysses, Jacobs et al. 2023, arXiv:2309.14509): each rank computes a part of every sequence.

All layers except attention work on single tokens, so a rank needs only its own. For attention the ranks of a group
exchange: from all heads of a part of the sequence to some heads of the whole sequence, and back.

DeepSpeed treats these ranks as data-parallel: each has the loss of its own tokens, divided by the number of tokens in
the whole global batch, and their sum over all ranks is the mean over all tokens, at every ZeRO stage.
"""

import copy
import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import masking_utils as masking

from ...recipe import layout as layouts
from ...recipe.compatibility import refusal
from ...recipe.layout import RankPosition
from ...recipe.recipe import Layout, Recipe
from .. import distributed
from ..data.collate import IGNORED, Batch, Collator, labelled_only, next_labels
from ..model import probe, transforms
from ..model.attention import VARLEN, needs_boundaries
from ..model.load import load_config

PREFIX = "ulysses_"
"""Prefix of attention implementations that compute over the ranks of a group."""
MASKS = [
    name
    for name, create in vars(masking).items()
    if name.startswith("create_") and {"inputs_embeds", "position_ids"} <= set(inspect.signature(create).parameters)
]
"""The functions with which models create their masks."""


def attend_over_ranks(model: torch.nn.Module, layout: Layout) -> None:
    """In training, make the model's attention cover whole sequences that are divided over ranks; a collective."""
    size = dist.get_world_size()
    sharing = defaultdict(list)
    for rank in range(size):
        place = layouts.rank_position(layout, rank, size)
        sharing[place.stage, place.data, place.tensor].append(rank)
    group, _ = dist.new_subgroups_by_enumeration(list(sharing.values()))
    attend(model, group)


def cut(batch: Batch, place: layouts.RankPosition, layout: Layout) -> Batch:
    """Return a rank's part of a batch: an equal share of the columns of every tensor, [sequences, width].

    `shift_labels`, in which each token's label is the next token, are computed from whole sequences: the label of a
    part's last token is in the next part. Position ids stay those of the whole sequence. Documents' boundaries are not
    divided: all ranks get them.
    """
    return {
        name: value.chunk(layout.sequence, dim=1)[place.sequence].contiguous()
        if torch.is_tensor(value) and value.ndim == 2
        else value
        for name, value in {**batch, "shift_labels": next_labels(batch["labels"])}.items()
    }


@dataclass(frozen=True)
class PartCollator:
    """Collates sequences into this rank's part of the model's inputs; counts (`tokens`) are of whole sequences."""

    pad_token_id: int
    layout: Layout
    boundaries: bool = False
    labelled: bool = False

    def __call__(self, sequences: Sequence[Batch]) -> Batch:
        """Return this rank's part of the collated batch."""
        collate = Collator(self.pad_token_id, multiple=8 * self.layout.sequence, boundaries=self.boundaries)
        part = cut(collate(sequences), distributed.place(self.layout), self.layout)
        return part | (labelled_only(part["shift_labels"]) if self.labelled else {})


def attend(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Make the attention in `model` cover whole sequences that are divided over the ranks of the group, in their order.

    This applies in training only: in evaluation mode the model is unchanged, and each rank may have its own sequences.
    Inputs must include `position_ids`, and no attention mask. The configuration objects of the attention layers are
    changed.
    """
    modules = list(model.modules())
    found: list[object] = [getattr(module, "config", None) for module in modules]
    configs = {
        id(config): config
        for config in found
        if isinstance(config, PreTrainedConfig) and config._attn_implementation is not None
    }
    inner = {name: config._attn_implementation for name, config in configs.items()}
    for name in set(inner.values()):
        AttentionInterface.register(PREFIX + name, partial(_attention, group, name))
        if name != VARLEN:  # it has no mask
            AttentionMaskInterface.register(PREFIX + name, masking.ALL_MASK_ATTENTION_FUNCTIONS[name])
    transforms.replace_functions(model, MASKS, lambda name: partial(_whole_mask, getattr(masking, name), group))

    def switch(module: torch.nn.Module, _: object) -> None:
        for key, config in configs.items():
            alone = "sdpa" if inner[key] == VARLEN else inner[key]
            config._attn_implementation = PREFIX + inner[key] if module.training else alone

    for module in [one for one in modules if isinstance(one, PreTrainedModel)] or [model]:
        module.register_forward_pre_hook(switch)
    for module in modules:
        kinds = str(getattr(module, "rope_type", ""))  # one type, or one per kind of layer
        if "dynamic" in kinds or "longrope" in kinds:
            _whole_rotary(module, group)


def _is_shared(config: PreTrainedConfig) -> bool:
    return (config._attn_implementation or "").startswith(PREFIX)


def _attention(
    group: dist.ProcessGroup,
    name: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the implementation `name`; queries, keys and values are [sequences, heads, part, width].

    Returns [sequences, part, heads, width], as every implementation does, and None instead of weights.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    seen: dict[str, Any] = {"config": copy.copy(module.config)}
    seen["config"]._attn_implementation = name
    repeat = size // math.gcd(size, key.shape[1])
    if repeat > 1:  # fewer key/value heads than ranks: several ranks get the same head
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        seen["num_key_value_groups"] = module.num_key_value_groups // repeat
    if getattr(module, "sinks", None) is not None:  # GPT-OSS: one number per head
        seen["sinks"] = module.sinks.chunk(size)[rank]
        options["s_aux"] = seen["sinks"]
    if options.get("position_ids") is not None:  # flash attention separates documents by them
        options["position_ids"] = _whole(options["position_ids"], group)
    query, key, value = (_exchange(part, group) for part in (query, key, value))
    own = sys.modules[type(module).__module__]  # each modeling file has its own eager implementation
    compute = own.eager_attention_forward if name == "eager" else AttentionInterface()[name]
    output, _ = compute(_Share(module, seen), query, key, value, attention_mask, **options)
    return _exchange(output, group), None


class _Share:
    """Presents an attention module to an implementation as one with only a share of the heads."""

    def __init__(self, module: torch.nn.Module, changed: dict[str, object]) -> None:
        self.module = module
        self.__dict__ |= changed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _exchange(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's share of all ranks' tensors: split along their second dimension, joined along the third."""
    sent = torch.stack(part.chunk(dist.get_world_size(group), dim=1))
    return torch.cat(_AllToAll.apply(sent, group).unbind(), dim=2)


class _AllToAll(torch.autograd.Function):
    """Gives rank r the r-th tensor of every rank, in the order of the ranks; the gradients travel back.

    torch's own function with a gradient (`torch.distributed.nn.functional`) is deprecated in favour of a private one.
    """

    @staticmethod
    def forward(context: FunctionCtx, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        context.group = group
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(context: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(gradient.contiguous(), context.group), None


def _whole(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return whole sequences, [sequences, width], gathered from the ranks' parts."""
    return torch.cat(distributed.gathered(part, group), dim=1)


def _whole_mask(create: Callable[..., object], group: dist.ProcessGroup, /, *values: object, **named: object) -> Any:
    """Call one of transformers' mask functions as a model does, but for whole sequences where the model has parts."""
    arguments = inspect.signature(create).bind(*values, **named).arguments
    if _is_shared(arguments["config"]):
        embedded = arguments["inputs_embeds"]  # only its shape, dtype and device are used
        width = embedded.shape[1] * dist.get_world_size(group)
        arguments["inputs_embeds"] = embedded[:, :1].expand(-1, width, -1)
        if arguments.get("position_ids") is not None:
            arguments["position_ids"] = _whole(arguments["position_ids"], group)
    return create(**arguments)


def _whole_rotary(module: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Compute a rotary embedding over whole sequences, since its frequencies may depend on the longest position."""

    def gather(module: torch.nn.Module, values: Any, named: dict[str, object]) -> Any:
        if not _is_shared(module.config):
            return None
        arguments = inspect.signature(module.forward).bind(*values, **named).arguments
        arguments["position_ids"] = _whole(arguments["position_ids"], group)
        return (), arguments

    def part(module: torch.nn.Module, _: object, output: Any) -> Any:
        if not _is_shared(module.config):
            return None
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        return tuple(whole.chunk(size, dim=1)[rank] for whole in output)

    module.register_forward_pre_hook(gather, with_kwargs=True)
    module.register_forward_hook(part)


PAIR = Layout(sequence=2)
"""The layout that is checked; a larger size only has to divide the heads too."""


def check(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse sequence parallelism where it would train a different model; takes about a second; a collective."""
    size = recipe.layout.sequence
    config = load_config(recipe).get_text_config()
    if not getattr(config, "num_attention_heads", None):
        raise refusal("no heads to share", size=size, kind=config.model_type)
    heads = config.num_attention_heads // recipe.layout.tensor
    if heads % size:  # the launcher may not have had a Hub model's dimensions
        raise refusal("heads of a sequence", size=size, heads=heads)
    attention = recipe.model.attention
    dtype = probe.check_dtype(attention)
    off, error = probe.on_two_ranks(
        lambda group: difference(probe.draft_of(config, tokenizer, attention, dtype, certain=True), group)
    )
    if error or not off < probe.LEAK[dtype]:
        why = f"on a shrunken model: {error}" if error else f"a shrunken model differs by {off:.0e}"
        raise refusal("sequence differs", size=size, kind=config.model_type, attention=attention, error=why)


def difference(model: torch.nn.Module, group: dist.ProcessGroup) -> float:
    """Return how far logits, loss and gradients of a draft without dropout over two ranks are from those on one.

    Each is a share of the largest; the draft is the same on both ranks.
    """
    attend(model, group)
    rank, found = dist.get_rank(group), []
    for batch in (_batch(model, True), _batch(model, False)):
        count = (batch["labels"][:, 1:] != IGNORED).sum()
        whole = _computed(model.eval(), batch, count)
        part = _computed(model.train(), cut(batch, RankPosition(0, 0, rank, 0), PAIR), count)
        for value in part[1:]:
            dist.all_reduce(value, group=group)
        whole[0] = whole[0].chunk(PAIR.sequence, dim=1)[rank]
        found.append(probe.worst(max(probe.off(a, b) for a, b in zip(part, whole, strict=True)), group))
    return max(found)


def _batch(model: torch.nn.Module, packed: bool) -> Batch:
    """Return two sequences, one of them of two documents if `packed`."""
    width = sum(probe.LENGTHS)
    sequences = [
        {
            "input_ids": tokens,
            "labels": tokens,
            "seq_lengths": list(probe.LENGTHS) if packed and not index else [width],
        }
        for index, tokens in enumerate(probe.random_tokens(model.config, 2, width))
    ]
    batch = Collator(0, multiple=8 * PAIR.sequence, boundaries=needs_boundaries(model))(sequences)
    inputs = {name: value for name, value in batch.items() if name not in ("tokens", "squared_lengths")}
    return {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in inputs.items()}


def _computed(model: torch.nn.Module, batch: Batch, count: torch.Tensor) -> list[torch.Tensor]:
    """Return logits, loss, and all gradients in one tensor."""
    model.zero_grad()
    output = model(**batch, num_items_in_batch=count)
    output.loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [output.logits.detach(), output.loss.detach(), torch.cat([grad.flatten() for grad in gradients])]
