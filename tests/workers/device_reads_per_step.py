"""Counts Python's reads of tensor values in one steady step, of a run and of DeepSpeed's engine by itself."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, masking_utils
from transformers.masking_utils import find_packed_sequence_indices
from trl import KTOTrainer

from deepspeed_recipes.benchmarks.measure import Reads
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_recipe
from deepspeed_recipes.training import distributed, run
from deepspeed_recipes.training.data import chat_templates, tokenize
from deepspeed_recipes.training.methods import method
from deepspeed_recipes.training.model import load

STEADY = 3
"""The step that is counted, after DeepSpeed has made its buffers and ZeRO-3 has traced: nothing is logged in it, and no
epoch begins, for which PyTorch draws a seed and reads it."""


class Count(TrainerCallback):
    """Counts from the end of one step to the end of the next: fetching a batch and everything in between."""

    def __init__(self, folder: Path, fault: Callable[[Any], None] | None) -> None:
        self.folder, self.fault = folder, fault

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Break something on purpose."""
        if self.fault:
            self.fault(kwargs["model"])

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start or stop counting."""
        if state.global_step == STEADY - 1:
            self.reads = Reads(places=True)
            self.reads.__enter__()
        if state.global_step == STEADY:
            self.reads.__exit__(None, None, None)
            write(self.folder, self.reads)


def of_a_run(folder: str, mistake: str | None) -> None:
    """Train what `folder`/recipe.json says."""
    module = method(read_recipe(RunFolder(Path(folder))).method.name)
    build = module.trainer

    def with_count(*arguments: Any) -> Any:
        trainer = build(*arguments)
        trainer.add_callback(Count(Path(folder), (lambda _: MISTAKES[mistake](trainer)) if mistake else None))
        return trainer

    object.__setattr__(module, "trainer", with_count)  # the methods on pairs are frozen
    run.main(folder)


def of_deepspeed(folder: str) -> None:
    """Train the same model on the same rows by the same configuration, with nothing but DeepSpeed's engine."""
    recipe = read_recipe(RunFolder(Path(folder)))
    config = read_json(RunFolder(Path(folder)).deepspeed)
    distributed.start()
    module = load.load_model(recipe)
    rows, _ = tokenize.prepare(recipe.data.path, recipe, chat_templates.load_tokenizer(recipe))
    masking_utils.find_packed_sequence_indices = lambda _: None  # transformers', not DeepSpeed's
    # The groups and the optimizer that the Trainer takes: DeepSpeed reads something of every group, and AdamW its step
    # of every weight unless it is fused.
    norms = [parameter for name, parameter in module.named_parameters() if "norm" in name]
    others = [parameter for name, parameter in module.named_parameters() if "norm" not in name]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    tokens = torch.tensor(rows[0]["input_ids"])[None]
    for step in range(1, STEADY + 1):
        with Reads(places=True) as reads:
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                engine.step()
        if step == STEADY:
            write(Path(folder), reads)
    distributed.stop()


def write(folder: Path, reads: Reads) -> None:
    """Keep the counts of rank 0."""
    if dist.get_rank() == 0:
        counted = {"counts": reads.counts, "places": reads.places}
        (folder / "reads.json").write_text(json.dumps(counted, indent=1))


def norms_at_every_step(trainer: Any) -> None:
    """Read the gradient norm in every step, as the Trainer does."""
    trainer._get_grad_norm = lambda model, grad_norm=None: Trainer._get_grad_norm(trainer, model, grad_norm)


def filtered_losses(trainer: Any) -> None:
    """Look at every loss for NaN, as the Trainer does by default."""
    trainer.args.logging_nan_inf_filter = True


def packing_looked_up(trainer: Any) -> None:
    """Let transformers read the position ids to find out whether rows are packed, as it does by itself."""
    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


def loss_of_trl(trainer: Any) -> None:
    """Compute KTO's loss as TRL does, with all that it reports."""
    trainer.compute_loss = partial(KTOTrainer.compute_loss, trainer)


def layers_read_at_every_step(trainer: Any) -> None:
    """Measure and read the numbers of the layers in every step."""
    stats = trainer.context.layer_stats
    stats.on_step_begin = lambda *_, **__: setattr(stats, "looks", True)

    def read(*_: Any, **__: Any) -> None:
        for _, sums in stats.found:
            float(sums[0])

    stats.on_step_end = read


MISTAKES = {
    one.__name__: one
    for one in (norms_at_every_step, filtered_losses, packing_looked_up, loss_of_trl, layers_read_at_every_step)
}
