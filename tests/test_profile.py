"""Profiles of real runs: where their time went, what they sent, and what is said about it."""

import re
from dataclasses import asdict, replace

import pytest

from deepspeed_recipes.planning.cost import communication
from deepspeed_recipes.recipe.layout import bubble
from deepspeed_recipes.recipe.recipe import Layout, Profile
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from deepspeed_recipes.report import run_data, write
from deepspeed_recipes.report.profiler import shares, trace, verdict
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.callbacks.metrics import Metrics
from tests.small import small, with_zero
from tests.workers import slow_runs

STEPS = Profile(steps="3:4")


@pytest.fixture(scope="module")
def profiled(ranks, tmp_path_factory, model_folder, conversations):
    """Return a function that trains four steps, of which the last two are recorded, and gives the run's folder."""

    def train(deepspeed, world_size=2, layout=None, mistake=None, evaluated=False, model=model_folder, **changes):
        folder = tmp_path_factory.mktemp("profiled")
        settings = {"max_steps": 4, "micro_batch_size": 2, "profile": STEPS, "layout": layout or Layout()}
        run = RunFolder(folder / "run")
        recipe = small(model, conversations, deepspeed, **(settings | changes))
        held_out = recipe.data.path if evaluated else None
        write_recipe(run, replace(recipe, data=replace(recipe.data, validation=held_out)))
        worker, arguments = (slow_runs.of_a_run, (mistake,)) if mistake else (training_run.main, ())
        ranks.check(worker, str(run.path), *arguments, world_size=world_size, log=folder / "log", timeout=600)
        return run

    return train


@pytest.fixture(scope="module")
def sharded(profiled):
    """Profile ZeRO-3 on two ranks."""
    return profiled("zero3.json")


def traces(run):
    files = sorted(run.profile.glob(f"rank-*{trace.SUFFIX}"))
    return [trace.read(file) for file in files]


def check_sums(run, world_size):
    """Compare the sum of the shares with the steps' time by the ranks' own clock."""
    found = traces(run)
    assert len(found) == world_size
    for one in found:
        parts = asdict(shares.of_rank(one))
        hidden = parts.pop("communication_hidden")
        measured = sum(step["seconds"] for step in one.about["steps"])
        assert sum(parts.values()) == pytest.approx(measured, rel=0.03)
        assert all(part >= 0 for part in parts.values()) and 0 <= hidden <= parts["compute"]
        assert parts["compute"] > 0


def check_traffic(run):
    """Compare the bytes with the planner's, of every kind and process group that it counts; return these."""
    rows = verdict.conclude(run.profile, communication.traffic_of_run)["traffic"]
    counted = {(row["kind"], tuple(row["ranks"])): row for row in rows if row["predicted_bytes"]}
    planned = communication.traffic_of_run(traces(run)[0].about)
    assert planned and {key: row["predicted_bytes"] for key, row in counted.items()} == planned
    for key, size in planned.items():
        assert counted[key]["bytes"] == pytest.approx(size, rel=0.01), key
    return set(planned)


def test_the_shares_of_a_zero_3_run_sum_to_its_steps(sharded):
    check_sums(sharded, 2)


def test_a_lost_share_is_noticed(sharded):
    one = traces(sharded)[0]
    found = shares.of_rank(one)
    measured = sum(step["seconds"] for step in one.about["steps"])
    assert found.seconds - found.communication_waited != pytest.approx(measured, rel=0.03)


def test_a_zero_3_run_sends_what_the_planner_counts(sharded):
    assert check_traffic(sharded) == {("all-gather", (0, 1)), ("reduce-scatter", (0, 1))}
    about = dict(traces(sharded)[0].about)
    assert communication.zero_traffic(2, 1000, 1000, 4, 2) == {"all-reduce": 8000, "all-gather": 4000}
    assert communication.zero_traffic(3, 3 * 10**9, 10, 1, 2)["all-gather"] == 2 * (3 + 2) * 10**9
    assert communication.traffic_of_run(about | {"layout": {"tensor": 2}}) == {}, "no two ranks hold the same"
    assert communication.traffic_of_run(about | {"layout": {"expert": 2}}) == {}


@pytest.mark.every
def test_zero_3_gathers_twice_what_it_does_not_keep(profiled, teacher_folder, tmp_path):
    """As of models above a billion parameters; a second copy on each host would save the second time."""
    limits = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    run = profiled(with_zero(tmp_path, "zero3.json", **limits), model=teacher_folder)
    check_traffic(run)
    about = traces(run)[0].about
    once = about["held"]["total"] * 4 * about["micro_batches"]
    assert communication.traffic_of_run(about)["all-gather", (0, 1)] == 2 * once
    assert verdict._gathers_again(verdict.of_trace(traces(run)[0]), about)


@pytest.mark.every
def test_zero_3_gathers_a_layer_in_one_message(profiled, teacher_folder, tmp_path):
    """Fewer messages than with what transformers fills in, of the same bytes, and the same loss."""
    limits = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 200_000}
    limits["stage3_param_persistence_threshold"] = 1000
    found = []
    for size in ("auto", int(0.9 * 96**2)):
        file = with_zero(tmp_path, "zero3.json", **limits, stage3_prefetch_bucket_size=size)
        run = profiled(file, model=teacher_folder)
        gathers = [one for one in verdict.of_trace(traces(run)[0]).collectives if one.kind == "all-gather"]
        loss = [row["loss"] for row in read_jsonl(run.metrics)][-1]
        found.append((sum(one.count for one in gathers), sum(one.bytes for one in gathers), loss))
    (by_layer, its_bytes, its_loss), (by_weight, other_bytes, other_loss) = found
    assert by_layer < 0.8 * by_weight
    assert its_bytes == pytest.approx(other_bytes, rel=0.05) and its_loss == other_loss


@pytest.mark.every
@pytest.mark.parametrize(("reuse", "live"), [(0, 200_000), (400_000, 1000)])
def test_zero_3_keeps_what_it_has_gathered_ahead(profiled, teacher_folder, tmp_path, reuse, live):
    """Up to the live parameters, or half the distance of reuse, whichever is more; to one matrix or bucket."""
    limits = {"stage3_max_reuse_distance": reuse, "stage3_max_live_parameters": live}
    run = profiled(with_zero(tmp_path, "zero3.json", **limits), model=teacher_folder)
    about = traces(run)[0].about
    rank = verdict.of_trace(traces(run)[0])
    passes = len(rank.steps) * about["micro_batches"]
    gathered = sum(one.bytes for one in rank.collectives if one.kind == "all-gather")
    total = about["held"]["total"]
    assert about["kept_weights"] == 200_000 < total / 1.5
    assert gathered / 4 / passes == pytest.approx(2 * total - 200_000, abs=0.9 * 96**2 + 96 * 128)


@pytest.mark.every
def test_an_evaluation_does_not_double_what_zero_3_gathers(profiled):
    """It does without `forget_kept_weights`."""
    run = profiled("zero3.json", evaluated=True)
    assert read_jsonl(run.evaluations)[0]["step"] == 0
    check_traffic(run)


def test_operators_are_named_with_their_modules_forward_and_backward(sharded):
    read = traces(sharded)[0]
    assert len(verdict.of_trace(read).operators) == 10
    every = shares.most_expensive(read, count=10**4)  # a busy machine's first ten may be others
    products = [one for one in every if one.name == "aten::mm"]
    assert products
    assert all(one.module for one in products), "backward too"
    assert any(one.module == "lm_head" or one.module.startswith("model.layers.*.") for one in products)


def test_the_verdict_is_printed_and_kept(sharded, capsys):
    verdict.at_end(sharded, communication.traffic_of_run)
    screen = capsys.readouterr().out
    found = verdict.conclude(sharded.profile, communication.traffic_of_run)
    assert (sharded.profile / "verdict.json").exists()
    assert found["steps"] == [3, 4] and found["other_step_seconds"] is None, "steps 1 and 2 are the warm-up"
    for rank in found["ranks"]:
        assert f"  rank {rank['rank']:<3} {verdict.bar(rank['shares'])}" in screen
        assert len(verdict.bar(rank["shares"])) == verdict.WIDTH
    assert "planner" in screen and f"change       {found['change']}" in screen


def test_the_report_shows_the_numbers_of_the_verdict(sharded):
    verdict.at_end(sharded, communication.traffic_of_run)
    found = read_json(sharded.profile / "verdict.json")
    page = write.render(write.document(run_data.read(sharded.path)))
    shown = re.findall(r'<data value="([^"]+)" data-from="(profile/verdict.json:[^"]+)"', page)
    sources = {source: float(value) for value, source in shown}
    assert len(sources) > 20
    for source, value in sources.items():
        expected = found
        for part in source.partition(":")[2].split("."):
            expected = expected[int(part)] if isinstance(expected, list) else expected[part]
        assert value == expected, source
    assert found["words"] in page


def test_the_time_that_a_profile_takes_is_not_in_the_logged_speed(sharded):
    metrics = Metrics(sharded, print, True, None)
    with metrics.waiting():
        opened = metrics.window_start
    metrics.leave_out(2.5)
    assert metrics.window_start == opened + 2.5


@pytest.mark.every
@pytest.mark.parametrize(
    ("deepspeed", "world_size", "layout"),
    [
        ("zero2.json", 2, Layout()),
        ("zero0.json", 2, Layout()),
        ("zero0.json", 4, Layout()),
        ("zero1.json", 2, Layout()),
        ("zero1.json", 4, Layout()),
        ("zero2.json", 4, Layout()),
        ("zero3.json", 4, Layout()),
        ("zero3_hpz.json", 4, Layout()),
        ("zero1.json", 2, Layout(tensor=2)),
        ("zero1.json", 4, Layout(tensor=2)),
        ("zero3.json", 2, Layout(sequence=2)),
        ("zero3.json", 4, Layout(sequence=2)),
        ("pipeline.json", 2, Layout(pipeline=2)),
        ("pipeline.json", 4, Layout(pipeline=2)),
    ],
)
def test_shares_and_bytes(profiled, deepspeed, world_size, layout):
    run = profiled(deepspeed, world_size, layout, micro_batch_size=1 if deepspeed == "zero3_hpz.json" else 2)
    check_sums(run, world_size)
    found = verdict.conclude(run.profile, communication.traffic_of_run)
    replicas = [
        rank for rank in range(world_size) if (rank % layout.tensor, rank // (world_size // layout.pipeline)) == (0, 0)
    ]
    if len(replicas) > 1 and layout.pipeline == 1:
        groups = {ranks for _, ranks in check_traffic(run)}
        assert groups == {tuple(replicas)} | ({(0, 1)} if deepspeed == "zero3_hpz.json" else set())
    if layout.tensor > 1:
        assert any(row["kind"] == "all-reduce" and row["ranks"] == [0, 1] for row in found["traffic"])
    if layout.pipeline > 1:
        micro_batches = 4 * 2 // world_size
        assert found["pipeline"]["bubble"] == bubble(2, micro_batches)
        assert found["bound_by"] in ("pipeline", "compute", "slow stage")
        assert found["pipeline"]["waited"] > 0
        assert {"send", "receive"} <= {one["kind"] for rank in found["ranks"] for one in rank["collectives"]}


@pytest.mark.every
def test_a_slow_data_loader_is_named(profiled):
    found = verdict.conclude(profiled("zero2.json", mistake="slow_loader").profile)
    assert found["bound_by"] == "data" and "data.workers" in found["change"]


@pytest.mark.every
def test_a_slow_rank_is_named(profiled):
    found = verdict.conclude(profiled("zero2.json", mistake="slow_rank").profile)
    assert found["bound_by"] == "slow rank" and found["words"].startswith("rank 1 on ")


@pytest.mark.every
def test_a_slow_optimizer_on_the_host_is_named(profiled):
    found = verdict.conclude(profiled("zero2_offload.json", mistake="slow_optimizer").profile)
    assert found["bound_by"] == "optimizer" and "zero2.json" in found["change"]


@pytest.mark.every
@pytest.mark.parametrize(("mistake", "stage"), [("slow_first_rank", 0), ("slow_rank", 1)])
def test_a_slow_stage_of_a_pipeline_is_named(profiled, mistake, stage):
    found = verdict.conclude(profiled("pipeline.json", layout=Layout(pipeline=2), mistake=mistake).profile)
    assert found["bound_by"] == "slow stage"
    assert found["words"].startswith(f"stage {stage} (rank {stage} on ") and "(compute)" in found["words"]
