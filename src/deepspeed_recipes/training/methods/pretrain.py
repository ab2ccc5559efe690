"""Continued pre-training: the loss on every token of raw text; otherwise as supervised fine-tuning."""

from .sft import arguments, datasets, metric, trainer

__all__ = ["arguments", "datasets", "metric", "trainer"]
