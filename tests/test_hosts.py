"""Several hosts: the hostfile by DeepSpeed's rules, the options of its launcher, the environment, and the checks."""

import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.launcher import runner
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_recipes.launching import command
from deepspeed_recipes.launching.ssh import host_info, hostfile, remote
from deepspeed_recipes.launching.ssh.remote import write_environment
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import RunFolder

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
    "@a slots=8\n": "is not a valid hostfile line",
    "a: slots=8\n": "is not a valid hostfile line",
    "# two\na slots=2\n\na slots=2\n": ":4: a is listed twice",
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
    monkeypatch.setattr(hostfile.shutil, "which", lambda name: name)
    pool = hostfile.read(two_hosts, include="a:0,2@b")
    options = hostfile.launcher_options(pool, "10.0.0.1")
    seen = runner.parse_args([*options, "script"])
    assert (seen.hostfile, seen.include, seen.master_addr) == (str(two_hosts), "a:0,2@b", "10.0.0.1")
    assert seen.force_multi and pool.ranks == 4 and pool.most_ranks == 2
    counted = hostfile.read(two_hosts, nodes=2, gpus=2)
    seen = runner.parse_args([*hostfile.launcher_options(counted, "a"), "script"])
    assert (seen.num_nodes, seen.num_gpus, counted.ranks) == (2, 2, 4)


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
    lines = write_environment(RunFolder(tmp_path / "run"), environment).read_text().splitlines()
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
    "gpus": (["H200"] * 4, "4 GPUs, but the hostfile says slots=8"),
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
    head, *rows = remote.table(
        [remote.table_row("n1", answer(), answer()), remote.table_row("n2", other, answer())]
    ).splitlines()
    assert head.split()[0] == "host" and len(rows) == 2 and rows[0] != rows[1].replace("n2", "n1")


def test_clock_skew_is_measured_against_the_round_trip(monkeypatch):
    result = subprocess.CompletedProcess([], 0, 'welcome\n{"time": 100.0}\n', "")
    for asked, answered, off in ((99, 101, 0), (90, 95, 5), (103, 104, 3)):
        assert remote.parse_answer(result, asked, answered)["clock"] == off


def test_two_checkouts_with_the_same_code_have_the_same_fingerprint(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "recipes").mkdir(parents=True)
        (tmp_path / name / "recipes" / "x.py").write_text("1")
    assert host_info.fingerprint(tmp_path / "a") == host_info.fingerprint(tmp_path / "b")
    (tmp_path / "b" / "recipes" / "x.py").write_text("2")
    assert host_info.fingerprint(tmp_path / "a") != host_info.fingerprint(tmp_path / "b")


def test_an_address_of_another_machine_has_no_interface_here():
    assert host_info.network("192.0.2.1") == ("", 0)


def test_the_launcher_without_pdsh_says_what_to_install(two_hosts, monkeypatch, refused):
    monkeypatch.setenv("PATH", "/nowhere")
    said = refused("tiny", "full", "--hostfile", two_hosts, "--dry-run", "global_batch_size=24")
    assert "apt-get install pdsh" in said
