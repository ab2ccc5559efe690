"""The structure of the house: which way imports run, and that what is pinned is what is installed and tested."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from recipes.spec.pages import ROOT, families

LAYERS = {
    "spec": set(),
    "zero_config": {"spec"},
    "machine": set(),
    "planning": {"spec"},
    "training": {"spec"},
    "launching": {"spec", "machine", "training", "zero_config"},
    "samples": set(),
}
"""What each package of `recipes` may import from the others."""


def imports(path: Path) -> set[str]:
    """Return the dotted names of all modules that a file or a notebook imports, at any depth."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def packages_of(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("recipes.")}


@pytest.mark.parametrize("package", [name for name in LAYERS if (ROOT / "recipes" / name).is_dir()])
def test_imports_run_one_way(package):
    files = list((ROOT / "recipes" / package).rglob("*.py"))
    for file in files:
        used = imports(file)
        assert packages_of(used) <= LAYERS[package] | {package}, file
        assert not any(name.split(".")[0] in ("scripts", "tests") for name in used), file


def test_notebooks_import_the_project_and_nothing_imports_them():
    notebooks = list((ROOT / "notebooks").glob("*.ipynb"))
    for file in notebooks:
        used = imports(file)
        assert packages_of(used) and packages_of(used) <= {"training", "planning", "spec"}, file
        assert not any(name.split(".")[0] in ("scripts", "tests") for name in used), file
    for file in [*(ROOT / "recipes").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        assert not any(name.split(".")[0] == "notebooks" for name in imports(file)), file


def test_pages_import_only_the_vocabulary():
    assert len(families()) >= 1
    for family in families():
        allowed = {"dataclasses.replace"}
        used = imports(ROOT / "recipes" / f"{family}.py")
        assert all(name in allowed or name.startswith("recipes.spec.") for name in used), family


def test_the_vocabulary_is_standard_library_only():
    for file in (ROOT / "recipes" / "spec").glob("*.py"):
        roots = {name.split(".")[0] for name in imports(file)}
        assert roots <= set(sys.stdlib_module_names) | {"recipes"}, file


def test_a_forbidden_import_is_noticed(tmp_path):
    page = tmp_path / "page.py"
    page.write_text("def f():\n    from recipes.training import run\n    import torch\n")
    assert packages_of(imports(page)) == {"training"} and "torch" in imports(page)


def test_every_requirement_is_pinned_and_installed_at_its_pin():
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert len(pins) > 80
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["test"]
    assert set(wanted) <= set(pins)
    if Path(sys.prefix) == ROOT / ".venv":
        for name, pin in pins.items():
            assert version(name).split("+")[0] == pin, name


def test_no_file_is_larger_than_8_mb_and_lint_is_clean():
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in tracked.split("\0") if name]
    assert len(files) > 30
    assert all(file.stat().st_size <= 8 * 2**20 for file in files if file.exists())
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
