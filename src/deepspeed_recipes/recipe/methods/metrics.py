"""The format of each metric and the direction in which it improves; standard library only."""

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
