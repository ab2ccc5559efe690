"""Methods on answers that people or a model have compared or judged: DPO, KTO, ORPO, SimPO, reward models."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ..bounds import Bounds
from ..errors import UserError
from .method import Method, own_head, whole_answers

DpoLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
]
SMOOTHED = ("robust", "exo_pair")
"""The DPO losses that read `label_smoothing`."""


@dataclass(frozen=True)
class Dpo(Method):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), run by TRL."""

    name = "dpo"
    title = "DPO"
    examples = "pairs"
    sequences = 2
    reference = True
    metric = "preference_accuracy"
    curve = "DPO loss per pair (nats)"
    tiles = True
    whole_loss = "TRL's DPO already computes it in tiles"
    excludes = whole_answers("DPO", "compares")

    beta: Annotated[float, Bounds(above=0, usual=0.1)] = 0.1
    """Strength with which the trained model is kept close to the reference model."""
    loss: DpoLoss = "sigmoid"
    """Loss per pair. `sigmoid` is DPO's own; the others are TRL's losses that treat each pair separately: `hinge`
    (SLiC), `ipo` (arXiv:2310.12036, whose tau is beta), `robust` to wrong labels (arXiv:2403.00409), `exo_pair`
    (arXiv:2402.00856), `nca_pair`, `bco_pair`, `sppo_hard` (arXiv:2405.00675), `apo_zero` if the better answers are
    better than the model's own and `apo_down` if they are worse (arXiv:2408.06266), `discopop`, and `sigmoid_norm`,
    which is normalised by length."""
    precompute: bool = False
    """Compute the reference model's log-likelihoods of all pairs once, before the first step, instead of in every
    step. Only one model is held instead of two, and each step has one pass less."""
    label_smoothing: Annotated[float, Bounds(least=0, below=0.5)] = 0.0
    """For `robust`, the share of pairs whose labels are wrong, below 0.5; for `exo_pair`, its epsilon, such as 1e-3."""

    @property
    def asks_reference(self) -> bool:
        """True unless the reference's log-likelihoods are computed before training."""
        return not self.precompute

    def check(self, recipe: object) -> None:
        """Refuse label smoothing that the loss does not read, or a loss that lacks it."""
        loss, smoothing = self.loss, self.label_smoothing
        if smoothing and loss not in SMOOTHED:
            read_by = " and ".join(SMOOTHED)
            raise UserError(
                f"dpo.label_smoothing={smoothing} with dpo.loss={loss}: only {read_by} read it; set "
                "dpo.label_smoothing=0."
            )
        if loss == "exo_pair" and not smoothing:
            raise UserError("dpo.loss=exo_pair: needs dpo.label_smoothing above 0, such as 1e-3.")


@dataclass(frozen=True)
class Kto(Method):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306), run by TRL."""

    name = "kto"
    title = "KTO"
    examples = "judged answers"
    sequences = 2
    reference = True
    metric = "judgement_accuracy"
    unit = "nats per token"
    curve = "KTO loss per answer"
    least_micro_batch = 2
    tiles = True
    whole_loss = "TRL's KTO already computes it in tiles"
    own_loss = True
    excludes = whole_answers("KTO", "judges")

    beta: Annotated[float, Bounds(above=0, usual=0.1)] = 0.1
    """Strength with which the trained model is kept close to the reference model."""
    good_weight: Annotated[float, Bounds(above=0, usual=1)] = 1.0
    """Weight of the answers labelled true; raise it if they are fewer than the others (the paper's equation 8)."""
    bad_weight: Annotated[float, Bounds(above=0, usual=1)] = 1.0
    """Weight of the answers labelled false."""


@dataclass(frozen=True)
class _WithoutReference(Method):
    """A method on pairs that needs no reference model."""

    examples = "pairs"
    sequences = 2
    metric = "preference_accuracy"
    unit = "nats per token"
    tiles = True
    own_loss = True


@dataclass(frozen=True)
class Orpo(_WithoutReference):
    """Odds ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691), run by TRL."""

    name = "orpo"
    title = "ORPO"
    curve = "ORPO loss per pair (nats)"
    whole_loss = "ORPO already computes its loss in tiles"
    excludes = whole_answers("ORPO", "compares", models=1)

    beta: Annotated[float, Bounds(above=0, usual=0.1)] = 0.1
    """Weight of the odds-ratio term relative to imitating the better answer; the paper's lambda."""


@dataclass(frozen=True)
class Simpo(_WithoutReference):
    """Simple preference optimisation (Meng et al. 2024, arXiv:2405.14734), run by TRL."""

    name = "simpo"
    title = "SimPO"
    curve = "SimPO loss per pair (nats)"
    whole_loss = "SimPO already computes its loss in tiles"
    excludes = whole_answers("SimPO", "compares", models=1)

    beta: Annotated[float, Bounds(above=0, usual=2)] = 2.0
    """Factor that turns the log-likelihood per token into a reward; far larger than in DPO, 2 to 10 in the paper."""
    gamma: Annotated[float, Bounds(least=0)] = 1.0
    """Margin by which the better answer's reward should exceed the other's; the authors start from half of beta."""


@dataclass(frozen=True)
class Reward(Method):
    """Reward modelling: a model that gives each answer a number, and the better answer of a pair a higher one."""

    name = "reward"
    title = "reward modelling"
    examples = "pairs"
    sequences = 2
    scores = True
    metric = "preference_accuracy"
    unit = "of reward"
    curve = "ranking loss per pair (nats)"
    whole_loss = "a reward model has no logits over the vocabulary"
    own_loss = True
    excludes = own_head("a reward model", "a reward")
