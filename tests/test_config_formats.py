"""The linter outside this project: what machines read of it, the pre-commit hook and the GitHub action."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from deepspeed_recipes.config.rules import RULES
from tests.test_config_fix import check
from tests.test_config_read import ROOT

BAD = '{"train_batch_size": 8,\n  "gradient_cliping": 1.0, "steps_per_print": 0}'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository that is not ours."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "ds_config.json").write_text(BAD)
    (tmp_path / "conf" / "zero2.json").write_text((ROOT / "configs" / "zero2.json").read_text())
    (tmp_path / "conf" / "broken.json").write_text("{")
    return tmp_path


def test_annotations_name_file_line_and_column(checkout: Path):
    run = check("--format", "github", "--trainer", "plain", str(checkout / "conf" / "ds_config.json"))
    first, second = sorted(run.stdout.splitlines())
    assert run.returncode == 1
    start = f"::error file={checkout}/conf/ds_config.json,line=2,col="
    assert first == f"{start}28,title=steps-per-print-0::steps_per_print = 0: {first.partition(' = 0: ')[2]}"
    assert second.startswith(f"{start}3,title=misspelt-key::gradient_cliping = 1.0: ")
    broken = check("--format", "github", str(checkout / "conf" / "broken.json"))
    assert (broken.returncode, broken.stdout.count("::error file=")) == (2, 1)
    clean = check("--format", "github", str(checkout / "conf" / "zero2.json"))
    assert (clean.returncode, clean.stdout) == (0, "")


def test_annotations_stay_on_one_line():
    from deepspeed_recipes.config.lint import Report, annotations
    from deepspeed_recipes.config.rule import Finding

    finding = Finding("rule", "error", "a\n::error::b", 1, 1, "100%\r\n", "what", "fix")
    (line,) = annotations([Report("a,b:c\n.json", (finding,))])
    assert line.startswith("::error file=a%2Cb%3Ac%0A.json,line=1,col=1,title=rule::a%0A::error::b = ")
    assert "100%25" in line and "\n" not in line and "\r" not in line


def test_sarif_has_what_its_readers_need(checkout: Path):
    run = check(
        "--format", "sarif", "--trainer", "plain", *(str(path) for path in sorted(checkout.glob("conf/*.json")))
    )
    log = json.loads(run.stdout)
    (first,) = log["runs"]
    assert (run.returncode, log["version"]) == (2, "2.1.0")
    described = {rule["id"] for rule in first["tool"]["driver"]["rules"]}
    assert (
        {"misspelt-key", "steps-per-print-0", "unreadable"} <= described <= {rule.id for rule in RULES} | {"unreadable"}
    )
    for result in first["results"]:
        assert result["ruleId"] in described and result["level"] in ("error", "warning") and result["message"]["text"]
        (location,) = result["locations"]
        assert location["physicalLocation"]["artifactLocation"]["uri"].endswith(".json")
        assert min(location["physicalLocation"]["region"].values()) >= 1


def test_json_is_one_of_the_formats(checkout: Path):
    file = str(checkout / "conf" / "ds_config.json")
    assert check("--json", file).stdout == check("--format", "json", file).stdout


def test_the_hook_runs_a_command_that_is_installed_on_the_right_files():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    program, command = hook["entry"].split()
    assert program in project["scripts"] and command == "check"
    assert hook["language"] == "python" and hook["types"] == ["json"]
    names = [
        "ds_config.json",
        "conf/ds_config_zero3.json",
        "deepspeed/stage2.json",
        "zero3.json",
        "a/zero2_offload.json",
    ]
    names += ["configs/deepspeed_zero1.json", "ds_configs/a.json", "examples/DeepSpeed_config.json", "ds-z3.json"]
    assert [name for name in names if not re.search(hook["files"], name)] == []
    others = ["package.json", "data/train.json", "config.json", "dsn.json", "zeros.json", "ads_config.json"]
    assert [name for name in others if re.search(hook["files"], name)] == []


@pytest.mark.parametrize(
    ("files", "arguments", "status", "said"),
    [
        ("conf/zero*.json", "", 0, ""),
        ("conf/ds_*.json", "--trainer plain", 1, "::error file=conf/ds_config.json,line=2,col=3,title=misspelt-key::"),
        ("**/b*.json conf/zero2.json", "", 2, "title=unreadable::"),
        ("nowhere/*.json", "", 2, "::error::no file matches nowhere/*.json"),
        ("$(touch${IFS}ran)", "", 2, "title=unreadable::"),
    ],
)
def test_the_action_lints_another_checkout(checkout: Path, files: str, arguments: str, status: int, said: str):
    """The action's own script; only the installation is replaced by a program that runs this checkout."""
    (checkout / "bin").mkdir()
    program = checkout / "bin" / "ds-recipes"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT}/src exec {sys.executable} -m deepspeed_recipes.commands "$@"\n')
    program.chmod(0o755)
    step = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"][-1]
    environment = {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "FILES": files, "ARGUMENTS": arguments}
    run = subprocess.run(
        ["bash", "-e", "-c", step["run"]], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == status, run.stdout + run.stderr
    assert said in run.stdout
    assert not (checkout / "ran").exists()
