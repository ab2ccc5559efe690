"""Methods on texts: supervised fine-tuning, continued pre-training, classification and embeddings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ..bounds import Bounds
from .method import Method, own_head


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


@dataclass(frozen=True)
class Classify(Method):
    """Sequence classification: cross-entropy over the classes of the training data."""

    name = "classify"
    title = "classification"
    examples = "labelled texts"
    scores = True
    metric = "accuracy"
    beside = "macro_f1"
    curve = "cross-entropy per text (nats)"
    whole_loss = "a classifier has no logits over the vocabulary"
    own_loss = True
    excludes = own_head("a classifier", "a class")

    class_weights: Literal["none", "balanced"] = "none"
    """`balanced`: weigh an example of a class with n of the N examples by N / (classes * n), as in scikit-learn, so
    that rare classes count as much as frequent ones; the weights average 1."""


@dataclass(frozen=True)
class Embed(Method):
    """Embeddings by InfoNCE (van den Oord et al. 2018, arXiv:1807.03748) on cosine similarities.

    An anchor is compared with the texts of all ranks' micro-batches: raise `micro_batch_size` for more negatives.
    """

    name = "embed"
    title = "contrastive training"
    examples = "matching texts"
    sequences = 2
    embeds = True
    metric = "recall_at_1"
    beside = "recall_at_10"
    curve = "InfoNCE per anchor (nats)"
    whole_loss = "an embedding model has no logits over the vocabulary"
    own_loss = True
    excludes: ClassVar[Mapping[str, str]] = {
        "tensor": "a model without a head is not among those that are tested to be split correctly",
        "sequence": "an embedding is read from all tokens of a text, and each rank has only some",
        "pipeline": "a pipeline's last stage has a language model's head, and an embedding model has none",
        "expert": "expert parallelism is tested with language models, and not with embeddings",
    }

    temperature: Annotated[float, Bounds(above=0, usual=0.05)] = 0.05
    """Divisor of the similarities: 0.05 as in SimCSE (Gao et al. 2021, arXiv:2104.08821) and by default in
    sentence-transformers, whose `scale` of 20 is its inverse. A lower value gives the hardest texts more weight."""
    pooling: Literal["mean", "last"] = "mean"
    """Hidden states that become a text's vector: the `mean` of all tokens, or the `last` token, which is the only one
    that attends to the whole text if attention is causal."""
