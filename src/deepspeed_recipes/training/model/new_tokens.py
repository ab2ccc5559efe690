"""Adds the tokens of `model.new_tokens`: to the tokenizer, and as rows of the embeddings and of the output head.

A new row starts as the mean of the rows of the pieces into which the tokenizer has split the token so far (Hewitt 2021,
"Initializing New Word Embeddings for Pretrained Language Models", takes the mean of all rows).
"""

import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path

import torch
from deepspeed.runtime.zero import GatheredParameters
from torch import nn
from transformers import AddedToken, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ...recipe import new_tokens
from ...recipe.compatibility import refusal
from ...recipe.errors import UserError
from ...recipe.recipe import Lora, Model, Recipe, names
from ...recipe.run_folder import read_json
from ..console import say
from ..model_folder import weights
from ..model_folder.base_model import ADAPTER

MULTIPLE = 64
"""Embeddings with a multiple of this many rows keep one."""


def add(tokenizer: PreTrainedTokenizerBase, model: Model) -> None:
    """Add the tokens, if there are any, to the tokenizer, which must not have them already."""
    tokens = new_tokens.read(model.new_tokens)
    new_tokens.check(tokens, tokenizer.get_vocab(), model.path)
    for one in tokens:
        tokenizer.add_tokens([AddedToken(one.content, special=one.special)], special_tokens=one.special)


def rows_of(recipe: Recipe) -> Mapping[int, list[int]]:
    """Return the numbers of the recipe's new tokens, with those of the old tokens that each has been until now."""
    return _rows(recipe.model.path, recipe.model.new_tokens, recipe.model.trust_remote_code)


@lru_cache(maxsize=2)
def _rows(path: str, text: str | None, trusted: bool) -> Mapping[int, list[int]]:
    tokens = [one.content for one in new_tokens.read(text)]
    if not tokens:
        return {}
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
    pieces = {token: tokenizer(token, add_special_tokens=False)["input_ids"] for token in tokens}
    if nothing := [token for token in tokens if not pieces[token]]:
        raise UserError(f"model.new_tokens: the tokenizer of {path} drops {nothing[0]!r}; write it differently.")
    add(tokenizer, Model(path, new_tokens=text))
    return {tokenizer.convert_tokens_to_ids(token): pieces[token] for token in tokens}


@torch.no_grad()
def start(model: PreTrainedModel, recipe: Recipe) -> None:
    """Give the new tokens their rows in the embeddings and the head; a collective under ZeRO-3.

    Rows that the model already has beyond its tokenizer's tokens are used first. Otherwise all matrices grow, to a
    multiple of the power of two, at most 64, of which they are one; for adapters to the number of tokens, since
    `AutoPeftModelForCausalLM` gives the base as many rows. What this adds beyond the tokens is the mean of all rows.
    """
    found = rows_of(recipe)
    if not found:
        return
    before = _rows_in(model.get_input_embeddings())
    after = max(before, max(found) + 1)
    if after > before:
        multiple = math.gcd(before, MULTIPLE) if recipe.lora is None else 1
        after = -(-after // multiple) * multiple
        _grow(model, after)
    for weight in _ends(model):
        with GatheredParameters([weight], modifier_rank=0):
            if weight.numel():  # under ZeRO-3 the other ranks only take part
                started = [weight[pieces].float().mean(0) for pieces in found.values()]
                weight[list(found)] = torch.stack(started).to(weight.dtype)
    grown = f"the embeddings grow from {before:,} to {after:,} rows" if after > before else "in spare rows"
    say(f"model.new_tokens: {len(found)} tokens from number {min(found):,} on, {grown}")


@torch.no_grad()
def _grow(model: PreTrainedModel, rows: int) -> None:
    """Give the embeddings and the head `rows` rows, of which the new ones are the mean of all."""
    before = _rows_in(model.get_input_embeddings())
    model.resize_token_embeddings(rows, mean_resizing=False)
    for weight in _ends(model):
        with GatheredParameters([weight], modifier_rank=0):
            if weight.numel():
                weight[before:] = weight[:before].float().mean(0).to(weight.dtype)


def _rows_in(embedding: nn.Module) -> int:
    return getattr(embedding.weight, "ds_shape", embedding.weight.shape)[0]


def _ends(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the weights that have a row for each token, shared ones once; and a head's bias."""
    found = [model.get_input_embeddings().weight]
    if (head := model.get_output_embeddings()) is not None:
        found += [one for one in (head.weight, getattr(head, "bias", None)) if one is not None and one is not found[0]]
    return found


def trained_rows(model: PreTrainedModel, lora: Lora, numbers: Collection[int]) -> dict[str, list[int]] | list[int]:
    """Return PEFT's `trainable_token_indices`, without modules that `lora.modules_to_save` trains whole.

    A head with a bias is refused: PEFT would train no part of it.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and getattr(head, "bias", None) is not None:
        raise refusal("bias of a head", kind=model.config.model_type)
    ends = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if module is embedding or module is head
    }
    saved = {name for name in ends if any(f".{name}".endswith(f".{one}") for one in names(lora.modules_to_save))}
    if head is None or head.weight is embedding.weight:
        return [] if saved else list(numbers)
    return {name.rpartition(".")[2]: list(numbers) for name in ends if name not in saved}


def fit(model: PreTrainedModel, adapter: Path) -> None:
    """Give a base model the rows that an adapter with new tokens needs, as `AutoPeftModelForCausalLM` does."""
    chosen = read_json(adapter / ADAPTER)
    indices = chosen.get("trainable_token_indices") or []
    numbers = [number for own in (indices.values() if isinstance(indices, dict) else [indices]) for number in own]
    needed = max(numbers, default=-1) + 1
    if (file := adapter / "adapter_model.safetensors").exists():
        held = weights.header(file)
        ends = [name for name in held if weights.EMBEDDING.search(name) or name.endswith("lm_head.weight")]
        needed = max([needed, *(held[name].shape[0] for name in ends)])
    if needed > _rows_in(model.get_input_embeddings()):
        _grow(model, needed)
