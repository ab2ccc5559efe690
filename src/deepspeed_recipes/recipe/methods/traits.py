"""The traits of each method, for every module that depends on the method: data, limits, memory, metrics.

No other module compares a method's name; `training/methods/` has a module of the same name, which trains.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Method = Literal["sft", "dpo", "pretrain", "reward", "kto", "orpo", "simpo", "classify", "embed", "distill", "grpo"]
Examples = Literal["conversations", "texts", "pairs", "judged answers", "labelled texts", "matching texts", "prompts"]
"""The kind of example that a method reads. `pairs`: a prompt with a chosen and a rejected answer; `judged answers`: a
prompt with one answer and a label good or bad; `labelled texts`: a text or conversation and its class; `matching
texts`: an anchor, a text that it should find, and optionally a text that it should not find."""


@dataclass(frozen=True)
class Traits:
    """Everything that depends on the method."""

    title: str
    """The method's name in a sentence."""
    examples: Examples
    packs: bool = False
    """`packing` applies: several documents can share a sequence. Otherwise TRL's trainer tokenizes the examples."""
    sequences: int = 1
    """Number of sequences of an example that pass through the model at once."""
    reference: bool = False
    """The loss compares with the model before training; without adapters a second model is held."""
    precomputes: bool = False
    """The reference model's log-likelihoods can be computed before training: `dpo.precompute`."""
    teacher: bool = False
    """The loss compares with another model, the recipe's `distill.teacher`; always in tiles."""
    scores: bool = False
    """The trained model has outputs per sequence, a reward or classes, instead of logits over the vocabulary."""
    embeds: bool = False
    """The trained model has no head: hidden states become a vector for each sequence."""
    metric: str | None = None
    """The metric that judges the run, or None if `data.metric` names it."""
    beside: str | None = None
    """A second metric, a share, that the last line shows after the metric."""
    unit: str = "nats"
    """Unit of the margin between a pair's answers."""
    loss: str = "loss per token (nats)"
    """Title of the loss curve."""
    least_micro_batch: int = 1
    """Smallest micro-batch that the method can compare answers in."""
    tiles: bool = False
    """Its loss is always computed in tiles, from TRL's log-probabilities of tokens."""
    whole_loss: str | None = None
    """Why `tiled_loss` does not apply, or None if it does."""
    rollouts: bool = False
    """The model writes the answers that it learns from, and functions score them."""
    own_loss: bool = False
    """Its loss is computed here, without the load-balancing loss of an MoE model's routers."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """Why the method does not train with a kind of parallelism, by the layout's field."""

    @property
    def headless(self) -> bool:
        """True if the trained model has no logits over the vocabulary."""
        return self.scores or self.embeds


def _excluded(title: str, does: str, models: int = 2) -> dict[str, str]:
    """Return, for each field of the layout, why a method that needs likelihoods of whole answers excludes it."""
    if models == 1:
        pipeline = f"{title} needs the likelihoods of two answers, and a pipeline returns one loss of all tokens"
        expert = f"expert parallelism is tested with the loss of all tokens, and not with {title}'s"
    else:
        pipeline = f"{title} needs the outputs of two models at once, and a pipeline returns the loss of one"
        expert = f"DeepSpeed's AutoEP spreads the experts of one model, and {title} has two"
    return {
        "tensor": f"tensor parallelism is tested with the loss of all tokens, and not with {title}'s",
        "sequence": f"{title} {does} whole answers, and each rank has the loss of only some of the tokens",
        "pipeline": pipeline,
        "expert": expert,
    }


def _own_head(model: str, output: str) -> dict[str, str]:
    """Return, for each field of the layout, why a model that scores whole sequences does not train with it."""
    return {
        "tensor": f"{model}'s head is not among the layers that are tested to be split correctly",
        "sequence": f"{output} is read at the last token, which only one of the ranks has",
        "pipeline": f"a pipeline's last stage has a language model's head, and {model} has another",
        "expert": f"expert parallelism is tested with language models, and not with {model}'s head",
    }


def _without_reference(title: str) -> Traits:
    """Return the traits of a method on pairs that needs no reference model."""
    return Traits(
        title,
        "pairs",
        sequences=2,
        metric="preference_accuracy",
        unit="nats per token",
        loss=f"{title} loss per pair (nats)",
        tiles=True,
        whole_loss=f"{title} already computes its loss in tiles",
        own_loss=True,
        excludes=_excluded(title, "compares", models=1),
    )


TRAITS: Mapping[Method, Traits] = {
    "sft": Traits("supervised fine-tuning", "conversations", packs=True),
    "pretrain": Traits("continued pre-training", "texts", packs=True),
    "dpo": Traits(
        "DPO",
        "pairs",
        sequences=2,
        reference=True,
        precomputes=True,
        metric="preference_accuracy",
        loss="DPO loss per pair (nats)",
        tiles=True,
        whole_loss="TRL's DPO already computes it in tiles",
        excludes=_excluded("DPO", "compares"),
    ),
    "reward": Traits(
        "reward modelling",
        "pairs",
        sequences=2,
        scores=True,
        metric="preference_accuracy",
        unit="of reward",
        loss="ranking loss per pair (nats)",
        whole_loss="a reward model has no logits over the vocabulary",
        own_loss=True,
        excludes=_own_head("a reward model", "a reward"),
    ),
    "kto": Traits(
        "KTO",
        "judged answers",
        sequences=2,
        reference=True,
        metric="judgement_accuracy",
        unit="nats per token",
        loss="KTO loss per answer",
        least_micro_batch=2,
        tiles=True,
        whole_loss="TRL's KTO already computes it in tiles",
        own_loss=True,
        excludes=_excluded("KTO", "judges"),
    ),
    "orpo": _without_reference("ORPO"),
    "simpo": _without_reference("SimPO"),
    "classify": Traits(
        "classification",
        "labelled texts",
        scores=True,
        metric="accuracy",
        beside="macro_f1",
        loss="cross-entropy per text (nats)",
        whole_loss="a classifier has no logits over the vocabulary",
        own_loss=True,
        excludes=_own_head("a classifier", "a class"),
    ),
    "embed": Traits(
        "contrastive training",
        "matching texts",
        sequences=2,
        embeds=True,
        metric="recall_at_1",
        beside="recall_at_10",
        loss="InfoNCE per anchor (nats)",
        whole_loss="an embedding model has no logits over the vocabulary",
        own_loss=True,
        excludes={
            "tensor": "a model without a head is not among those that are tested to be split correctly",
            "sequence": "an embedding is read from all tokens of a text, and each rank has only some",
            "pipeline": "a pipeline's last stage has a language model's head, and an embedding model has none",
            "expert": "expert parallelism is tested with language models, and not with embeddings",
        },
    ),
    "distill": Traits(
        "distillation",
        "conversations",
        packs=True,
        teacher=True,
        loss="distillation loss per token (nats)",
        own_loss=True,
        excludes={
            "tensor": "tensor parallelism splits one model, and distillation has two",
            "sequence": "distillation does not spread the teacher's attention, and a rank has a part of a sequence",
            "pipeline": "distillation needs the outputs of two models at once, and a pipeline returns the loss of one",
            "expert": "DeepSpeed's AutoEP spreads the experts of one model, and distillation has two",
        },
    ),
    "grpo": Traits(
        "GRPO",
        "prompts",
        reference=True,
        loss="GRPO loss per answer",
        whole_loss="GRPO already computes its loss in tiles",
        rollouts=True,
        own_loss=True,
        excludes={
            "tensor": "tensor parallelism is tested with the loss of all tokens, and not with GRPO's",
            "sequence": "GRPO generates answers, and a rank that has a part of each sequence cannot",
            "pipeline": "GRPO generates answers, and a pipeline's stages only train",
            "expert": "expert parallelism is tested with the loss of all tokens, and not with GRPO's",
        },
    ),
}


def reading(examples: Examples) -> list[Method]:
    """Return the methods that read examples of a kind."""
    return [method for method, traits in TRAITS.items() if traits.examples == examples]
