"""From sources to rows of tokens with labels: chat templates, loss masks, packing, streams."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from jinja2 import TemplateError
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import PreTrainedTokenizerBase
from trl import pack_dataset

from recipes.spec.errors import UserError
from recipes.spec.recipe import Recipe
from recipes.training import attention, sources, templates
from recipes.training.data_report import Pieces, Report, histogram, pieces

IGNORED = -100
"""The label of a token that the loss leaves out (PyTorch's `ignore_index`)."""
TOKENS = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
SHUFFLED = 1000
"""How many examples of a stream are held to draw the next one from."""


def prepare(path: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Report]:
    """Read what `path` names, every row once, and return `tokenized` of it."""
    return tokenized(sources.mix(sources.read(path, recipe), None, recipe.seed), recipe, tokenizer)


def tokenized(raw: Dataset, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Report]:
    """Return rows with `input_ids`, `labels` and `seq_lengths`, ready for `Collator`.

    The first token of every document has no label, so no document is asked to predict the next one's start.

    Raises:
        UserError: the tokenizer cannot mark the assistant's tokens, or nothing is left to train on.
    """
    rows = _tokens(raw, recipe, tokenizer)
    kept = rows.filter(_fits, fn_kwargs={"longest": recipe.sequence_length})
    lengths = _lengths(rows)
    dropped = int((lengths > recipe.sequence_length).sum())
    if not len(kept):
        raise UserError(_nothing_left(recipe, len(raw), dropped))
    packed = pack_dataset(kept, recipe.sequence_length, "bfd") if recipe.packing else kept.map(_alone)
    return packed, Report(
        examples=len(raw),
        dropped=dropped,
        unlearnable=len(rows) - len(kept) - dropped,
        extra_pieces=len(rows) - len(raw),
        rows=len(packed),
        tokens=int(_lengths(kept).sum()),
        loss_tokens=_learned(kept),
        lengths=histogram(_lengths(kept)),
    )


def stream(raw: IterableDataset, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> "Stream":
    """Return what `tokenized` does for rows that are read while training."""
    shuffled = raw.shuffle(recipe.seed, buffer_size=SHUFFLED)
    kept = _tokens(shuffled, recipe, tokenizer).filter(_fits, fn_kwargs={"longest": recipe.sequence_length})
    return Stream(
        pack_dataset(kept, recipe.sequence_length, "bfd") if recipe.packing else kept.map(_alone),
        _nothing_left(recipe, None, 0),
    )


class Stream(TorchIterableDataset):
    """Rows for ever, in another order each time round.

    Every rank reads all of them and accelerate gives it its own batches, so that all ranks get as many. It would give
    whole files to the ranks if it saw a data set of `datasets`: some would be through theirs before others.
    """

    def __init__(self, rows: IterableDataset, if_empty: str) -> None:
        """`if_empty` is what to tell the user where there are no rows."""
        self.rows = rows
        self.if_empty = if_empty

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield rows as `tokenized` has them."""
        found, epoch = True, 0
        while found:
            found = False
            self.rows.set_epoch(epoch)
            for row in self.rows:
                found = True
                yield row
            epoch += 1
        raise UserError(self.if_empty)


def following(labels: torch.Tensor) -> torch.Tensor:
    """Return the label of the token after each position, [rows, length]; the last has none."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def examples(rows: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, most: int = 2) -> list[Pieces]:
    """Return the first documents of `tokenized` or `stream` as text, parted where the loss begins and ends."""
    found: list[Pieces] = []
    for row in islice(rows, most):
        ends = np.cumsum(row["seq_lengths"])
        for start, end in zip([0, *ends], ends, strict=False):
            learned = [label != IGNORED for label in row["labels"][start:end]]
            found.append(pieces(row["input_ids"][start:end], learned, tokenizer))
    return found[:most]


def pair_examples(pairs: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[Pieces]:
    """Return the first preference pair as text: the prompt with either answer, which is what is compared."""
    pair = pairs[0]
    prompt = tokenizer.apply_chat_template(pair["prompt"], pair["tools"], add_generation_prompt=True, return_dict=True)
    found = []
    for answer in ("chosen", "rejected"):
        tokens = tokenizer.apply_chat_template(pair["prompt"] + pair[answer], pair["tools"], return_dict=True)
        learned = [index >= len(prompt["input_ids"]) for index in range(len(tokens["input_ids"]))]
        found.append([(f"({answer}) ", False), *pieces(tokens["input_ids"], learned, tokenizer)])
    return found


def _tokens(raw: sources.Rows, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> sources.Rows:
    tokenize = _texts(recipe, tokenizer) if recipe.method == "pretrain" else _conversation(recipe, tokenizer)
    told = {"desc": "tokenizing"} if isinstance(raw, Dataset) else {}
    batched = recipe.method == "pretrain"
    return raw.map(tokenize, batched=batched, remove_columns=raw.column_names, features=TOKENS, **told)


def _conversation(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Any:
    template, mark = templates.marker(recipe, tokenizer)
    with_tools = templates.renders_tools(tokenizer, template)

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        turns, tools, given = row["messages"], row["tools"], row["given"]
        if not with_tools and (tools or any("tool_calls" in turn for turn in turns)):
            raise UserError(
                f"model.path={recipe.model.path}: its chat template leaves tool calls out, and the data has some; "
                "take another model, or model.chat_template=chatml."
            )
        try:
            tokens, assistant = mark(turns, tools)
            before = (
                tokenizer.apply_chat_template(turns[:given], tools, chat_template=template, return_dict=False)
                if given
                else [0]
            )
        except (TemplateError, TypeError, UserError) as error:
            raise UserError(
                f"data.path: the model's chat template cannot be trained on a conversation: {error}.\n"
                f"It begins: {str(turns)[:200]}"
            ) from error
        pairs = zip(tokens, assistant, strict=True)
        labels = [token if said and at >= len(before) else IGNORED for at, (token, said) in enumerate(pairs)]
        return {"input_ids": tokens, "labels": labels}

    return tokenize


def _texts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Any:
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

    return tokenize


def _fits(row: dict[str, Any], longest: int) -> bool:
    return len(row["input_ids"]) <= longest and any(label != IGNORED for label in row["labels"])


def _alone(row: dict[str, Any]) -> dict[str, Any]:
    return {"seq_lengths": [len(row["input_ids"])]}


def _lengths(rows: Dataset) -> np.ndarray:
    columns = (batch["input_ids"] for batch in rows.with_format("arrow").iter(1000))
    return np.concatenate([pc.list_value_length(column).to_numpy() for column in columns])


def _learned(rows: Dataset) -> int:
    columns = (pc.list_flatten(batch["labels"]) for batch in rows.with_format("arrow").iter(1000))
    return sum(pc.sum(pc.not_equal(column, IGNORED)).as_py() for column in columns)


def _nothing_left(recipe: Recipe, examples: int | None, dropped: int) -> str:
    every = "every example is" if examples is None else f"all {examples} examples are"
    if examples is not None and not dropped:
        return f"data.path: {every} without a token that the loss could be computed on; are the answers empty?"
    return f"data.path: {every} longer than sequence_length={recipe.sequence_length}; raise it."


@dataclass(frozen=True)
class Collator:
    """Rows of documents to the model's inputs.

    Position ids start again at every document, and there is no attention mask: from that, transformers keeps
    every document to itself. Padding goes on counting after a row's last document; the causal mask keeps it out
    of sight, and its labels out of the loss.
    """

    pad_token_id: int
    multiple: int = 8
    tells: bool = False
    """Also say where documents begin, for attention that wants to know."""

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
            **(attention.documents([row["seq_lengths"] for row in rows], width) if self.tells else {}),
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
