"""Distillation: the model learns a teacher's whole distribution over each next token of the assistant's answers.

Hinton et al. 2015 (arXiv:1503.02531) and, for the divergences, Agarwal et al. 2023 (arXiv:2306.13649), on the data's
answers or, with `distill.on_policy`, on the student's own. The loss is the mean over all labelled tokens of a step,
whatever their micro-batch and rank, of

    (1 - alpha) * temperature^2 * divergence(teacher, student) + alpha * cross-entropy

Runs on transformers' Trainer, with the packed sequences of supervised fine-tuning. TRL's GKDTrainer divides a step's
loss by its tokens over all ranks, and DeepSpeed its gradients by the ranks once more, so on two ranks both are halved;
it also holds whole logits of both models. TRL's DistillationTrainer, which uses tiles, is for answers that the student
writes, packs nothing, and reads numbers from the device at every pass.

The seed, the step and the example determine which steps are on the student's policy (Agarwal et al., algorithm 1) and
what is sampled, so that another number of ranks or a resumed run gives the same answers. No gradient passes through the
sampling, as in the paper.
"""

import random
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, Trainer
from trl.trainer.utils import maybe_gather_lm_head_ctx

from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.methods import Distill
from ...recipe.recipe import Recipe
from ..console import say
from ..data.collate import FILLER, IGNORED, KEY, Batch, Collator, filler
from ..data.load import Datasets, tokenized_datasets
from ..model import output_head
from ..model.attention import needs_boundaries
from ..model.generate import ends
from ..trainer import RunContext
from . import sft
from .averages import Averaging
from .distillation import divergence, likeliest, teacher
from .distillation.likeliest import LOG_PROBS, PLACES, TARGETS, TOKENS, PlacesCollator, Served
from .distillation.teacher import Teacher
from .rollouts import hooks

arguments = sft.arguments
metric = sft.metric
answer = sft.answer


def datasets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Datasets:
    """Return sequences of tokens with labels; where the student writes, those whose prompts leave room for it."""
    distill = Distill.of(recipe)
    if not distill.served:
        teacher.check(recipe, tokenizer)
    found = tokenized_datasets(recipe, tokenizer)
    if not distill.on_policy:
        return found
    longest, training = recipe.sequence_length - distill.max_new_tokens, found.training
    kept: Any = training.filter(lambda sequence: _prompt_length(sequence["labels"]) <= longest)
    if len(kept) < recipe.global_batch_size:
        raise UserError(
            f"distill.max_new_tokens={distill.max_new_tokens}: {len(kept)} of {len(training)} prompts leave "
            f"room in sequence_length={recipe.sequence_length}; use fewer, or a larger sequence_length."
        )
    if len(kept) < len(training):
        say(f"distillation: {len(training) - len(kept)} examples left out, whose prompts leave no room for an answer")
    size = found.size and replace(found.size, documents=len(kept), sequences=len(kept))
    return replace(found, training=kept, size=size)


class RunDistillTrainer(Averaging, Trainer):
    """transformers' Trainer with the run's hooks, and a teacher."""

    train_dataset: Dataset

    def __init__(self, context: RunContext, *, processing_class: PreTrainedTokenizerBase, **options: object) -> None:
        recipe = context.recipe
        boundaries = needs_boundaries(options["model"])
        self.distill = Distill.of(recipe)
        collator = PlacesCollator(Collator(processing_class.pad_token_id, boundaries=boundaries), self.distill.top_k)
        super().__init__(context, processing_class=processing_class, data_collator=collator, **options)
        self.model_accepts_loss_kwargs = True  # the loss below takes a step's number of tokens, whatever the model does
        self.student = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        self.vocabulary = teacher.entries(recipe)
        self.head = output_head.head_of(self.student, self.vocabulary)
        self.teacher: Teacher | None = None
        if self.distill.top_k is None:
            self.teacher = Teacher.of(recipe, self.vocabulary, self.accelerator)
            return
        folder = Path(self.distill.cache or context.run.likeliest)
        mark = likeliest.of_run(recipe, self.train_dataset, processing_class)
        if not likeliest.known(folder, mark):
            served = Served.of(recipe, self.vocabulary) if self.distill.served else None
            if served:
                served.check(processing_class)
            asked = served or Teacher.of(recipe, self.vocabulary, self.accelerator)
            likeliest.compute(folder, mark, asked, self.train_dataset, self.data_collator, recipe.micro_batch_size)
        self.train_dataset = likeliest.read(folder, self.train_dataset)

    def prepare_step(self, batches: list[Batch], items: object) -> tuple[list[Batch], object]:
        """Return a step's micro-batches, with the student's own answers in the share of steps `distill.on_policy`."""
        if not writes(self.context.recipe, self.state.global_step):
            return batches, items
        with self.context.phases.phase("rollout"):
            device, prompts = self.accelerator.device, []
            for batch in batches:
                rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
                prompts.append([tokens[: _prompt_length(labels)] for tokens, labels in rows])
            numbers = [number for batch in batches for number in batch[KEY]]
            noise = hooks.Noise(hooks.seeds_of(self.context.recipe.seed, self.state.global_step, numbers), 1.0, device)
            asked, stop = [prompt for batch in prompts for prompt in batch], ends(self.model, self.processing_class)
            longest = self.distill.max_new_tokens
            answers = iter(hooks.written_answers(self, asked, noise, longest, stop, gather=True))
            found = []
            for batch, own in zip(batches, prompts, strict=True):
                inputs = self.data_collator([_sequence(prompt, next(answers)) for prompt in own])
                moved = {name: one.to(device) if torch.is_tensor(one) else one for name, one in inputs.items()}
                written = {**moved, KEY: batch[KEY]}
                found.append(filler(written) if FILLER in batch else written)
            batches = found
        return batches, self._get_num_items_in_batch(batches, self.args.device)

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *arguments: object, **options: object
    ) -> torch.Tensor:
        """Return this rank's part of the step's mean loss per token, times the ranks, over which DeepSpeed averages."""
        with self.context.phases.phase("forward"):
            of_teacher = self.teacher.hidden(inputs, inputs[PLACES]) if self.teacher else None
            forward = partial(self._forward, inputs, of_teacher)
            loss, numbers = teacher.run_as(model, self.student, forward, **teacher.read_by_models(inputs))
        self.averages.add(dict(zip(("divergence", "cross_entropy"), numbers, strict=True)))
        return loss * (not self.filler) * dist.get_world_size() / options["num_items_in_batch"]

    def _forward(
        self, batch: Batch, of_teacher: torch.Tensor | None, **inputs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss summed over a micro-batch's tokens, and its numbers; inside the student's forward pass.

        ZeRO-3 gathers the student's weights and reduces the gradients by hooks there, so both heads are gathered in it.
        """
        read = teacher.read_by_models(inputs)  # PEFT adds its own arguments
        hidden = teacher.hidden_states(self.student, read, batch[PLACES])
        with ExitStack() as gathered:
            gathered.enter_context(maybe_gather_lm_head_ctx(*self.head.weights))
            if self.teacher:
                gathered.enter_context(self.teacher.gathered())
            return divergence.summed(hidden, self.head, partial(self._compared, batch, of_teacher))

    def _compared(
        self, batch: Batch, of_teacher: torch.Tensor | None, logits: torch.Tensor, tokens: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of a tile, summed, and its tokens' divergences and cross-entropies, [2, tokens]."""
        distill = self.distill
        log_probs = (logits / distill.temperature).log_softmax(-1)
        if self.teacher and of_teacher is not None:
            wanted = self.teacher.log_probs(of_teacher[tokens])
        else:
            log_probs = divergence.of_outcomes(log_probs, batch[TOKENS][tokens])
            wanted = batch[LOG_PROBS][tokens]
        apart = divergence.per_token(log_probs, wanted, self.context.recipe)
        entropy = torch.nn.functional.cross_entropy(logits, batch[TARGETS][tokens], reduction="none")
        loss = (1 - distill.alpha) * distill.temperature**2 * apart + distill.alpha * entropy
        return loss.sum(), torch.stack([apart, entropy])


trainer = RunDistillTrainer.of


def writes(recipe: Recipe, step: int) -> bool:
    """Return whether the student writes the answers of a step."""
    return random.Random(f"{recipe.seed} {step}").random() < Distill.of(recipe).on_policy


def _prompt_length(labels: list[int]) -> int:
    return next((at for at, label in enumerate(labels) if label != IGNORED), 1)  # a filler has no answer


def _sequence(prompt: list[int], answer: list[int]) -> Json:
    ids = [*prompt, *answer]
    return {"input_ids": ids, "labels": [IGNORED] * len(prompt) + answer, "seq_lengths": [len(ids)]}
