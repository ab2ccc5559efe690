"""Sequence classification on transformers' own Trainer: the class of a text or of a conversation.

transformers computes a classifier's loss as the mean of a micro-batch, whatever number of examples its Trainer passes.
The Trainer nevertheless multiplies it by the number of ranks, and does not divide it by the number of micro-batches.
Here it is the mean over all examples of the global batch.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.modeling_outputs import SequenceClassifierOutput

from ...recipe.errors import counted
from ...recipe.files import Json
from ...recipe.methods import Classify
from ...recipe.recipe import Layout, Recipe
from .. import distributed
from ..console import say, show
from ..data import classes, load, report, tokenize, updates
from ..data.collate import Batch, padded
from ..model.load import load_config
from ..parallel import scores
from ..trainer import Parts, RunContext
from . import sft
from .averages import Averaging

arguments = sft.arguments


def datasets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> load.Datasets:
    """Return texts as tokens, each with the number of its class; all data must have the model's classes."""
    found, held_out = load.read_examples(recipe, tokenizer)
    counts = Counter(found["label"])
    classes.check("data.path", counts)
    config = load_config(recipe)
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        labels = [config.id2label[at] for at in range(config.num_labels)]
        classes.check_known("data.path", counts, labels, f"the classifier model.path={recipe.model.path}")
    else:
        labels = classes.ordered(counts)
    if held_out is not None:
        classes.check_known("data.validation", held_out["label"], labels)
    numbers = {name: number for number, name in enumerate(labels)}
    make = partial(_with_tokens, tokenizer=tokenizer, numbers=numbers, longest=recipe.sequence_length)
    tokens = tokenize.mapped(found, tokenizer, make)
    cut = sum(tokens["cut"])
    kept = tokens.remove_columns("cut")
    shown = [[(f"({found[at]['label']}) ", True), (tokenizer.decode(kept[at]["input_ids"]), False)] for at in (0, 1)]
    show(shown)
    say(
        f"training: {counted(len(kept), 'text')} by class: "
        + ", ".join(f"{name}: {counts[name]:,}" for name in labels[: classes.SHOWN * 2])
    )
    if cut:
        say(report.cut_off(cut, len(found), recipe.sequence_length))
    size = updates.Size(len(found), len(kept), len(kept), sum(map(len, kept["input_ids"])))
    return load.Datasets(kept, held_out, None, kept[0]["input_ids"], size, {"shown": shown}, tuple(labels))


def _tokens(tokenizer: PreTrainedTokenizerBase, example: Json, longest: int) -> list[int]:
    content, options = example["messages"] or example["text"], example.get("options")
    return tokenize.text_tokens(tokenizer, content, longest, example["tools"], options)


def _with_tokens(example: Json, tokenizer: PreTrainedTokenizerBase, numbers: dict[str, int], longest: int) -> Json:
    tokens = _tokens(tokenizer, example, longest + 1)
    return {"input_ids": tokens[:longest], "labels": numbers[example["label"]], "cut": len(tokens) > longest}


@dataclass(frozen=True)
class TextCollator:
    """Pads texts, and adds the numbers of their classes as `labels`, [texts]."""

    pad_token_id: int

    def __call__(self, texts: Sequence[Json]) -> Batch:
        """Return the model's inputs."""
        inputs = padded([text["input_ids"] for text in texts], self.pad_token_id)
        return {**inputs, "labels": torch.tensor([text["labels"] for text in texts])}


class RunClassificationTrainer(Averaging, Trainer):
    """transformers' Trainer with the run's hooks and our loss."""

    def __init__(self, context: RunContext, *, class_weights: torch.Tensor | None, **options: object) -> None:
        """`class_weights`: one per class, or None if all are 1. `options` are passed to the trainer's own class."""
        self.class_weights = class_weights
        super().__init__(context, compute_loss_func=self.loss, **options)

    def loss(
        self, output: SequenceClassifierOutput, labels: torch.Tensor, num_items_in_batch: torch.Tensor
    ) -> torch.Tensor:
        """Return a micro-batch's part of the mean weighted cross-entropy, in nats.

        The Trainer multiplies it by the number of ranks, over which DeepSpeed takes the mean. It is divided by the
        number of examples even with class weights: dividing by their sum would cancel them in a batch of one class.

        Args:
            output: with `logits`, [texts, classes].
            labels: the numbers of the classes, [texts].
            num_items_in_batch: examples of the global batch, on all ranks.
        """
        logits = output.logits.float()
        self.averages.add({"accuracy": logits.detach().argmax(-1) == labels})
        return cross_entropy(logits, labels, weight=self.class_weights, reduction="sum") / num_items_in_batch


def trainer(context: RunContext, parts: Parts) -> RunClassificationTrainer:
    """Return the Trainer."""
    model = parts.model
    pad = model.config.get_text_config().pad_token_id
    if pad is None:  # otherwise transformers could not find the end of a text
        pad = model.config.get_text_config().pad_token_id = parts.tokenizer.pad_token_id
    weights = None
    if Classify.of(context.recipe).class_weights == "balanced":
        weights = balanced(parts.dataset["labels"], model.config.num_labels).to(distributed.device())
    return RunClassificationTrainer.of(context, parts, data_collator=TextCollator(pad), class_weights=weights)


def balanced(labels: Sequence[int], number: int) -> torch.Tensor:
    """Return examples / (classes * examples of the class) for each of `number` classes, or 0 without examples."""
    counts = Counter(labels)
    weights = [len(labels) / (len(counts) * counts[at]) if counts[at] else 0.0 for at in range(number)]
    return torch.tensor(weights)


def metric(trainer: RunClassificationTrainer, examples: Dataset) -> dict[str, float]:
    """Return `accuracy`, `macro_f1` (the mean over classes that occur) and the unweighted `loss` of held-out texts."""
    recipe, model = trainer.context.recipe, trainer.model
    numbers = {model.config.id2label[at]: at for at in range(model.config.num_labels)}
    confused = torch.zeros(len(numbers), len(numbers), dtype=torch.float64)  # true classes, answered classes
    loss = 0.0
    for batch, logits in judged(model, trainer.processing_class, examples, recipe, recipe.layout):
        labels = torch.tensor([numbers[example["label"]] for example in batch], dtype=torch.long)
        loss += cross_entropy(logits, labels, reduction="sum").item() if batch else 0.0
        for label, answer in zip(labels.tolist(), logits.argmax(-1).tolist(), strict=True):
            confused[label, answer] += 1
    loss, *counted = distributed.total(loss, *confused.flatten().tolist())
    confused = torch.tensor(counted).view_as(confused)
    right, both = confused.diagonal(), confused.sum(0) + confused.sum(1)
    return {
        "accuracy": right.sum().item() / len(examples),
        "macro_f1": (2 * right / both)[both > 0].mean().item(),
        "loss": loss / len(examples),
    }


@torch.no_grad()
def judged(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Dataset, recipe: Recipe, layout: Layout
) -> Iterator[tuple[list[Json], torch.Tensor]]:
    """Yield this rank's share of the examples with their logits on the host, [examples, classes]; a collective."""
    for batch, count in scores.rank_batches(list(examples), recipe.micro_batch_size, layout):
        texts = [_tokens(tokenizer, example, recipe.sequence_length) for example in batch]
        inputs = scores.to_device(padded(texts, model.config.get_text_config().pad_token_id))
        yield batch[:count], model(**inputs, use_cache=False).logits[:count].float().cpu()
