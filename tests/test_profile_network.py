"""Two hosts with a slow link between them: the verdict names the network, and what it suggests makes the run faster."""

from statistics import median

import pytest

from deepspeed_recipes.launching import paths
from deepspeed_recipes.planning.cost import communication
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.overrides import apply
from deepspeed_recipes.recipe.run_folder import RunFolder, read_jsonl, write_recipe
from deepspeed_recipes.report.profiler import verdict
from tests.network_hosts import Hosts, without_hosts
from tests.workers import on_hosts

pytestmark = [
    pytest.mark.every,
    pytest.mark.skipif(bool(without_hosts()), reason=without_hosts() or "two hosts can run here"),
]
SLOW = "50mbit"
"""Of 12 MB of gradients, two seconds; the passes of a step take less than one."""
SETTINGS = {"max_steps": 5, "logging_steps": 1, "save_steps": 0, "micro_batch_size": 4, "global_batch_size": 8}
SETTINGS |= {"data.validation": "none", "data.metric": "loss", "wandb.mode": "disabled", "profile.steps": "4:5"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with Hosts(tmp_path_factory.mktemp("machines") / "two") as started:
        yield started


@pytest.fixture
def train(hosts, ranks, tmp_path):
    """Return a function that trains `tiny` on both hosts, and gives the verdict and tokens per second after warm-up."""

    def run(name, rate, slots=1, **changes):
        folder = RunFolder(tmp_path / name)
        words = [f"{key}={value}" for key, value in (SETTINGS | changes).items()]
        write_recipe(folder, paths.locate(apply(pages.find("tiny", "full"), words)))
        if rate:
            hosts.throttle(rate)
        try:
            arguments = (str(folder.path), hosts.spaces, hosts.addresses[0])
            ranks.check(on_hosts.main, *arguments, world_size=2 * slots, log=tmp_path / f"{name}.log", timeout=400)
        finally:
            if rate:
                hosts.unthrottle()
        found = verdict.conclude(folder.profile, communication.traffic_of_run)
        assert len(found["ranks"]) == 2 * slots
        speed = median(row["tokens_per_second"] for row in read_jsonl(folder.metrics)[2:])
        print(f"{name}: {found['step_seconds']:.2f} s, {speed:,.0f} tokens/s, {found['words']}")
        return found, speed

    return run


def test_a_slow_link_is_named_and_a_larger_batch_helps(train):
    free, _ = train("free", None, deepspeed="zero1.json")
    assert free["bound_by"] == "compute", free["words"]
    throttled, before = train("throttled", SLOW, deepspeed="zero1.json")
    assert throttled["bound_by"] == "communication"
    assert throttled["words"].startswith("waits for the network ")
    assert throttled["words"].endswith(" mostly for all-reduce of ranks 0, 1")
    assert throttled["change"].startswith("a larger global_batch_size ")
    _, after = train("larger", SLOW, deepspeed="zero1.json", global_batch_size=32)
    assert after > 1.5 * before


def test_zero_1_helps_where_zero_2_sends_every_micro_batchs_gradients(train):
    throttled, before = train("zero2", SLOW, deepspeed="zero2.json", global_batch_size=32)
    assert throttled["bound_by"] == "communication" and "all-reduce" in throttled["words"]
    assert throttled["change"].startswith("deepspeed=zero1.json ")
    _, after = train("zero1", SLOW, deepspeed="zero1.json", global_batch_size=32)
    assert after > 1.5 * before


def test_weights_gathered_within_a_host_make_zero_3_faster(train):
    """Two ranks on each host; four micro-batches, whose weights hpZ gathers over the network only once."""
    settings = {"slots": 2, "micro_batch_size": 1, "global_batch_size": 16}
    throttled, before = train("zero3", SLOW, deepspeed="zero3.json", **settings)
    assert throttled["bound_by"] == "communication" and " of ranks 0, 1, 2, 3" in throttled["words"]
    assert throttled["change"].startswith("deepspeed=zero3_hpz.json ")
    _, after = train("hpz", SLOW, deepspeed="zero3_hpz.json", **settings)
    assert after > 1.15 * before
