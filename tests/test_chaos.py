"""Fault injection: a run with a fault at a random moment ends with the right loss, or names the fault."""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from deepspeed_recipes.launching import paths, restarts
from deepspeed_recipes.launching.command import rank_environment
from deepspeed_recipes.launching.supervise import session_alive, supervise
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Recipe
from deepspeed_recipes.recipe.run_folder import (
    COMPLETE,
    RunFolder,
    newest_checkpoint,
    read_json,
    read_jsonl,
    sizes,
    step_of,
    write_json,
    write_recipe,
)
from deepspeed_recipes.training import run as training_run
from tests.conftest import shared_buffers
from tests.launching import LAUNCH
from tests.nan_data import leave_out, write_nan_data, write_nan_model
from tests.ranks import Ranks, free_port
from tests.test_launch import processes_of, ranks_of
from tests.workers.quick_launch import PROCESSES, quick_launch

RANKS, STEPS, EVERY = 4, 24, 4
NAN_EXAMPLE = 9
"""The example that makes the loss NaN, for the faults that need one."""
FAULTS = (
    *("kill", "stop", "truncated", "nan", "disk", "kill", "stop", "truncated", "rewind", "network"),
    *("launcher", "second_writer", "foreign", "flipped", "foreign", "launcher", "second_writer", "flipped", "foreign"),
    "flipped",
)
"""What happens in seeds 0, 20; 1, 21; and so on."""
THROUGH_DEEPSPEED = (0, 10)
"""The seeds that go through DeepSpeed's launcher, as `test_launch.py` does; in the others the ranks are forks."""


@dataclass
class Setup:
    """The settings of the runs, and the losses that they have to end with."""

    ranks: Ranks
    overrides: list[str]
    with_nan: list[str]
    final: float
    without: float
    foreign: Path
    """A checkpoint of a run on other data."""
    through_deepspeed: bool = False


@pytest.fixture(scope="module")
def setup(ranks, tmp_path_factory, model_folder, conversations):
    """Train undisturbed, on all examples and without the one that has a NaN elsewhere."""
    folder = tmp_path_factory.mktemp("chaos")
    rows = folder / "rows.jsonl"
    rows.write_text(conversations.read_text() * 4)
    model, with_nan = (
        write_nan_model(model_folder, folder / "model"),
        write_nan_data(rows, folder / "with_nan.jsonl", NAN_EXAMPLE),
    )
    fixed = [f"model.path={model}", "data.validation=none", "data.metric=loss", "packing=false", "deepspeed=zero2.json"]
    fixed += ["global_batch_size=8", "micro_batch_size=1", "sequence_length=128", f"max_steps={STEPS}", "epochs=99"]
    fixed += [f"save_steps={EVERY}", "logging_steps=1", "wandb.mode=disabled", "precision=fp32", "hang_minutes=0.4"]
    final = {}
    for name, path in (("all", rows), ("without", leave_out(with_nan, folder / "without.jsonl", NAN_EXAMPLE))):
        run = RunFolder(folder / name)
        write_recipe(run, recipe_of([*fixed, f"data.path={path}"]))
        ranks.check(training_run.main, str(run.path), world_size=RANKS, log=folder / f"{name}.log")
        final[name] = read_jsonl(run.metrics)[-1]["loss"]
        foreign = run.checkpoints / f"checkpoint-{STEPS - EVERY}"
        shutil.copytree(foreign, folder / foreign.name, dirs_exist_ok=True)
        shutil.rmtree(run.path)
    changes = ([*fixed, f"data.path={rows}"], [*fixed, f"data.path={with_nan}"])
    return Setup(ranks, *changes, final["all"], final["without"], folder / foreign.name)


def recipe_of(changes: list[str]) -> Recipe:
    """Return the recipe that the launcher would write."""
    return paths.locate(overrides.apply(pages.find("tiny", "full"), changes))


class Chaos:
    """One run through the launcher, and the fault that disturbs it."""

    def __init__(self, run: RunFolder, start: Callable[[str], Any], log: Path) -> None:
        self.run = run
        self.log = log
        self.process = start(str(log))

    def ended(self) -> bool:
        return self.process.poll() is not None if hasattr(self.process, "poll") else not self.process.is_alive()

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 240
        while not reached():
            assert not self.ended() and time.monotonic() < deadline, f"{what}\n{self.said()}"
            time.sleep(0.02)

    def reach(self, step: int) -> None:
        self.wait_until(lambda: any(row["step"] >= step for row in read_jsonl(self.run.metrics)), f"step {step}")

    def rank(self, number: int) -> int:
        """Return a rank's process id."""
        attempts = read_jsonl(self.run.path / PROCESSES)
        if attempts:
            return attempts[-1]["ranks"][number]
        return next(one.pid for one in ranks_of(self.run) if one.environ()["RANK"] == str(number))

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def end(self) -> int:
        """Wait for the end and return the exit status; nothing may be left behind."""
        deadline = time.monotonic() + 300
        while not self.ended():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)
        assert not processes_of(self.run)
        assert not any(session_alive(attempt["launcher"]) for attempt in read_jsonl(self.run.path / PROCESSES))
        return self.process.returncode if hasattr(self.process, "returncode") else self.process.exitcode

    def kill(self) -> None:
        """End what a failed test has left."""
        self.process.kill()
        for attempt in read_jsonl(self.run.path / PROCESSES):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(attempt["launcher"], signal.SIGKILL)
        for process in processes_of(self.run):
            process.kill()


@pytest.mark.every
@pytest.mark.parametrize("seed", range(40))
def test_a_fault_at_a_random_moment(tmp_path, setup, seed):
    draw, fault = random.Random(seed), FAULTS[seed % len(FAULTS)]
    buffers = shared_buffers()
    setup = replace(setup, through_deepspeed=seed in THROUGH_DEEPSPEED)
    with contextlib.ExitStack() as stack:
        globals()[fault](stack, made(tmp_path / "files"), setup, draw)
    assert shared_buffers() <= buffers


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def started(stack, folder: Path, setup: Setup, changes: list[str], *flags: str) -> Chaos:
    """Start the launcher, and end it with the test whatever happens."""
    run = RunFolder(folder / "run")
    flags = flags or ("--max-restarts", "2")
    arguments = ["tiny", "full", "--gpus", str(RANKS), "--output-dir", str(run.path), *flags, *changes]

    def through_deepspeed(log: str):
        with open(log, "w") as output:
            return subprocess.Popen([*LAUNCH, *arguments], stdout=output, stderr=subprocess.STDOUT)

    def forked(log: str):
        process = setup.ranks.context.Process(target=quick_launch, args=(arguments, log))
        process.start()
        return process

    chaos = Chaos(run, through_deepspeed if setup.through_deepspeed else forked, folder.parent / "output")
    stack.callback(chaos.kill)
    return chaos


def ends_well(chaos: Chaos, final: float, kept: int) -> None:
    """Fail unless the run ended with the right loss, having restarted from `kept` or later."""
    status = chaos.end()
    said = chaos.said()
    assert status == 0, said
    rows = read_jsonl(chaos.run.metrics)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] == pytest.approx(final, rel=1e-4)
    assert (chaos.run.export / "model.safetensors").exists()
    assert all(row["from_step"] >= kept for row in read_jsonl(chaos.run.restarts)), said


def kill(stack, folder, setup, draw):
    step, victim = draw.randrange(EVERY + 1, STEPS - 6), draw.randrange(RANKS)
    chaos = started(stack, folder, setup, setup.overrides)
    chaos.reach(step)
    kept = step_of(newest_checkpoint(chaos.run))
    at = time.monotonic()
    os.kill(chaos.rank(victim), signal.SIGKILL)
    chaos.wait_until(lambda: "restart 1 of 2: resuming from" in chaos.said(), "a restart")
    assert time.monotonic() - at < 30
    assert f"rank {victim} on " in chaos.said() and "was killed by SIGKILL" in chaos.said()
    ends_well(chaos, setup.final, kept)


def stop(stack, folder, setup, draw):
    """Stop a rank: it blocks the others, and cannot report where it was."""
    step, victim = draw.randrange(EVERY + 1, STEPS - 6), draw.randrange(RANKS)
    chaos = started(stack, folder, setup, setup.overrides)
    chaos.reach(step)
    kept = step_of(newest_checkpoint(chaos.run))
    at = time.monotonic()
    os.kill(chaos.rank(victim), signal.SIGSTOP)
    chaos.wait_until(lambda: "restart 1 of 2: resuming from" in chaos.said(), "a restart")
    assert time.monotonic() - at < 0.4 * 60 + 30
    assert "no step finished for 0.4 minutes" in chaos.said(), chaos.said()
    assert f"none from rank {victim}, which was stopped or cut off" in chaos.said(), chaos.said()
    ends_well(chaos, setup.final, kept)


def truncated(stack, folder, setup, draw):
    """Truncate a file of the newest checkpoint as the run ends: the one before it is used."""
    chaos = started(stack, folder, setup, setup.overrides)
    wanted = EVERY * draw.randrange(2, STEPS // EVERY - 1)
    newest = chaos.run.checkpoints / f"checkpoint-{wanted}"
    victim = draw.randrange(RANKS)
    chaos.wait_until(lambda: (newest / COMPLETE).exists(), "a checkpoint")
    file = draw.choice(sorted(name for name, size in read_json(newest / COMPLETE)["files"].items() if size))
    os.kill(chaos.rank(victim), signal.SIGKILL)
    os.truncate(newest / file, (newest / file).stat().st_size // 2)
    ends_well(chaos, setup.final, wanted - EVERY)
    (restart,) = read_jsonl(chaos.run.restarts)
    assert restart["from_step"] == wanted - EVERY, chaos.said()


def nan(stack, folder, setup, draw):
    chaos = started(stack, folder, setup, setup.with_nan, "--max-restarts", "2")
    assert chaos.end() == 2, chaos.said()
    told = re.search(r"step (\d+): the loss is not finite on rank (\d), sequences (\d+) of", chaos.said())
    assert int(told[3]) == NAN_EXAMPLE and "restart" not in chaos.said() and "Traceback" not in chaos.said()
    checkpoint = newest_checkpoint(chaos.run)
    assert checkpoint is None or step_of(checkpoint) < int(told[1])


def rewind(stack, folder, setup, draw):
    """Save after every step, since the example comes in the first epoch, which has four."""
    chaos = started(
        stack, folder, setup, [*setup.with_nan, "on_nan=rewind", "save_steps=1", f"seed={draw.randrange(99)}"]
    )
    status = chaos.end()
    if "nothing to restart from" in chaos.said():  # the row came in the first step
        assert status == 2
        return
    assert status == 0 and "rewinding: resuming from" in chaos.said(), chaos.said()
    assert read_json(chaos.run.left_out) == [NAN_EXAMPLE]
    assert all(abs(row["loss"]) < 100 for row in read_jsonl(chaos.run.metrics))


def disk(stack, folder, setup, draw):
    """Fill up the disk while a checkpoint is being written."""
    place = made(folder / "disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system takes root")
    stack.callback(lambda: subprocess.run(["umount", "--lazy", str(place)], check=True))
    chaos = started(stack, place, setup, setup.overrides)
    wanted = EVERY * draw.randrange(2, STEPS // EVERY)
    writing = chaos.run.checkpoints / f"checkpoint-{wanted}"
    chaos.wait_until(writing.exists, "a save")
    with contextlib.suppress(OSError), (place / "filler").open("wb") as filler:
        while True:
            filler.write(b"\0" * 2**16)
    status = chaos.end()
    assert status == 2 and ("a checkpoint needs about" in chaos.said() or "the disk is full" in chaos.said())
    kept = newest_checkpoint(chaos.run)
    assert step_of(kept) in (wanted - EVERY, wanted)


def network(stack, folder, setup, draw):
    """Cut the cable between two hosts of two ranks each."""
    names = [f"chaos{os.getpid()}{side}" for side in "ab"]
    connect(stack, names)
    run = RunFolder(folder / "run")
    recipe = recipe_of(setup.overrides)
    write_recipe(run, recipe)
    step = draw.randrange(EVERY + 1, STEPS - 6)
    environment = rank_environment(RANKS, 0) | {"GLOO_SOCKET_IFNAME": "eth0"}
    link = ["ip", "-n", names[1], "link", "set", "eth0"]

    def cut() -> None:
        deadline = time.monotonic() + 240
        while not any(row["step"] >= step for row in read_jsonl(run.metrics)) and time.monotonic() < deadline:
            time.sleep(0.02)
        subprocess.run([*link, "down"], check=True)

    def start(ranks: int):
        subprocess.run([*link, "up"], check=True)
        arguments = [*names, "10.219.7.1", str(free_port()), str(RANKS // 2), str(run.path)]
        return supervise([sys.executable, "-m", "tests.workers.two_hosts", *arguments], environment, run, ranks)

    threading.Thread(target=cut, daemon=True).start()
    stack.callback(lambda: [process.kill() for process in processes_of(run)])
    assert restarts.run_with_restarts(recipe, run, RANKS, 2, start, lambda: RANKS) == 0
    rows, (restart, *_) = read_jsonl(run.metrics), read_jsonl(run.restarts)
    assert rows[-1]["loss"] == pytest.approx(setup.final, rel=1e-4)
    assert "no step finished for" in restart["cause"], restart


def kill_launcher(chaos: Chaos) -> None:
    """Kill the launcher; its ranks end with it."""
    pids = {chaos.rank(number) for number in range(RANKS)}
    os.kill(chaos.process.pid, signal.SIGKILL)
    left = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)[1]
    assert not left
    chaos.end()


def launcher(stack, folder, setup, draw):
    chaos = started(stack, folder, setup, setup.overrides)
    chaos.reach(draw.randrange(EVERY + 1, STEPS - 6))
    kept = step_of(newest_checkpoint(chaos.run))
    kill_launcher(chaos)
    ends_well(started(stack, folder, setup, [], "--resume"), setup.final, kept)


def second_writer(stack, folder, setup, draw):
    chaos = started(stack, folder, setup, setup.overrides)
    chaos.reach(draw.randrange(EVERY + 1, STEPS - 6))
    kept = step_of(newest_checkpoint(chaos.run))
    command = [*LAUNCH, "tiny", "full", "--gpus", str(RANKS), "--output-dir", str(chaos.run.path), "--resume"]
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 2 and second.stderr.count("\n") == 1, second.stderr
    assert f"is being written by process {chaos.process.pid} on {socket.gethostname()}" in second.stderr
    ends_well(chaos, setup.final, kept)


def flipped(stack, folder, setup, draw):
    """Flip a bit in the newest checkpoint as the run ends: the one before it is used, and the file is named."""
    chaos = started(stack, folder, setup, setup.overrides)
    wanted = EVERY * draw.randrange(2, STEPS // EVERY - 1)
    newest, victim = chaos.run.checkpoints / f"checkpoint-{wanted}", draw.randrange(RANKS)
    chaos.wait_until(lambda: (newest / COMPLETE).exists(), "a checkpoint")
    name = draw.choice(sorted(name for name, size in read_json(newest / COMPLETE)["files"].items() if size))
    os.kill(chaos.rank(victim), signal.SIGKILL)
    content = bytearray((newest / name).read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    (newest / name).write_bytes(content)
    ends_well(chaos, setup.final, wanted - EVERY)
    (restart,) = read_jsonl(chaos.run.restarts)
    assert restart["from_step"] == wanted - EVERY, chaos.said()
    assert f"{newest / name} is damaged" in chaos.said()


def foreign(stack, folder, setup, draw):
    """Put a later checkpoint of a run on other data between the run's own."""
    chaos = started(stack, folder, setup, setup.overrides)
    chaos.reach(draw.randrange(EVERY + 1, STEPS - 2 * EVERY))
    kept = step_of(newest_checkpoint(chaos.run))
    kill_launcher(chaos)
    stranger = chaos.run.checkpoints / setup.foreign.name
    shutil.copytree(setup.foreign, stranger)
    refused = started(stack, folder, setup, [], "--resume")
    assert refused.end() == 2, refused.said()
    assert f"{stranger} was trained with other data" in refused.said() and "Traceback" not in refused.said()
    shutil.rmtree(stranger)
    ends_well(started(stack, folder, setup, [], "--resume"), setup.final, kept)


def connect(stack, names: list[str]) -> None:
    """Make two network namespaces and a cable between them; an interface is called eth0 in each."""
    made = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True) if shutil.which("ip") else None
    if made is None or made.returncode:
        pytest.skip("network namespaces take root and iproute2")
    stack.callback(lambda: [subprocess.run(["ip", "netns", "del", name]) for name in names])
    subprocess.run(["ip", "netns", "add", names[1]], check=True)
    ends = ["type", "veth", "peer", "name", "eth0", "netns", names[1]]
    subprocess.run(["ip", "link", "add", "eth0", "netns", names[0], *ends], check=True)
    for number, name in enumerate(names, start=1):
        for command in (["addr", "add", f"10.219.7.{number}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            subprocess.run(["ip", "-n", name, *command], check=True)
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)


@pytest.mark.every
def test_a_restart_with_fewer_ranks_ends_with_the_same_loss(ranks, tmp_path, setup):
    """As when a host is lost for good: the states are converted, the global batch stays the same."""
    run = RunFolder(tmp_path / "run")
    recipe = recipe_of(setup.overrides)
    write_recipe(run, recipe)
    world = []

    def start(size: int):
        world.append(size)
        processes = ranks.start(training_run.main, str(run.path), world_size=size, log=tmp_path / f"log{len(world)}")
        while size == RANKS and not any(row["step"] > STEPS // 2 for row in read_jsonl(run.metrics)):
            time.sleep(0.02)
        for process in processes:
            if size == RANKS:
                process.kill()
            process.join(240)
        statuses = [process.exitcode for process in processes]
        return restarts.Outcome(max(map(abs, statuses)), f"exit statuses {statuses}", False)

    assert restarts.run_with_restarts(recipe, run, RANKS, 1, start, lambda: 3) == 0
    assert world == [4, 2]  # eight sequences are not divisible by three ranks
    rows = read_jsonl(run.metrics)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] == pytest.approx(setup.final, rel=1e-4)


@pytest.mark.every
def test_restarts_are_counted_and_have_a_checkpoint_to_start_from(tmp_path, setup, capsys):
    run = RunFolder(tmp_path)
    recipe = recipe_of(setup.overrides)
    bad = restarts.Outcome(1, "rank 0 on here exited with status 1", False)
    assert restarts.run_with_restarts(recipe, run, 2, 0, lambda _: bad, lambda: 2) == 1
    assert "rank 0 on here exited with status 1" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"nothing to restart from: .* has no complete checkpoint yet"):
        restarts.run_with_restarts(recipe, run, 2, 1, lambda _: bad, lambda: 2)
    stopped = restarts.Outcome(143, None, True)
    assert restarts.run_with_restarts(recipe, run, 2, 1, lambda _: stopped, lambda: 2) == 143


def test_a_launch_that_could_not_restart_is_refused(tmp_path, refusal):
    for flags, said in (
        (["--max-restarts", "2", "save_steps=0"], "save_steps=0 writes no checkpoints to restart from"),
        (["--max-restarts", "-1"], "at least 0"),
    ):
        error = refusal("launch", "tiny", "full", "--output-dir", tmp_path / "run", *flags)
        assert said in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_truncated_checkpoint_is_skipped(tmp_path):
    run = RunFolder(tmp_path)
    for step in (5, 10):
        folder = run.checkpoints / f"checkpoint-{step}"
        (folder / "global_step").mkdir(parents=True)
        (folder / "global_step" / "states.pt").write_bytes(b"0123456789")
        write_json(folder / COMPLETE, {"step": step, "world_size": 2, "layout": {}, "files": sizes(folder)})
    assert step_of(newest_checkpoint(run)) == 10
    os.truncate(run.checkpoints / "checkpoint-10/global_step/states.pt", 9)
    assert step_of(newest_checkpoint(run)) == 5
    (run.checkpoints / "checkpoint-5/global_step/states.pt").unlink()
    assert newest_checkpoint(run) is None
