"""SLURM: what a run asks for, the batch script, and a real cluster of two nodes that preempts and restarts runs."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from deepspeed_recipes.commands import launch
from deepspeed_recipes.launching import node, slurm
from deepspeed_recipes.launching.options import Allocation, LaunchOptions
from deepspeed_recipes.launching.supervise import Outcome
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import (
    RunFolder,
    newest_checkpoint,
    read_json,
    read_jsonl,
    step_of,
)
from tests.launching import LAUNCH
from tests.ranks import free_port, run_on
from tests.small import small
from tests.test_hosts import overrides, wait_for_step
from tests.test_launch import ranks_of

SINFO = """\
cpu|4|(null)
big*|8|gpu:h100:8(S:0-1)
big*|2|lustre:1,gpu:4
mixed|1|gpu:2
mixed|1|(null)
fast|3|gpu:2
"""
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch")


def without_slurm() -> str:
    """Return why no cluster can be started here; empty if it can."""
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin")]
    if missing:
        return f"not installed: {', '.join(missing)} (slurm-wlm, munge)"
    return "" if os.getuid() == 0 else "slurmd needs root"


HERE = pytest.mark.skipif(bool(without_slurm()), reason=without_slurm() or "a cluster can be started here")


def test_a_clusters_partitions_are_read():
    big, *others = slurm.partitions(SINFO)
    assert (big.name, big.nodes, big.gpus) == ("big", 10, 4)
    assert {(one.name, one.nodes, one.gpus) for one in others} == {("cpu", 4, 0), ("mixed", 2, 0), ("fast", 3, 2)}


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ("JobState=COMPLETED Reason=None ExitCode=0:0", 0),
        ("JobState=FAILED Reason=NonZeroExitCode ExitCode=2:0", 2),
        ("JobState=FAILED Reason=RaisedSignal ExitCode=0:9", 128 + 9),
        ("JobState=NODE_FAIL Reason=None ExitCode=0:0", 1),
        ("", 1),
    ],
)
@pytest.mark.parametrize("log", ["step 1\n", None])
def test_a_followed_job_prints_its_log_and_returns_its_status(facts, status, log, tmp_path, monkeypatch, capsys):
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{facts}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if log:
        slurm.log(RunFolder(tmp_path)).write_text(log)
    assert slurm.follow("7", RunFolder(tmp_path)) == status
    assert capsys.readouterr().out.count("step 1") == bool(log)


@pytest.mark.parametrize("text", ["30", "4:00:00", "1-12", "2-00:30", "90:30", "0", "5:01"])
def test_slurms_forms_of_a_time_limit_are_accepted(text, monkeypatch):
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    assert slurm.allocation("x", 2, 8, None, text, dry_run=True).time == text


@pytest.mark.parametrize(("text", "seconds"), [("2:00", 120), ("3", 180), ("0:00:04", 4), ("5", 300), ("0-0:5", 300)])
def test_a_limit_that_leaves_no_time_before_the_checkpoint_is_refused(text, seconds):
    with pytest.raises(UserError, match=f"^--time {text}: SLURM reads it as {seconds} seconds"):
        slurm.allocation("x", 2, 8, None, text, dry_run=True)


def test_what_the_cluster_does_not_have_is_refused(monkeypatch):
    monkeypatch.setattr(slurm.shutil, "which", lambda name: name)
    monkeypatch.setattr(slurm, "ask", lambda *command: SINFO)
    for asked, hint in (
        ({"partition": "gpu_a100-mig@night"}, "not a partition's name, because of '@'"),
        ({"partition": "gpu"}, "--partition gpu: no such partition; this cluster has big, cpu, mixed, fast"),
        ({"partition": "big,gpu"}, "--partition gpu: no such partition; this cluster has big, cpu, mixed, fast"),
        ({"partition": "cpu,big"}, "--partition cpu,big: some have GPUs and others none"),
        ({"partition": "fast,big", "nodes": 11}, "--nodes 11: partition fast,big has only 10"),
        ({"partition": "fast,big", "ranks": 3}, "--gpus 3: nodes in partition fast,big have only 2"),
        ({"nodes": 11}, "--nodes 11: partition big has only 10"),
        ({"ranks": 8}, "--gpus 8: nodes in partition big have only 4"),
        ({"limit": "soon"}, "--time: invalid time limit soon"),
    ):
        words = {"nodes": None, "ranks": None, "partition": None, "limit": None} | asked
        with pytest.raises(UserError, match=re.escape(hint)):
            slurm.allocation("x", **words, dry_run=False)
    assert slurm.allocation("x", 2, None, None, None, dry_run=False) == Allocation("x", 2, 4, True)
    assert slurm.allocation("x", 9, None, "big,fast", None, dry_run=False).ranks_per_node == 2
    assert slurm.allocation("x", 2, None, "cpu", None, dry_run=False) == Allocation("x", 2, 2, False, "cpu")


def test_the_script_has_what_was_asked_and_no_secrets(tmp_path):
    environment = {
        "HF_TOKEN": "hf_" + "a1B2" * 8,
        "NCCL_DEBUG": "a b",
        "TORCH_EXTENSIONS_DIR": "/o",
        "PYTHONPATH": "/p",
    }
    asked = Allocation("tiny-3m-full", 2, 8, True, "big", "4:00:00")
    text = slurm.script(asked, RunFolder(tmp_path / "a run"), environment)
    for line in (
        "--nodes=2",
        "--gpus-per-node=8",
        "--partition=big",
        "--time=4:00:00",
        "--requeue",
        "--signal=B:USR1@300",
    ):
        assert f"#SBATCH {line}\n" in text
    assert "hf_a1B2" not in text and "export NCCL_DEBUG='a b'\n" in text
    assert f"#SBATCH --output='{tmp_path}/a run/slurm.log'\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert "gpus-per-node" not in slurm.script(Allocation("x", 1, 2, False), RunFolder(tmp_path), environment)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="not installed: shellcheck")
@pytest.mark.parametrize("restarts", [0, 3])
def test_shellcheck_has_nothing_to_say_about_the_script(restarts, tmp_path):
    environment = {"NCCL_DEBUG": "a 'b' $c", "TORCH_EXTENSIONS_DIR": "/o", "PYTHONPATH": "/p q"}
    asked = Allocation("tiny-3m-full", 2, 8, True, "big", "4:00:00", restarts)
    text = slurm.script(asked, RunFolder(tmp_path / "a run"), environment)
    done = subprocess.run(["shellcheck", "--shell=bash", "-"], input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_without_slurm_the_script_is_shown_and_nothing_submitted(tmp_path, monkeypatch, capsys, printed_by, refused):
    words = ["tiny", "full", "--slurm", "--gpus", "2", "--output-dir", str(tmp_path / "run")]
    monkeypatch.setenv("PATH", "/nowhere")
    assert launch.main([*words, "--dry-run"]) == 0 and "#SBATCH --nodes=1\n" in capsys.readouterr().out
    assert "sbatch is not installed here" in refused(*words) and not (tmp_path / "run").exists()
    for name in ("sinfo", "sbatch"):  # installed, but without a cluster
        (tmp_path / name).write_text("#!/bin/sh\necho 'sinfo: fatal: no configuration source' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    lacks = refused(*words)
    assert "--slurm: sinfo: fatal: no configuration source\n" in lacks and "--write-only to write the job" in lacks
    more = ["--shared", "--account", "me", "--mem", "64G", "--sbatch", "--qos=high -C 'a100|h100'", "--write-only"]
    printed = printed_by("launch", *words, *more)
    warned = re.search(r"warning: --output-dir.* in /tmp: in most clusters each node has its own", printed)
    assert bool(warned) == str(tmp_path).startswith("/tmp/")
    assert f"sbatch {tmp_path}/run/slurm.sbatch\n" in printed
    text = (tmp_path / "run" / "slurm.sbatch").read_text()
    wanted = ("--gpus-per-node=2", "--cpus-per-task=8", "--account=me", "--mem=64G", "--qos=high", "-C 'a100|h100'")
    assert all(f"#SBATCH {line}\n" in text for line in wanted) and "--exclusive" not in text
    assert (tmp_path / "run" / "recipe.json").exists()


def test_options_that_the_job_sets_itself_are_refused():
    def asked(**words):
        return slurm.with_options(Allocation("x", 1, 2, True), LaunchOptions("tiny", "full", slurm=True, **words))

    for words, said in (
        ({"sbatch": "--nodes=3"}, "--sbatch --nodes: write --nodes."),
        ({"sbatch": "-N 3"}, "--sbatch -N: write --nodes."),
        ({"sbatch": "--qos=a --output x"}, "--sbatch --output: the launcher follows slurm.log"),
        ({"sbatch": "--sig=B:USR1@60"}, "--sbatch --sig: the job itself saves before its limit"),
        ({"sbatch": "--export=NONE"}, "--sbatch --export: the ranks need all of the job's environment"),
        ({"sbatch": "-Mother"}, "--sbatch -M: the launcher submits the job and follows it"),
        ({"sbatch": "--mail-type=END # all"}, "--sbatch --mail-type=END # all: write options with at most one value"),
        ({"sbatch": "-x n1 n2"}, "--sbatch -x n1 n2: write options with at most one value"),
        ({"sbatch": "-- -x n1"}, "--sbatch --: write options"),
        ({"sbatch": "high"}, "--sbatch high: not an option"),
        ({"sbatch": "--comment='"}, "no closing quotation"),
        ({"sbatch": '--comment="a\n#SBATCH --nodes=9"'}, "an option may not contain"),
        ({"mem": "lots"}, "--mem lots: write"),
        ({"account": "a b"}, "--account 'a b': not an account's name"),
        ({"shared": True}, "--shared: also name --gpus N"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            asked(**words)
    with pytest.raises(UserError, match="--mem needs --slurm"):
        LaunchOptions("tiny", "full", mem="1G").check()


def test_a_part_of_a_node_uses_the_gpus_that_it_was_given(tmp_path, monkeypatch):
    from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion

    def used(devices):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        run, asked = RunFolder(tmp_path), node.Node(tmp_path, None, 2, 1, 2, "a", 29500)
        monkeypatch.setattr(node, "prepare", lambda *_: None)
        monkeypatch.setattr(node, "supervise", started)
        monkeypatch.setattr(node.run_folder, "is_finished", lambda _: True)
        node.start(run, asked)
        return found.pop()

    def started(command, *_):
        given = dict(pairwise(command))
        hosts = fetch_hostfile(given["--hostfile"])
        found.append(parse_inclusion_exclusion(hosts, given["--include"], ""))
        return Outcome(0, None, False)

    found = []
    assert used("4,5") == {"node-0": [0, 1], "node-1": [4, 5]}
    assert used("0,1") == used("") == used("GPU-a,GPU-b") == {"node-0": [0, 1], "node-1": [0, 1]}


class Cluster:
    """One slurmctld, two slurmd and a munged, on ports and in folders of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> "Cluster":
        for name in ("state", "n1", "n2", "munge"):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        for path, mode in ((key, 0o400), (key.parent, 0o700)):
            path.chmod(mode)
        ports = [free_port() for _ in range(3)]
        (self.folder / "slurm.conf").write_text(self._configuration(*ports))
        munge = [f"--{name}={self.folder / 'munge' / file}" for name, file in MUNGE.items()]
        self.servers = [self._start("munged", "--foreground", "--force", *munge)]
        wait_until(lambda: (self.folder / "munge" / "socket").exists())
        configuration = str(self.folder / "slurm.conf")
        self.servers.append(self._start("slurmctld", "-D", "-f", configuration))
        self.servers += [self._start("slurmd", "-D", "-f", configuration, "-N", node) for node in ("n1", "n2")]
        wait_until(lambda: self.ask("sinfo", "-h", "-o", "%t %D").strip() == "idle 2")
        return self

    def __exit__(self, *_: object) -> None:
        self.ask("scancel", "--user=root")
        deadline = time.monotonic() + 60  # slurmd would leave the processes of a job that still ends
        while self.ask("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.5)
        for server in reversed(self.servers):
            server.terminate()
        for server in self.servers:
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()

    def _start(self, *command: str) -> subprocess.Popen:
        path = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin")
        with (self.folder / f"{Path(path).name}.log").open("a") as log:
            return subprocess.Popen([path, *command[1:]], stdout=log, stderr=log, env=self.environment())

    def _configuration(self, control: int, first: int, second: int) -> str:
        here = self.folder
        name = socket.gethostname()
        return f"""\
ClusterName=test
SlurmctldHost={name}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={here}/munge/socket
SlurmctldPort={control}
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/%n.pid
SlurmdSpoolDir={here}/%n
StateSaveLocation={here}/state
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TaskPlugin=task/none
ProctrackType=proctrack/pgid
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
EnforcePartLimits=ALL
NodeName=n1 NodeHostname={name} NodeAddr=127.0.0.1 Port={first} CPUs=1 RealMemory=1000
NodeName=n2 NodeHostname={name} NodeAddr=127.0.0.1 Port={second} CPUs=1 RealMemory=1000
PartitionName=small Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""

    def environment(self) -> dict[str, str]:
        """Return the environment in which SLURM's commands speak to this cluster."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def ask(self, *command: str) -> str:
        """Return what one of SLURM's commands prints."""
        return subprocess.run(command, capture_output=True, text=True, env=self.environment(), timeout=60).stdout


MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def wait_until(reached, seconds=60):
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@HERE
def test_a_real_cluster_says_what_it_does_not_have(cluster, tmp_path):
    for words, hint in (
        (["--partition", "big"], "--partition big: no such partition; this cluster has small"),
        (["--nodes", "3"], "--nodes 3: partition small has only 2"),
        (["--time", "9-0"], "sbatch: error:"),
        (["--mem", "64T"], "sbatch: error:"),
        (["--shared"], "sbatch: error:"),
    ):
        command = [*LAUNCH, "tiny", "full", "--slurm", "--gpus", "1", "--output-dir", str(tmp_path / "run"), *words]
        done = subprocess.run(
            [*command, "global_batch_size=24"], capture_output=True, text=True, env=cluster.environment()
        )
        assert done.returncode == 2 and hint in done.stderr, done.stdout + done.stderr
        assert len(done.stderr.strip().splitlines()) == 1 and not (tmp_path / "run").exists()
    assert not cluster.ask("squeue", "-h")


@HERE
def test_a_real_cluster_gives_the_job_what_was_asked_for(cluster, tmp_path, monkeypatch):
    run, python = RunFolder(tmp_path / "a run"), tmp_path / "python"
    run.path.mkdir()
    python.write_text("#!/bin/sh\nenv\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    environment = cluster.environment() | {"TORCH_EXTENSIONS_DIR": "/o", "PYTHONPATH": "/p", "NCCL_DEBUG": "a b"}
    more = (("--comment", "# c d"), ("--nice=5",))
    text = slurm.script(Allocation("x", 1, 1, False, time="10", more=more), run, environment)
    slurm.path(run).write_text(text)
    defaults = {"SBATCH_TIMELIMIT": "20", "SBATCH_EXPORT": "NONE", "SLURM_EXPORT_ENV": "NONE", "MINE": "shell"}
    job = slurm.submit(run, environment | defaults)
    wait_until(lambda: not cluster.ask("squeue", "-h"))
    facts = cluster.ask("scontrol", "-o", "show", "job", job)
    assert "TimeLimit=00:10:00 " in facts and " Nice=5 " in facts and "Comment=# c d" in facts, facts
    assert {"NCCL_DEBUG=a b", "MINE=shell"} <= {*slurm.log(run).read_text().splitlines()}


def submitted(cluster, run, *words):
    command = [*LAUNCH, "tiny", "full", "--slurm", "--gpus", "1", "--output-dir", str(run.path), *words]
    return subprocess.Popen(
        command, env=cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@HERE
@pytest.mark.every
@pytest.mark.parametrize("ending", ["preemption", "time limit"])
def test_a_stopped_job_resumes_by_itself(ending, cluster, ranks, model_folder, conversations, tmp_path):
    recipe = small(model_folder, conversations, "zero3.json", max_steps=60, save_steps=50, learning_rate=1e-3)
    run = RunFolder(tmp_path / "run")
    one = run_on(ranks, recipe, tmp_path, name="one")
    process = submitted(cluster, run, "--nodes", "2", *overrides(recipe))
    wait_for_step(process, run, 4)
    job = cluster.ask("squeue", "-h", "-o", "%i").strip()
    if ending == "preemption":
        cluster.ask("scontrol", "requeue", job)
    else:  # the signal that sbatch's --signal asks for, without the wait
        cluster.ask("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: cluster.ask("squeue", "-h", "-o", "%t").strip() == "PD", 120)
    stopped = read_json(run.summary)
    assert stopped["stopped"] and stopped["steps"] == step_of(newest_checkpoint(run)) < 50
    assert not ranks_of(run)
    cluster.ask(
        "scontrol", "update", f"JobId={job}", "StartTime=now"
    )  # SLURM waits two minutes before it starts it again
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert (
        f"job {job}: pending" in output and f"resuming from {run.checkpoints}/checkpoint-{stopped['steps']}" in output
    )
    ours, theirs = ([(row["step"], row["loss"]) for row in read_jsonl(each.metrics)] for each in (run, one))
    assert [step for step, _ in ours] == list(range(1, 61)) and ours == theirs
    assert not read_json(run.summary)["stopped"] and slurm.path(run).exists()
    assert not cluster.ask("squeue", "-h")


@HERE
@pytest.mark.every
def test_ctrl_c_leaves_the_job_running_and_a_failed_job_fails(cluster, model_folder, conversations, tmp_path):
    run = RunFolder(tmp_path / "run")
    words = overrides(small(model_folder, conversations, "zero3.json", max_steps=4000))
    process = submitted(cluster, run, *words)
    wait_for_step(process, run, 1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    job = re.search(r"job (\d+): log in", output)[1]
    assert process.returncode == 0 and cluster.ask("squeue", "-h", "-o", "%i %t").split() == [job, "R"]
    (rank,) = ranks_of(run)
    rank.kill()
    wait_until(lambda: not cluster.ask("squeue", "-h"))
    assert "JobState=FAILED" in cluster.ask("scontrol", "show", "job", job)


@HERE
@pytest.mark.every
def test_after_a_rank_dies_the_nodes_restart_in_the_same_job(cluster, ranks, model_folder, conversations, tmp_path):
    recipe = small(model_folder, conversations, "zero3.json", max_steps=60, save_steps=10, learning_rate=1e-3)
    run = RunFolder(tmp_path / "run")
    one = run_on(ranks, recipe, tmp_path, name="one")
    process = submitted(cluster, run, "--nodes", "2", "--max-restarts", "1", *overrides(recipe))
    wait_for_step(process, run, 15)
    next(rank for rank in ranks_of(run) if rank.environ()["RANK"] == "1").kill()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "was killed by SIGKILL" in output, output
    assert re.search(r"restarting after exit status \d+; restarts left: 0\n", output)
    assert f"resuming from {run.checkpoints}/checkpoint-" in output
    ours, theirs = ([(row["step"], row["loss"]) for row in read_jsonl(each.metrics)] for each in (run, one))
    assert [step for step, _ in ours] == list(range(1, 61)) and ours == theirs
