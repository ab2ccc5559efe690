"""Runs on a Ray cluster: the same training, a killed rank, worker or node, and clusters that cannot take a run."""

import importlib.util
import shlex
import signal
import socket
import subprocess
from functools import partial

import psutil
import pytest

from deepspeed_recipes.launching.options import LaunchOptions
from deepspeed_recipes.launching.ray import cluster, rank
from deepspeed_recipes.launching.ray.cluster import Node
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import RunFolder, newest_checkpoint, read_json, read_jsonl
from tests import test_launch
from tests.launching import LAUNCH
from tests.ranks import run_on
from tests.ray_cluster import RayNodes, variables, without_ray
from tests.small import small
from tests.test_hosts import overrides
from tests.test_launch import processes_of, ranks_of

HERE = pytest.mark.skipif(bool(without_ray()), reason=without_ray() or "Ray is installed")
wait_for_step = partial(test_launch.wait_for_step, seconds=900)
wait_until = partial(test_launch.wait_until, seconds=900)
NODES = [Node("a", "10.0.0.1", 4, 0), Node("b", "10.0.0.2", 8, 0), Node("c", "10.0.0.3", 2, 0)]
GPUS = [Node("a", "10.0.0.1", 64, 0), Node("b", "10.0.0.2", 64, 8), Node("c", "10.0.0.3", 64, 4)]


@pytest.mark.parametrize(
    ("nodes", "asked", "names", "each", "on_gpus"),
    [
        (NODES, (None, None), "abc", 2, False),
        (NODES, (2, None), "ab", 4, False),
        (NODES, (None, 3), "ab", 3, False),
        (GPUS, (None, None), "bc", 4, True),
        (GPUS, (1, 8), "b", 8, True),
    ],
)
def test_a_run_gets_the_first_nodes_with_room(nodes, asked, names, each, on_gpus):
    found = cluster.selected("here:1", nodes, *asked)
    assert "".join(node.id for node in found.nodes) == names
    assert (found.most_ranks, found.on_gpus, found.ranks) == (each, on_gpus, each * len(names))


@pytest.mark.parametrize(
    ("nodes", "asked", "said"),
    [
        (NODES, (4, None), "--nodes 4: the Ray cluster at here:1 has fewer CPUs (10.0.0.1 4, 10.0.0.2 8, 10.0.0.3 2)."),
        (GPUS, (2, 8), "--nodes 2 --gpus 8: the Ray cluster at here:1 has fewer GPUs (10.0.0.1 0, 10.0.0.2 8"),
    ],
)
def test_a_cluster_with_less_than_asked_is_refused(nodes, asked, said):
    with pytest.raises(UserError) as error:
        cluster.selected("here:1", nodes, *asked)
    assert said in str(error.value)


def test_nodes_at_one_address_have_names_of_their_own():
    found = [{"id": one * 9, "address": address, "cpus": 1, "gpus": 0} for one, address in ("ax", "bx", "cy")]
    assert [node.name for node in cluster.nodes_of(found)] == ["x-aaaaaa", "x-bbbbbb", "y"]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ray://here:10001", "write HOST:6379"),
        ("here", "write HOST:PORT as `ray start` prints it"),
        ("here:port", "write HOST:PORT"),
        ("127.0.0.1:1", "Connection refused; start Ray there (ray start --head), or correct the address."),
    ],
)
def test_an_address_that_is_no_clusters_is_named(address, said, monkeypatch):
    monkeypatch.setattr(cluster, "check_installed", lambda: None)
    with pytest.raises(UserError) as error:
        cluster.of(LaunchOptions("tiny", "full", ray=True, address=address))
    assert str(error.value).startswith(f"--address {address}: ") and said in str(error.value)


def test_without_ray_the_line_that_installs_it_is_given(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'--ray: Ray is not installed here; pip install "ray\[train\]=='):
        cluster.of(LaunchOptions("tiny", "full", ray=True))


@HERE
def test_several_nodes_need_an_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match="--nodes 2: --ray alone uses this machine"):
        cluster.of(LaunchOptions("tiny", "full", ray=True, nodes=2))


def test_a_dashboards_address_makes_a_job_of_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["tiny", "full", "--ray", "--address", "http://head:8265", "--nodes", "2", "data.path=a file.jsonl"]
    for name, value in {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "secret", "HOME": "/root"}.items():
        monkeypatch.setenv(name, value)
    assert cluster.submit_job("http://head:8265", [*words, "--submit"], submit=False) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[1:6] == ["job", "submit", "--address", "http://head:8265", "--"]
    job = command[6:]
    assert job[:3] == ["env", "-C", str(tmp_path)] and "NCCL_DEBUG=INFO" in job
    assert not any("secret" in word or word.startswith("HOME=") for word in job)
    assert job[job.index("launch") + 1 :] == [*words[:3], *words[5:], "--address", "auto"]
    with pytest.raises(UserError, match="may not have"):
        cluster.submit_job("http://head:8265", ["data.path=$HOME/x"], submit=False)


def test_a_job_is_submitted_by_ray(monkeypatch):
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--ray: Ray is not installed here"):
        cluster.submit_job("http://head:8265", ["tiny", "full"], submit=True)


def test_what_ranks_print_is_shown_once_and_in_whole_lines(tmp_path, capfd):
    run = RunFolder(tmp_path)
    run.ranks.mkdir()
    rank.of_rank(run, 0).write_text("before\n")
    with rank.followed(run), rank.of_rank(run, 0).open("a") as first, rank.of_rank(run, 1).open("w") as second:
        for file, text in ((first, "one "), (second, "two\n"), (first, "and more\nthe end")):
            file.write(text)
            file.flush()
    assert sorted(capfd.readouterr().out.splitlines()) == ["one and more", "the end", "two"]


def test_a_rank_gets_its_place_and_its_share_of_the_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # Ray's, one reserved CPU
    monkeypatch.setattr(rank, "share_of_cores", lambda ranks: f"share of {ranks}")
    place = {"RANK": 1, "LOCAL_SIZE": 2}
    found = rank.environment({"DS_ACCELERATOR": "cpu"}, place)
    assert (found["RANK"], found["DS_ACCELERATOR"], found["OMP_NUM_THREADS"]) == ("1", "cpu", "share of 2")
    assert rank.environment({"OMP_NUM_THREADS": "7"}, place)["OMP_NUM_THREADS"] == "7", "the user's own"


@pytest.fixture(scope="module")
def ray_nodes():
    """Return a cluster of two nodes with one CPU each."""
    with RayNodes() as started:
        started.add()
        started.add()
        yield started


@pytest.fixture
def words(model_folder, conversations):
    """Return a short run as words of the command line."""
    return overrides(small(model_folder, conversations, "zero2.json", max_steps=24, save_steps=4))


def launch(run, *arguments):
    command = [*LAUNCH, "tiny", "full", "--ray", "--output-dir", str(run.path), *map(str, arguments)]
    return subprocess.Popen(command, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process):
    said, _ = process.communicate(timeout=1000)
    return said


def losses(run):
    rows = read_jsonl(run.metrics)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "every step once"
    return [row["loss"] for row in rows]


def worker_of(run, number):
    """Return the Ray worker of a rank, and the rank."""
    process = next(one for one in ranks_of(run) if one.environ()["RANK"] == str(number))
    return process.parent(), process


@HERE
@pytest.mark.every
def test_two_nodes_train_the_same_and_a_killed_rank_is_resumed(
    ray_nodes, words, ranks, model_folder, conversations, tmp_path
):
    run = RunFolder(tmp_path / "run")
    one = run_on(
        ranks, small(model_folder, conversations, "zero2.json", max_steps=24, save_steps=4), tmp_path, name="one"
    )
    process = launch(run, "--address", ray_nodes.address, "--nodes", 2, "--gpus", 1, "--max-restarts", 1, *words)
    wait_for_step(process, run, 6)
    assert {one.environ()["RANK"] for one in ranks_of(run)} == {"0", "1"}
    worker_of(run, 1)[1].send_signal(signal.SIGKILL)
    said = ended(process)
    assert process.returncode == 0, said
    assert f"rank 1 on {socket.gethostname()} was killed by SIGKILL" in said and "restart 1 of 1" in said
    assert losses(run) == pytest.approx(losses(one), rel=1e-5)
    assert run.report_page.exists() and not read_json(run.summary)["stopped"] and not processes_of(run)
    assert (run.path / "ray").is_dir() and "held-out" not in said and said.count("step 24/24") == 1
    assert [row["ranks"] for row in read_jsonl(run.restarts)] == [2]


@HERE
@pytest.mark.every
def test_a_killed_worker_takes_its_rank_along_and_is_named(ray_nodes, words, tmp_path):
    run = RunFolder(tmp_path / "run")
    process = launch(run, "--address", ray_nodes.address, "--nodes", 2, "--gpus", 1, *words, "max_steps=400")
    wait_for_step(process, run, 1)
    worker, _ = worker_of(run, 0)
    worker.send_signal(signal.SIGKILL)
    said = ended(process)
    assert process.returncode not in (0, 2) and "rank 0 on " in said and "was killed by SIGKILL" in said, said
    assert not processes_of(run)


@HERE
@pytest.mark.every
def test_ctrl_c_writes_a_checkpoint_without_a_cluster_of_ones_own(words, tmp_path):
    run = RunFolder(tmp_path / "run")
    process = launch(run, "--gpus", 2, *words, "max_steps=400")
    wait_for_step(process, run, 2)
    process.send_signal(signal.SIGINT)
    said = ended(process)
    stopped = read_json(run.summary)
    assert stopped["stopped"] and newest_checkpoint(run).name == f"checkpoint-{stopped['steps']}", said
    assert process.returncode == 130 and not processes_of(run)
    assert not any(
        "raylet" in " ".join(one.info["cmdline"] or ())
        for one in psutil.process_iter(["cmdline"])
        if one.ppid() == process.pid
    )


@HERE
@pytest.mark.every
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nodes", 3), "--nodes 3: the Ray cluster at {address} has fewer CPUs ("),
        (("--nodes", 2, "--gpus", 2), "--nodes 2 --gpus 2: the Ray cluster at {address} has fewer CPUs ("),
        (("--nodes", 2, "learning_rat=1"), "learning_rat"),
    ],
)
def test_what_cannot_run_there_is_refused_before_anything_starts(ray_nodes, tmp_path, arguments, said):
    run = RunFolder(tmp_path / "run")
    process = launch(run, "--address", ray_nodes.address, *arguments)
    answer = ended(process)
    assert process.returncode == 2 and said.format(address=ray_nodes.address) in answer and answer.count("\n") <= 3
    assert not run.path.exists()


@HERE
@pytest.mark.every
def test_a_server_that_is_no_cluster_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        process = launch(RunFolder(tmp_path / "run"), "--address", address)
        answer = ended(process)
    assert process.returncode == 2 and f"--address {address}: " in answer and answer.count("\n") <= 3, answer
    assert not (tmp_path / "run").exists()


@HERE
@pytest.mark.every
def test_a_node_that_dies_is_named_and_the_run_ends(words, tmp_path):
    run = RunFolder(tmp_path / "run")
    with RayNodes() as nodes:
        nodes.add()
        lost = nodes.add()
        process = launch(run, "--address", nodes.address, "--nodes", 2, "--gpus", 1, *words, "max_steps=400")
        wait_for_step(process, run, 1)
        nodes.kill(lost)
        said = ended(process)
    assert process.returncode not in (0, 2), said
    assert "stopped answering; the ranks on the other hosts were ended" in said, said
    assert not processes_of(run)
