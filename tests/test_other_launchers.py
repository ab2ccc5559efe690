"""Ranks that torchrun, mpirun and srun start: where they meet, and that they train the same run in the same folder."""

import os
import shlex
import shutil
import signal
import subprocess
import time

import psutil
import pytest

from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from deepspeed_recipes.training import rendezvous, without_launcher
from deepspeed_recipes.training import run as training_run
from tests.launching import LAUNCH, environment
from tests.small import small

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "job-1",
}
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "17",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "here", "MASTER_PORT": "1"}
MEET = {"MASTER_ADDR": "first", "MASTER_PORT": "5"}
ROOT_IS_ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Open MPI refuses root otherwise, which tests in a container are."""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (TORCHRUN, ("1", "2", "1", "here", "2")),
        # srun starts torchrun on each node: its own variables count nodes.
        (SRUN | TORCHRUN, ("1", "2", "1", "here", "2")),
        (OPEN_MPI | {"MASTER_ADDR": "first"}, ("3", "4", "1", "first", "2")),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ("3", "4", "1", "127.0.0.1", "4")),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", **MEET}, ("0", "2", "0", "first", None)),
        (SRUN, ("2", "4", "0", "gpu07", None)),
        # Kubeflow's operator starts one rank in each pod.
        ({"RANK": "1", "WORLD_SIZE": "2", **MEET}, ("1", "2", "0", "first", None)),
        # In a batch script without srun.
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "17", "SLURM_NTASKS": "8"}, ("0", "1", "0", "127.0.0.1", None)),
        ({}, ("0", "1", "0", "127.0.0.1", None)),
    ],
)
def test_the_variables_of_launchers_are_understood(given, found):
    environment = dict(given)
    rendezvous.complete(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "LOCAL_SIZE")
    assert tuple(environment.get(name) for name in names) == found and int(environment["MASTER_PORT"]) < 65536


def test_ranks_of_a_job_meet_at_one_port_and_jobs_at_two():
    ports = []
    for rank, job in (("0", "a"), ("1", "a"), ("0", "b")):
        environment = OPEN_MPI | {"OMPI_COMM_WORLD_RANK": rank, "PMIX_NAMESPACE": job, "MASTER_ADDR": "first"}
        rendezvous.complete(environment)
        ports.append(environment["MASTER_PORT"])
    assert ports[0] == ports[1] != ports[2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (OPEN_MPI | {"RANK": "0", **MEET}, "RANK=0 contradicts the launcher's 3; unset RANK"),
        (OPEN_MPI, "MASTER_ADDR: not set; add -x MASTER_ADDR=HOST"),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST=: not a list of nodes"),
        ({"RANK": "1"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT: not set"),
        (TORCHRUN | {"RANK": "2"}, "RANK=2: must be below WORLD_SIZE=2"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE=two: not a whole number"),
    ],
)
def test_variables_that_lead_nowhere_are_named(given, said):
    with pytest.raises(UserError, match=said):
        rendezvous.complete(dict(given))


@pytest.mark.parametrize(
    ("nodes", "host"), [("gpu[01-03,7],cpu1", "gpu01"), ("node7", "node7"), ("a-b.c,x", "a-b.c"), ("n[5]", "n5")]
)
def test_the_first_of_a_list_of_nodes_is_found(nodes, host):
    assert rendezvous.first_host(nodes) == host


def losses(run):
    rows = read_jsonl(run.metrics)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "every step once"
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, model_folder, conversations):
    """Return a function that writes the folder of a run of 24 steps."""

    def prepare(name):
        run = RunFolder(tmp_path_factory.mktemp(name) / "run")
        write_recipe(run, small(model_folder, conversations, "zero2.json", max_steps=24, save_steps=4))
        return run

    return prepare


@pytest.fixture(scope="module")
def expected(ranks, prepared):
    """Return the losses of the same run under launch.py's ranks."""
    run = prepared("expected")
    ranks.check(training_run.main, str(run.path), log=run.path.parent / "log")
    return losses(run)


def start(words, run):
    """Start ranks by a launcher that knows nothing of the project."""
    command = [*words, "-m", "deepspeed_recipes.training.run", str(run.path)]
    hidden = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK"}
    own = {name: value for name, value in environment().items() if name not in hidden}
    return subprocess.Popen(
        command, env=own | ROOT_IS_ALLOWED, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def torchrun(*more):
    python = LAUNCH[0]
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *more]


def ended(process):
    """Return what a launcher printed, once it has ended; nothing that it has started outlives it."""
    try:
        said, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
    return said


def of_run(run, rank):
    """Return the process of a rank."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        is_rank = command[-1:] == [str(run.path)] and "torch.distributed.run" not in command
        if is_rank and process.environ().get("RANK") == str(rank):
            return process
    raise AssertionError(f"rank {rank} is not running")


@pytest.mark.every
def test_torchrun_restarts_a_run_that_lost_a_rank(prepared, expected):
    run = prepared("torchrun")
    process = start(torchrun("--max-restarts", "1"), run)
    while not any(row["step"] >= 6 for row in read_jsonl(run.metrics)):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    of_run(run, 1).send_signal(signal.SIGKILL)
    said = ended(process)
    assert process.returncode == 0 and "resuming from " in said, said
    assert losses(run) == pytest.approx(expected, rel=1e-5)
    assert run.report_page.exists() and not read_json(run.summary)["stopped"]
    assert "FutureWarning" not in said
    process = start(torchrun(), run)
    assert "this run has already finished" in ended(process) and process.returncode


@pytest.mark.every
@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun")
def test_mpirun_trains_the_same(prepared, expected):
    run = prepared("mpirun")
    process = start(["mpirun", "-np", "2", "--oversubscribe", LAUNCH[0]], run)
    said = ended(process)
    assert process.returncode == 0, said
    assert losses(run) == pytest.approx(expected, rel=1e-5) and run.report_page.exists()


@pytest.mark.every
def test_one_process_needs_no_launcher(prepared, expected):
    run = prepared("alone")
    process = start([LAUNCH[0]], run)
    assert process.wait(300) == 0, process.stdout.read()
    assert losses(run) == pytest.approx(expected, rel=1e-5), "the same global batch"


def test_a_run_has_one_writer_under_other_launchers_too(prepared, monkeypatch):
    run = prepared("locked")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(without_launcher.run_lock, "SILENT", 0)
    with without_launcher.kept(run), pytest.raises(UserError, match=f"written by process {os.getpid()}"):
        without_launcher.kept(run).__enter__()


@pytest.mark.every
def test_launch_prints_the_commands_of_other_launchers(tmp_path):
    run = RunFolder(tmp_path / "run")
    words = [
        "tiny",
        "full",
        "--draft",
        "--prepare",
        "--gpus",
        "2",
        "--output-dir",
        run.path,
        "max_steps=2",
        "wandb.mode=disabled",
    ]
    done = subprocess.run([*LAUNCH, *map(str, words)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    commands = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[1:])
    assert set(commands) == {"torchrun", "mpirun", "srun"} and str(run.path) in done.stdout
    settings, _, command = commands["torchrun"].partition(shlex.quote(LAUNCH[0]))
    given = environment() | dict(word.split("=", 1) for word in shlex.split(settings))
    trained = subprocess.run([LAUNCH[0], *shlex.split(command)], env=given, capture_output=True, text=True, timeout=400)
    assert trained.returncode == 0, trained.stderr
    assert len(losses(run)) == 2


def test_the_commands_for_several_nodes_say_what_to_fill_in(tmp_path, capsys):
    from deepspeed_recipes.launching import command

    found = command.other_launchers(RunFolder(tmp_path), 8, 4)
    assert "--nnodes 4 --rdzv_backend c10d --rdzv_endpoint HOST --nproc_per_node 8" in found["torchrun"]
    assert "mpirun -np 32 --map-by ppr:8:node -x MASTER_ADDR=HOST" in found["mpirun"]
    assert "srun --nodes 4 --ntasks-per-node 8" in found["srun"]
