"""From JSON Lines to rows of tokens with labels: chat templates, loss masks, packing, and a report of what happened."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase
from trl import pack_dataset
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from recipes.spec.errors import UserError
from recipes.spec.recipe import Recipe

IGNORED = -100
"""The label of a token that the loss leaves out (PyTorch's `ignore_index`)."""


@dataclass(frozen=True)
class Report:
    """What a data set became."""

    examples: int
    """As read."""
    dropped: int
    """Longer than the sequence length, so left out."""
    extra_pieces: int
    """Pieces beyond one per text, from texts longer than the sequence length."""
    rows: int
    """What training sees: packed rows, or examples."""
    tokens: int
    """In all rows, without padding."""
    loss_tokens: int
    """Those the loss is computed on."""

    def lines(self, name: str, sequence_length: int) -> list[str]:
        """Return the report as text for a person."""
        share = 100 * self.loss_tokens / self.tokens
        filled = 100 * self.tokens / (self.rows * sequence_length)
        first = f"{name}: {self.examples} examples, {self.tokens:,} tokens, {share:.0f}% of them in the loss; "
        first += f"{self.rows} rows of at most {sequence_length} tokens, {filled:.0f}% filled"
        notes = []
        if self.dropped:
            notes.append(f"{name}: {self.dropped} dropped, longer than sequence_length={sequence_length}")
        if self.extra_pieces:
            cut = f"cut into {self.examples + self.extra_pieces} pieces"
            notes.append(f"{name}: texts longer than sequence_length={sequence_length} were {cut}")
        return [first, *notes]


def read(path: str) -> Dataset:
    """Return the rows of a local JSON Lines file or of a Hub data set's `train` split."""
    if Path(path).is_file():
        return load_dataset("json", data_files=path, split="train")
    try:
        return load_dataset(path, split="train")
    except (OSError, ValueError) as error:
        raise UserError(f"data.path={path}: cannot load: {str(error).partition(chr(10))[0]}") from error


def prepare(path: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Report]:
    """Return rows with `input_ids`, `labels` and `seq_lengths`, ready for `Collator`.

    The first token of every document has no label, so no document is asked to predict the next one's start.

    Raises:
        UserError: the tokenizer cannot mark the assistant's tokens, or nothing is left to train on.
    """
    raw = read(path)
    tokenize = _texts if recipe.method == "pretrain" else _conversations
    rows = tokenize(raw, recipe, tokenizer)
    kept = rows.filter(_fits, fn_kwargs={"longest": recipe.sequence_length})
    if not len(kept):
        raise UserError(
            f"{path}: all {len(raw)} examples are longer than sequence_length={recipe.sequence_length}; raise it."
        )
    packed = pack_dataset(kept, recipe.sequence_length, "bfd") if recipe.packing else kept.map(_alone)
    labels = [torch.as_tensor(label) for label in packed["labels"]]
    report = Report(
        examples=len(raw),
        dropped=len(rows) - len(kept),
        extra_pieces=len(rows) - len(raw),
        rows=len(packed),
        tokens=sum(len(label) for label in labels),
        loss_tokens=sum(int((label != IGNORED).sum()) for label in labels),
    )
    return packed, report


def _fits(row: dict[str, Any], longest: int) -> bool:
    return len(row["input_ids"]) <= longest and any(label != IGNORED for label in row["labels"])


def _alone(row: dict[str, Any]) -> dict[str, Any]:
    return {"seq_lengths": [len(row["input_ids"])]}


def _conversations(raw: Dataset, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    template = _marking_template(recipe, tokenizer)

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        tokens = tokenizer.apply_chat_template(
            row["messages"], chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        marked = zip(tokens["input_ids"], tokens["assistant_masks"], strict=True)
        labels = [token if assistant else IGNORED for token, assistant in marked]
        return {"input_ids": tokens["input_ids"], "labels": [IGNORED, *labels[1:]]}

    return raw.map(tokenize, remove_columns=raw.column_names, desc="tokenizing")


def _marking_template(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a chat template that marks the assistant's tokens; TRL knows one for the common families."""
    if tokenizer.chat_template is None:
        raise UserError(
            f"model.path={recipe.model.path}: its tokenizer has no chat template, so it is a base model; take the "
            "instruct version, or the variant `pretrain` for raw text."
        )
    if has_generation_markers(tokenizer.chat_template):
        return tokenizer.chat_template
    try:
        return get_training_chat_template(tokenizer)
    except ValueError:
        raise UserError(
            f"model.path={recipe.model.path}: its chat template does not mark the assistant's tokens; put "
            "{% generation %} ... {% endgeneration %} around the assistant's turn in its chat_template.jinja."
        ) from None


def _texts(raw: Dataset, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    length = recipe.sequence_length

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        pieces: dict[str, list[Any]] = {"input_ids": [], "labels": []}
        for tokens in tokenizer(batch["text"])["input_ids"]:
            tokens = [*tokens, tokenizer.eos_token_id]
            for start in range(0, len(tokens), length):
                piece = tokens[start : start + length]
                pieces["input_ids"].append(piece)
                pieces["labels"].append([IGNORED, *piece[1:]])
        return pieces

    return raw.map(tokenize, batched=True, remove_columns=raw.column_names, desc="tokenizing")


@dataclass(frozen=True)
class Collator:
    """Rows of documents to the model's inputs.

    Position ids start again at every document, and there is no attention mask: from that, transformers keeps
    every document to itself. Padding goes on counting after a row's last document; the causal mask keeps it out
    of sight, and its labels out of the loss.
    """

    pad_token_id: int
    multiple: int = 8

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return `input_ids`, `labels`, `position_ids`, each [rows, longest], and two plain counts."""
        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // self.multiple) * self.multiple
        return {
            "input_ids": self._pad([row["input_ids"] for row in rows], width, self.pad_token_id),
            "labels": self._pad([row["labels"] for row in rows], width, IGNORED),
            "position_ids": torch.stack([_positions(row["seq_lengths"], width) for row in rows]),
            "tokens": sum(len(row["input_ids"]) for row in rows),
            "squared_lengths": sum(length**2 for row in rows for length in row["seq_lengths"]),
        }

    @staticmethod
    def _pad(rows: list[list[int]], width: int, value: int) -> torch.Tensor:
        padded = torch.full((len(rows), width), value)
        for index, row in enumerate(rows):
            padded[index, : len(row)] = torch.as_tensor(row)
        return padded


def _positions(lengths: Sequence[int], width: int) -> torch.Tensor:
    lengths = [*lengths[:-1], width - sum(lengths[:-1])]
    return torch.cat([torch.arange(length) for length in lengths])
