"""A page run as a script: `python recipes/llama3.py 8b lora ...` is the launcher on that page."""

import os
import subprocess
import sys

import pytest

from tests import ROOT

PAGE = ROOT / "recipes" / "llama3.py"


def run(page, *words, folder, **variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")} | variables
    command = [sys.executable, str(page), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_page_shows_the_run_that_it_would_start(tmp_path):
    done = run(PAGE, "1b", "lora", "--dry-run", "--gpus", "2", "learning_rate=3e-4", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/runs/llama3-1b-lora/" in done.stdout and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("words", "status"), [([], 2), (["--help"], 0)])
def test_a_page_lists_its_sizes_and_variants(tmp_path, words, status):
    done = run(PAGE, *words, folder=tmp_path)
    assert done.returncode == status and not done.stderr
    assert "\n  405b " in done.stdout and "\n  qlora " in done.stdout and "usage: python llama3.py SIZE" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["8bb", "lora"], "llama3.py: unknown size '8bb'; did you mean 8b? There are: 1b, 3b, 8b, 70b, 405b."),
        (["8b", "lorra"], "llama3.py: unknown variant of llama3 'lorra'; did you mean 'lora'?"),
    ],
)
def test_a_mistake_is_answered_with_the_nearest(tmp_path, words, message):
    done = run(PAGE, *words, folder=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(message) and len(done.stderr.splitlines()) <= 3


def test_a_page_anywhere_is_a_script_and_needs_no_size_if_it_has_one(tmp_path):
    text = (ROOT / "recipes" / "tiny.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    (tmp_path / "json").mkdir()  # a folder of the user's with a library's name
    done = run(tmp_path / "mine.py", "lora", "--dry-run", folder=tmp_path)
    assert done.returncode == 0 and f"{tmp_path}/runs/mine-3m-lora/" in done.stdout, done.stderr


def test_a_page_from_before_the_move_says_what_to_change(tmp_path):
    page = tmp_path / "old.py"
    page.write_text("from .spec.recipe import Model\nSIZES = {'1b': Model(path='a')}\n", encoding="utf-8")
    command = [sys.executable, ROOT / "scripts" / "launch.py", f"{page}-1b", "lora", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{page}:1: " in done.stderr and "deepspeed_recipes.recipe" in done.stderr
