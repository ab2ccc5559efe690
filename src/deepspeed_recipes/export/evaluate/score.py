"""Scores a model on each of the held-out examples."""

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.recipe import Layout, Recipe
from ...training import export, server
from ...training.data import classes, tokenize
from ...training.data.answers import Question, generation_prompt, question
from ...training.data.collate import Collator
from ...training.data.thinking import stripped
from ...training.methods import classify, embed
from ...training.model.transforms import cross_entropy_alone
from ...training.model_folder import base_model
from ...training.parallel import scores
from ...training.server import Server
from .held_out import HeldOut, is_learned


@dataclass(frozen=True)
class Scores:
    """A model's values of the metric, by example."""

    sums: list[float]
    """1 for a right answer or a right order of a pair, and 0 for a wrong one; or an example's loss, in nats."""
    counts: list[int]
    """Divisors of `sums`: 1, or an example's tokens."""
    answers: list[str]
    """The model's answers; empty if the metric needs none."""
    seconds: float
    cut_off: int = 0
    """Number of answers that had not ended within data.max_new_tokens, which count as wrong."""

    @property
    def value(self) -> float:
        """The metric over all examples."""
        return sum(self.sums) / sum(self.counts)


def of(model: Path | Server, held_out: HeldOut) -> Scores:
    """Return a model's scores; refuse a metric that the model in a folder does not have."""
    started = time.monotonic()
    if isinstance(model, Server):
        found = _of_server(model, held_out)
    else:
        head, own = base_model.head_of(model), None
        if head == "vision" and "images" in held_out.examples.column_names:
            raise UserError(
                f"{model}: ds-recipes evaluate does not support images; the run's last line has its metric on them."
            )
        if head == "scores":
            own = "accuracy" if base_model.labels_of(model) else "preference_accuracy"
        elif head == "none":
            own = "recall_at_1"
        if own and held_out.metric != own:
            raise UserError(f"{model}: {KINDS[own]} is measured by {own}, not by {held_out.metric}.")
        # The likelihood of answers ranks pairs, too, but not as the rewards next to it do.
        rewards = held_out.metric == "preference_accuracy" and held_out.recipe.method.scores
        if not own and (rewards or held_out.metric in ("accuracy", "recall_at_1")):
            raise UserError(
                f"{model}: {held_out.metric} is a metric for {KINDS[held_out.metric]} here, and this model writes "
                "text; a run's evaluations.jsonl has what it measured before training."
            )
        found = _of_folder(model, held_out)
        gc.collect()
        torch.cuda.empty_cache()
    return replace(found, seconds=time.monotonic() - started)


def _of_server(model: Server, held_out: HeldOut) -> Scores:
    if held_out.metric != "exact_match":
        raise UserError(f"{model.address}: a server is measured by exact_match only, not by {held_out.metric}.")
    if "images" in held_out.examples.column_names:
        raise UserError(
            f"{model.address}: ds-recipes evaluate does not support images; the run's last line has its metric on them."
        )
    asked: list[list[Json]] = []
    own: list[Json] = []
    expected: list[Json] = []
    thinking = held_out.recipe.data.thinking
    for example in held_out.examples:
        turns = stripped(example["messages"]) if thinking == "strip" else example["messages"]
        last = max(at for at, turn in enumerate(turns) if is_learned(turn))
        asked.append(turns[:last])
        own.append({"tools": example["tools"], "chat_template_kwargs": example.get("options")})
        # The expected answer has its reasoning, to compare it with the server's, only if training teaches reasoning.
        expected += [turns[last]] if thinking == "learn" else stripped([turns[last]])
    options = {"temperature": 0, "max_tokens": held_out.recipe.data.max_new_tokens}
    answers = server.answers(model, asked, options, own)
    right = [answer.right(wanted) for answer, wanted in zip(answers, expected, strict=True)]
    return _shares(right, [str(answer) for answer in answers], sum(one.cut_off for one in answers))


def _shares(right: Sequence[bool], answers: list[str], cut_off: int = 0) -> Scores:
    return Scores([float(one) for one in right], [1] * len(right), answers, 0.0, cut_off)


KINDS = {"accuracy": "a classifier", "recall_at_1": "an embedding model", "preference_accuracy": "a reward model"}
"""The kind of model by its only metric."""


def _of_folder(folder: Path, held_out: HeldOut) -> Scores:
    model, tokenizer = export.load(folder, placed=True), export.load_tokenizer(folder)
    recipe = _as_for(tokenizer, held_out)
    if tokenizer.chat_template is None and recipe.method.examples == "conversations":
        raise UserError(
            f"{folder}: its tokenizer has no chat template, in which conversations are measured; save the template "
            "with which it was trained there, as chat_template.jinja."
        )
    if held_out.metric == "exact_match":
        found: list[scores.Answer] = []
        measured = scores.exact_match(
            model,
            tokenizer,
            _sequences(tokenizer, held_out),
            recipe.data.max_new_tokens,
            synced_gpus=False,
            layout=Layout(),
            on_answer=found.append,
        )
        cut_off = round(measured.get("cut_off", 0) * len(found))
        return _shares([answer.right for answer in found], [answer.text for answer in found], cut_off)
    if held_out.metric == "loss":
        sequences, about = tokenize.tokenized(held_out.examples, tokenize.alone(recipe), tokenizer)
        if about.dropped:
            longer = f"{about.dropped} of {len(held_out.examples)} examples are left out: longer than sequence_length="
            print(f"{held_out.source}: {longer}{recipe.sequence_length}", file=sys.stderr)
        cross_entropy_alone(model)
        collator, sums, counts = Collator(tokenizer.pad_token_id), list[float](), list[int]()
        for sequence in sequences:
            inputs = scores.to_device(collator([sequence]))
            with torch.no_grad():
                loss = model(**inputs, num_items_in_batch=torch.ones((), device=model.device)).loss
            sums.append(float(loss))
            counts.append(int((inputs["labels"][:, 1:] != -100).sum()))
        return Scores(sums, counts, [], 0.0)
    if held_out.metric == "recall_at_1":
        places = embed.found_at(model, tokenizer, list(held_out.examples), recipe, Layout())
        return _shares([place < 1 for place in places], [])
    right: list[bool] = []
    if held_out.metric == "accuracy":
        known = [str(name) for name in model.config.id2label.values()]
        classes.check_known(held_out.source, held_out.examples["label"], known, f"{folder}'s classes")
        answers: list[str] = []
        for batch, logits in classify.judged(model, tokenizer, held_out.examples, recipe, Layout()):
            for example, answer in zip(batch, logits.argmax(-1).tolist(), strict=True):
                answers.append(model.config.id2label[answer])
                right.append(answers[-1] == example["label"])
        return _shares(right, answers)
    per_token = recipe.method.unit == "nats per token"  # as the method's own metric compares answers
    likelihood = partial(scores.log_likelihood, per_token=per_token, own_head=True)
    value = scores.reward if base_model.head_of(folder) == "scores" else likelihood  # classifiers are judged above
    examples = list(held_out.examples)
    for start in range(0, len(examples), recipe.micro_batch_size):
        pairs = examples[start : start + recipe.micro_batch_size]
        with torch.no_grad():
            chosen, rejected = (value(model, tokenizer, pairs, side) for side in ("chosen", "rejected"))
        right += (chosen > rejected).tolist()
    return _shares(right, [])


def questions(tokenizer: PreTrainedTokenizerBase, held_out: HeldOut) -> list[Question]:
    """Return the held-out questions tokenized by `tokenizer`, with the answers that training teaches."""
    opening = generation_prompt(tokenizer)
    return [question(one, opening) for one in _sequences(tokenizer, held_out)]


def _sequences(tokenizer: PreTrainedTokenizerBase, held_out: HeldOut) -> list[Json]:
    """Return every example as training a model with this tokenizer would read it."""
    return list(map(tokenize.of_conversation(_as_for(tokenizer, held_out), tokenizer), held_out.examples))


def _as_for(tokenizer: PreTrainedTokenizerBase, held_out: HeldOut) -> Recipe:
    """Return the recipe with which a model with this tokenizer would be trained on the examples."""
    recipe = held_out.recipe
    return replace(recipe, model=replace(recipe.model, path=tokenizer.name_or_path, vision=False))
