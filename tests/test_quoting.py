"""What reaches a shell, a batch script or a manifest: any text arrives as it was given, or the launcher refuses it."""

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.launcher import runner
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from deepspeed_recipes.launching import kubernetes, paths, slurm
from deepspeed_recipes.launching.command import deepspeed_command
from deepspeed_recipes.launching.options import Allocation
from deepspeed_recipes.launching.ssh import hostfile, remote
from deepspeed_recipes.recipe import pages, run_folder
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import RunFolder
from tests.network_hosts import needs_pdsh
from tests.versions import needs

ATTACKS = (
    "$(touch PWNED)",
    "`touch PWNED`",
    '"; touch PWNED; "',
    "'; touch PWNED; '",
    "a\\",
    " both ends ",
    "%h %n %u %%",
    "$HOME ${HOME} $$",
    "~/x !! * ? # é \x85",
    "",
)
VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30) | st.text(
    "$`\"'\\%() ;&|<>{}~!\n\r\tah#*=", max_size=12
)
"""Any text that a variable can hold, and more of what shells react to."""
BOUNDED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def attacks(test):
    """Run a property test on every attack too."""
    for text in ATTACKS:
        test = example(text)(test)
    return test


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def far(tmp_path, monkeypatch):
    """Provide an `ssh` that gives its command to a shell here, as sshd does, and a Python that records what it got."""
    folder = tmp_path / "bin"
    folder.mkdir()
    executable(folder / "ssh", '#!/bin/bash\nwhile [ "$1" != far ]; do shift; done; shift; exec bash -c "$*"\n')
    python = executable(
        folder / "python", f"#!/bin/bash\nprintf '%s\\0' \"$@\" > {tmp_path}/words\nenv -0 > {tmp_path}/environment\n"
    )
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("far slots=2\n")
    (tmp_path / "run").mkdir()
    return tmp_path


def arrived(far: Path, environment: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Send a run through DeepSpeed's launcher and pdsh, and return the words and the variables that arrive."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME")} | {"TORCH_EXTENSIONS_DIR": "/o"} | environment
    run, pool = RunFolder(far / "run"), hostfile.read(far / "hosts")
    launcher = remote.launcher_environment(run, environment)
    command = deepspeed_command(run, 2, pool, "far")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with (
        mock.patch.dict(os.environ, launcher | {"DS_ACCELERATOR": "cpu"}, clear=True),
        mock.patch.object(runner, "DEEPSPEED_ENVIRONMENT_NAME", launcher["DS_ENV_FILE"]),
    ):
        runner.main(command[command.index("--log_level") :])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    words = (far / "words").read_text(encoding="utf-8").split("\0")[:-1]
    lines = (far / "environment").read_bytes().decode().split("\0")[:-1]
    return words, dict(line.split("=", 1) for line in lines)


@needs_pdsh
@attacks
@given(VALUES)
@BOUNDED
def test_a_variable_reaches_another_host_as_it_is_or_is_refused(far, value):
    mine = {"WANDB_NOTES": value, "NCCL_DEBUG_FILE": value, "PYTHONPATH": value}
    if "\n" in value or "\r" in value:
        with pytest.raises(UserError, match="line break"):
            arrived(far, mine)
        return
    words, seen = arrived(far, mine)
    assert {name: seen[name] for name in mine} == mine and not (far / "PWNED").exists()
    assert words[-1] == str(far / "run") and words[:3] == ["-u", "-m", "deepspeed.launcher.launch"]


@needs_pdsh
@needs("deepspeed>=0.19.8")
def test_deepspeed_exports_nothing_that_the_file_does_not_have(far):
    with mock.patch.object(CUDA_Accelerator, "__init__", lambda self: None):
        assert set(remote.EXPORTED) == {*runner.EXPORT_ENVS, *CUDA_Accelerator().export_envs()}
    hostile = {"MLFLOW_TRACKING_PASSWORD": "$(touch PWNED)", "PYTHON_X;touch PWNED;": "1", "NCCL_X;touch PWNED;": "1"}
    _, seen = arrived(far, hostile)
    assert not (far / "PWNED").exists() and "MLFLOW_TRACKING_PASSWORD" not in seen


@needs_pdsh
def test_the_users_own_file_may_name_variables_of_the_host_and_run_nothing(far):
    (far / ".deepspeed_env").write_text("A=x:$HOME\nB=${HOME}/y\nC=$(touch PWNED)\nD;touch PWNED;=1\nE=`touch PWNED`\n")
    _, seen = arrived(far, {})
    assert (seen["A"], seen["B"]) == (f"x:{far}", f"{far}/y") and seen["C"] == "$(touch PWNED)"
    assert not (far / "PWNED").exists()


def test_pdsh_is_given_no_path_that_a_shell_would_read(tmp_path, monkeypatch):
    for name in ("$(id)", "a b", "a;b", "a'b", "%n", "a\nb"):
        with pytest.raises(UserError, match="--output-dir"):
            hostfile.check_command(tmp_path / name, None)
    for master in ("a;touch PWNED", "$(id)", "-oProxyCommand=x", "a b", ""):
        with pytest.raises(UserError, match="--master-addr"):
            hostfile.check_command(tmp_path, master)
    hostfile.check_command(tmp_path / "ünder_é.1=2,3@x", "fe80::1")
    (tmp_path / "$(id)").mkdir()
    monkeypatch.chdir(tmp_path / "$(id)")
    with pytest.raises(UserError, match="the current folder"):
        hostfile.check_command(tmp_path, None)


# A batch job in which `srun` writes down the words it got and the variables that ranks get.
JOB = """
scontrol() { echo node-1; }
srun() { printf '%s\\0' "$@" >"$SEEN/words"; env -0 >"$SEEN/environment"; }
SLURM_JOB_ID=1 SLURM_JOB_NODELIST=x SLURM_JOB_NUM_NODES=1
"""


@attacks
@given(VALUES)
@BOUNDED
def test_a_batch_script_says_what_was_given_or_is_refused(tmp_path, value):
    environment = {"WANDB_NOTES": value, "NCCL_X;touch PWNED;": "1", "TORCH_EXTENSIONS_DIR": value, "PYTHONPATH": value}
    name = re.sub(r"[/\0]", "", value) or "x"
    assume(len(name.encode()) < 200 and name not in (".", ".."))
    named = slurm.script(Allocation(value, 1, 2, True), RunFolder(tmp_path / "run"), environment)
    assert re.fullmatch(r"#SBATCH --job-name=([\w.-]+|'[\w.-]*')", named.split("\n")[1])
    try:
        run = run_folder.new(pages.find("tiny", "full"), tmp_path / name)
        script = slurm.script(Allocation(value, 1, 2, True), run, environment)
    except UserError as error:
        assert str(error).startswith("--output-dir") and (re.search(r"[%'\"\\]", name) or not name.isprintable())
        return
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert [line.partition("=")[0] for line in options] == [
        *("#SBATCH --job-name", "#SBATCH --nodes", "#SBATCH --ntasks-per-node", "#SBATCH --gpus-per-node"),
        *("#SBATCH --output", "#SBATCH --open-mode", "#SBATCH --signal", "#SBATCH --export"),
        *("#SBATCH --exclusive", "#SBATCH --requeue"),
    ]
    done = subprocess.run(
        ["bash", "-s"], input=JOB + script, text=True, capture_output=True, cwd=tmp_path, encoding="utf-8",
        env={"PATH": os.environ["PATH"], "SEEN": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    words = (tmp_path / "words").read_text(encoding="utf-8").split("\0")
    assert str(run.path) in words and not (tmp_path / "PWNED").exists()
    seen = dict(line.split("=", 1) for line in (tmp_path / "environment").read_bytes().decode().split("\0")[:-1])
    assert all(seen[name] == value for name in environment if ";" not in name)


def expanded(text: str) -> str:
    """Return what a pod gets for a variable's value, in which Kubernetes replaces $(NAME) and makes one $ of two."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: f"<{found[1]}>" if found[1] else "$", text)


@attacks
@example("$(HF_TOKEN)")
@given(VALUES)
@BOUNDED
def test_a_manifest_says_what_was_given(tmp_path, value):
    assume(not value.startswith(("/", "~")))  # paths of this machine are left out
    recipe = paths.locate(pages.find("tiny", "full"), kubernetes.MOUNT)
    options = {"image": "image:1", "volume": "runs", "environment": {"WANDB_NOTES": value, "NCCL_X=\n": "1"}}
    texts = kubernetes.manifests(Allocation(value, 1, 2, True), recipe, RunFolder(tmp_path / "run"), **options)
    job = list(yaml.safe_load_all(texts["job.yaml"]))[-1]
    env = {one["name"]: one.get("value") for one in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert expanded(env["WANDB_NOTES"]) == value and not any(name.startswith("NCCL_X") for name in env)


MISTAKES = {
    "--output-dir": [["--output-dir", "a\n#SBATCH --uid=0"], ["--slurm", "--output-dir", "a\n#SBATCH --uid=0"]],
    "--output-dir ": [["--slurm", "--output-dir", "a%j"], ["--hostfile", "hosts", "--output-dir", "$(touch PWNED)"]],
    "--partition": [["--slurm", "--partition", "a\n#SBATCH --uid=0"]],
    "--master-addr": [["--hostfile", "hosts", "--master-addr", "a;touch PWNED"]],
    "--image": [["--kubernetes", "--image", "a\nb: c"]],
    "--volume": [["--kubernetes", "--volume", "a\nb: c"]],
}


@pytest.mark.parametrize("option", MISTAKES)
def test_an_option_that_would_be_a_command_is_refused_in_a_line(option, tmp_path, refused):
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    for words in MISTAKES[option]:
        said = refused("tiny", "full", *words, "--dry-run")
        assert option.strip() in said and len(said.strip().splitlines()) == 1
        assert "PWNED" not in os.listdir(tmp_path)


def test_a_variable_that_is_not_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="WANDB_NOTES: its value is not UTF-8 text"):
        slurm.script(
            Allocation("x", 1, 2, True),
            RunFolder(tmp_path),
            {"WANDB_NOTES": "\udcff", "TORCH_EXTENSIONS_DIR": "/o", "PYTHONPATH": "/p"},
        )


def test_commands_to_copy_are_quoted(tmp_path):
    said = kubernetes.how_to(tmp_path / "a run; touch PWNED")
    assert f"kubectl apply -f '{tmp_path}/a run; touch PWNED/job.yaml'" in said
