"""Floating-point operations of training, per token: the numerator of MFU (model FLOPs utilisation)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TrainingFlops:
    """Floating-point operations of forward and backward pass; recomputation is not counted, by MFU's definition."""

    per_token: float
    """Products with weights: 2 per weight forward, 2 for the gradient of the input, 2 for that of a trained weight."""
    per_squared_length: float
    """Causal attention, per squared length of a document: scores and values, s^2 d each forward, twice that back."""

    def of(self, tokens: float, squared_lengths: float) -> float:
        """Return the operations for documents with this number of tokens and this sum of squared lengths."""
        return self.per_token * tokens + self.per_squared_length * squared_lengths


def training_flops(model: torch.nn.Module) -> TrainingFlops:
    """Return the operations per token of a causal language or reward model, with or without adapters, sharded or not.

    An embedding is a look-up and costs nothing, unless it is tied and so also the last matrix product. In an MoE model
    a token uses `num_experts_per_tok` experts. Sliding windows are counted as full attention.
    """
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()  # a reward model has none
    tied = head is not None and head.weight is embedding
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    used = config.num_experts_per_tok / experts if experts else 1.0
    total = 0.0
    for name, parameter in model.named_parameters():
        size = getattr(parameter, "ds_shape", parameter.shape)
        if len(size) < 2 or (parameter is embedding and not tied):
            continue
        share = used if ".experts." in name else 1.0
        total += share * (6 if parameter.requires_grad else 4) * torch.Size(size).numel()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return TrainingFlops(total, 6.0 * config.num_hidden_layers * width)
