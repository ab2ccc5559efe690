"""Embeddings from texts that belong together: InfoNCE with the other texts of all ranks' micro-batches as negatives.

van den Oord et al. 2018, arXiv:1807.03748. As in sentence-transformers' MultipleNegativesRankingLoss, from anchors to
texts, on cosine similarities.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from datasets import Dataset
from torch.autograd.function import FunctionCtx
from torch.nn.functional import cross_entropy, normalize
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from ...recipe.files import Json
from ...recipe.layout import data_parallel_size
from ...recipe.methods import Embed
from ...recipe.recipe import Layout, Recipe
from .. import distributed
from ..console import say, show
from ..data import classes, load, report, tokenize, updates
from ..data.collate import Batch, padded
from ..parallel import scores
from ..trainer import Parts, RunContext
from . import sft
from .averages import Averaging

arguments = sft.arguments
SIDES = ("anchor", "positive", "negative")


def datasets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> load.Datasets:
    """Return pairs, all with equally many negatives, as tokens; whole micro-batches of all ranks."""
    found, held_out = load.read_examples(recipe, tokenizer)
    classes.check_negatives("data.path", Counter(map(len, found["negative"])))
    classes.check_pairs("data.path", len(found), recipe.global_batch_size)
    make = partial(_with_tokens, tokenizer=tokenizer, longest=recipe.sequence_length)
    tokens = tokenize.mapped(found, tokenizer, make).shuffle(recipe.seed)
    cut, tokens = sum(tokens["cut"]), tokens.remove_columns("cut")
    # Ranks could not exchange the texts of unequal batches.
    together = recipe.micro_batch_size * data_parallel_size(recipe.layout, dist.get_world_size())
    kept = tokens.select(range(len(tokens) // together * together))
    texts = _texts(found[0])
    shown = [[(f"({side}) ", True), (text, False)] for side, text in zip(SIDES, texts, strict=False)]
    show(shown)
    say(
        f"training: {len(kept)} pairs, each with {together * (len(texts) - 1) - 1} other texts as negatives"
        f"{report.left_out(len(found) - len(kept), together)}"
    )
    if cut:
        say(report.cut_off(cut, len(found) * len(texts), recipe.sequence_length))
    size = updates.Size(len(found), len(kept), len(kept), None)
    return load.Datasets(kept, held_out, None, kept[0]["texts"][1], size, {"shown": shown})


def _texts(example: Json) -> list[str]:
    """Return the texts of a pair: its anchor, its positive, its negatives."""
    return [example["anchor"], example["positive"], *example["negative"]]


def _with_tokens(example: Json, tokenizer: PreTrainedTokenizerBase, longest: int) -> Json:
    tokens = [tokenize.text_tokens(tokenizer, text, longest + 1) for text in _texts(example)]
    return {"texts": [text[:longest] for text in tokens], "cut": sum(len(text) > longest for text in tokens)}


@dataclass(frozen=True)
class PairCollator:
    """Pads the texts of pairs: all anchors, then all positives, then the first negative of all, and so on."""

    pad_token_id: int

    def __call__(self, pairs: Sequence[Json]) -> Batch:
        """Return the model's inputs, and `texts`, [texts of a pair, pairs]: numbers, equal for equal texts."""
        texts = list(zip(*(pair["texts"] for pair in pairs), strict=True))
        numbers = torch.tensor([[_number(tokens) for tokens in side] for side in texts])
        return padded([tokens for side in texts for tokens in side], self.pad_token_id) | {"texts": numbers}


def _number(tokens: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(list(tokens)).encode(), digest_size=7).digest())


class Gathered(torch.autograd.Function):
    """The texts of all ranks, [ranks * texts, hidden size], with gradients back to the rank that computed each.

    torch.distributed.nn's own `all_gather` is deprecated, and its replacement is private.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, vectors: torch.Tensor) -> torch.Tensor:
        """Return the vectors of all ranks, in their order; a collective."""
        return torch.cat(distributed.gathered(vectors))

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gradients of all ranks' losses for this rank's vectors; a collective."""
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        return summed.chunk(dist.get_world_size())[dist.get_rank()]


class RunEmbeddingTrainer(Averaging, Trainer):
    """transformers' Trainer with the run's hooks and our loss."""

    loss_is_scaled_for_ga = False  # a mean per micro-batch

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *arguments: object, **options: object
    ) -> torch.Tensor:
        """Return the mean InfoNCE of this rank's anchors, in nats."""
        recipe, numbers = self.context.recipe, inputs["texts"]
        settings = Embed.of(recipe)
        vectors = embedded(model, inputs, settings.pooling)
        anchors, others = vectors[: numbers.shape[1]], vectors[numbers.shape[1] :]
        similarities = anchors @ Gathered.apply(others).T / settings.temperature
        right, equal = candidates(numbers)
        similarities = similarities.masked_fill(equal, -torch.inf)
        self.averages.add({"accuracy": similarities.detach().argmax(-1) == right})
        return cross_entropy(similarities, right)


def candidates(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each anchor's right text among the texts of all ranks, and which of these are not its negatives.

    A text that is equal to the right one, or belongs to an equal anchor, is right too. `numbers` are those of this
    rank's texts, [texts of a pair, pairs], from `PairCollator`; the results are places, [pairs], and booleans, [pairs,
    texts of all ranks].
    """
    every = distributed.gathered(numbers)
    texts = torch.cat([one[1:].flatten() for one in every])
    owners = torch.cat([torch.cat([one[0], torch.full_like(one[2:].flatten(), -1)]) for one in every])
    pairs = numbers.shape[1]
    own = torch.arange(pairs, device=numbers.device)
    right = dist.get_rank() * numbers[1:].numel() + own
    equal = (texts == numbers[1][:, None]) | (owners == numbers[0][:, None])
    equal[own, right] = False
    return right, equal


def embedded(model: PreTrainedModel, inputs: Batch, pooling: str) -> torch.Tensor:
    """Return the vectors of texts, [texts, hidden size], of length 1 and in fp32, from a model without a head.

    `inputs` are `input_ids` and `attention_mask`, [texts, length], padded behind the tokens; `pooling` is as in
    `Embed`.
    """
    mask = inputs["attention_mask"]
    states = model(input_ids=inputs["input_ids"], attention_mask=mask, use_cache=False).last_hidden_state.float()
    if pooling == "last":
        return normalize(states[torch.arange(len(states), device=states.device), mask.sum(-1) - 1], dim=-1)
    return normalize((states * mask[..., None]).sum(1) / mask.sum(-1, keepdim=True), dim=-1)


def trainer(context: RunContext, parts: Parts) -> RunEmbeddingTrainer:
    """Return the Trainer."""
    return RunEmbeddingTrainer.of(context, parts, data_collator=PairCollator(parts.tokenizer.pad_token_id))


def metric(trainer: RunEmbeddingTrainer, examples: Dataset) -> dict[str, float]:
    """Return `recall_at_1` and `recall_at_10`: the share of held-out anchors with their text at these ranks or better.

    The candidates are the texts of all held-out pairs, negatives included.
    """
    recipe = trainer.context.recipe
    places = found_at(trainer.model, trainer.processing_class, list(examples), recipe, recipe.layout)
    return {f"recall_at_{most}": sum(place < most for place in places) / len(places) for most in (1, 10)}


@torch.no_grad()
def found_at(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: list[Json], recipe: Recipe, layout: Layout
) -> list[int]:
    """Return for each example how many texts are at least as similar to its anchor as its own; a collective.

    The other texts of an equal anchor do not count.
    """
    texts = list(dict.fromkeys(text for example in examples for text in _texts(example)[1:]))
    anchors = list(dict.fromkeys(example["anchor"] for example in examples))
    every = texts + anchors
    vectors = torch.zeros(len(every), model.config.get_text_config().hidden_size, device=distributed.device())
    for batch, count in scores.rank_batches(list(enumerate(every)), recipe.micro_batch_size, layout):
        tokens = [tokenize.text_tokens(tokenizer, text, recipe.sequence_length) for _, text in batch]
        inputs = scores.to_device(padded(tokens, tokenizer.pad_token_id))
        places = torch.tensor([at for at, _ in batch[:count]], dtype=torch.long, device=vectors.device)
        vectors[places] = embedded(model, inputs, Embed.of(recipe).pooling)[:count]
    dist.all_reduce(vectors)
    vectors = vectors.cpu()
    similar = vectors[len(texts) :] @ vectors[: len(texts)].T
    place = {text: at for at, text in enumerate(texts)}
    own: dict[str, set[int]] = {}
    for example in examples:
        own.setdefault(example["anchor"], set()).add(place[example["positive"]])
    rows = dict(zip(anchors, similar, strict=True))
    found = []
    for one in examples:
        to_texts = rows[one["anchor"]]
        before = to_texts >= to_texts[place[one["positive"]]]  # all of them, if a model gives all texts the same vector
        found.append(int(before.sum()) - int(before[list(own[one["anchor"]])].sum()))
    return found
