"""Compares several models' scores in one table, with intervals and paired tests of neighbours on the same examples."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import NormalDist

import numpy as np

from ...recipe.files import Json
from ...recipe.methods.method import higher_is_better, shown, title
from .harness import Found
from .held_out import HeldOut
from .score import Scores

LEVEL = 0.95
"""Confidence level of the intervals."""
RESAMPLES = 2000


def of(held_out: HeldOut, found: Sequence[tuple[str, Scores]]) -> Json:
    """Return the comparison in the format of evaluation.json."""
    return _compared(held_out.metric, held_out.source, higher_is_better(held_out.metric), found)


def of_tasks(found: Sequence[tuple[str, Sequence[Found]]]) -> list[Json]:
    """Return a comparison in the same format for each metric of each of lm-evaluation-harness's tasks."""
    first = found[0][1]
    measured = [(name, {(one.task, one.metric): one.scores for one in of_model}) for name, of_model in found]
    return [
        _compared(
            one.metric,
            f"the task {one.task}",
            one.higher_is_better,
            [(name, scores[one.task, one.metric]) for name, scores in measured],
        )
        for one in first
    ]


def _compared(metric: str, data: str, higher_is_better: bool, found: Sequence[tuple[str, Scores]]) -> Json:
    return {
        "metric": metric,
        "data": data,
        "examples": len(found[0][1].sums),
        "level": LEVEL,
        "models": [model(name, scores) for name, scores in found],
        "pairs": [
            pair(higher_is_better, first, second)
            for first, second in pairwise(found)
            if first[1].counts == second[1].counts
        ],
    }


def model(name: str, scores: Scores) -> Json:
    """Return one model's row: `score` with the interval from `low` to `high`, and every example's value."""
    values: list[float]
    if set(scores.sums) <= {0, 1} and set(scores.counts) == {1}:
        low, high = wilson(round(sum(scores.sums)), len(scores.sums))
        values = [int(value) for value in scores.sums]
    else:
        low, high = bootstrap(scores.sums, scores.counts)
        values = [total / count for total, count in zip(scores.sums, scores.counts, strict=True)]
    interval = {"score": scores.value, "low": low, "high": high}
    answers: Json = {"answers": scores.answers} if scores.answers else {}
    answers |= {"cut_off": scores.cut_off} if scores.cut_off else {}
    return {"name": name, **interval, "seconds": round(scores.seconds, 1), "values": values, **answers}


def pair(higher_is_better: bool, first: tuple[str, Scores], second: tuple[str, Scores]) -> Json:
    """Return the number of examples on which the second model is better or worse than the first, and the p-value."""
    sign = 1 if higher_is_better else -1
    values = [
        [sign * total / count for total, count in zip(one.sums, one.counts, strict=True)] for _, one in (first, second)
    ]
    better = sum(after > before for before, after in zip(*values, strict=True))
    worse = sum(after < before for before, after in zip(*values, strict=True))
    p = sign_test(better, worse)
    return {"first": first[0], "second": second[0], "better": better, "worse": worse, "p": p}


def lines(found: Json) -> Iterator[str]:
    """Yield the lines that print a comparison."""
    metric, examples = found["metric"], found["examples"]
    yield f"{title(metric)} on {examples} held-out examples of {found['data']}"
    yield ""
    width = max(len(one["name"]) for one in found["models"])
    yield f"{'model':<{width}}  {'score':>7}  {'95 % interval':>16}  {'seconds':>7}"
    for one in found["models"]:
        interval = f"{shown(metric, one['low'])} to {shown(metric, one['high'])}"
        yield f"{one['name']:<{width}}  {shown(metric, one['score']):>7}  {interval:>16}  {one['seconds']:>7.1f}"
    for one in found["models"]:
        if one.get("cut_off"):
            yield ""
            yield (
                f"{one['name']}: {one['cut_off']} of {examples} answers were cut off at data.max_new_tokens of the run "
                "and count as wrong"
            )
    shares = all(value in (0, 1) for one in found["models"] for value in one["values"])
    for one in found["pairs"]:
        yield ""
        if not one["better"] and not one["worse"]:
            yield f"{one['second']} and {one['first']}: equal on all {examples} examples"
            continue
        test = "McNemar's test, exact" if shares else "sign test"
        p = f"p = {one['p']:.4f}" if one["p"] >= 1e-4 else f"p = {one['p']:.0e}"
        yield (
            f"{one['second']}: better than {one['first']} on {one['better']} examples and worse on {one['worse']} "
            f"({p}, {test})"
        )


def wilson(right: int, examples: int) -> tuple[float, float]:
    """Return the interval of a share (Wilson 1927), which stays within 0 and 1 even if all or none are right."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    share = right / examples
    middle = share + z * z / (2 * examples)
    half = z * math.sqrt(share * (1 - share) / examples + z * z / (4 * examples**2))
    scale = 1 + z * z / examples
    # The ends are exact if all or none are right: rounding would move them slightly off 0 and 1.
    low = 0.0 if right == 0 else (middle - half) / scale
    return low, 1.0 if right == examples else (middle + half) / scale


def bootstrap(sums: Sequence[float], counts: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the interval of `sum(sums) / sum(counts)` over examples resampled with replacement."""
    numbers = np.random.default_rng(seed)
    drawn = numbers.integers(len(sums), size=(RESAMPLES, len(sums)))
    means = np.asarray(sums)[drawn].sum(1) / np.asarray(counts)[drawn].sum(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def sign_test(better: int, worse: int) -> float:
    """Return the probability of a split at least this uneven, among differing examples, for two equally good models.

    For right and wrong answers this is McNemar's test in its exact form (McNemar 1947).
    """
    differing = better + worse
    tail = sum(math.comb(differing, count) for count in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**differing)
