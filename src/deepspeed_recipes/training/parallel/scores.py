"""Scores on held-out data: loss per token, exactly reproduced answers, correctly ranked preferences.

Every function divides the examples over the data-parallel ranks, makes the same number of forward passes on each
(under ZeRO-3 a forward pass is a collective), and returns the value over all of them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...recipe.files import Json, JsonView
from ...recipe.layout import data_parallel_size
from ...recipe.own_code import functions
from ...recipe.recipe import Layout, Recipe
from ...recipe.run_folder import RunFolder
from .. import distributed, own_code
from ..data.answers import Question, generation_prompt, question
from ..data.collate import IGNORED, Batch, rows
from ..data.tokenize import answered
from ..model.generate import continued, ends, until

GENERATION_BATCH = 100
"""Prompts per call of `generate`; the answers are short, so the key/value cache stays small."""


def rank_batches(examples: Sequence[object], batch_size: int, layout: Layout) -> Iterator[tuple[list[Any], int]]:
    """Yield this rank's batches, each with the number of its examples that count.

    Ranks with fewer examples repeat the first example as filler, so that all make the same number of passes. Ranks that
    hold parts of the model's matrices or layers get the same batches, and only one of them counts. Sequence-parallel
    ranks hold whole models and get batches of their own.
    """
    place = distributed.place(layout)
    first, ranks = _share(layout)
    mine = list(examples)[first::ranks]
    passes = math.ceil(math.ceil(len(examples) / ranks) / batch_size)
    for index in range(passes):
        batch = mine[index * batch_size : (index + 1) * batch_size]
        yield batch or [examples[0]], 0 if place.stage or place.tensor else len(batch)


def _share(layout: Layout) -> tuple[int, int]:
    """Return the index of this rank's first example, and the number of ranks that share the examples."""
    place, copies = distributed.place(layout), data_parallel_size(layout, dist.get_world_size())
    return place.data * layout.sequence + place.sequence, copies * layout.sequence


@dataclass(frozen=True)
class Answer:
    """A model's answer to a question, and whether it is right."""

    prompt: str
    expected: str
    """The answer that training teaches, without the token that ends it and surrounding white space."""
    text: str
    """The model's answer, likewise; special tokens are shown."""
    right: bool
    cut_off: bool
    """True if the model had not ended the answer within the tokens that it may write; such an answer is wrong."""


@torch.no_grad()
def exact_match(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequence[JsonView],
    max_new_tokens: int,
    synced_gpus: bool,
    layout: Layout,
    on_answer: Callable[[Answer], None] = lambda answer: None,
    ask: Callable[..., list[list[int]]] | None = None,
    batch_size: int = GENERATION_BATCH,
) -> dict[str, float]:
    """Return `exact_match`, the share of last answers that greedy decoding reproduces, and `cut_off` if some are.

    `sequences` are conversations as they are trained on, one document each, with `input_ids` and `labels`. `on_answer`
    gets each answer that this rank has counted, and `ask` writes the answers to `batch_size` questions, as
    `answers.generate` does. With `synced_gpus` ranks that have finished wait for the others.
    """
    opening = generation_prompt(tokenizer)
    right = cut_off = 0.0
    for batch, count in rank_batches(sequences, batch_size, layout):
        questions = [question(sequence, opening) for sequence in batch]
        for answer in answers(model, tokenizer, questions, max_new_tokens, synced_gpus, ask)[:count]:
            right += answer.right
            cut_off += answer.cut_off
            on_answer(answer)
    right, cut_off = distributed.total(right, cut_off)
    found = {"exact_match": right / len(sequences)}
    return found | {"cut_off": cut_off / len(sequences)} if cut_off else found


@torch.no_grad()
def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    max_new_tokens: int,
    synced_gpus: bool,
    ask: Callable[..., list[list[int]]] | None = None,
) -> list[Answer]:
    """Return the model's greedy answers to questions; see `exact_match`."""
    stop = {*ends(model, tokenizer), *closing(questions, tokenizer)}
    if ask is None:
        prompts = [one.prompt for one in questions]
        written = continued(model, tokenizer, prompts, max_new_tokens, synced_gpus, stop)
    else:
        written = ask(model, tokenizer, questions, max_new_tokens, synced_gpus, stop)
    return [compared(one, tokens, stop, tokenizer) for one, tokens in zip(questions, written, strict=True)]


def own_metrics(recipe: Recipe, mine: Sequence[tuple[str, str]], run: RunFolder | None, step: int) -> dict[str, float]:
    """Return the numbers of the recipe's own metrics for the answers of all ranks; a collective.

    `mine` are this rank's answers that count, each with its reference, in the order of `rank_batches`. Errors name the
    step and the run's newest checkpoint.
    """
    if not functions("data.metric", recipe.data.metric):
        return {}
    first, ranks = _share(recipe.layout)
    numbered = [(first + at * ranks, *pair) for at, pair in enumerate(mine)]
    every = sorted(distributed.items_of_all(numbered))  # as in the data, whatever the number of ranks
    return own_code.measured(recipe, [one[1] for one in every], [one[2] for one in every], run, f"at step {step}")


def closing(questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the control tokens that end the answers in training, possibly followed by white space only.

    The model's settings may not list them, and training does not teach the tokens after them.
    """
    control = frozenset(tokenizer.get_added_vocab().values())
    found: set[int] = set()
    for one in questions:
        written = (token for token in reversed(one.answer) if token in control or tokenizer.decode([token]).strip())
        found |= control.intersection(islice(written, 1))
    return found


def compared(asked: Question, tokens: list[int], stop: Collection[int], tokenizer: PreTrainedTokenizerBase) -> Answer:
    """Compare the model's answer with the expected answer, as text, since a text has several tokenizations.

    Where training teaches no token that ends the answer, only the length that training covers is compared. `tokens` are
    the model's, with the token of `stop` that ends them unless they were cut off.
    """
    wanted = until(asked.answer, stop)
    ended = bool(wanted) and wanted[-1] in stop
    if not ended:
        tokens = tokens[: len(wanted)]
    cut_off = ended and not (tokens and tokens[-1] in stop)

    def text(found: list[int]) -> str:
        bare = found[:-1] if found and found[-1] in stop else found
        return tokenizer.decode(bare, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    expected, given = text(wanted).strip(), text(tokens).strip()
    right = bool(wanted) and expected == given and not cut_off
    return Answer(text(asked.prompt), expected, given, right, cut_off)


@torch.no_grad()
def preferences(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Json],
    batch_size: int,
    layout: Layout,
    value: Callable[..., torch.Tensor],
) -> dict[str, float]:
    """Return how a model ranks pairs of answers.

    `preference_accuracy` is the share of pairs whose chosen answer has the higher value, and `preference_margin` is how
    much higher it is on average. `value` computes it: `log_likelihood` or `reward`.
    """
    right = margin = 0.0
    for batch, count in rank_batches(pairs, batch_size, layout):
        chosen = value(model, tokenizer, batch, "chosen")
        rejected = value(model, tokenizer, batch, "rejected")
        right += (chosen > rejected)[:count].sum().item()
        margin += (chosen - rejected)[:count].sum().item()
    right, margin = distributed.total(right, margin)
    return {"preference_accuracy": right / len(pairs), "preference_margin": margin / len(pairs)}


@torch.no_grad()
def judgements(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    judged: Sequence[Json],
    batch_size: int,
    layout: Layout,
) -> dict[str, float]:
    """Return how a model, as TRL's KTOTrainer has patched it, ranks judged answers by their log-likelihood per token.

    `judgement_accuracy` is the share of all pairs of a good and a bad answer in which the good answer is likelier (the
    area under the ROC curve). `judgement_margin` is how much likelier good answers are on average, in nats per token.
    """
    mine: list[tuple[bool, float]] = []
    for batch, count in rank_batches(judged, batch_size, layout):
        values = log_likelihood(model, tokenizer, batch, "completion", per_token=True).tolist()
        mine += [(example["label"], value) for example, value in zip(batch[:count], values, strict=False)]
    every = distributed.items_of_all(mine)
    good, bad = (torch.tensor([value for label, value in every if label == wanted]) for wanted in (True, False))
    if not len(good) or not len(bad):
        return {"judgement_accuracy": math.nan, "judgement_margin": math.nan}
    right = (good[:, None] > bad).double().mean().item()
    return {"judgement_accuracy": right, "judgement_margin": (good.mean() - bad.mean()).item()}


def log_likelihood(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Json],
    answer: str,
    per_token: bool = False,
    own_head: bool = False,
) -> torch.Tensor:
    """Return the log-likelihood of each example's answer given its prompt, [examples], in nats, summed or `per_token`.

    Uses the head that TRL's trainers give the model: whole logits never exist, and ZeRO-3 runs the modules in the same
    order as in training. In another order it prefetches the head's weight just when TRL gathers it, which fails. Models
    that no trainer has changed have only their `own_head`.
    """
    inputs, labels = _answers(tokenizer, examples, answer)
    if own_head:
        logits, labels = model(input_ids=inputs).logits[:, :-1].float(), labels[:, 1:]
        likelihood = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        likelihood = likelihood.masked_fill(labels == IGNORED, 0.0)
    else:
        likelihood = model(input_ids=inputs, labels=labels, fused_lm_head=True).log_probs
    summed = likelihood.sum(-1)
    return summed / (labels != IGNORED).sum(-1) if per_token else summed


def reward(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Json], answer: str
) -> torch.Tensor:
    """Return the reward that a reward model gives each example's answer, [examples]."""
    inputs, _ = _answers(tokenizer, examples, answer)
    return model(input_ids=inputs).logits[:, 0].float()  # causal: padding on the right reaches no token


def _answers(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Json], answer: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return conversations padded on the right and the labels of their answers' tokens, [examples, longest] each."""
    texts = [answered(tokenizer, example, answer) for example in examples]
    width = max(len(tokens) for tokens, _ in texts)
    inputs = rows([tokens for tokens, _ in texts], width, tokenizer.pad_token_id)
    labels = rows([[IGNORED] * start + tokens[start:] for tokens, start in texts], width, IGNORED)
    return inputs.to(distributed.device()), labels.to(distributed.device())


def to_device(batch: Batch) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch on this rank's device."""
    return {name: value.to(distributed.device()) for name, value in batch.items() if torch.is_tensor(value)}
