"""TRL's head for language models, which computes log-probabilities of labels in tiles: whole logits never exist."""

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from ...data.collate import IGNORED, Batch
from ...trainer import RunContext, RunHooks


class FusedHead(RunHooks):
    """A trainer that gives its model the head; TRL's DPO and KTO trainers do that themselves."""

    def __init__(self, context: RunContext, **options: object) -> None:
        """`options` are passed to the trainer's own class."""
        super().__init__(context, **options)
        add_fused_lm_head(self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model)


def log_probs(model: PreTrainedModel, inputs: Batch, labelled: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token but the first, [sequences, length - 1]; 0 where it is not labelled.

    Args:
        model: with the head.
        inputs: `input_ids` and `attention_mask`, [sequences, length].
        labelled: booleans of the same shape that select tokens.
    """
    labels = inputs["input_ids"].masked_fill(~labelled, IGNORED)
    passed = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    return model(**passed, labels=labels, use_cache=False, fused_lm_head=True).log_probs


def mean(log_probs: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return the mean log-probability of the tokens that `counted` selects, [sequences]."""
    counted = counted[:, 1:]
    return (log_probs.float() * counted).sum(-1) / counted.sum(-1)
