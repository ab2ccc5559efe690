"""The range of versions: what is declared, what doctor says of it, and what older versions lack."""

import re
import runpy
import tomllib
from dataclasses import replace

import pytest

from deepspeed_recipes.machine import software
from deepspeed_recipes.recipe import deepspeed_file, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Layout
from deepspeed_recipes.training import distributed
from tests import ROOT
from tests.versions import pins

STACKS = ROOT / "tests" / "stacks"


def test_each_range_runs_from_the_oldest_stack_to_the_pins():
    oldest, newest = pins(STACKS / "oldest.txt"), pins()
    for name in software.NEEDED:
        first, last = software.RANGES[name]
        assert software._judged(name, newest[name], None, "").state == "ok" and newest[name].startswith(last), name
        assert oldest.get(name, newest[name]).startswith(first), name


def test_the_package_asks_for_the_same_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = dict(re.findall(r"^([a-z]+)>=([\d.]+)", "\n".join(project["optional-dependencies"]["train"]), re.MULTILINE))
    assert asked == {name: software.RANGES[name][0] for name in software.NEEDED}
    assert project["requires-python"] == f">={software.RANGES['python'][0]}"


@pytest.mark.parametrize(
    ("name", "version", "state", "said"),
    [
        ("torch", "2.13.0+cpu", "ok", "2.13.0+cpu"),
        ("torch", "2.8.0", "warning", "2.8.0 is outside the tested range, 2.9 to 2.13"),
        ("torch", "2.14.1", "warning", "2.14.1 is outside the tested range, 2.9 to 2.13"),
        ("torch", "2.9.1", "warning", "no variable-length attention kernel: packed sequences take FlexAttention"),
        ("torch", "2.11.0", "warning", "shared keys and values are repeated"),
        ("deepspeed", "0.19.0", "warning", "layout.pipeline is refused, since it divides gradients"),
        ("deepspeed", "0.18.9", "warning", "0.18.9 is outside the tested range, 0.19.0 to 0.19.8"),
        ("transformers", "5.21.0", "ok", "5.21.0, of the tested range 5.10 to 5.22"),
        ("transformers", "5.23.0", "warning", "5.23.0 is outside"),
        ("python", "3.14.0", "warning", "3.14.0 is outside the tested range, 3.11 to 3.13"),
    ],
)
def test_doctor_says_what_is_outside_and_what_is_lost(name, version, state, said):
    check = software._judged(name, version, pins().get(name), "pip install it")
    assert check.state == state and said in check.found
    assert check.fix == ("pip install it" if state == "warning" else "")


def test_only_what_a_version_itself_lacks_is_said():
    said = [software._judged("torch", version, None, "").found for version in ("2.9.1", "2.10.0")]
    assert [text.count("; ") for text in said] == [1, 1]
    for name, version in (("torch", "2.13.0"), ("accelerate", "1.13.0")):
        assert software._judged(name, version, None, "").state == "ok"


def test_a_stack_replaces_pins_and_adds_none():
    stack = runpy.run_path(str(ROOT / ".ci" / "stack"))
    newest = set(stack["versions"]("newest"))
    assert newest == {f"{name}=={version}" for name, version in pins().items()}
    for name in ("oldest", "middle"):
        own = {f"{name}=={version}" for name, version in pins(STACKS / f"{name}.txt").items()}
        found = set(stack["versions"](name))
        assert own and own <= found and len(found) == len(newest) and found - newest == own


@pytest.mark.parametrize("key", software.LAYOUTS)
def test_a_layout_that_an_old_deepspeed_gets_wrong_is_refused(monkeypatch, key):
    first, why = software.LAYOUTS[key]
    split, whole = (replace(pages.find("tiny", "full"), layout=layout) for layout in (Layout(**{key: 2}), Layout()))
    file = deepspeed_file.parse({})
    monkeypatch.setattr(distributed.metadata, "version", lambda _: "0.19.0")
    with pytest.raises(
        UserError, match=rf"layout\.{key}=2: DeepSpeed 0\.19\.0 {why}: pip install 'deepspeed>={first}'"
    ):
        distributed.check_installed(split, file)
    distributed.check_installed(whole, file)
    monkeypatch.setattr(distributed.metadata, "version", lambda _: first)
    distributed.check_installed(split, file)
