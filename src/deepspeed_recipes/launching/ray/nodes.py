"""Ask a Ray cluster for its nodes, and each of them about itself: `python -m ...ray.nodes ADDRESS [ABOUT]`.

A process of its own, since Ray changes the process that it is in. It prints one line of JSON: the nodes, or why there
are none. With ABOUT, the arguments of `rank.describe` without the peer, each node has an `answer`.
"""

import json
import logging
import sys
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...recipe.errors import first_line
from ...recipe.project import python_path
from . import rank

PATIENCE = 180
"""Seconds that a node gets for an answer; a first start of Python from a network file system can take most of them."""


def connect(address: str, variables: dict[str, str] | None = None, **local: Any) -> None:
    """Become a driver of the cluster at `address`, whose processes find this checkout; `local`: of one started here."""
    runtime = {"env_vars": python_path({}) | (variables or {})}
    ray.init(address, runtime_env=runtime, log_to_driver=False, logging_level=logging.ERROR, **local)


def alive() -> list[dict[str, Any]]:
    """Return the living nodes, the first one first: its id, address, and how many CPUs and GPUs Ray counts there."""
    found = [
        {
            "id": node["NodeID"],
            "address": node["NodeManagerAddress"],
            "head": "node:__internal_head__" in node["Resources"],
            "cpus": int(node["Resources"].get("CPU", 0)),
            "gpus": int(node["Resources"].get("GPU", 0)),
        }
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (not node["head"], node["address"], node["id"]))


def on(node: str, function: Any, *arguments: Any) -> ray.ObjectRef:
    """Start `function` on a node, whatever else runs there."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(function).remote(*arguments)


def answers(nodes: list[dict[str, Any]], folder: str, file: str, extensions: str) -> list[dict[str, Any]]:
    """Return what each node says about itself, or `{"failed": why}`."""
    asked = time.time()
    tasks = [on(node["id"], rank.describe, folder, file, nodes[0]["address"], extensions) for node in nodes]
    ray.wait(tasks, num_returns=len(tasks), timeout=PATIENCE)
    answered = time.time()
    return [_answer(task, asked, answered) for task in tasks]


def _answer(task: ray.ObjectRef, asked: float, answered: float) -> dict[str, Any]:
    try:
        found = ray.get(task, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return {"failed": f"no answer within {PATIENCE} s"}
    except Exception as error:  # the checkout is not there, or Ray cannot start a process with it
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return {"failed": f"different checkout or environment: {last}"}
    # Its clock is in sync if its time lies between ours before and ours after.
    return found | {"clock": max(asked - found["time"], found["time"] - answered, 0.0)}


def main(address: str, *about: str) -> None:
    """Print the nodes as JSON, or why they cannot be asked."""
    try:
        connect(address)
    except Exception as error:
        print(json.dumps({"failed": first_line(error) or type(error).__name__}))
        return
    nodes = alive()
    if about:
        nodes = [node | {"answer": answer} for node, answer in zip(nodes, answers(nodes, *about), strict=True)]
    print(json.dumps({"nodes": nodes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
