"""What is particular to each method, for everything that must know: data, limits, memory, metrics.

Nothing else asks for a method by its name; `training/methods/` has the module of the same name that trains.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Method = Literal["sft", "dpo", "pretrain", "reward", "kto", "orpo", "simpo", "grpo"]
Examples = Literal["conversations", "texts", "pairs", "judged answers", "prompts"]
"""What a method reads: an example of `pairs` is a prompt with a chosen and a rejected answer; of `judged answers` a
prompt with one answer, and whether it is good; one of `prompts` a question, with what a reward function has to know."""


@dataclass(frozen=True)
class Traits:
    """What is particular to a method."""

    title: str
    """Its name in a sentence."""
    examples: Examples
    packs: bool = False
    """`packing` applies: several documents can share a sequence. Otherwise TRL's trainer tokenizes the examples."""
    sequences: int = 1
    """How many sequences of an example go through the model at once."""
    reference: bool = False
    """The loss compares with the model as it was before training: without adapters a second model is held."""
    scores: bool = False
    """The trained model has one output per sequence, a reward, instead of logits over the vocabulary."""
    metric: str | None = None
    """What the run is judged by; None: what `data.metric` says."""
    unit: str = "nats"
    """Of the margin between a pair's answers."""
    loss: str = "loss per token (nats)"
    """What the curve of the loss shows."""
    least_micro_batch: int = 1
    """Examples that a rank must have at once."""
    whole_loss: str | None = None
    """Why `tiled_loss` does not apply; None: it does."""
    rollouts: bool = False
    """The model writes the answers that it learns from, and functions score them."""
    own_loss: bool = False
    """Its loss is computed here, without the load-balancing loss of a mixture's routers."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """By the layout's field: why the method does not train with it."""


def _excluded(title: str, does: str, models: int = 2) -> dict[str, str]:
    """Return why a method that needs log-likelihoods of whole answers does not train with each field of the layout."""
    if models == 1:
        pipeline = f"{title} needs the likelihoods of two answers, and a pipeline returns one loss of all tokens"
        expert = f"expert parallelism is tested with the loss of all tokens, and not with {title}'s"
    else:
        pipeline = f"{title} needs the outputs of two models at once, and a pipeline returns the loss of one"
        expert = f"DeepSpeed's AutoEP spreads the experts of one model, and {title} has two"
    return {
        "tensor": f"TRL's {title} needs the whole output head",
        "sequence": f"{title} {does} whole answers, and each rank has the loss of only some of the tokens",
        "pipeline": pipeline,
        "expert": expert,
    }


def _without_reference(title: str) -> Traits:
    """Return the traits of a method on pairs that compares nothing with the model as it was before training."""
    return Traits(
        title,
        "pairs",
        sequences=2,
        metric="preference_accuracy",
        unit="nats per token",
        loss=f"{title} loss per pair (nats)",
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
        metric="preference_accuracy",
        loss="DPO loss per pair (nats)",
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
        excludes={
            "tensor": "a reward model's head is not among the layers that are tested to be split correctly",
            "sequence": "a reward is read at the last token, which only one of the ranks has",
            "pipeline": "a pipeline's last stage has a language model's head, and a reward model has another",
            "expert": "expert parallelism is tested with language models, and not with a reward model's head",
        },
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
        whole_loss="TRL's KTO already computes it in tiles",
        own_loss=True,
        excludes=_excluded("KTO", "judges"),
    ),
    "orpo": _without_reference("ORPO"),
    "simpo": _without_reference("SimPO"),
    "grpo": Traits(
        "GRPO",
        "prompts",
        reference=True,
        loss="GRPO loss per answer",
        whole_loss="GRPO already computes its loss in tiles",
        rollouts=True,
        own_loss=True,
        excludes={
            "tensor": "TRL's GRPO needs the whole output head",
            "sequence": "GRPO generates answers, and a rank that has a part of each sequence cannot",
            "pipeline": "GRPO generates answers, and a pipeline's stages only train",
            "expert": "expert parallelism is tested with the loss of all tokens, and not with GRPO's",
        },
    ),
}


def reading(examples: Examples) -> list[Method]:
    """Return the methods that read examples of a kind."""
    return [method for method, traits in TRAITS.items() if traits.examples == examples]
