"""Several hosts: the hostfile by DeepSpeed's rules, the options of its launcher, the environment, and the checks.

Runs over ssh on two real hosts: undisturbed, stopped, with a failing or hanging rank, with a lost host.
"""

import contextlib
import signal
import subprocess
import sys
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from deepspeed.launcher import runner
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_recipes.launching import command
from deepspeed_recipes.launching.ranks import SILENCE
from deepspeed_recipes.launching.ssh import host_info, hostfile, remote
from deepspeed_recipes.planning.hardware import machine_file
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import RunFolder, newest_checkpoint, read_json, read_jsonl
from tests import ROOT, test_launch
from tests.launching import LAUNCH
from tests.network_hosts import Hosts, without_hosts
from tests.ranks import run_on
from tests.small import small
from tests.test_launch import processes_of, ranks_of

MISTAKES = {
    "a 8\n": "`a 8` is not a valid hostfile line",
    "a slots=x\n": "is not a valid hostfile line",
    "a slots=4 extra\n": "is not a valid hostfile line",
    "a;reboot slots=4\n": "is not a valid hostfile line",
    "-oProxyCommand=x slots=4\n": "is not a valid hostfile line",
    "a slots=0\n": "slots=0",
    "a slots=99999999999\n": "is not a valid hostfile line",  # a list of all of them would fill the memory
    "ubuntu@10.0.0.5 slots=8\n": "write `10.0.0.5 slots=8`, and add to ~/.ssh/config, which ssh and pdsh both read: "
    "`Host 10.0.0.5`, and below it `User ubuntu`",
    "node1:2222 slots=8\n": "`Host node1`, and below it `Port 2222`",
    "me@node1:2222 slots=8\n": "`Host node1`, and below it `User me` and `Port 2222`",
    "fe80::1 slots=8\n": "write `NAME slots=8`, and add to ~/.ssh/config, which ssh and pdsh both read: `Host NAME`, "
    "and below it `HostName fe80::1`",
    "me@[fe80::1]:22 slots=8\n": "and below it `HostName fe80::1` and `User me` and `Port 22`",
    "[fe80::1] slots=8\n": "and below it `HostName fe80::1`.",
    "[a]:22 slots=8\n": "is not a valid hostfile line",
    "@a slots=8\n": "is not a valid hostfile line",
    "a: slots=8\n": "is not a valid hostfile line",
    "# two\na slots=2\n\na slots=2\n": ":4: a is listed twice",
    "a slots=2\nA slots=2\n": ":2: A is listed twice",
    "\ufeffa slots=2\n": "begins with a byte order mark",
    "": "no hosts",
    "# nothing\n": "no hosts",
}
FILTERS = {
    "c": "'c' is not in",
    "a:9": "slots 0 to 3",
    "a:x": "slots are numbers",
    "a:": "slots are numbers",
    "a:0,": "slots are numbers",
}


@pytest.fixture
def two_hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a slots=4  # the first\n\nb slots=2\n")
    return path


@pytest.mark.parametrize("text", MISTAKES)
def test_a_hostfile_with_a_mistake_is_refused_with_its_line(text, tmp_path, refused):
    path = tmp_path / "hosts"
    path.write_text(text)
    said = refused("tiny", "full", "--hostfile", path)
    assert MISTAKES[text] in said and len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("asked", FILTERS)
def test_a_filter_that_names_a_missing_host_is_refused(asked, two_hosts):
    for name in ("include", "exclude"):
        with pytest.raises(UserError, match=FILTERS[asked]):
            hostfile.read(two_hosts, **{name: asked})


def test_too_many_hosts_and_contradictory_options_are_refused(two_hosts, tmp_path, refused):
    for wanted, hint in (
        ({"nodes": 3}, "has 2 hosts"),
        ({"nodes": 0}, "has 2 hosts"),
        ({"gpus": 3}, "b has slots=2"),
        ({"include": "a", "exclude": "b"}, "not both"),
        ({"include": "a", "nodes": 1}, "leave out"),
        ({"exclude": "a@b"}, "excludes every host of"),
    ):
        with pytest.raises(UserError, match=hint):
            hostfile.read(two_hosts, **wanted)
    with pytest.raises(UserError, match="No such file"):
        hostfile.read(tmp_path / "nowhere")
    assert "--nodes needs --hostfile, --slurm" in refused("tiny", "full", "--nodes", 2)
    assert refused("tiny", "full", "--prepare", "--nodes", 0) == "launch.py: --nodes 0: must be at least 1.\n"
    assert "with --prepare your own launcher restarts" in refused("tiny", "full", "--prepare", "--max-restarts", 3)


NAMES = ("n1", "n2", "n3")
SLOTS = st.lists(st.integers(0, 3), max_size=3)
PARTS = st.lists(st.tuples(st.sampled_from(NAMES), SLOTS), min_size=1, max_size=3)


@given(st.lists(st.integers(1, 4), min_size=3, max_size=3), PARTS, st.booleans(), st.integers(0, 3))
def test_filters_select_the_hosts_that_deepspeed_selects(tmp_path_factory, counts, parts, include, nodes):
    path = tmp_path_factory.mktemp("filter") / "hosts"
    path.write_text("".join(f"{name} slots={count}\n" for name, count in zip(NAMES, counts, strict=True)))
    text = "@".join(f"{name}:{','.join(map(str, slots))}" if slots else name for name, slots in parts)
    asked = {"include" if include else "exclude": text} if not nodes else {"nodes": nodes, "gpus": 1}
    pool = runner.fetch_hostfile(str(path))
    try:
        left = runner.parse_inclusion_exclusion(pool, asked.get("include", ""), asked.get("exclude", ""))
        left = runner.apply_num_nodes_and_gpus(left, asked.get("nodes", -1), asked.get("gpus", -1))
    except ValueError:
        left = {}
    try:
        ours = hostfile.read(path, **asked).slots
    except UserError:
        ours = {}
    # DeepSpeed takes the last mention of a host in both forms at once (`n1@n1:0`); ours takes them together.
    if len({name for name, _ in parts}) == len(parts) or nodes:
        assert list(ours.items()) == [(host, tuple(slots)) for host, slots in left.items()]


def test_the_command_is_deepspeeds_own(two_hosts, tmp_path, monkeypatch):
    monkeypatch.setattr(command.shutil, "which", lambda name: name)

    def seen(pool, master=None):
        words = command.launcher_command(["script"], 4, pool, master)
        return runner.parse_args(words[words.index("--log_level") :])

    pool = hostfile.read(two_hosts, include="a:0,2@b")
    found = seen(pool, "10.0.0.1")
    assert (found.hostfile, found.include, found.master_addr) == (str(two_hosts), "a:0,2@b", "10.0.0.1")
    assert found.force_multi and found.user_script == "script" and pool.ranks == 4 and pool.most_ranks == 2
    counted = hostfile.read(two_hosts, nodes=2, gpus=2)
    found = seen(counted)
    assert (found.num_nodes, found.num_gpus, found.master_addr, counted.ranks) == (2, 2, "a", 4)


def test_secrets_are_not_forwarded_and_are_named(tmp_path, monkeypatch, capsys):
    token = "hf_" + "a1B2" * 8
    environment = {
        "NCCL_DEBUG": "INFO",
        "HF_HOME": "/shared/hf",
        "WANDB_MODE": "offline",
        "https_proxy": "http://proxy:3128",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_TOKEN": token,
        "WANDB_API_KEY": "short",
        "http_proxy": "http://ada:secret@proxy:3128",
        "HF_ENDPOINT": f"https://mirror/?key={token}",
        "AWS_SECRET_ACCESS_KEY": "x",
        "EDITOR": "vi",
        "TORCH_EXTENSIONS_DIR": "/ops",
    }
    kept = {"NCCL_DEBUG", "HF_HOME", "WANDB_MODE", "https_proxy", "TOKENIZERS_PARALLELISM"}
    assert set(command.forwarded(environment)) == kept
    assert command.withheld(environment) == ["HF_ENDPOINT", "HF_TOKEN", "WANDB_API_KEY", "http_proxy"]
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".deepspeed_env").write_text(
        f"# A=1\nexport B=1\nMY_OWN=1\nNCCL_DEBUG=WARN\nMY_PASSWORD=x\nMINE={token}\n"
    )
    (tmp_path / "run").mkdir()
    file = Path(remote.launcher_environment(RunFolder(tmp_path / "run"), environment)["DS_ENV_FILE"])
    lines = file.read_text().splitlines()
    assert lines[:2] == ["MY_OWN=1", "NCCL_DEBUG=INFO"]
    assert "TORCH_EXTENSIONS_DIR=/ops" in lines and f"PATH={Path(sys.executable).parent}:$PATH" in lines
    assert "secret" not in "".join(lines) and token not in "".join(lines)
    ignored, forwarded, left = capsys.readouterr().out.splitlines()
    assert ignored.endswith("/.deepspeed_env: ignored, since they name no variable: export B")
    assert forwarded == "forwarded: " + ", ".join(line.partition("=")[0] for line in lines)
    assert "HF_ENDPOINT, HF_TOKEN, MINE, MY_PASSWORD, WANDB_API_KEY, http_proxy" in left


def answer(**changes):
    """Return the answer of a host that can take part."""
    return {
        "commit": "abc",
        "code": "1",
        "versions": {"python": "3.11.2", "torch": "2.13.0", "deepspeed": "0.19.8"},
        "ops": ["cpu_adam"],
        "gpus": ["H200"] * 8,
        "free_gib": 9.0,
        "address": "10.0.0.1",
        "interface": "eth0",
        "megabits": 10000,
        "shared": True,
        "clock": 0.0,
        **changes,
    }


DIFFERENCES = {
    "failed": ("not reachable: x", "n2: not reachable: x"),
    "code": ("2", "git pull"),
    "versions": ({"python": "3.11.2", "torch": "2.12.0", "deepspeed": "0.19.8"}, "torch 2.12.0, but n1 has 2.13.0"),
    "ops": ([], "cpu_adam not built"),
    "gpus": (["H200"] * 4, "4 GPUs, but slots=8 in the hostfile"),
    "clock": (7.0, "off by 7 s"),
    "interface": ("", "no route to n1"),
    "shared": (False, "is a different folder there"),
}


def test_hosts_are_compared_with_the_first(tmp_path):
    pool = hostfile.HostPool(dict.fromkeys(("n1", "n2", "n3"), tuple(range(8))), tmp_path)
    answers = [answer(), answer(code="2"), answer()]
    with pytest.raises(UserError) as error:
        remote.check_hosts(pool, tmp_path / "run", lambda folder, file: answers)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == ["n2"]


@pytest.mark.parametrize("name", DIFFERENCES)
def test_each_difference_between_hosts_is_a_reason_not_to_start(name, tmp_path):
    pool = hostfile.HostPool({"n1": tuple(range(8)), "n2": tuple(range(8))}, tmp_path)
    value, hint = DIFFERENCES[name]
    other = answer(**{name: value})
    assert remote.problems("n2", answer(), answer(), pool, tmp_path) == []
    (line,) = remote.problems("n2", other, answer(), pool, tmp_path)
    assert hint in line and line.startswith("n2: ")
    head, *rows = remote.table([("n1", answer()), ("n2", other)]).splitlines()
    assert head.split()[0] == "host" and len(rows) == 2 and rows[0] != rows[1].replace("n2", "n1")


def test_clock_skew_is_measured_against_the_round_trip(monkeypatch):
    result = subprocess.CompletedProcess([], 0, 'welcome\n{"time": 100.0}\n', "")
    monkeypatch.setattr(remote, "run_on_each", lambda hosts, command: [result])
    pool = hostfile.HostPool({"n1": (0,)}, Path("hosts"))
    for asked, answered, off in ((99, 101, 0), (90, 95, 5), (103, 104, 3)):
        monkeypatch.setattr(remote, "time", SimpleNamespace(time=iter((asked, answered)).__next__))
        (found,) = remote.ask_by_ssh(pool, "n1", "/ops", Path("runs"), "token")
        assert found["clock"] == off


@pytest.mark.parametrize("file", ["x.py", "x.toml"])
def test_two_checkouts_with_the_same_code_have_the_same_fingerprint(tmp_path, file):
    for name in ("a", "b"):
        (tmp_path / name / "recipes").mkdir(parents=True)
        (tmp_path / name / "recipes" / file).write_text("1")
    assert host_info.fingerprint(tmp_path / "a") == host_info.fingerprint(tmp_path / "b")
    (tmp_path / "b" / "recipes" / file).write_text("2")
    assert host_info.fingerprint(tmp_path / "a") != host_info.fingerprint(tmp_path / "b")


def test_an_address_of_another_machine_has_no_interface_here():
    assert host_info.network("192.0.2.1") == ("", 0)


def test_the_launcher_without_pdsh_says_what_to_install(two_hosts, monkeypatch, refused):
    monkeypatch.setenv("PATH", "/nowhere")
    said = refused("tiny", "full", "--hostfile", two_hosts, "--dry-run", "global_batch_size=24")
    assert "apt-get install pdsh" in said


wait_for_step = partial(test_launch.wait_for_step, seconds=240)
wait_until = partial(test_launch.wait_until, seconds=240)

HERE = pytest.mark.skipif(bool(without_hosts()), reason=without_hosts() or "two hosts can run here")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with Hosts(tmp_path_factory.mktemp("machines") / "two") as started:
        yield started


@pytest.fixture
def shared(tmp_path):
    """Return a folder that a host can be made to lack, with the run's folder in it."""
    (tmp_path / "shared").mkdir()
    return RunFolder(tmp_path / "shared" / "run")


def launch(hosts, run, *arguments, **options):
    command = [*LAUNCH, "tiny", "full", "--output-dir", str(run.path), *map(str, arguments)]
    return subprocess.Popen(
        command, env=hosts.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def ended(process, status=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    return output


def overrides(recipe, **changes):
    """Return the recipe of `tests.small` as words of the command line."""
    fixed = {"precision": "fp32", "packing": "false", "logging_steps": 1, "wandb.mode": "disabled"}
    fixed |= {"data.validation": "none", "data.metric": "loss", "gradient_checkpointing": "false"}
    fixed |= {"model.path": recipe.model.path, "data.path": recipe.data.path, "deepspeed": recipe.deepspeed}
    fixed |= {name: getattr(recipe, name) for name in ("learning_rate", "weight_decay", "max_steps", "save_steps")}
    fixed |= {name: getattr(recipe, name) for name in ("global_batch_size", "micro_batch_size", "sequence_length")}
    fixed |= {"schedule.kind": recipe.schedule.kind, "schedule.warmup": recipe.schedule.warmup}
    return [f"{name}={value}" for name, value in (fixed | changes).items()]


@HERE
@pytest.mark.every
def test_two_hosts_train_what_two_ranks_on_one_host_train(hosts, shared, ranks, model_folder, conversations, tmp_path):
    recipe = small(model_folder, conversations, "zero3.json")
    one = run_on(ranks, recipe, tmp_path, name="one")
    output = ended(launch(hosts, shared, "--hostfile", hosts.hostfile(), *overrides(recipe)))
    rows = [line for line in output.splitlines() if line.endswith("  shared")]
    assert len(rows) == 2 and all("in sync" in row and "eth0" in row for row in rows), output
    ours, theirs = ([(row["loss"], row["grad_norm"]) for row in read_jsonl(run.metrics)] for run in (shared, one))
    assert len(ours) == recipe.max_steps and ours == theirs
    assert read_json(shared.environment)["world_size"] == 2
    assert f"'{hosts.addresses[1]}': [0]" in output  # DeepSpeed's own words: the second rank was there


@pytest.mark.every
@HERE
def test_a_host_that_cannot_take_part_is_named_and_nothing_starts(hosts, shared, tmp_path):
    dead = f"{hosts.network}.9"
    output = ended(launch(hosts, shared, "--hostfile", hosts.hostfile(hosts=[hosts.addresses[0], dead])), 2)
    assert f"{dead}: not reachable" in output and not shared.path.exists()

    name = metadata.distribution("deepspeed").locate_file("deepspeed-0.19.8.dist-info/METADATA")
    other = tmp_path / "METADATA"
    other.write_text(Path(name).read_text().replace("Version: 0.19.8", "Version: 0.18.0", 1))
    changed = tmp_path / "tiny.py"
    changed.write_text((ROOT / "recipes" / "tiny.py").read_text() + "\n")
    for before, hint in (
        (f"mount --bind {other} {name}", "deepspeed 0.18.0"),
        (f"mount --bind {changed} {ROOT}/recipes/tiny.py", "git pull"),
        (f"mount -t tmpfs none {shared.path.parent}", "is a different folder there"),
        (f"mount -t tmpfs none {ROOT}", "the project must be at the same path"),
    ):
        hosts.change(1, before)
        output = ended(launch(hosts, shared, "--hostfile", hosts.hostfile()), 2)
        assert f"launch.py: {hosts.addresses[1]}: " in output and hint in output, output
        assert not shared.path.exists() and not list(shared.path.parent.iterdir()) and not processes_of(shared)
    hosts.change(1, "true")


@HERE
@pytest.mark.every
def test_doctor_measures_the_network_between_hosts(hosts, tmp_path):
    """A host can send 500 Mbit/s, which is 0.0625 GB/s."""
    hosts.throttle("500mbit")
    file = tmp_path / "machine.json"
    words = ["--measure", file, "--gpus", "1", "--hostfile", hosts.hostfile(), "--output-dir", tmp_path / "shared"]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "doctor.py", *map(str, words)],
        env=hosts.environment(), capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    hosts.unthrottle()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all-reduce over 2 hosts, 2 ranks" in done.stdout
    assert 0.03 < machine_file.read(file).network_gbs < 0.066
    assert not list((tmp_path / "shared").iterdir())


@HERE
@pytest.mark.every
def test_ctrl_c_writes_a_checkpoint_on_two_hosts_and_a_dead_rank_ends_both(hosts, shared, model_folder, conversations):
    words = overrides(small(model_folder, conversations, "zero3.json", max_steps=400, save_steps=5))
    process = launch(hosts, shared, "--hostfile", hosts.hostfile(), *words)
    wait_for_step(process, shared, 6)
    process.send_signal(signal.SIGINT)
    output = ended(process, 130)
    stopped = read_json(shared.summary)
    assert stopped["stopped"] and newest_checkpoint(shared).name == f"checkpoint-{stopped['steps']}", output
    assert not processes_of(shared)
    process = launch(hosts, shared, "--resume", "--hostfile", hosts.hostfile())
    wait_for_step(process, shared, stopped["steps"] + 2)
    rank_of(shared, 0).kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, 2) and not processes_of(shared)
    assert f"rank 0 on {hosts.addresses[0]} was killed by SIGKILL; the last lines of its log:\n  | " in output


LONG = {"max_steps": 60, "save_steps": 10, "epochs": 99, "learning_rate": 1e-4}
"""Changes of the recipe for a run in which something happens at step 35."""


@pytest.fixture(scope="module")
def undisturbed(ranks, tmp_path_factory, model_folder, conversations):
    """Return the last loss of the long run on two ranks of one host."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = run_on(ranks, small(model_folder, conversations, "zero3.json", **LONG), folder)
    return read_jsonl(run.metrics)[-1]["loss"]


@HERE
@pytest.mark.every
def test_a_lost_host_is_named_and_training_resumes_on_the_others(
    hosts, shared, model_folder, conversations, undisturbed
):
    words = overrides(small(model_folder, conversations, "zero3.json", **LONG), epochs=99)
    process = launch(hosts, shared, "--hostfile", hosts.hostfile(), "--max-restarts", 1, *words)
    with mended(hosts, process):
        wait_for_step(process, shared, 35)
        other = rank_of(shared, 0)
        hosts.cut(1)
        assert psutil.wait_procs([other], timeout=30)[0]
        output = ended(process)
    lost = hosts.addresses[1]
    (restart,) = read_jsonl(shared.restarts)
    assert restart["cause"].startswith(f"{lost} stopped answering") and restart["cause"] in output
    assert restart["ranks"] == 1 and restart["from_step"] >= 30 and f"continuing without {lost}" in output
    ends_as(undisturbed, shared)
    wait_until_gone(shared, SILENCE + 10)


@HERE
@pytest.mark.every
def test_a_host_that_is_back_joins_the_next_restart(hosts, shared, model_folder, conversations, undisturbed):
    """It is the first one, the rendezvous of all ranks: meanwhile they use the other, whatever was asked for."""
    words = overrides(small(model_folder, conversations, "zero3.json", **LONG), epochs=99)
    master = ["--master-addr", hosts.addresses[0]]
    process = launch(hosts, shared, "--hostfile", hosts.hostfile(), "--max-restarts", 2, *master, *words)
    with mended(hosts, process):
        wait_for_step(process, shared, 15)
        other = rank_of(shared, 1)
        hosts.switch_off(0)
        assert psutil.wait_procs([other], timeout=30)[0]
        wait_until(process, shared.restarts.exists)
        hosts.mend()
        wait_until(process, lambda: ranks_of(shared))
        wait_for_step(process, shared, 35)
        rank_of(shared, 0).kill()
        output = ended(process)
    first, second = read_jsonl(shared.restarts)
    assert (first["ranks"], second["ranks"]) == (1, 2), output
    assert second["cause"].startswith(f"rank 0 on {hosts.addresses[1]} was killed by SIGKILL"), second
    ends_as(undisturbed, shared)
    assert not processes_of(shared)


@HERE
@pytest.mark.every
def test_a_stopped_rank_ends_both_hosts_and_without_a_host_nothing_restarts(
    hosts, shared, model_folder, conversations, tmp_path
):
    long = {**LONG, "max_steps": 2000, "hang_minutes": 0.3}
    words = overrides(small(model_folder, conversations, "zero3.json", **long), epochs=9999, hang_minutes=0.3)
    process = launch(hosts, shared, "--hostfile", hosts.hostfile(), *words)
    with mended(hosts, process):
        wait_for_step(process, shared, 15)
        rank_of(shared, 1).suspend()
        output, _ = process.communicate(timeout=0.3 * 60 + 30)
        assert process.returncode not in (0, 2) and not processes_of(shared)
        assert (
            "no step finished for 0.3 minutes" in output and "none from rank 1, which was stopped or cut off" in output
        ), output
        process = launch(hosts, shared, "--resume", "--hostfile", hosts.hostfile(), "--max-restarts", 1)
        wait_until(process, lambda: len(ranks_of(shared)) == 2)
        for index in range(2):
            hosts.switch_off(index)
        assert f"cannot restart: {', '.join(hosts.addresses)} do not answer." in ended(process, 2)
    assert not processes_of(shared)


@HERE
@pytest.mark.every
def test_ranks_do_not_outlive_a_launcher_that_is_killed(hosts, shared, model_folder, conversations):
    words = overrides(small(model_folder, conversations, "zero3.json", **LONG | {"max_steps": 2000}), epochs=9999)
    process = launch(hosts, shared, "--hostfile", hosts.hostfile(), *words)
    wait_for_step(process, shared, 2)
    process.kill()
    process.wait()
    wait_until_gone(shared, 20)
    process.stdout.close()


@contextlib.contextmanager
def mended(hosts, process):
    """End the launcher and repair the hosts, whatever happens."""
    try:
        yield
    finally:
        process.kill()
        hosts.mend()


def rank_of(run, number):
    return next(rank for rank in ranks_of(run) if rank.environ()["RANK"] == str(number))


def ends_as(undisturbed, run):
    rows = read_jsonl(run.metrics)
    assert [row["step"] for row in rows] == list(range(1, LONG["max_steps"] + 1))
    assert rows[-1]["loss"] == pytest.approx(undisturbed, rel=1e-4)
    assert (run.export / "model.safetensors").exists()


def wait_until_gone(run, seconds):
    """Wait until a host has ended the processes by itself."""
    deadline = time.monotonic() + seconds
    while processes_of(run):
        assert time.monotonic() < deadline, [process.cmdline() for process in processes_of(run)]
        time.sleep(0.5)
