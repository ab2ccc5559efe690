"""How a metric is written and which direction is better; standard library only."""

SHARES = (
    "exact_match",
    "cut_off",
    "preference_accuracy",
    "judgement_accuracy",
    "accuracy",
    "macro_f1",
    "recall_at_1",
    "recall_at_10",
)
"""The project's metrics between 0 and 1, shown as percentages."""
FORMS = {"loss": ".4f", "reward": ".3f"} | dict.fromkeys((*SHARES, "acc", "acc_norm"), ".1%")
"""Format of a metric's value, by its name; the last two are lm-evaluation-harness's."""


def form(metric: str) -> str:
    """Return the format of a metric's values; the harness adds a filter to a name: `exact_match (strict-match)`."""
    return FORMS.get(metric.partition(" ")[0], ".4f")


def shown(metric: str, value: float) -> str:
    """Return a value as a person reads it."""
    return format(value, form(metric))


def title(metric: str) -> str:
    """Return a metric's name as a person reads it."""
    return metric.replace("_", " ")


def higher_is_better(metric: str) -> bool:
    """Return whether a higher value is a better one: all but losses and cut-off answers."""
    return metric not in ("loss", "cut_off")
