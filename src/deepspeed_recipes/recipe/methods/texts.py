"""Methods on texts: supervised fine-tuning, continued pre-training, distillation, classification, embeddings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from ..bounds import Bounds
from ..errors import UserError
from .method import Method, check_room, own_head


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


DistillLoss = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True)
class Distill(Method):
    """Distillation: the model learns a teacher's distribution over the next token (Hinton et al. 2015, 1503.02531)."""

    name = "distill"
    title = "distillation"
    examples = "conversations"
    packs = True
    curve = "distillation loss per token (nats)"
    own_loss = True
    excludes: ClassVar[Mapping[str, str]] = {
        "tensor": "tensor parallelism splits one model, and distillation has two",
        "sequence": "distillation does not spread the teacher's attention, and a rank has a part of a sequence",
        "pipeline": "distillation needs the outputs of two models at once, and a pipeline returns the loss of one",
        "expert": "DeepSpeed's AutoEP spreads the experts of one model, and distillation has two",
    }

    teacher: str | None = None
    """The model to learn from: a folder, a Hub id, or with `top_k` the address of a vLLM server that has loaded it
    (`http://HOST:8000`). Its tokenizer must be that of the recipe's model."""
    teacher_quantization: Literal["none", "nf4"] = "none"
    """`nf4`: load the teacher's linear layers in 4 bits, whole on every rank. Otherwise ZeRO-3 shards the teacher like
    the model."""
    loss: DistillLoss = "forward_kl"
    """Divergence per token (Agarwal et al. 2023, arXiv:2306.13649). `forward_kl` of the teacher from the student covers
    everything that the teacher may write, `reverse_kl` concentrates on the teacher's likeliest tokens, and `jsd` is
    between the two."""
    beta: float = 0.5
    """For `jsd`, the teacher's weight in the average distribution with which both models are compared: above 0, where
    the loss becomes forward KL, and below 1, where it becomes reverse KL."""
    temperature: Annotated[float, Bounds(above=0, usual=1)] = 1.0
    """Divisor of both models' logits: above 1 the teacher's unlikely tokens count more. The divergence is multiplied by
    the square of the temperature, so that its gradients keep their size relative to the cross-entropy's."""
    alpha: Annotated[float, Bounds(least=0, below=1)] = 0.0
    """Share of the cross-entropy with the data's own answers in the loss; the rest is the divergence. It is below 1,
    since 1 would be the variant `full`."""
    top_k: Annotated[int | None, Bounds(least=1)] = None
    """Compute this many of the teacher's likeliest tokens for all of the data once, before training, and then unload
    the teacher. All other tokens together count as one more outcome. None runs the teacher during training, together
    with the student."""
    cache: str | None = None
    """Folder for the teacher's likeliest tokens, which other runs on the same data can reuse. None keeps them in the
    run folder. Needs `top_k`."""
    on_policy: Annotated[float, Bounds(least=0, most=1)] = 0.0
    """Share of the steps that learn from answers that the model has just written, sampled at temperature 1, instead of
    from the data's answers (Agarwal's lambda), so that the teacher corrects the model's own mistakes."""
    max_new_tokens: Annotated[int, Bounds(least=1)] = 256
    """Longest answer that the model writes for `on_policy`, in tokens; together with its prompt it has to fit into
    `sequence_length`."""

    @property
    def served(self) -> bool:
        """True if the teacher is on a server."""
        return str(self.teacher).startswith(("http://", "https://"))

    @property
    def writes_answers(self) -> bool:
        """True if the trained model writes the answers of some steps."""
        return self.on_policy > 0

    def check(self, recipe: Any) -> None:
        """Refuse values out of range, and settings that exclude each other."""
        if self.loss == "jsd" and not 0 < self.beta < 1:
            raise UserError(
                f"distill.beta={self.beta}: must be above 0 and below 1; use distill.loss=forward_kl instead of 0, and "
                "reverse_kl instead of 1."
            )
        if self.cache and self.top_k is None:
            raise UserError(
                f"distill.cache={self.cache}: whole distributions are too large to store; add distill.top_k=64."
            )
        if self.top_k and recipe.data.streaming:
            raise UserError(
                f"distill.top_k={self.top_k} with data.streaming=true: a stream cannot be read before training; remove "
                "one of the two."
            )
        if self.served and self.top_k is None:
            raise UserError(
                f"distill.teacher={self.teacher}: a server returns only the likeliest tokens; add distill.top_k=20, "
                "vLLM's limit unless the server was started with another --max-logprobs."
            )
        for key, plain in (("teacher_quantization", "none"), ("temperature", 1)):
            if self.served and getattr(self, key) != plain:
                raise UserError(
                    f"distill.{key}={getattr(self, key)}: a teacher on a server computes as it was started; "
                    f"use distill.{key}={plain}."
                )
        if not self.on_policy:
            return
        both = "remove one of the two"
        packs = "packs the data's answers, and new answers differ in length"
        for key, used, why, instead in (
            ("distill.top_k", self.top_k, "computes the data's answers before training", both),
            ("distill.alpha", self.alpha, "imitates the data's answers", both),
            ("data.streaming=true", recipe.data.streaming, "cannot be searched for prompts that are too long", both),
            ("packing=true", recipe.packing, packs, "use packing=false"),
        ):
            if used:
                raise UserError(f"distill.on_policy={self.on_policy} with {key}, which {why}: {instead}.")
        check_room("distill", self.max_new_tokens, recipe.sequence_length)
