"""The notebooks, executed from top to bottom at smaller settings in a kernel of this very interpreter."""

import os
import re
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from recipes.spec.project import CHECKOUT as ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXTRACT = ROOT / "recipes" / "samples" / "extract"
ONE_RANK = '["--gpus", "1", "data.max_new_tokens=4", "deepspeed=zero1.json"]'
SMALLER = {
    "first_finetune": {"EPOCHS": "1", "OPTIONS": ONE_RANK},
    "experiment": {"RATES": "[3e-3, 3e-2]", "WIDTH": "64", "LAYERS": "1", "STEPS": "3", "OPTIONS": ONE_RANK},
    "choose_a_config": {},
    "read_the_memory": {},
}
"""What a test puts in the place of a notebook's parameters, as source."""
FOLDERS = {name: ROOT / "notebooks" for name in SMALLER} | {"experiment": ROOT}
"""Where Jupyter was started: both have to work."""


class OnlyThisInterpreter(KernelSpecManager):
    """Knows one kernel, which is registered nowhere: this interpreter."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Return it, whatever the name."""
        return KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])


class Kernel(AsyncKernelManager):
    """A kernel of this interpreter; nbclient makes and ends it."""

    def __init__(self, **options):
        super().__init__(kernel_spec_manager=OnlyThisInterpreter(), **options)


@pytest.fixture
def execute(tmp_path):
    """Return a function that executes a notebook with smaller parameters; what it started ends with the test."""
    for name, lines in (("train.jsonl", 60), ("held_out.jsonl", 20)):
        rows = (EXTRACT / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / name).write_text("".join(rows[:lines]), encoding="utf-8")
    places = {"TRAIN": tmp_path / "train.jsonl", "HELD_OUT": tmp_path / "held_out.jsonl", "RUNS": tmp_path / "runs"}
    # Under pytest a kernel leaves out what subprocesses print; and without the path, the notebook finds the project.
    hidden = ("PYTEST_CURRENT_TEST", "PYTHONPATH", "MPLBACKEND")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}

    def run(name):
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        [parameters] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
        own = {key: f"Path({str(place)!r})" for key, place in places.items()} if SMALLER[name] else {}
        for key, value in (own | SMALLER[name]).items():
            assert re.search(rf"^(\w+, )*{key}(, \w+)* = ", parameters.source, re.MULTILINE), key
            parameters.source += f"\n{key} = {value}"
        folder = {"metadata": {"path": str(FOLDERS[name])}}
        client = NotebookClient(notebook, timeout=240, kernel_manager_class=Kernel, resources=folder)
        client.execute(env=environment)
        return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}

    yield run
    left = [process for process in psutil.process_iter(["cmdline"]) if mentions(process, tmp_path)]
    for process in left:
        process.kill()
    assert not left


def mentions(process, folder: Path) -> bool:
    return any(str(folder) in word for word in process.info["cmdline"] or [])


def text(outputs) -> str:
    """Return what a cell printed and displayed, as text."""
    shown = [output.get("text") or "".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    return "".join(shown)


def images(cells) -> int:
    return sum("image/png" in output.get("data", {}) for outputs in cells.values() for output in outputs)


def test_there_are_four_notebooks_and_each_is_executed():
    assert {path.stem for path in NOTEBOOKS} == set(SMALLER) == set(FOLDERS) and len(NOTEBOOKS) == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_clean_and_leave_training_to_the_project(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3" and notebook.cells[0].cell_type == "markdown"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert all(re.fullmatch(r"[a-z-]+", cell.id) for cell in notebook.cells), "ids that an edit would not change"
    assert not re.search(r"\.backward\(|optimizer\.step|Trainer\(", "\n".join(cell.source for cell in code))


@pytest.mark.every
def test_the_first_fine_tune_shows_answers_before_and_after(execute, tmp_path):
    cells = execute("first_finetune")
    assert images(cells) == 1
    assert "trained      3 steps" in text(cells["train"])
    table = text(cells["after"])
    assert table.count("<tr>") == 6 and "<th>before</th>" in table and "<th>after</th>" in table
    assert re.search(r"exact match on the held-out file: 0\.0% before, \d+\.\d% after", table)
    [run] = (tmp_path / "runs").iterdir()
    assert (run / "my-model" / "model.safetensors").exists()


@pytest.mark.every
def test_the_experiment_ends_with_the_resulting_command(execute, tmp_path):
    cells = execute("experiment")
    assert images(cells) == 1
    rates = {run.name for run in (tmp_path / "runs").iterdir()}
    assert rates == {"rate-0.003", "rate-0.03"}
    sync = text(cells["compare"]).partition("wandb sync ")[2].split()
    assert len(sync) == 2 and all(list(Path(folder).glob("*.wandb")) for folder in sync)
    command = text(cells["choice"]).splitlines()[-1]
    assert re.match(r"python scripts/launch\.py llama3-8b lora learning_rate=\d\.\de-\d\d data\.path=", command)


def test_the_choice_ends_with_a_command_and_a_picture(execute):
    cells = execute("choose_a_config")
    assert images(cells) == 1
    assert "python scripts/launch.py llama3-8b full --gpus 8 deepspeed=" in text(cells["search"])
    assert "zero0.json: Does not fit: " in text(cells["why"])
    methods = re.findall(r"^ *(\w+): +([\d.]+) GiB", text(cells["methods"]), re.MULTILINE)
    assert [name for name, _ in methods] == ["full", "lora", "qlora"]


def test_every_switch_of_the_memory_shows_in_the_bar(execute):
    cells = execute("read_the_memory")
    assert images(cells) == 5

    def needs(cell):
        return [float(size) for size in re.findall(r"([\d.]+) GiB  host", text(cells[cell]))]

    stages, (without, with_checkpointing), offload = needs("stages"), needs("checkpointing"), needs("offload")
    assert stages == sorted(stages, reverse=True) and len(stages) == 4
    assert with_checkpointing < without and offload[1] < offload[0] and offload[4] < offload[3] < offload[2]
    full, lora, qlora = needs("methods")
    assert qlora < lora < full
    assert needs("lengths")[0] < needs("lengths")[1] < needs("lengths")[2] > needs("lengths")[3]
