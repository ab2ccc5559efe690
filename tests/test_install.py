"""The package that pip installs: what is in it, that the planner and the linter need no torch, that it trains.

No file of the folder that a user stands in is run: there is data in it that others have made.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import replace
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest

from deepspeed_recipes.commands.launch import borrowed
from deepspeed_recipes.commands.main import COMMANDS
from deepspeed_recipes.launching import command
from deepspeed_recipes.launching.ray import cluster
from deepspeed_recipes.launching.ssh import remote
from deepspeed_recipes.planning.search import model_recipe
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.project import IMPORT_ROOT, SAMPLES, SCRIPTS, python_path
from deepspeed_recipes.recipe.recipe import Wandb
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json
from deepspeed_recipes.recipe.samples import TINY_MODEL
from deepspeed_recipes.training.tracking import writer
from tests import ROOT
from tests.tiers import tiered

STACK = {"torch", "transformers", "deepspeed", "numpy", "datasets", "peft", "trl", "accelerate"}
PINS = ("constraints.txt", "constraints-serving.txt")


def tracked() -> list[str]:
    """Return the names of the checkout's files, those that are not committed yet included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in names if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink())]


def installed_name(name: str) -> str | None:
    """Return where a file of the checkout is installed, or None where it is not."""
    if name.startswith("recipes/"):
        return f"deepspeed_recipes/pages/{name.removeprefix('recipes/')}"
    if name.startswith("src/") and not (ROOT / name).is_symlink():
        return name.removeprefix("src/")
    return f"deepspeed_recipes/{name}" if name.startswith("configs/") or name in PINS else None


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Copy the checkout, so that a build leaves nothing in it."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


def pip(command: str, *arguments: str, python: Path | None = None) -> None:
    """Run pip without a network, for this environment or for another one's Python."""
    where = ["--python", str(python)] if python else []
    words = [sys.executable, "-m", "pip", *where, command, "--quiet", "--no-deps", "--no-index", *arguments]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def environment(folder: Path) -> Path:
    """Make an environment with nothing in it, and return its Python."""
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Path:
    """Return the `bin` of an environment that holds the wheel and its base dependencies, and nothing else."""
    python = environment(tmp_path_factory.mktemp("bare"))
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    for name in closure(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]):
        found = metadata.distribution(name)
        for top in {file.parts[0] for file in found.files if file.parts[0] != ".."}:
            (site / top).symlink_to(found.locate_file(top))
    pip("install", str(wheel), python=python)
    return python.parent


def closure(requirements: list[str]) -> set[str]:
    """Return the names of packages and of all that they require, extras left out."""
    found: set[str] = set()
    while requirements:
        name = re.match(r"[\w.-]+", requirements.pop())[0]
        if name not in found:
            found.add(name)
            requirements += [line for line in metadata.requires(name) or [] if "extra ==" not in line]
    return found


def run(command: list[str | Path], folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a command of an installed package: nothing of the checkout or of this environment is on its path."""
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "COLUMNS": "140", "HF_HUB_OFFLINE": "1", **variables}
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)


def test_the_wheel_holds_the_package_its_data_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {installed_name(name) for name in tracked()} - {None}
    assert names == expected and len(names) > 200
    assert wheel.stat().st_size < 20 * 2**20  # four small models are most of it


@pytest.mark.every
def test_the_source_distribution_builds_the_same_wheel(source, wheel, tmp_path):
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert not (unpacked / "tests").exists() and not (unpacked / "notebooks").exists()
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(unpacked))
    (again,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


def test_only_its_own_names_are_installed(bare):
    names = {path.name for path in bare.parents[0].glob("lib/python*/site-packages/*")}
    assert "deepspeed_recipes" in names and not {"recipes", "configs", "scripts", "tests"} & names
    assert "ds-recipes" in {path.name for path in bare.iterdir()}


def test_the_planner_works_without_torch(bare, tmp_path):
    done = run([bare / "ds-recipes", "plan", "llama3-8b", "--gpu", "H100", "--gpus", "8"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ds-recipes launch llama3-8b full --gpus 8" in done.stdout and "scripts/" not in done.stdout
    written = run(
        [bare / "ds-recipes", "plan", "llama3-8b", "--gpu", "H100", "--gpus", "8", "--write", "plan"], tmp_path
    )
    assert written.returncode == 0 and "\nds-recipes launch " in (tmp_path / "plan" / "launch.sh").read_text()


def test_the_linter_and_the_configs_work_without_torch(bare, tmp_path):
    done = run([bare / "ds-recipes", "configs", "copy", "zero3"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "zero3.json").read_bytes() == (ROOT / "configs" / "zero3.json").read_bytes()
    assert run([bare / "ds-recipes", "check", "zero3.json"], tmp_path).returncode == 0
    again = run([bare / "ds-recipes", "configs", "copy", "zero3"], tmp_path)
    assert again.returncode == 2 and "already exists" in again.stderr
    typo = run([bare / "ds-recipes", "configs", "copy", "zreo3", "conf"], tmp_path)
    assert typo.returncode == 2 and "did you mean zero3?" in typo.stderr and not (tmp_path / "conf").exists()
    resolved = run([bare / "ds-recipes", "resolve", "zero1", "--world-size", "8"], tmp_path)
    assert json.loads(resolved.stdout)["train_batch_size"] == 8


def test_recipes_are_listed_and_a_run_is_shown_without_torch(bare, tmp_path):
    listed = run([bare / "ds-recipes", "list", "--json"], tmp_path)
    assert "llama3-8b" in {entry["recipe"] for entry in json.loads(listed.stdout)}
    shown = run([bare / "ds-recipes", "launch", "tiny", "full", "--dry-run"], tmp_path)
    assert shown.returncode == 0 and f"{tmp_path}/runs/tiny-3m-full/" in shown.stdout, shown.stderr
    wrong = run([bare / "ds-recipes", "launch", "tinny", "full"], tmp_path)
    assert wrong.stderr.startswith("ds-recipes launch: ") and "ds-recipes launch --list" in wrong.stderr


@pytest.mark.parametrize("command", ["plan llama3-8b --gpu H100 --gpus 8", "check zero3", "list", "resolve zero1"])
def test_no_package_of_the_stack_is_imported(bare, tmp_path, command):
    """Were a package of the stack there, it would not be imported either: each is made to fail."""
    for name in STACK:
        (tmp_path / f"{name}.py").write_text(f"raise AssertionError('{name} was imported')\n")
    done = run([bare / "ds-recipes", *command.split()], tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "launch tiny full",
        "export RUN --output DIR",
        "generate RUN text",
        "evaluate RUN",
        "publish RUN O/N",
        "shrink RUN --layers 2 --output DIR",
        "benchmark all",
    ],
)
def test_what_needs_the_stack_says_so_in_a_line(bare, tmp_path, command):
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "config.json").write_text("{}")
    done = run([bare / "ds-recipes", *command.split()], tmp_path)
    name = command.split()[0]
    assert done.returncode == 2 and done.stderr.startswith(f"ds-recipes {name}: "), done.stderr
    assert 'pip install "deepspeed-recipes[train]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_the_commands_as_they_are_typed(bare, tmp_path, command):
    done = run([bare / "ds-recipes", command, "--help"], tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: ds-recipes {command} "), done.stderr
    assert f"ds-recipes {command}" in done.stdout.partition("\n\n")[2] and len(done.stdout.splitlines()) > 10
    assert not re.findall(rf"scripts/\w+\.py|(?<![\w/])(?:{'|'.join(SCRIPTS.values())})\.py", done.stdout)


def test_the_overview_names_every_command(bare, tmp_path):
    done = run([bare / "ds-recipes"], tmp_path)
    assert done.returncode == 0 and all(f"\n  {name} " in done.stdout for name in COMMANDS)
    unknown = run([bare / "ds-recipes", "lunch"], tmp_path)
    assert unknown.returncode == 2 and "unknown command 'lunch'" in unknown.stderr


def test_a_new_page_is_a_script(bare, tmp_path):
    done = run([bare / "ds-recipes", "page", "new", "heron"], tmp_path)
    assert done.returncode == 0 and "ds-recipes launch ./heron.py full --draft" in done.stdout, done.stderr
    text = (tmp_path / "heron.py").read_text()
    assert "_template" not in text and "make install" not in text
    assert "copy" not in text.splitlines()[0] and "ds-recipes launch ./heron.py" in text
    shown = run([bare / "python", "heron.py", "lora", "--dry-run", "full"], tmp_path)
    assert shown.returncode == 0 and '"rank": 16' in shown.stdout, shown.stderr
    assert run([bare / "ds-recipes", "page", "new", "heron"], tmp_path).returncode == 2
    assert run([bare / "ds-recipes", "page", "new", "llama3"], tmp_path).returncode == 2
    assert run([bare / "ds-recipes", "page", "new", "two-words"], tmp_path).returncode == 2


def test_a_checkout_in_the_wrong_python_says_what_to_do(tmp_path):
    python = environment(tmp_path / "venv")
    for script in ("launch.py", "plan.py", "benchmark.py", "generate.py"):
        words = {"generate.py": [ROOT / "configs" / "accelerate", "text"], "launch.py": ["tiny", "full"]}
        arguments = words.get(script, ["tiny"])
        done = run([python, ROOT / "scripts" / script, *arguments], tmp_path)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith(f"{script}: ")
        if script != "generate.py":
            assert str(python) in done.stderr and "source .venv/bin/activate" in done.stderr
    assert run([python, ROOT / "scripts" / "check_config.py", "zero3"], tmp_path).returncode == 0


NEEDS_PACKAGES = {
    "benchmark": ["--help"],
    "certify": [SAMPLES / "tiny_model"],
    "check_config": [ROOT / "configs" / "zero3.json", "--deepspeed"],
    "evaluate": [SAMPLES / "tiny_model"],
    "export": [SAMPLES / "tiny_model", "--output", "out"],
    "generate": [SAMPLES / "tiny_model", "Ada?"],
    "launch": ["tiny", "full"],
    "plan": ["llama3-8b"],
    "publish": [SAMPLES / "tiny_model", "OWNER/NAME"],
    "report": ["runs"],
    "sweep": ["tiny", "full", "learning_rate=1e-4,2e-4"],
    "serve": [SAMPLES / "tiny_model"],
    "shrink": [SAMPLES / "tiny_model", "--layers", "2", "--output", "out"],
}
"""Each script with arguments for which it needs a package; the others need none."""
WITHOUT = {"doctor": ["--json"], "resolve_config": [ROOT / "configs" / "zero3.json", "--model", "llama3-8b"]}


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_every_script_says_in_a_line_what_to_do_without_the_packages(script, tmp_path):
    arguments = (NEEDS_PACKAGES | WITHOUT)[script.stem]
    done = run([sys.executable, "-S", "-I", script, *arguments], tmp_path)
    assert "Traceback" not in done.stderr
    if script.stem in NEEDS_PACKAGES:
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and line.startswith(f"{script.name}: ") and "source .venv/bin/activate" in line
        assert not done.stdout and not list(tmp_path.iterdir())
    else:
        assert json.loads(done.stdout)


def test_an_old_python_gets_a_message_too(tmp_path):
    """What an older Python would do with the script: `sys.version_info` is all that it looks at first."""
    code = "import sys; sys.version_info = (3, 9, 0); import _checkout; _checkout.run('launch')"
    done = run([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(ROOT / "scripts"))
    assert done.returncode == 2 and "not 3.11 or newer" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.every
def test_a_run_from_the_wheel_trains_in_any_folder(wheel, ranks, tmp_path):
    """The real launcher and two real ranks; `ranks` only says that this test needs them, and compiles the ops."""
    site, folder = tmp_path / "site", tmp_path / "empty"
    folder.mkdir()
    pip("install", "--target", str(site), str(wheel))
    variables = {
        "PYTHONPATH": str(site),
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    }
    options = ["max_steps=4", "wandb.mode=disabled", "data.validation=none", "data.metric=loss", "save_steps=2"]
    done = run([site / "bin" / "ds-recipes", "launch", "tiny", "full", "--gpus", "2", *options], folder, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (folder / "runs" / "tiny-3m-full").iterdir()
    assert read_json(RunFolder(path).summary)["steps"] == 4 and (path / "export" / "model.safetensors").exists()
    assert str(ROOT) not in (path / "recipe.json").read_text() and str(site) in (path / "recipe.json").read_text()


NAMES = ("argparse", "pathlib", "json", "logging", "runpy", "subprocess", "xxhash", "torch", "yaml", "recipes")
PACKAGES = ("wandb", "datasets", "deepspeed", "transformers", "evaluate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a folder whose files have the names of modules, and leave a trace when they are imported."""
    found = tmp_path_factory.mktemp("data")
    trace = f"open({str(found / 'ran')!r}, 'a').write(__file__ + '\\n')\n"
    for name in (*NAMES, "sitecustomize", "usercustomize"):
        (found / f"{name}.py").write_text(trace)
    for name in PACKAGES:
        (found / name).mkdir()
        (found / name / "__init__.py").write_text(trace)
    (found / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    return found


def ran(folder: Path) -> str:
    trace = folder / "ran"
    text = trace.read_text() if trace.exists() else ""
    trace.unlink(missing_ok=True)
    return text


@pytest.mark.parametrize(
    ("name", "path"),
    tiered(product(SCRIPTS, (None, str(ROOT))), lambda case: case[1] is None or case[0] in ("launch", "plan")),
)
def test_the_help_of_a_script_teaches_and_runs_none_and_imports_no_torch(name, path, folder):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [sys.executable, "-X", "importtime", ROOT / "scripts" / f"{SCRIPTS[name]}.py", "--help"]
    done = subprocess.run(
        words, cwd=folder, env=environment | ({"PYTHONPATH": path} if path else {}), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ran(folder) == "" and "argparse" in done.stderr and not re.search(r"\|\s+torch$", done.stderr, re.MULTILINE)
    assert "    ds-recipes " in done.stdout and len(done.stdout.splitlines()) > 10


@pytest.mark.parametrize("path", [":", ".", f":{ROOT}", f"{ROOT}::", "../{}"])
def test_a_relative_entry_of_pythonpath_counts_for_nothing(path, folder):
    """But for what Python itself imports before the first line of a program."""
    words = [sys.executable, ROOT / "scripts" / "plan.py", "--help"]
    path = path.format(folder.name)
    done = subprocess.run(words, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {Path(line).stem for line in ran(folder).splitlines()} <= {"sitecustomize", "usercustomize"}


def test_an_entry_of_pythonpath_that_is_a_whole_path_is_kept(tmp_path):
    found = python_path({"PYTHONPATH": f":.:{tmp_path}:x/y:{IMPORT_ROOT}"})
    assert found == {"PYTHONPATH": f"{IMPORT_ROOT}:{tmp_path}", "PYTHONSAFEPATH": "1"}
    assert python_path({})["PYTHONPATH"] == str(IMPORT_ROOT)


def test_ranks_run_none(folder, launcher):
    """Nor do the launchers above them."""
    words = ["tiny", "full", "data.path=train.jsonl", "data.validation=none", "max_steps=1", "wandb.mode=offline"]
    done = subprocess.run(
        [*launcher, *words, "--gpus", "1", "--output-dir", folder / "run"], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": f":{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert ran(folder).splitlines() in ([], [str(folder / "sitecustomize.py")])  # Python's own start, of launch.py


def test_what_starts_elsewhere_is_told_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    ranks = command.rank_environment(1, 0)
    assert ranks["PYTHONSAFEPATH"] == cluster.environment({})["PYTHONSAFEPATH"] == "1"
    assert command.forwarded(ranks)["PYTHONSAFEPATH"] == "1"  # SLURM, Kubernetes, SageMaker, pdsh
    assert "PYTHONSAFEPATH=1" in shlex.split(remote.module_command("x"))
    cluster.submit_job("a", ["tiny", "full"], submit=False)
    assert "PYTHONSAFEPATH=1" in shlex.split(capsys.readouterr().out)
    for typed in command.other_launchers(RunFolder(tmp_path), 2, 2).values():
        assert "PYTHONSAFEPATH=1" in typed
    (tmp_path / "data" / ".deepspeed_env").write_text("LD_PRELOAD=/data/evil.so\n")
    (tmp_path / ".deepspeed_env").write_text("MINE=1\n")
    written = Path(remote.launcher_environment(RunFolder(tmp_path), ranks)["DS_ENV_FILE"]).read_text()
    assert "MINE=1" in written and "LD_PRELOAD" not in written and "PYTHONSAFEPATH=1" in written
    assert f"{tmp_path}/data/.deepspeed_env: ignored; move the variables" in capsys.readouterr().out


def test_a_folder_with_a_recipes_name_is_not_that_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = Path(shutil.copytree(TINY_MODEL, tmp_path / "tiny"))
    for name in ("tiny", "tiny-3m"):
        assert pages.find(name, "full").model.path == model_recipe.find(name, "full").model.path != str(own)
    assert Path(borrowed.borrow("tiny", "full").model.path).resolve() == own
    assert Path(model_recipe.find("./tiny", "full").model.path).resolve() == own


def test_a_folder_that_is_gone_is_named(tmp_path):
    words = [sys.executable, ROOT / "scripts" / "launch.py", "tiny", "full", "--dry-run"]
    gone = ["sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh", *map(str, words)]
    done = subprocess.run(gone, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "launch.py: the current folder does not exist any more" in done.stderr
    assert "Traceback" not in done.stderr


def test_wandb_does_not_read_where_to_send_the_key(tmp_path, monkeypatch, capsys):
    (tmp_path / "data" / "wandb").mkdir(parents=True)
    (tmp_path / "data" / "wandb" / "settings").write_text("[default]\nbase_url = http://evil.example\nentity = evil\n")
    monkeypatch.chdir(tmp_path / "data")
    (tmp_path / "run").mkdir()
    recipe = replace(pages.find("tiny", "full"), wandb=Wandb("offline"))
    tracked = writer.opened("wandb", recipe, RunFolder(tmp_path / "run"), {})
    assert "evil" not in tracked.live.settings.base_url and tracked.live.settings.entity is None
    tracked.finish({}, 0)
    assert "data/wandb/settings: ignored; set WANDB_BASE_URL" in capsys.readouterr().out
    assert Path.cwd() == tmp_path / "data"
