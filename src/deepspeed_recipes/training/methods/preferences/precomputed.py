"""Reference log-probabilities of all pairs, computed once before the first step by the model that will be trained.

TRL gives the model to a second DeepSpeed engine before the run's, whose hooks stay on its modules under ZeRO-3; this
uses the run's engine.
"""

from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset

from ....recipe.errors import UserError
from ....recipe.run_folder import RunFolder, read_json, write_json
from ... import distributed
from ...console import say


def of_run(trainer: Any, pairs: Dataset) -> torch.Tensor:
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
def compute(trainer: Any, pairs: Dataset) -> torch.Tensor:
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
