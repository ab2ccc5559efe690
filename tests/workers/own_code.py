"""The user's own code of the parity tests: a loss, a callback, a metric and a transform, each in a few lines."""

import json
import os
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback


def train(folder, events):
    """Train a run folder's recipe, with the folder of the recorded events; executed on every rank."""
    from deepspeed_recipes.training import run

    os.environ["EVENTS"] = events
    run.main(folder)


def focal(logits, labels, num_items_in_batch):
    """Return the focal loss (Lin et al. 2017, arXiv:1708.02002), per labelled token of the step."""
    each = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).sum() / num_items_in_batch


class Recorder(TrainerCallback):
    """Writes the events of its rank, and adds a number to the logs."""

    def note(self, event, state):
        """Write one event."""
        path = Path(os.environ["EVENTS"]) / f"rank-{os.environ.get('RANK', 0)}.jsonl"
        with path.open("a", encoding="utf-8") as log:
            log.write(json.dumps([event, state.global_step]) + "\n")

    def on_train_begin(self, args, state, control, **kwargs):
        """Note it."""
        self.note("on_train_begin", state)

    def on_step_begin(self, args, state, control, **kwargs):
        """Note it."""
        self.note("on_step_begin", state)

    def on_substep_end(self, args, state, control, **kwargs):
        """Note it."""
        self.note("on_substep_end", state)

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Note it."""
        self.note("on_optimizer_step", state)

    def on_step_end(self, args, state, control, **kwargs):
        """Note it."""
        self.note("on_step_end", state)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Note it, and add the loss in bits."""
        if "loss" in logs:
            self.note("on_log", state)
            logs["loss_in_bits"] = logs["loss"] / 0.6931471805599453

    def on_train_end(self, args, state, control, **kwargs):
        """Note it."""
        self.note("on_train_end", state)


def overlap(answers, references):
    """Return shares of common characters: the mean, and a sum that depends on the order of the examples."""
    shares = [
        len(set(answer) & set(reference)) / len(set(answer) | set(reference))
        for answer, reference in zip(answers, references, strict=True)
    ]
    return {"mean": sum(shares) / len(shares), "ordered": sum(at * share for at, share in enumerate(shares))}


def asked(example):
    """Return a question and its answer as a conversation, and drop those that are marked."""
    if example["skip"]:
        return None
    turns = [("user", example["q"]), ("assistant", example["a"])]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}
