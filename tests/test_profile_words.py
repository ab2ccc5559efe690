"""What `--profile` accepts, and what is made of traces that are written by hand."""

import json
import shlex
from dataclasses import asdict, replace

import pytest

from deepspeed_recipes.commands import launch, main
from deepspeed_recipes.planning.cost import communication
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Profile
from deepspeed_recipes.recipe.run_folder import RunFolder
from deepspeed_recipes.report.profiler import collectives, shares, trace, verdict, window
from deepspeed_recipes.report.profiler.collectives import Collective
from deepspeed_recipes.report.profiler.shares import Shares
from deepspeed_recipes.report.profiler.trace import both, length, union, without
from deepspeed_recipes.report.profiler.verdict import Rank

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
        (["--profile", "8:10", "max_steps=9"], "the run has 9 steps; e.g. --profile 7:9, or a larger max_steps."),
        (["--profile", "profile.ranks=0,2"], "profile.ranks=0,2: rank 2 does not exist; ranks are 0 to 1."),
        (["--profile", f"profile.ranks={'9' * 5000}"], "is not a rank; give numbers with commas (0,1), or all."),
        (["--profile", "9" * 5000], "not FIRST:LAST"),
        (["--profile", "profile.ranks=first"], "`first` is not a rank; give numbers with commas (0,1), or all."),
        (["--profile", "--nsys"], "--nsys: nsys is not on PATH; install Nsight Systems (https://developer.nvidia"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(changes, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / "run"
    assert main.run("launch", ["tiny", "full", "--gpus", "2", "--output-dir", str(folder), *changes]) == 2
    error = capsys.readouterr().err
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


def test_the_words_of_nsight_systems(tmp_path, capsys):
    run = RunFolder(tmp_path)
    assert launch.main(["tiny", "full", "--nsys", "--dry-run", "--output-dir", str(tmp_path)]) == 0
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
