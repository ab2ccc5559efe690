"""`ds-recipes doctor --prove`: techniques beside the plain loop, known defects, and what is said of both."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_recipes.prove import defects, prove
from deepspeed_recipes.prove.techniques import TECHNIQUES
from deepspeed_recipes.recipe.layout import gradient_accumulation_steps
from deepspeed_recipes.recipe.project import CONFIGS
from tests import ROOT
from tests.tiers import tiered
from tests.workers import mended, mistakes

KNOWN = {technique.name: technique for technique in TECHNIQUES}
DEFECTS = {defect.name: defect for defect in defects.known()}
TORCHRUN = Path(sys.executable).with_name("torchrun")


@pytest.fixture(scope="module")
def shop(ranks, tmp_path_factory):
    """Return a place to prove something: two ranks, and what the plain loop trains."""
    made = prove.Workshop(ranks, most=2, gpus=0, folder=tmp_path_factory.mktemp("proof"))
    prove.prepare(made, [KNOWN["zero1"], KNOWN["adapters"]])
    return made


def doctor(*words: str, **options) -> subprocess.CompletedProcess:
    script = [sys.executable, str(ROOT / "scripts" / "doctor.py"), "--prove", *words]
    return subprocess.run(script, capture_output=True, text=True, env=os.environ | {"COLUMNS": "160"}, **options)


@pytest.mark.every
def test_the_command_shows_and_writes_what_it_finds(launcher, tmp_path):
    """And a report's script, which a stranger runs alone, says what the report says."""
    asked = ["--only", "zero3,tensor,expert,varlen,gradient_norm", "--gpus", "2"]
    done = doctor(*asked, "--json", str(tmp_path / "proof.json"), "--reports", str(tmp_path / "reports"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "proof.json").read_text())
    assert {one["name"]: one["state"] for one in result["techniques"]} == {
        "zero3": "equal", "tensor": "equal", "expert": "equal", "varlen": "not tried",
    }  # fmt: skip
    assert result["environment"]["backend"] == "gloo" and result["environment"]["ranks"] == 2
    (defect,) = result["defects"]
    assert defect["state"] == "present" and "is None after a step" in defect["detail"]
    assert "all 3 techniques train what plain PyTorch trains (1 not tried)" in done.stdout
    assert not list(Path("/tmp").glob("proof-*/zero3"))

    folder = tmp_path / "reports" / "gradient_norm"
    report = (folder / prove.REPORT).read_text()
    assert defect["detail"] in report and f"deepspeed {result['environment']['packages']['deepspeed']}" in report
    words = DEFECTS["gradient_norm"].command.split()
    assert f"    {' '.join(words)}\n" in report
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([str(TORCHRUN), *words[1:]], cwd=folder, env=alone, capture_output=True, text=True)
    assert f"PRESENT: {defect['detail']}" in ran.stdout, ran.stderr


@pytest.mark.parametrize("name", tiered(["zero1", "adapters"], {"zero1"}))
def test_a_gradient_that_is_twice_as_large_is_found_and_named(shop, name):
    planted = replace(KNOWN[name], name=f"planted_{name}", train=mistakes.doubled_gradients)
    found = prove.prove(shop, planted)
    assert found.state == "different" and "gradient norm off by 1.0e+00" in found.detail
    right = prove.prove(shop, KNOWN[name])
    assert right.state == "equal"
    assert prove.exit_status([right]) == 0 and prove.exit_status([right, found]) == 1
    assert prove.summary([right, found], []) == f"planted_{name}: not what plain PyTorch trains."


def test_a_technique_that_does_not_train_is_named_with_the_reason(shop):
    found = prove.prove(shop, replace(KNOWN["zero1"], name="fails", train=mistakes.fail))
    assert found.state == "failed" and found.detail == "ValueError: no training in run"
    assert prove.exit_status([found]) == 1


MENDED = ["gradient_norm", "step_of_zeros", "resume_intervals", "rotary_frequencies", "expert_gradient_norm"]
MENDED += ["round_robin_order"]


@pytest.mark.parametrize("name", MENDED)
def test_a_defect_is_absent_where_the_library_is_mended(shop, name):
    """Each of these scripts measures the defect itself, and not a version."""
    defect = DEFECTS[name]
    assert prove.look_for(shop, defect).state == "present"
    output, log = shop.folder / f"{name}-mended" / "measured.json", shop.folder / f"{name}-mended" / "log"
    output.parent.mkdir()
    shop.ranks.check(mended.measure, name, str(output), world_size=defect.ranks, log=log)
    assert json.loads(output.read_text())["present"] is False


@pytest.mark.every
@pytest.mark.parametrize("name", DEFECTS)
def test_every_known_defect_is_in_the_pinned_stack_or_mended_there(shop, name):
    """When one is absent, upstream has mended it: say since when, and remove its work-around where there is one."""
    shop = replace(shop, folder=shop.folder / "all")
    shop.folder.mkdir(exist_ok=True)
    found = prove.look_for(shop, DEFECTS[name])
    assert found.state == ("absent" if DEFECTS[name].right_since else "present"), found.detail


@pytest.mark.every
def test_every_technique_trains_what_plain_pytorch_trains(shop, tmp_path):
    shop = replace(shop, folder=tmp_path)
    prove.prepare(shop, TECHNIQUES)
    found = [prove.prove(shop, technique) for technique in TECHNIQUES]
    on_gpus = {"varlen", "flex", "flash2", "flash3", "flash4", "compiled", "liger"}
    assert {one.name for one in found if one.state != "equal"} == on_gpus
    assert {one.detail for one in found if one.state != "equal"} == {"needs a GPU"}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_reproduction_needs_nothing_of_the_project(name):
    defect = DEFECTS[name]
    tree = ast.parse(defect.script)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any(getattr(node, "level", 0) for node in imports)
    roots = {alias.name for node in imports for alias in node.names if isinstance(node, ast.Import)}
    roots |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    allowed = {"accelerate", "deepspeed", "peft", "torch", "transformers"} | set(sys.stdlib_module_names)
    assert {name.split(".")[0] for name in roots} <= allowed
    assert defect.title.endswith(".") and defect.text and 1 <= defect.ranks <= 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_any_number_of_ranks_shares_the_batch(tmp_path, ranks):
    for technique in TECHNIQUES:
        assert (CONFIGS / technique.config).is_file()
        if ranks < technique.smallest:
            assert technique.lacks(ranks, gpus=0) == f"needs {technique.smallest} ranks"
            continue
        count = technique.ranks(ranks)
        assert technique.smallest <= count <= ranks
        recipe = technique.recipe(tmp_path, tmp_path, count)
        assert gradient_accumulation_steps(recipe, count) >= 1


def test_on_gpus_kernels_are_proven_and_their_substitutes_are_not():
    on_gpus = {name for name, technique in KNOWN.items() if technique.lacks(2, gpus=2) is None}
    on_cpus = {name for name, technique in KNOWN.items() if technique.lacks(2, gpus=0) is None}
    assert on_gpus - on_cpus >= {"varlen", "flex"} and on_cpus - on_gpus == {"varlen_boundaries"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prove", "--gpus", "9"], "doctor.py: --gpus 9: this machine has 2."),
        (["--prove", "--gpus", "0"], "doctor.py: --gpus 0: must be at least 1."),
        (["--prove", "--only", "zero3,zero9"], "doctor.py: --only zero3,zero9: 'zero9' is neither a technique (zero0,"),
        (["--prove", "--reports", "/proc/nowhere"], "doctor.py: --reports /proc/nowhere: "),
        (["--prove", "--only", ","], "doctor.py: --only ,: names nothing to prove; choose among zero0,"),
        (["--measure", "/proc/rates.json"], "doctor.py: --measure /proc/rates.json: "),
        (["--only", "zero3"], "doctor.py: --only zero3: only with --prove; leave it out."),
    ],
)
def test_bad_input_is_answered_in_a_line(monkeypatch, refusal, words, said):
    monkeypatch.setattr(prove, "visible_gpus", lambda: 2)
    printed = refusal("doctor", *words)
    assert printed.startswith(said) and printed.count("\n") == 1


def test_differences_beyond_a_bound_are_named():
    bounds = {"loss": 1e-5, "grad_norm": 1e-4, "weights": 1.0}
    near = {"loss": 1e-7, "grad_norm": 1e-6, "weights": 0.1}
    assert prove.judged(near, bounds)[0] == "equal"
    assert prove.judged(near | {"loss": float("nan")}, bounds)[0] == "different"
    assert prove.judged(near | {"weights": 7.0}, bounds) == ("different", "weights off by 7 x the bound")
