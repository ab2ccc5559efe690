"""What planning says of a model's states is what a rank holds, to 2 %: every tensor is weighed, storages once."""

import json
from typing import Any

import pytest

from recipes.planning.states import mixture_bytes, state_bytes
from tests.ranks import read_logs
from tests.workers import weigh_states

RANKS = 2
HALF = weigh_states.LAYERS // 2


def cases() -> list[dict[str, Any]]:
    """Return ZeRO 0-3, offload and spread experts in bf16 and fp32; with half of the weights frozen in bf16."""
    found: list[dict[str, Any]] = []
    for precision in ("bf16", "fp32"):
        shared = {"precision": precision, "accumulation": 2}
        found += [{**shared, "stage": stage} for stage in range(4)]
        found += [{**shared, "stage": stage, "offload": True} for stage in (2, 3)]
        found += [{**shared, "stage": stage, "expert_ranks": 2} for stage in (1, 2, 3)]
    found += [{"precision": "bf16", "accumulation": 2, "stage": stage, "frozen": HALF} for stage in range(4)]
    found += [{"precision": "bf16", "accumulation": 1, "stage": stage, "offload": True} for stage in (2, 3)]
    return found


def predicted(case: dict[str, Any]) -> float:
    if case.get("expert_ranks"):
        dense = case["parameters"] - case["routed"]
        return mixture_bytes(dense, case["routed"], case["stage"], RANKS, case["precision"], case["expert_ranks"]).total
    return state_bytes(
        case["parameters"],
        case["trainable"],
        case["stage"],
        RANKS,
        case["precision"],
        case.get("offload", False),
        case["accumulation"],
    ).total


@pytest.fixture(scope="module")
def weighed(ranks, tmp_path_factory):
    """Return every case with what each rank holds."""
    log = tmp_path_factory.mktemp("weighed") / "log"
    ranks.check(weigh_states.main, cases(), world_size=RANKS, log=log, timeout=500)
    found = [json.loads(line) for text in read_logs(log) for line in text.splitlines() if line.startswith("{")]
    assert len(found) == RANKS * len(cases()) == 48
    return found


def test_what_each_rank_holds_is_what_is_predicted(weighed):
    for case in weighed:
        assert case["bytes"] == pytest.approx(predicted(case), rel=0.02), case


@pytest.mark.parametrize(
    "wrong",
    [
        {"stage": lambda case: (case["stage"] + 1) % 4},
        {"precision": lambda case: {"bf16": "fp32", "fp32": "bf16"}[case["precision"]]},
        {"trainable": lambda case: case["trainable"] * 0.9},
    ],
)
def test_another_stage_precision_or_share_is_noticed(weighed, wrong):
    ((key, change),) = wrong.items()
    others = [case for case in weighed if not case.get("offload") and not case.get("expert_ranks")]
    for case in others:
        if key == "precision" and case["stage"] == 0 and case["parameters"] == case["trainable"]:
            continue  # 2 + 2 + 12 and 4 + 4 + 8 bytes: the same
        assert case["bytes"] != pytest.approx(predicted({**case, key: change(case)}), rel=0.02), case
