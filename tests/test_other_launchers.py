"""Ranks that torchrun, mpirun and srun start: where they meet, and that they train the same run in the same folder.

Ranks run on the GPUs that CUDA_VISIBLE_DEVICES names, and share the cores: the real launcher, told of eight GPUs.

What a run writes down about where it ran, and that looking never ends it.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from deepspeed_recipes.launching import command
from deepspeed_recipes.machine import software
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from deepspeed_recipes.training import distributed, rendezvous, without_launcher
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.callbacks import metrics
from tests.launching import LAUNCH, environment
from tests.ranks import free_port
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
    found = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": nodes}
    rendezvous.complete(found)
    assert found["MASTER_ADDR"] == host


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


SAYS = (
    "import os; os.write(1, (os.environ['LOCAL_RANK'] + ' on ' + os.environ['CUDA_VISIBLE_DEVICES'] + '\\n').encode())"
)


def devices_of_ranks(folder: Path, options: list[str], visible: str) -> list[str]:
    """Return what two ranks say, with a CPU in the place of each GPU: the launcher treats both alike."""
    script = folder / "says.py"
    script.write_text(SAYS)
    launcher = Path(sys.executable).with_name("deepspeed")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible, "LOCAL_SIZE": "8", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [str(launcher), "--no_local_rank", *options, "--master_port", str(free_port()), str(script)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return sorted(line for line in done.stdout.splitlines() if " on " in line and line[0].isdigit())


def options_with(monkeypatch, gpus):
    """Return the launcher's options that place two ranks on a machine with so many GPUs."""
    monkeypatch.setattr(command, "visible_gpus", lambda: gpus)
    found = command.launcher_command((), 2)
    return found[found.index("--no_local_rank") + 1 : found.index("--master_port")]


def test_ranks_get_the_gpus_that_the_user_has_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    options = options_with(monkeypatch, gpus=3)
    assert devices_of_ranks(tmp_path, options, "4,5,6") == ["0 on 4,5", "1 on 4,5"]


@pytest.mark.every
def test_num_gpus_alone_would_take_the_first_ones(tmp_path):
    """When this fails, DeepSpeed respects CUDA_VISIBLE_DEVICES, and `--include` can go."""
    assert devices_of_ranks(tmp_path, ["--num_gpus", "2"], "4,5") == ["0 on 0,1", "1 on 0,1"]


@pytest.mark.parametrize(("visible", "gpus"), [("", 8), (None, 8), ("4,5", 0)])
def test_without_a_choice_the_launcher_counts(monkeypatch, visible, gpus):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert options_with(monkeypatch, gpus) == ["--num_gpus", "2"]


def test_uuids_are_refused_in_a_line(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6")
    with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES=GPU-8932\S+ DeepSpeed's launcher accepts numbers only"):
        options_with(monkeypatch, gpus=1)


@pytest.mark.parametrize(("asked", "cores", "threads"), [(None, 96, "12"), (None, 4, "1"), ("5", 96, "5")])
def test_ranks_on_gpus_share_the_cores_that_this_process_may_use(monkeypatch, asked, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS")
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert command.rank_environment(8, gpus=8)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize("gpus", [0, 2])
def test_ranks_run_on_the_cpu_only_where_there_are_no_gpus(gpus, monkeypatch):
    for name in ("DS_ACCELERATOR", "TORCH_CPP_LOG_LEVEL", *command.ALLOCATOR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MALLOC_TOP_PAD_", "4096")
    environment = command.rank_environment(2, gpus)
    assert environment.get("TORCH_CPP_LOG_LEVEL") == (None if gpus else "ERROR"), "NCCL's warnings name causes of hangs"
    assert environment.get("DS_ACCELERATOR") == (None if gpus else "cpu")
    assert environment.get("MALLOC_ARENA_MAX") == environment.get("THP_MEM_ALLOC_ENABLE") == (None if gpus else "1")
    assert environment["MALLOC_TOP_PAD_"] == "4096", "the user's own value"


def test_versions_of_what_is_not_installed_are_left_out():
    found = software.installed(["torch", "no-such-package"])
    assert list(found) == ["torch"] and found["torch"].startswith("2.")


class NVMLError(Exception):
    """As NVIDIA's bindings raise: no RuntimeError."""


@pytest.mark.parametrize("error", [ModuleNotFoundError("pynvml"), NVMLError("GPU is lost")])
def test_a_failing_management_library_does_not_end_a_run(monkeypatch, error):
    def utilization():
        raise error

    monkeypatch.setattr(distributed, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 2**30)
    assert metrics.memory() == {
        "host_peak_gib": pytest.approx(metrics.memory()["host_peak_gib"]),
        "gpu_peak_gib": 1,
        "gpu_reserved_gib": 1,
    }
