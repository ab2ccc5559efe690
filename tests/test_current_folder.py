"""No file of the folder that a user stands in is run: there is data in it that others have made."""

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from deepspeed_recipes.commands.launch import borrowed
from deepspeed_recipes.launching import command
from deepspeed_recipes.launching.ray import cluster
from deepspeed_recipes.launching.ssh import remote
from deepspeed_recipes.planning.search import model_recipe
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.project import IMPORT_ROOT, SCRIPTS, python_path
from deepspeed_recipes.recipe.recipe import Wandb
from deepspeed_recipes.recipe.run_folder import RunFolder
from deepspeed_recipes.recipe.samples import TINY_MODEL
from deepspeed_recipes.training.tracking import writer
from tests import ROOT
from tests.tiers import tiered

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
def test_a_script_runs_none(name, path, folder):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [sys.executable, ROOT / "scripts" / f"{SCRIPTS[name]}.py", "--help"]
    done = subprocess.run(
        words, cwd=folder, env=environment | ({"PYTHONPATH": path} if path else {}), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ran(folder) == ""


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
    assert "PYTHONSAFEPATH=1" in cluster.job_command("a", ["tiny", "full"], {})
    for typed in command.other_launchers(RunFolder(tmp_path), 2, 2).values():
        assert "PYTHONSAFEPATH=1" in typed
    (tmp_path / "data" / ".deepspeed_env").write_text("LD_PRELOAD=/data/evil.so\n")
    (tmp_path / ".deepspeed_env").write_text("MINE=1\n")
    written = remote.write_environment(RunFolder(tmp_path), ranks).read_text()
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
