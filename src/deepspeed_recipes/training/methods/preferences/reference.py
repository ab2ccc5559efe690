"""The model before training, for the methods that compare with it, and its log-probabilities computed in advance.

To compute these once, TRL gives the model to a second DeepSpeed engine before the run's, whose hooks stay on its
modules under ZeRO-3; `precomputed` uses the run's engine, before the first step.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import PreTrainedModel, Trainer

from ....recipe.errors import UserError
from ....recipe.recipe import Recipe
from ....recipe.run_folder import RunFolder, read_json, write_json
from ... import distributed
from ...console import say
from ...model import load
from ...trainer import Parts, RunContext, RunHooks


def of_recipe(recipe: Recipe) -> PreTrainedModel | None:
    """Return the model before training, or None with adapters: without them, the model is its own reference."""
    return load.load_model(recipe) if recipe.method.asks_reference and recipe.lora is None else None


def with_reference(kind: type[RunHooks]) -> Callable[[RunContext, Parts], RunHooks]:
    """Return a method's `trainer` for a class of TRL's, with a reference model where all weights are trained.

    With adapters the model without them is the reference. TRL would load a second model by itself, but not as the run
    loads the first: also from pickles, and under ZeRO-3 with rotary frequencies rounded to the training dtype.
    """
    return lambda context, parts: kind.of(context, parts, ref_model=of_recipe(context.recipe))


def precomputed(trainer: Trainer, pairs: Dataset) -> torch.Tensor:
    """Return the log-likelihoods of the chosen and the rejected answers, [pairs, 2], on the host; a collective.

    A new run computes them and stores them in its folder, for when it is resumed with a model that has changed.

    Raises:
        UserError: the run to resume has none, or has those of other pairs.
    """
    context = trainer.context
    if context.checkpoint:
        return stored(context.run, len(pairs))
    say(f"reference: log-probabilities of {len(pairs)} pairs, computed once")
    computed = compute(trainer, pairs)
    if distributed.is_first():
        write_json(context.run.reference, computed.tolist())
    return computed


def stored(run: RunFolder, count: int) -> torch.Tensor:
    """Return the log-probabilities that a run has stored for `count` pairs.

    Raises:
        UserError: none are stored, or those of another number of pairs.
    """
    found = read_json(run.reference) if run.reference.exists() else []
    if len(found) != count:
        raise UserError(
            f"dpo.precompute=true: {run.reference} has the reference's log-probabilities of {len(found)} pairs, and "
            f"the data has {count}; resume with the data and the settings that the run started with."
        )
    return torch.tensor(found)


@torch.no_grad()
def compute(trainer: Trainer, pairs: Dataset) -> torch.Tensor:
    """Return the log-probabilities under the current model, without its adapters if it has any; a collective."""
    engine, size = trainer.deepspeed, trainer.context.recipe.micro_batch_size
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parts = []
    engine.eval()
    for start in range(0, len(pairs), ranks * size):  # under ZeRO-3 ranks must make equally many passes
        first = start + rank * size
        own = [pairs[min(number, len(pairs) - 1)] for number in range(first, first + size)]
        inputs = trainer._prepare_inputs(trainer.data_collator(own))
        said = torch.stack(trainer.compute_ref_log_probs(engine, inputs), dim=1).float()
        gathered = [torch.empty_like(said) for _ in range(ranks)]
        dist.all_gather(gathered, said)
        parts += [part.cpu() for part in gathered]
    engine.train()
    return torch.cat(parts)[: len(pairs)]
