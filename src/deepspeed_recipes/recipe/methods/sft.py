"""Supervised fine-tuning and continued pre-training: the loss of all labelled tokens, on packed sequences."""

from dataclasses import dataclass

from .method import Method


@dataclass(frozen=True)
class Sft(Method):
    """Supervised fine-tuning: the loss on the assistant's tokens of conversations."""

    name = "sft"
    title = "supervised fine-tuning"
    examples = "conversations"
    packs = True


@dataclass(frozen=True)
class Pretrain(Method):
    """Continued pre-training: the loss on all tokens of raw texts."""

    name = "pretrain"
    title = "continued pre-training"
    examples = "texts"
    packs = True
