"""Lists a Ray cluster's nodes, and optionally facts about each: `python -m ...ray.nodes ADDRESS [ABOUT]`.

This is a separate process, since Ray changes the process in which it runs. It prints one line of JSON: the nodes, or
the reason why they cannot be listed. With ABOUT, the arguments of `rank.describe` without the peer, each node has an
`answer`.
"""

import json
import logging
import sys
import time

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...recipe.errors import first_line
from ...recipe.files import Json
from ...recipe.project import python_path
from . import rank

PATIENCE = 180
"""Seconds within which a node must answer; a first start of Python from a network file system can take most of them."""


def connect(address: str, variables: dict[str, str] | None = None, **local: object) -> None:
    """Become a driver of the cluster at `address`, whose processes import this checkout and get `variables`.

    `local` are options of `ray.init` for a cluster that is started here.
    """
    runtime = {"env_vars": python_path({}) | (variables or {})}
    ray.init(address, runtime_env=runtime, log_to_driver=False, logging_level=logging.ERROR, **local)


def alive() -> list[Json]:
    """Return the living nodes, the head first, with id, address, and Ray's number of CPUs and GPUs."""
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


def on(node: str, function: object, *arguments: object) -> ray.ObjectRef:
    """Start `function` on a node, even if the node is busy."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(function).remote(*arguments)


def answers(nodes: list[Json], folder: str, file: str, extensions: str) -> list[Json]:
    """Return each node's facts, or `{"failed": REASON}`."""
    asked = time.time()
    tasks = [on(node["id"], rank.describe, folder, file, nodes[0]["address"], extensions) for node in nodes]
    ray.wait(tasks, num_returns=len(tasks), timeout=PATIENCE)
    answered = time.time()
    results: list[Json] = []
    for task in tasks:
        try:
            found: Json = ray.get(task, timeout=0)
            # The clock is in sync if the node's time lies between our times before and after the query.
            results.append(found | {"clock": max(asked - found["time"], found["time"] - answered, 0.0)})
        except ray.exceptions.GetTimeoutError:
            results.append({"failed": f"no answer within {PATIENCE} s"})
        except Exception as error:  # the node has no such checkout, or Ray cannot start a process with it
            last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            results.append({"failed": f"different checkout or environment: {last}"})
    return results


def main(address: str, *about: str) -> None:
    """Print the nodes as JSON, or the reason why they cannot be listed."""
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
