"""The type from which every training method derives, and the metrics that runs report.

A method's fields are its settings, its class variables its traits. The traits are what other modules depend on: data,
memory, metrics, compatibility. `training/methods/` has a module of the method's name, which trains.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from ..errors import UserError

Examples = Literal["conversations", "texts", "pairs", "judged answers", "labelled texts", "matching texts", "prompts"]
"""The kind of example that a method reads. `pairs`: a prompt with a chosen and a rejected answer; `judged answers`: a
prompt with one answer and a label good or bad; `labelled texts`: a text or conversation and its class; `matching
texts`: an anchor, a text that it should find, and optionally a text that it should not find."""


@dataclass(frozen=True)
class Method:
    """A training method with its settings, which are a section of the override keys (`dpo.beta=0.2`)."""

    name: ClassVar[str]
    """The method's name, and that of its section."""
    title: ClassVar[str]
    """The method's name in a sentence."""
    examples: ClassVar[Examples]
    packs: ClassVar[bool] = False
    """`packing` applies: several documents can share a sequence. Otherwise TRL's trainer tokenizes the examples."""
    sequences: ClassVar[int] = 1
    """Number of sequences of an example that pass through the model at once."""
    reference: ClassVar[bool] = False
    """The loss compares with the model before training; without adapters a second model is held."""
    scores: ClassVar[bool] = False
    """The trained model has outputs per sequence, a reward or classes, instead of logits over the vocabulary."""
    embeds: ClassVar[bool] = False
    """The trained model has no head: hidden states become a vector for each sequence."""
    metric: ClassVar[str | None] = None
    """The metric that judges the run, or None if `data.metric` names it."""
    beside: ClassVar[str | None] = None
    """A second metric, a share, that the last line shows after the metric."""
    unit: ClassVar[str] = "nats"
    """Unit of the margin between a pair's answers."""
    curve: ClassVar[str] = "loss per token (nats)"
    """Title of the loss curve."""
    least_micro_batch: ClassVar[int] = 1
    """Smallest micro-batch that the method can compare answers in."""
    tiles: ClassVar[bool] = False
    """Its loss is always computed in tiles, from TRL's log-probabilities of tokens."""
    whole_loss: ClassVar[str | None] = None
    """Why `tiled_loss` does not apply, or None if it does."""
    rollouts: ClassVar[bool] = False
    """The model writes the answers that it learns from, and functions score them."""
    own_loss: ClassVar[bool] = False
    """Its loss is computed here, without the load-balancing loss of an MoE model's routers."""
    excludes: ClassVar[Mapping[str, str]] = {}
    """Why the method does not train with a kind of parallelism, by the layout's field: rows of `compatibility`."""

    @classmethod
    def of(cls, recipe: Any) -> Self:
        """Return the settings of a recipe that is known to use this method."""
        assert isinstance(recipe.method, cls), f"{recipe.method.name} is not {cls.__name__}"
        return recipe.method

    @property
    def headless(self) -> bool:
        """True if the trained model has no logits over the vocabulary."""
        return self.scores or self.embeds

    @property
    def asks_reference(self) -> bool:
        """True if every step compares with the model before training, which without adapters is a second model."""
        return self.reference

    @property
    def writes_answers(self) -> bool:
        """True if the trained model writes the answers that it learns from."""
        return self.rollouts

    def judged_by(self, chosen: str) -> str:
        """Return the metric that judges the run: the method's own, or `chosen` (`data.metric`) if it has none."""
        return self.metric or chosen

    def check(self, recipe: object) -> None:
        """Refuse settings that contradict each other or the rest of the `Recipe`, whose module imports this module."""


def check_room(section: str, max_new_tokens: int, sequence_length: int) -> None:
    """Refuse answers that leave no room for a prompt."""
    if max_new_tokens >= sequence_length:
        raise UserError(
            f"{section}.max_new_tokens={max_new_tokens}: leaves no room for a prompt in "
            f"sequence_length={sequence_length}; use {section}.max_new_tokens={sequence_length // 2} or a larger "
            "sequence_length."
        )


def whole_answers(title: str, does: str, models: int = 2) -> dict[str, str]:
    """Return `excludes` of a method that needs likelihoods of whole answers, from one model or two."""
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


def own_head(model: str, output: str) -> dict[str, str]:
    """Return `excludes` of a method whose model scores whole sequences."""
    return {
        "tensor": f"{model}'s head is not among the layers that are tested to be split correctly",
        "sequence": f"{output} is read at the last token, which only one of the ranks has",
        "pipeline": f"a pipeline's last stage has a language model's head, and {model} has another",
        "expert": f"expert parallelism is tested with language models, and not with {model}'s head",
    }


SHARES = (
    *("exact_match", "cut_off", "preference_accuracy", "judgement_accuracy", "accuracy", "macro_f1", "recall_at_1"),
    "recall_at_10",
)
"""The project's metrics between 0 and 1, shown as percentages."""
FORMS = {"loss": ".4f", "reward": ".3f"} | dict.fromkeys((*SHARES, "acc", "acc_norm"), ".1%")
"""Format of a metric's value, by its name; `acc` and `acc_norm` are from lm-evaluation-harness."""


def form(metric: str) -> str:
    """Return the format of a metric's values.

    lm-evaluation-harness adds a filter to the name: `exact_match (strict-match)`.
    """
    return FORMS.get(metric.partition(" ")[0], ".4f")


def shown(metric: str, value: float) -> str:
    """Return a metric's value formatted for display."""
    return format(value, form(metric))


def title(metric: str) -> str:
    """Return a metric's name for display, with spaces."""
    return metric.replace("_", " ")


def higher_is_better(metric: str) -> bool:
    """Return True if a higher value is better, as for every metric except losses and cut-off answers."""
    return metric not in ("loss", "cut_off")
