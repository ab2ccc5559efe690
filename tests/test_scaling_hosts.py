"""1, 2 and 4 hosts over a fast and a slow link: the planner's efficiency is the measured one."""

from itertools import pairwise
from statistics import median

import pytest

from deepspeed_recipes.benchmarks import scaling
from deepspeed_recipes.launching import paths
from deepspeed_recipes.planning.cost.communication import zero_traffic
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.overrides import apply
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from tests.network_hosts import Hosts, without_hosts
from tests.workers import on_hosts

pytestmark = [
    pytest.mark.every,
    pytest.mark.skipif(bool(without_hosts()), reason=without_hosts() or "four hosts can run here"),
]
COUNTS = (1, 2, 4)
LINKS = ("500mbit", "50mbit")
"""What a host can send."""
SETTINGS = {"zero_stage": 1, "micro_batch": 8, "length": 256, "dtype": "fp32"}
WARM_UP, STEPS = 2, 6


@pytest.fixture(scope="module")
def measured(ranks, tmp_path_factory):
    """Return a function that gives the result of a link as `ds-recipes benchmark scaling` writes it."""
    folder = tmp_path_factory.mktemp("scaling")

    def alone_and_together(link):
        runs = {str(count): [step_of(ranks, hosts, folder / f"{link}-{count}", link, count)] for count in COUNTS}
        per_byte = {str(count): all_reduce(ranks, hosts, folder / f"{link}-{count}", count) for count in COUNTS[1:]}
        alone, gradients = runs["1"][0]["step_seconds"], 4 * pages.find("tiny", "full").model.parameters
        sent = zero_traffic(SETTINGS["zero_stage"], gradients // 4, gradients // 4, 4, 1)
        moved = sent["all-reduce"] + sent["all-gather"] / 2  # an all-gather takes half as long
        seconds = {count: alone * max(1, int(count) / 2) + moved * per_byte.get(count, 0) for count in runs}  # 2 cores
        predicted = {count: alone / taken for count, taken in seconds.items()}
        return {"runs": {"weak": runs}, "predicted": {"weak": predicted}}

    with Hosts(folder / "four", count=4) as hosts:
        yield alone_and_together


def step_of(ranks, hosts, path, link, count):
    """Train on the first `count` hosts; return tokens per second and the seconds of a step."""
    run = RunFolder(path)
    each, length = SETTINGS["micro_batch"], SETTINGS["length"]
    changes = {"micro_batch_size": each, "global_batch_size": each * count, "sequence_length": length}
    changes |= {"max_steps": STEPS}
    changes |= {"logging_steps": 1, "save_steps": 0, "precision": "fp32", "deepspeed": "zero1.json"}
    changes |= {"data.validation": "none", "data.metric": "loss", "wandb.mode": "disabled"}
    words = [f"{key}={value}" for key, value in changes.items()]
    write_recipe(run, paths.locate(apply(pages.find("tiny", "full"), words)))
    hosts.throttle(link)
    where = (hosts.spaces[:count], hosts.addresses[0])
    ranks.check(on_hosts.main, str(path), *where, world_size=count, log=path.with_suffix(".log"), timeout=400)
    rows = read_jsonl(run.metrics)[WARM_UP:]
    seconds = median(later["seconds"] - row["seconds"] for row, later in pairwise(rows))
    speed = median((b["tokens"] - a["tokens"]) / (b["seconds"] - a["seconds"]) for a, b in pairwise(rows))
    return {"step_seconds": seconds, "tokens_per_second": speed}


def all_reduce(ranks, hosts, path, count):
    """Return the seconds of an all-reduce between the first `count` hosts, per byte."""
    file, where = path.with_suffix(".json"), (hosts.spaces[:count], hosts.addresses[0])
    log = path.with_suffix(".link")
    ranks.check(on_hosts.measure_link, str(file), *where, world_size=count, log=log, timeout=400)
    return read_json(file)["seconds_per_byte"]


@pytest.mark.parametrize("link", LINKS)
def test_the_planner_foresees_the_efficiency_of_hosts(measured, link):
    """Here hosts share the cores, which carry the packets too: a cost that hosts with their own cores do not have."""
    result = measured(link)
    for count, speed, efficiency, predicted in scaling.efficiencies(result, "weak"):
        print(f"{link}: {count} hosts {speed:,.0f} tokens/s, {efficiency:.0%}, by the planner {predicted:.0%}")
        if link == "50mbit":
            assert efficiency == pytest.approx(predicted, abs=0.05)
        else:
            assert 0.7 * predicted < efficiency < 1.05 * predicted
