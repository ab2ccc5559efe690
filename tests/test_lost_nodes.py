"""Two hosts with a link of their own under torchrun, mpirun and Ray: a slow link, and a host that dies."""

import errno
import os
import shutil
import subprocess
import time

import psutil
import pytest
import torch.distributed as dist

from deepspeed_recipes.recipe.errors import UserError, passing
from deepspeed_recipes.recipe.run_folder import UNREADABLE, RunFolder, read_jsonl, write_recipe
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.without_launcher import lost_peer
from tests.launching import LAUNCH
from tests.network_hosts import Hosts, without_hosts
from tests.ranks import read_logs
from tests.ray_cluster import RayNodes, variables, without_ray
from tests.small import small
from tests.test_hosts import overrides
from tests.test_launch import ranks_of, wait_for_step
from tests.test_other_launchers import ROOT_IS_ALLOWED, environment, losses

TWO = pytest.mark.skipif(bool(without_hosts()), reason=without_hosts() or "two hosts can run here")
RAY = pytest.mark.skipif(bool(without_ray()), reason=without_ray() or "Ray is installed")
NAMED = 30
"""Seconds in which the end of a host has to be named."""


@pytest.mark.parametrize(
    ("said", "host"),
    [
        ("[gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:15064: Connection reset by peer.", "10.0.0.2"),
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [fe80::1]:7", "fe80::1"),
        ("ncclRemoteError: NET/Socket: remote process exited, peer 10.0.0.3<42>", "10.0.0.3"),
        ("recvValue failed on SocketImpl(fd=4, addr=[::1]:376, remote=[::1]:567): Connection reset by peer", "::1"),
        ("Gloo connectFullMesh failed with [...] no error", "another rank"),
        ("shapes do not match", None),
    ],
)
def test_the_host_that_a_connection_led_to_is_named(said, host):
    found = lost_peer(RuntimeError(said))
    assert found is None if host is None else f"the connection to {host} was lost" in found


def refuse_on_rank_1(folder, error):
    """Run with an error that rank 1 alone finds, while rank 0 waits for it."""

    def execute(*_):
        dist.barrier()
        if dist.get_rank() == 1:
            raise error
        dist.barrier()

    training_run.execute, training_run.LOST = execute, 1
    training_run.main(folder)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError("rng.pt: wrong."), 2),
        (PermissionError(errno.EACCES, "Permission denied", "rng.pt"), 2),
        (OSError(errno.EIO, "Input/output error", "rng.pt"), UNREADABLE),
        (OSError(errno.ESTALE, "Failed to open local file 'rng.pt'. Detail: [errno 116]"), UNREADABLE),
    ],
)
def test_the_reason_of_one_rank_is_not_followed_by_tracebacks(
    ranks, tmp_path, model_folder, conversations, error, status
):
    run = RunFolder(tmp_path / "run")
    write_recipe(run, small(model_folder, conversations))
    assert ranks.run(refuse_on_rank_1, str(run.path), error, log=tmp_path / "log") == [1, status]
    other, reason = read_logs(tmp_path / "log")
    assert "Traceback" not in other and reason.startswith("rng.pt: ") and reason.count("\n") == 1
    assert "Connection closed by peer" in (run.ranks / "rank-0.log").read_text()
    assert passing(TimeoutError(errno.ETIMEDOUT, "a host, and no file")) is None


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with Hosts(tmp_path_factory.mktemp("machines") / "two") as started:
        yield started


@pytest.fixture
def prepared(tmp_path, model_folder, conversations):
    """Return a function that writes the folder of a run of so many steps."""

    def prepare(steps):
        run = RunFolder(tmp_path / f"run-{steps}")
        write_recipe(run, small(model_folder, conversations, "zero2.json", max_steps=steps, save_steps=4))
        return run

    return prepare


def inside(hosts, index):
    """Return the words before a command that runs on a host."""
    return ("ip", "netns", "exec", hosts.spaces[index])


def start(command, more=None):
    hidden = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK"}
    own = {name: value for name, value in environment().items() if name not in hidden}
    given = own | ROOT_IS_ALLOWED | {"GLOO_SOCKET_IFNAME": "eth0"} | (more or {})
    return subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def torchrun(hosts, run):
    """Start torchrun on both hosts, as a person would."""
    meet = ["--nnodes", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{hosts.addresses[0]}:29400"]
    command = [LAUNCH[0], "-m", "torch.distributed.run", *meet]
    rank = ["--nproc_per_node", "1", "-m", "deepspeed_recipes.training.run", str(run.path)]
    # These hosts share a name, by which torchrun would find out whose address the endpoint has.
    own = ["--rdzv_conf", "is_host=true"], ["--rdzv_conf", "is_host=false"]
    return [
        start([*inside(hosts, index), *command, *own[index], "--local_addr", address, *rank])
        for index, address in enumerate(hosts.addresses)
    ]


def mpirun(hosts, run):
    """Start mpirun on the first host, which reaches the other one over ssh."""
    where = ["--host", ",".join(f"{address}:1" for address in hosts.addresses), "-np", "2", "--bind-to", "none"]
    network = ["--mca", "oob_tcp_if_include", "eth0", "--mca", "btl_tcp_if_include", "eth0"]
    exported = [
        word for name in ("PYTHONPATH", "PATH", "GLOO_SOCKET_IFNAME", "DS_ACCELERATOR") for word in ("-x", name)
    ]
    exported += ["-x", f"MASTER_ADDR={hosts.addresses[0]}", "-x", "OMP_NUM_THREADS", "-x", "TORCH_EXTENSIONS_DIR"]
    rank = [LAUNCH[0], "-m", "deepspeed_recipes.training.run", str(run.path)]
    path = {"PATH": hosts.environment()["PATH"]}
    return [start([*inside(hosts, 0), shutil.which("mpirun"), *where, *network, *exported, *rank], path)]


def kill_all(processes):
    for process in processes:
        if process.poll() is None:
            below = psutil.Process(process.pid).children(recursive=True)
            for one in [*below, process]:
                one.kill()
        process.wait()


def kill_host(hosts, index):
    """End every process of a host at once: those in its network namespace, but not the namespace's sshd."""
    own = os.stat(f"/var/run/netns/{hosts.spaces[index]}").st_ino
    for process in psutil.process_iter(["pid"]):
        try:
            there = os.stat(f"/proc/{process.pid}/ns/net").st_ino == own
        except OSError:
            continue
        if there:
            process.kill()


@TWO
@pytest.mark.every
def test_torchrun_trains_the_same_over_a_slow_link(hosts, prepared, ranks, tmp_path):
    run, alone = prepared(8), RunFolder(tmp_path / "alone")
    shutil.copytree(run.path, alone.path)
    ranks.check(training_run.main, str(alone.path), log=tmp_path / "log")
    hosts.throttle("20mbit")
    processes = torchrun(hosts, run)
    try:
        for process in processes:
            said, _ = process.communicate(timeout=1000)
            assert process.returncode == 0, said
    finally:
        hosts.unthrottle()
        kill_all(processes)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)


@TWO
@pytest.mark.every
@pytest.mark.parametrize("launcher", [torchrun, mpirun])
def test_a_host_that_dies_is_named(hosts, prepared, launcher):
    if not shutil.which(launcher.__name__) and launcher is mpirun:
        pytest.skip("no mpirun")
    run = prepared(400)
    processes = launcher(hosts, run)
    try:
        wait_for_step(processes[0], run, 2, seconds=1000)
        kill_host(hosts, 1)
        killed = time.monotonic()
        said, _ = processes[0].communicate(timeout=1000)
        took = time.monotonic() - killed
    finally:
        kill_all(processes)
        hosts.mend()
    assert processes[0].returncode not in (0, 2) and hosts.addresses[1] in said, said
    # Ours, and two of MPI's.
    names = ("the connection to", "lost communication with a remote daemon", "closed by remote host")
    assert any(name in said for name in names), said
    assert took < NAMED and not ranks_of(run)


@TWO
@RAY
@pytest.mark.every
def test_ray_resumes_on_the_other_host(hosts, tmp_path, model_folder, conversations):
    run = RunFolder(tmp_path / "run")
    words = overrides(small(model_folder, conversations, "zero2.json", max_steps=24, save_steps=4))
    hosts.throttle("100mbit")
    with RayNodes(hosts.addresses[0]) as nodes:
        nodes.add(inside=inside(hosts, 0))
        lost = nodes.add(inside=inside(hosts, 1), ip=hosts.addresses[1])
        options = ["--ray", "--address", nodes.address, "--nodes", "2", "--gpus", "1", "--max-restarts", "1"]
        command = [*inside(hosts, 0), *LAUNCH, "tiny", "full", "--output-dir", str(run.path), *options, *words]
        process = subprocess.Popen(
            command, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            wait_for_step(process, run, 6, seconds=1000)
            nodes.kill(lost)
            said, _ = process.communicate(timeout=1500)
        finally:
            hosts.unthrottle()
            kill_all([process])
    assert process.returncode == 0, said
    assert f"{hosts.addresses[1]} stopped answering" in said and f"continuing on {hosts.addresses[0]}" in said, said
    assert [row["step"] for row in read_jsonl(run.metrics)] == list(range(1, 25))
    assert [row["ranks"] for row in read_jsonl(run.restarts)] == [1] and not ranks_of(run)
