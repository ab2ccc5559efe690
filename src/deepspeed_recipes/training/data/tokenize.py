"""Converts examples to sequences of tokens with labels: chat templates, loss masks, packing."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pyarrow.compute as pc
import tokenizers
import transformers
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher
from jinja2 import TemplateError
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils
from trl import pack_dataset

from ...recipe.errors import UserError, first_line
from ...recipe.files import Json, JsonView
from ...recipe.recipe import Recipe
from ..console import say
from ..model import stored
from ..model.control_tokens import Turns, conversation_tokens
from ..model.shown import bounded, shown
from ..model_folder import weights
from . import chat_templates, sources, thinking
from .collate import IGNORED
from .image_conversations import conversation
from .report import BARS, NOT_IN_LOSS, Pieces, Report, enough, pieces, too_long

TOKENS = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32")), "forgets": Value("bool")})
"""`forgets`: the chat template removes reasoning of earlier turns; counted, then removed."""


SEEN = Features({**TOKENS, **sources.PICTURES})
"""Columns of conversations with images, which are read again for each batch."""


SHUFFLED = 1000
"""Examples in the shuffle buffer of a stream."""


TOKENIZED_BY = sources.digest_of_code(
    (
        file
        for part in ("data", "methods", "model")
        for file in sorted((Path(__file__).parents[1] / part).rglob("*.py"))
    ),
    transformers.__version__,
    tokenizers.__version__,
)
"""Identifies this version of the code that tokenizes; what another version has left in the cache is tokenized again."""


class Stream(TorchIterableDataset):
    """Endless sequences, shuffled again on every pass.

    Every rank reads all of them and accelerate picks its batches, so that all ranks get equally many. If accelerate got
    a dataset of `datasets`, it would assign whole files to ranks, and some ranks would finish before others.
    """

    def __init__(self, sequences: IterableDataset, if_empty: str) -> None:
        """`if_empty` is the error message if there are no sequences."""
        self.sequences = sequences
        self.if_empty = if_empty

    def __iter__(self) -> Iterator[Json]:
        for epoch in count():
            self.sequences.set_epoch(epoch)
            empty = True
            for sequence in self.sequences:
                empty = False
                yield sequence
            if empty:
                raise UserError(self.if_empty)


def alone(recipe: Recipe) -> Recipe:
    """Return the recipe by which held-out examples are tokenized.

    Each is a sequence of its own, so that its loss counts the same, however it would be packed. It is cut as in
    training, but not if answers are compared, which then would lack their ends or be answers to earlier questions.
    """
    return replace(recipe, packing=False, truncate=recipe.truncate and recipe.data.metrics == ["loss"])


def prepare(path: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Report]:
    """Read every example of `path` once, and return `tokenized` of them."""
    return tokenized(sources.mix(sources.read(path, recipe), None, recipe.seed), recipe, tokenizer)


def tokenized(
    raw: Dataset, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, name: str = "data.path"
) -> tuple[Dataset, Report]:
    """Return sequences with `input_ids`, `labels` and `seq_lengths`, ready for `Collator`.

    The first token of every document has no label, so no document has to predict the start of the next. Errors call the
    examples `name`.
    """
    documents = _tokens(raw, recipe, tokenizer)
    forgetting = int(np.sum(documents.with_format("numpy")["forgets"][:]))
    documents = documents.remove_columns("forgets")
    lengths = _lengths(documents)
    over = int((lengths > recipe.sequence_length).sum())
    dropped, cut = (0, over) if recipe.truncate else (over, 0)
    if cut:
        documents = documents.map(_cut, fn_kwargs={"longest": recipe.sequence_length})
    kept = documents.filter(_fits, fn_kwargs={"longest": recipe.sequence_length})
    if not len(kept):
        raise UserError(f"{name}: {_nothing_left(recipe, len(raw), dropped, int(lengths.max()))}")
    packed = pack_dataset(kept, recipe.sequence_length, "bfd") if recipe.packing else kept.map(_alone)
    kept_lengths = _lengths(kept)
    least, most = int(kept_lengths.min()), int(kept_lengths.max())
    step = -(-(most - least + 1) // BARS)
    starts, counts = range(least, most + 1, step), np.bincount((kept_lengths - least) // step)
    labels = (pc.list_flatten(batch["labels"]) for batch in kept.with_format("arrow").iter(1000))
    return packed, Report(
        examples=len(raw),
        dropped=dropped,
        unlearnable=len(documents) - len(kept) - dropped,
        extra_pieces=len(documents) - len(raw),
        sequences=len(packed),
        tokens=int(kept_lengths.sum()),
        loss_tokens=sum(pc.sum(pc.not_equal(some, IGNORED)).as_py() for some in labels),
        forgetting=forgetting,
        lengths=tuple((start, start + step - 1, int(count)) for start, count in zip(starts, counts, strict=True)),
        longest=int(lengths.max()),
        cut=cut,
    )


def stream(raw: IterableDataset, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Stream:
    """Return the same as `tokenized`, for examples that are read during training."""
    shuffled = raw.shuffle(recipe.seed, buffer_size=SHUFFLED)
    tokens = _tokens(shuffled, recipe, tokenizer).remove_columns("forgets")
    if recipe.truncate:
        tokens = tokens.map(_cut, fn_kwargs={"longest": recipe.sequence_length})
    kept = tokens.filter(_fits, fn_kwargs={"longest": recipe.sequence_length})
    return Stream(
        pack_dataset(kept, recipe.sequence_length, "bfd") if recipe.packing else kept.map(_alone),
        f"data.path: {_nothing_left(recipe, None, 0, 0)}",
    )


def first_documents(sequences: Iterable[Json], tokenizer: PreTrainedTokenizerBase, most: int = 2) -> list[Pieces]:
    """Return the first documents of `tokenized` or `stream` as text, divided at the boundaries of the loss.

    A document that repeats another is shown once.
    """
    found: list[Pieces] = []
    for sequence in islice(sequences, 10 * most):
        ends = np.cumsum(sequence["seq_lengths"])
        for start, end in zip([0, *ends], ends, strict=False):
            learned = [label != IGNORED for label in sequence["labels"][start:end]]
            shown = pieces(sequence["input_ids"][start:end], learned, tokenizer)
            if shown not in found:
                found.append(shown)
            if len(found) == most:
                return found
    return found


def first_answers(examples: Iterable[Json], tokenizer: PreTrainedTokenizerBase) -> list[Pieces]:
    """Return two answers to compare as text, each with its prompt.

    Those of the first pair, or the first good and the first bad one among the first judged answers.
    """
    found: dict[str, Pieces] = {}
    for example in islice(examples, 100):
        answers = {"(chosen) ": "chosen", "(rejected) ": "rejected"}
        if "label" in example:
            answers = {"(good) " if example["label"] else "(bad) ": "completion"}
        for name, answer in answers.items():
            if name not in found:
                tokens, start = answered(tokenizer, example, answer)
                learned = [index >= start for index in range(len(tokens))]
                found[name] = [(name, False), *pieces(tokens, learned, tokenizer)]
    return list(found.values())


def answered(tokenizer: PreTrainedTokenizerBase, example: Json, answer: str) -> tuple[list[int], int]:
    """Return the tokens of an example's prompt with one of its answers, and the number of prompt tokens.

    The prompt goes as far as the model gets it at inference; templates that write an answered prompt differently differ
    from that towards its end.
    """
    turns, tools, options = example["prompt"], example.get("tools"), example.get("options") or {}
    asked = conversation_tokens(tokenizer, turns, tools, add_generation_prompt=True, **options)
    tokens = conversation_tokens(tokenizer, turns + example[answer], tools, **options)
    differing = (index for index, (one, other) in enumerate(zip(asked, tokens, strict=False)) if one != other)
    return tokens, next(differing, min(len(asked), len(tokens)))


def text_tokens(
    tokenizer: PreTrainedTokenizerBase,
    content: str | Turns,
    longest: int,
    tools: list[Json] | None = None,
    options: JsonView | None = None,
) -> list[int]:
    """Return the tokens of a text as the tokenizer gives them, or of a conversation; at most the first `longest`.

    Text that looks like a control token stays text.
    """
    if isinstance(content, str):
        return tokenizer(content, split_special_tokens=True, verbose=False)["input_ids"][:longest]
    return conversation_tokens(tokenizer, content, tools, **(options or {}))[:longest]


def fitting(examples: Dataset, recipe: Recipe) -> Dataset:
    """Return the examples whose prompt with the longest answer fits, and warn of the others.

    The columns are tokens: `prompt_ids` and those of the answers.
    """
    lengths = [
        len(example["prompt_ids"])
        + max(len(tokens) for name, tokens in example.items() if name.endswith("_ids") and name != "prompt_ids")
        for example in examples
    ]
    kept = examples.select([at for at, length in enumerate(lengths) if length <= recipe.sequence_length])
    if not len(kept):
        raise UserError(
            f"data.path: all {len(examples)} {recipe.method.examples} have an answer that is longer, with its prompt, "
            f"than sequence_length={recipe.sequence_length}; {enough(max(lengths))} keeps all."
        )
    if dropped := len(examples) - len(kept):
        say(too_long("training", dropped, len(examples), max(lengths), recipe.sequence_length))
    return kept


def _tokens(raw: sources.Examples, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> sources.Examples:
    # The recipe stays out of the closures, see `of_conversation`.
    batched, path = recipe.method.name == "pretrain", recipe.model.path
    tokenize = unchecked = _texts(recipe, tokenizer) if batched else of_conversation(recipe, tokenizer)
    folder = stored.folder_of(path)
    rows = weights.embedding_rows(folder) if folder else None
    if rows is not None and not recipe.model.new_tokens and max(tokenizer.get_vocab().values(), default=-1) >= rows:

        def checked(given: object) -> Json:
            """Refuse tokens without rows in the embeddings, which special tokens may be."""
            found = unchecked(given)
            documents = found["input_ids"] if batched else [found["input_ids"]]
            if beyond := [token for document in documents for token in document if token >= rows]:
                raise UserError(
                    f"data.path: {tokenizer.decode(beyond[:1])!r} is token {beyond[0]:,} of the tokenizer, and the "
                    f"embeddings of model.path={path} have {rows:,} rows; remove it from the data."
                )
            return found

        tokenize = checked
    features = SEEN if recipe.model.vision else TOKENS
    unread = [name for name in raw.column_names if name not in features]
    options: Json = {"batched": batched, "remove_columns": unread, "features": features}
    if isinstance(raw, Dataset):
        options |= {"desc": "tokenizing", "new_fingerprint": cache_key(raw, tokenizer, options, _state(tokenize))}
    return raw.map(tokenize, **options)


def mapped(examples: Dataset, tokenizer: PreTrainedTokenizerBase, make: Callable[..., Json]) -> Dataset:
    """Return the columns that `make` computes from each example, from the cache if they are there."""
    key = cache_key(examples, tokenizer, make)
    return examples.map(make, remove_columns=examples.column_names, new_fingerprint=key)


def cache_key(examples: Dataset, tokenizer: PreTrainedTokenizerBase, *given: object) -> str:
    """Return the key of what tokenizing `examples` gives, which depends on `given` and on this version of the code.

    datasets would pickle whole modules for its own key, which takes half a second of every start on every rank, and
    would find yesterday's tokens where the template writes the date, as Llama 3's does.
    """
    dated = "strftime_now" in str(tokenizer.chat_template)
    day = str(chat_template_utils.datetime.now().date()) if dated else None
    return Hasher.hash([examples._fingerprint, TOKENIZED_BY, given, day])


def _state(value: object) -> Any:
    """Return a function's state other than its code and its globals, which `TOKENIZED_BY` identifies."""
    if isinstance(value, FunctionType):
        return [
            value.__qualname__,
            value.__defaults__,
            *(_state(cell.cell_contents) for cell in value.__closure__ or ()),
        ]
    return value


def of_conversation(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Callable[[Any], Json]:
    """Return the function that computes a conversation's `input_ids` and `labels`."""
    if recipe.model.vision:
        return conversation(recipe, tokenizer)
    template, mark = chat_templates.marker(recipe, tokenizer)
    with_tools = chat_templates.renders_tools(tokenizer, template)
    # The recipe stays out of the closure, so that a run at another learning rate finds its tokens in the cache.
    reasoning, loss_on, path = recipe.data.thinking, recipe.loss_on, recipe.model.path

    def tokenize(example: Json) -> Json:
        turns, tools, given, options = example["messages"], example["tools"], example["given"], example.get("options")
        if reasoning == "strip":
            turns = thinking.stripped(turns)
        if loss_on == "last":
            turns = chat_templates.only_last_learned(turns)
        if not with_tools and (tools or any("tool_calls" in turn for turn in turns)):
            raise UserError(
                f"model.path={path}: its chat template drops tool calls, and the data has some; "
                "choose another model, or model.chat_template=chatml."
            )
        try:
            with bounded(f"model.path={path}"):
                found = shown(tokenizer, template, turns, tools, options)
                tokens, assistant = mark(found.turns, tools, options)
                if loss_on == "all":
                    chat_templates.check_all_learned(turns)
                    assistant, given = [True] * len(tokens), 0
                if reasoning == "read":
                    assistant = thinking.unlearned(tokenizer, turns, tokens, assistant)
                before = [0]
                if given:
                    asked = found.turns[:given]
                    before = conversation_tokens(tokenizer, asked, tools, chat_template=template, **(options or {}))
        except (TemplateError, TypeError, ValueError, UserError) as error:
            raise UserError(
                f"data.path: the model's chat template cannot be trained on a conversation: {first_line(error)}.\n"
                f"It begins: {str(turns)[:200]}"
            ) from error
        pairs = zip(tokens, assistant, strict=True)
        labels = [token if said and at >= len(before) else IGNORED for at, (token, said) in enumerate(pairs)]
        return {"input_ids": tokens, "labels": labels, "forgets": found.forgets}

    return tokenize


def _texts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Callable[[Any], Json]:
    length, begin, end = recipe.sequence_length, tokenizer.bos_token_id, tokenizer.eos_token_id

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        """Return documents, cut; special tokens in them stay tokens, as in plain transformers."""
        cut: dict[str, list[object]] = {"input_ids": [], "labels": [], "forgets": []}
        for tokens in tokenizer(batch["text"], verbose=False)["input_ids"]:
            # Some tokenizers add these tokens themselves, also to a text that has them.
            while begin is not None and tokens[:2] == [begin] * 2:
                tokens = tokens[1:]
            while end is not None and tokens[-1:] == [end]:
                tokens = tokens[:-1]
            tokens = tokens if end is None else [*tokens, end]
            for start in range(0, len(tokens), length):
                piece = tokens[start : start + length]
                cut["input_ids"].append(piece)
                cut["labels"].append([IGNORED, *piece[1:]])
                cut["forgets"].append(False)
        return cut

    return tokenize


def _cut(document: Json, longest: int) -> Json:
    return {name: document[name][:longest] for name in ("input_ids", "labels")}


def _fits(document: Json, longest: int) -> bool:
    return len(document["input_ids"]) <= longest and any(label != IGNORED for label in document["labels"])


def _alone(document: Json) -> Json:
    return {"seq_lengths": [len(document["input_ids"])]}


def _lengths(documents: Dataset) -> np.ndarray:
    columns = (batch["input_ids"] for batch in documents.with_format("arrow").iter(1000))
    return np.concatenate([pc.list_value_length(column).to_numpy() for column in columns])


def _nothing_left(recipe: Recipe, examples: int | None, dropped: int, longest: int) -> str:
    longer = f"longer than sequence_length={recipe.sequence_length}"
    if examples is None:
        return f"every example is {longer} or {NOT_IN_LOSS}"
    every = "the only example is" if examples == 1 else f"all {examples} examples are"
    if dropped == examples:
        return f"{every} {longer}; {enough(longest)} keeps all."
    if not dropped:
        return f"{every} {NOT_IN_LOSS}"
    return f"{dropped} of {examples} examples are {longer}, and the others {NOT_IN_LOSS}"
