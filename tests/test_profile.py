"""Profiles of real runs: where their time went, what they sent, and what is said about it.

What `--profile` accepts, and what is made of traces that are written by hand.
"""

import json
import re
import shlex
from dataclasses import asdict, replace

import pytest

from deepspeed_recipes.commands import launch
from deepspeed_recipes.planning.cost import communication
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.layout import bubble
from deepspeed_recipes.recipe.recipe import Layout, Profile
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from deepspeed_recipes.report import run_data, write
from deepspeed_recipes.report.profiler import collectives, shares, trace, verdict, window
from deepspeed_recipes.report.profiler.collectives import Collective
from deepspeed_recipes.report.profiler.shares import Shares
from deepspeed_recipes.report.profiler.trace import both, length, union, without
from deepspeed_recipes.report.profiler.verdict import Rank
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
    advice = verdict._communication(0.5, [verdict.of_trace(traces(run)[0])], about).change
    assert "zero3_hpz.json gathers weights over the network once per step" in advice


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


EVEN = Shares(0.9, 0.1, 0.04, 0.02, 0.03, 0.01)


def test_intervals_are_sets_of_points():
    one = union([(4, 6), (0, 2), (1, 3), (5, 5.5)])
    assert one == ((0, 3), (4, 6)) and length(one) == 5
    assert both(one, ((2, 5),)) == ((2, 3), (4, 5))
    assert without(one, ((1, 2), (2.5, 4.5))) == ((0, 1), (2, 2.5), (4.5, 6))
    assert without(one, ()) == one and both(one, ()) == ()


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["tiny", "full", "--profile"], ["tiny", "full", "--profile=auto"]),
        (["--profile", "tiny", "full"], ["--profile=auto", "tiny", "full"]),
        (["tiny", "full", "--profile", "max_steps=9"], ["tiny", "full", "--profile=auto", "max_steps=9"]),
        (["tiny", "full", "--profile", "5:7"], ["tiny", "full", "--profile", "5:7"]),
    ],
)
def test_the_steps_may_be_left_out(typed, read):
    assert window.words(typed) == read
    assert launch.parse(typed, "").overrides == [word for word in typed if "=" in word]


def test_steps_are_those_of_the_run():
    assert (
        window.parse("auto", None) == (4, 6) and window.parse("auto", 5) == (4, 5) and window.parse("auto", 2) == (2, 2)
    )
    assert window.parse("7", 9) == (7, 7) and window.parse("1:9", 9) == (1, 9)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["--profile", "5:3"], "--profile 5:3: the last step comes before the first; e.g. --profile 3:5."),
        (["--profile", "0:3"], "--profile 0:3: steps are counted from 1; e.g. --profile 1:3."),
        (["--profile", "5:"], "--profile 5:: not FIRST:LAST; give the first and the last step, e.g. --profile 10:12."),
        (["--profile", "8:10", "max_steps=9"], "the run has 9 steps; use --profile 7:9, say, or a larger max_steps."),
        (["--profile", "profile.ranks=0,2"], "profile.ranks=0,2: rank 2 does not exist; ranks are 0 to 1."),
        (["--profile", f"profile.ranks={'9' * 5000}"], "is not a rank; give numbers with commas (0,1), or all."),
        (["--profile", "9" * 5000], "not FIRST:LAST"),
        (["--profile", "profile.ranks=first"], "`first` is not a rank; give numbers with commas (0,1), or all."),
        (["--nsys", "--kubernetes", "--dry-run"], "that the launcher starts on this machine; remove --kubernetes."),
        (["--nsys", "--prepare"], "that the launcher starts on this machine; remove --prepare."),
        (["--profile", "--nsys"], "--nsys: nsys is not on PATH; install Nsight Systems (https://developer.nvidia"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(changes, says, tmp_path, refusal, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / "run"
    error = refusal("launch", "tiny", "full", "--gpus", "2", "--output-dir", folder, *changes)
    assert says in error and len(error.splitlines()) <= 2 and not folder.exists()


def test_no_room_is_said_before_the_run(tmp_path, monkeypatch):
    recipe = replace(pages.find("tiny", "full"), profile=Profile(steps="4:6"), max_steps=9)
    same, line = window.checked(recipe, 2, 2, tmp_path / "run")
    assert same.profile == Profile("4:6", "0,1")
    assert line.startswith("profile: steps 4 to 6 on 2 ranks; the traces need about ")
    monkeypatch.setattr(window.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match=r"the traces need about .* MB while they are written, and .* has 1 MB left"):
        window.checked(recipe, 2, 2, tmp_path / "run")
    assert window.checked(replace(recipe, profile=Profile()), 2, 2, tmp_path)[1] is None


def test_ranks_of_several_hosts():
    assert window.ranks("auto", 4, 4) == (0, 1, 2, 3) and window.ranks("auto", 16, 8) == (0, 8)
    assert window.ranks("all", 3, 1) == (0, 1, 2) and window.ranks("1, 0", 2, 2) == (0, 1)


@pytest.mark.parametrize("asked", ["--nsys", "profile.nsys=true"])
def test_the_words_of_nsight_systems(asked, tmp_path, capsys):
    run = RunFolder(tmp_path)
    assert launch.main(["tiny", "full", asked, "--dry-run", "--output-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{shlex.join(window.nsys_command(run))} ")
    assert window.nsys_command(run) == [
        *("nsys", "profile", "--trace=cuda,nvtx,osrt,cublas", "--sample=none", "--cpuctxsw=none"),
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true"),
        f"--output={tmp_path}/profile/nsys",
    ]


def event(name, kind, begin, end, thread=1, **arguments):
    return {"ph": "X", "name": name, "cat": kind, "ts": begin, "dur": end - begin, "tid": thread, "args": arguments}


def on_gpu(**about):
    """Return the trace of a step of 100 us on a GPU."""
    nccl = {"Collective name": "allreduce", "In msg nelems": 500, "dtype": "BFloat16", "Process Group Name": "0"}
    events = [
        event("step/4", "user_annotation", 0, 100),
        event("step/data", "user_annotation", 0, 10),
        event("module/model.layers.3.mlp", "user_annotation", 10, 25),
        event("aten::mm", "cpu_op", 12, 20, **{"External id": 7}),
        event("gemm", "kernel", 20, 50, thread=9, **{"External id": 7}),
        event("ncclDevKernel_AllReduce", "kernel", 40, 70, thread=10, **nccl),
        event("aten::add", "cpu_op", 70, 75),
        event("Optimizer.step#AdamW.step", "user_annotation", 80, 90),
        event("aten::mm", "cpu_op", 110, 120, **{"External id": 8}),  # an evaluation's, between steps
        event("gemm", "kernel", 120, 900, thread=9, **{"External id": 8}),
    ]
    groups = {"pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    return trace.parse({"traceEvents": events, "distributedInfo": groups, trace.RECORD: about})


def test_a_gpus_step_is_divided():
    found = shares.of_rank(on_gpu())
    us = {kind: round(1e6 * seconds) for kind, seconds in asdict(found).items()}
    # 12 to 20 and 70 to 75 the host prepares; 10 to 12 and 75 to 100 nobody does anything.
    assert us == {
        "compute": 30,
        "communication_hidden": 10,
        "communication_waited": 20,
        "data": 10,
        "host": 13,
        "idle": 27,
    }
    assert found.seconds == pytest.approx(100e-6)


def test_an_offloaded_optimizer_is_the_hosts_work():
    found = shares.of_rank(on_gpu(offload_optimizer="cpu"))
    assert found.host == pytest.approx(23e-6) and found.idle == pytest.approx(17e-6)


def test_a_gpus_kernels_belong_to_operators_and_modules():
    best = shares.most_expensive(on_gpu())[0]
    assert (best.name, best.module, best.calls) == ("aten::mm", "model.layers.*.mlp", 1)
    assert best.seconds == pytest.approx(30e-6)


def test_a_gpus_collectives_say_their_size():
    (found,) = collectives.of_rank(on_gpu())
    assert (found.kind, found.ranks, found.count, found.bytes) == ("all-reduce", (0, 1), 1, 1000)
    assert found.seconds == pytest.approx(30e-6) and found.waited == pytest.approx(20e-6)
    assert found.bandwidth == pytest.approx(1000 / 30e-6), "twice the half that comes from the other rank"


def test_a_collective_flies_until_gloos_thread_is_done_however_late_it_begins():
    events = [
        event("step/4", "user_annotation", 0, 100),
        event("c10d::_allgather_base_", "cpu_op", 10, 11, **{"Input Dims": [[8], [4]], "Input type": ["float"] * 2}),
        event("c10d::allreduce_", "cpu_op", 12, 13, **{"Input Dims": [[[2]]], "Input type": ["TensorList"]}),
        event("c10d::_allgather_base_", "cpu_op", 14, 15, **{"Input Dims": [[8], [4]], "Input type": ["float"] * 2}),
        event("gloo:all_gather", "cpu_op", 10.5, 30, thread=8),
        event("gloo:all_reduce", "cpu_op", 20, 40, thread=9),
        event("gloo:all_gather", "cpu_op", 30, 60, thread=8),
        event("aten::mm", "cpu_op", 50, 80),
    ]
    found = {one.kind: one for one in collectives.of_rank(trace.parse({"traceEvents": events, trace.RECORD: {}}))}
    assert found["all-gather"].seconds == pytest.approx(50e-6) and found["all-gather"].waited == pytest.approx(40e-6)
    assert found["all-reduce"].seconds == pytest.approx(28e-6)


@pytest.mark.parametrize("ahead", [-150, 0, 30])
def test_a_collective_has_the_group_of_its_entry_whatever_the_recorders_clock_says(ahead):
    """Most calls are far apart, but some follow each other faster than two clocks agree."""
    begins = [100, 1000, 2000, 3000, 3070, 3140, 5000]
    shape = {"Input Dims": [[8], [4]], "Input type": ["float"] * 2}
    events = [event("c10d::_allgather_base_", "cpu_op", begin, begin + 60, **shape) for begin in begins]
    written = [{"name": "gloo:all_gather", "ns": (begin + 50 + ahead) * 1000, "dtype": ""} for begin in (-900, *begins)]
    groups = [str(number % 2) for number in range(len(written))]
    about = {"collectives": [one | {"group": group} for one, group in zip(written, groups, strict=True)], "base_us": 0}
    file = {"traceEvents": [event("step/4", "user_annotation", 0, 6000), *events], trace.RECORD: about}
    file["distributedInfo"] = {"pg_config": [{"pg_name": "0", "ranks": [0, 1]}, {"pg_name": "1", "ranks": [0, 2]}]}
    found = {one.ranks: one.count for one in collectives.of_rank(trace.parse(file))}
    assert found == {(0, 2): 4, (0, 1): 3}


def rank(number, collectives=(), **parts):
    return Rank(number, f"host{number}", (4,), 1.0, replace(EVEN, **parts), (), collectives, 0.0)


def waiting(gathers=1):
    """Return two ranks that wait for all-gathers of 1,000 weights of 4 bytes."""
    gathered = Collective("all-gather", (0, 1), 10 * gathers, 4000 * gathers, 1.0, 0.9)
    return [rank(number, (gathered,), communication_waited=1.0) for number in range(2)]


HELD = {"held": {"total": 1000}, "weight_bytes": 4, "stage": 3}
STAGED = {"layout": {"pipeline": 2}, "world_size": 4, "micro_batches": 4}


@pytest.mark.parametrize(
    ("ranks", "about", "name", "change"),
    [
        ([rank(0), rank(1)], {}, "compute", "micro_batch_size"),
        ([rank(0, data=0.5), rank(1, data=0.5)], {}, "data", "data.workers"),
        ([rank(0, host=0.5), rank(1, host=0.5)], {}, "host", "micro_batch_size"),
        ([rank(0, idle=0.5), rank(1, idle=0.5)], {}, "idle", "--gpus"),
        (waiting(), {"stage": 1}, "communication", "global_batch_size"),
        (waiting(), {"stage": 2}, "communication", "micro_batch_size"),
        (waiting(), {"stage": 2, "micro_batches": 2}, "communication", "zero1.json"),
        (waiting(2), HELD, "communication", "zero3_hpz.json"),
        ([rank(0, communication_waited=1.0), rank(1)], {}, "slow rank", "rank 1 on host1"),
    ],
)
def test_the_change_follows_from_the_shares(ranks, about, name, change):
    found = verdict.cause(ranks, about)
    assert found.name == name and change in found.change


SENT = {"stage": 3, "held": {"total": 100, "trained": 100}, "weight_bytes": 2, "micro_batches": 4, "world_size": 4}


@pytest.mark.parametrize(
    ("more", "sent"),
    [
        ({}, {("all-gather", (0, 1, 2, 3)): 800, ("reduce-scatter", (0, 1, 2, 3)): 800}),
        # With a second copy the network carries the weights once; the other three passes gather among two ranks.
        (
            {"partition_size": 2, "rank": 3},
            {("all-gather", (0, 1, 2, 3)): 200, ("all-gather", (2, 3)): 600, ("reduce-scatter", (0, 1, 2, 3)): 800},
        ),
        ({"kept_weights": 0}, {("all-gather", (0, 1, 2, 3)): 1600, ("reduce-scatter", (0, 1, 2, 3)): 800}),
        ({"layout": {"tensor": 2}, "stage": 1, "rank": 1}, {("all-reduce", (1, 3)): 200, ("all-gather", (1, 3)): 200}),
        ({"layout": {"tensor": 4}}, {}),
        ({"layout": {"pipeline": 2}}, {}),
    ],
)
def test_what_zero_sends_is_counted_by_group(more, sent):
    assert communication.traffic_of_run(SENT | more) == sent


@pytest.mark.parametrize(("ranks", "more"), [(waiting(), {}), (waiting(2), {"partition_size": 2})])
def test_a_second_copy_is_suggested_only_where_it_saves_a_gather(ranks, more):
    assert "hpz" not in verdict.cause(ranks, HELD | more).change


@pytest.mark.parametrize(("slow", "stage"), [((0, 1), 0), ((2, 3), 1), ((3,), 1)])
def test_a_slow_stage_is_named_with_its_busiest_rank(slow, stage):
    ranks = [rank(at, communication_waited=0.1 if at in slow else 1.5, compute=1.5) for at in range(4)]
    found = verdict.cause(ranks, STAGED)
    assert found.name == "slow stage" and found.words.startswith(f"stage {stage} (rank {slow[0]} on host{slow[0]})")
    assert "20% is unavoidable" in found.words


def test_stages_that_all_wait_are_not_slow():
    found = verdict.cause([rank(at, communication_waited=0.5) for at in range(4)], STAGED)
    assert found.name == "pipeline" and "global_batch_size" in found.change


def test_bars_are_as_long_as_the_step():
    shares = {"compute": 0.5, "communication_waited": 0.3, "data": 0.0, "host": 0.1, "idle": 0.1}
    assert verdict.bar(shares) == "#" * 25 + "~" * 15 + "h" * 5 + "." * 5


def test_a_trace_of_somebody_else_is_refused(tmp_path):
    import gzip

    path = tmp_path / f"rank-0{trace.SUFFIX}"
    path.write_bytes(b"cut")
    with pytest.raises(UserError, match="not a trace"):
        trace.read(path)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": []}).encode()))
    with pytest.raises(UserError, match="contains no recorded step"):
        trace.read(path)
