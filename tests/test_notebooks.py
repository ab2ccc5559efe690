"""The notebooks: what they show is what executing them, at smaller settings, gives."""

import re
import sys
from pathlib import Path

import nbformat
import psutil
import pytest

from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.project import SAMPLES
from tests import ROOT, notebooks
from tests.notebooks import NOTEBOOKS, kinds

EXTRACT = SAMPLES / "extract"
ONE_RANK = '["--gpus", "1", "data.max_new_tokens=4", "deepspeed=zero1.json"]'
SMALLER = {
    "first_finetune": {"EPOCHS": "1", "OPTIONS": ONE_RANK},
    "experiment": {
        **{"RATES": "[3e-3, 3e-2]", "SEEDS": "[1, 2]", "WIDTH": "64", "LAYERS": "1", "STEPS": "3"},
        "OPTIONS": ONE_RANK,
    },
    "choose_a_config": {},
    "read_the_memory": {},
    "zero_stages": {"STEPS": "3"},
    "why_is_my_run_slow": {"PROFILE, STEPS": '"3:4", 4'},
    "your_own_code": {"STEPS": "6", "EXAMPLES": "4", "OPTIONS": ONE_RANK},
    "lora_rank": {"RANKS": "[2, 4]", "STEPS": "2", "EXAMPLES": "4"},
    "distil_and_quantise": {"STEPS": "3", "EXAMPLES": "4", "OPTIONS": ONE_RANK},
}
"""What a test puts in the place of a notebook's parameters, as source."""
OWN = {"first_finetune": ("TRAIN", "HELD_OUT", "RUNS"), "experiment": ("TRAIN", "HELD_OUT", "RUNS")}
OWN |= {"your_own_code": ("TRAIN", "HELD_OUT", "RUNS")}
OWN |= dict.fromkeys(("why_is_my_run_slow", "zero_stages", "lora_rank", "distil_and_quantise"), ("RUNS",))
"""The paths that a test replaces."""
FOLDERS = {name: ROOT / "notebooks" for name in SMALLER} | {"experiment": ROOT}
"""Where Jupyter was started: both have to work."""
EXACT = ("choose_a_config", "read_the_memory")
"""Notebooks whose text is the same on every machine: they measure nothing."""

CHOSEN = ("gemma3_vision", "gpt2", "mixtral")
"""Families that lack what the notebooks show of Llama: 4 bits, or sequence parallelism."""


@pytest.fixture
def execute(tmp_path):
    """Return a function that executes a notebook with smaller parameters; what it started ends with the test."""
    for name, lines in (("train.jsonl", 60), ("held_out.jsonl", 20)):
        rows = (EXTRACT / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / name).write_text("".join(rows[:lines]), encoding="utf-8")
    places = {"TRAIN": tmp_path / "train.jsonl", "HELD_OUT": tmp_path / "held_out.jsonl", "RUNS": tmp_path / "runs"}

    def run(name):
        notebook = read(name)
        [parameters] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
        own = {key: f"Path({str(places[key])!r})" for key in OWN.get(name, ())}
        for key, value in (own | SMALLER[name]).items():
            assert re.search(rf"^(\w+, )*{key}(, \w+)* = ", parameters.source, re.MULTILINE), key
            parameters.source += f"\n{key} = {value}"
        notebooks.execute(notebook, FOLDERS[name])
        notebooks.clean(notebook)
        found = notebooks.outputs(notebook)
        agree(found, committed(name), exactly=name in EXACT)
        return found

    yield run
    left = [process for process in psutil.process_iter(["cmdline"]) if mentions(process, tmp_path)]
    for process in left:
        process.kill()
    assert not left


def read(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def committed(name):
    return notebooks.outputs(read(name))


def agree(found, shown, exactly):
    """Compare the outputs of an execution with those that are committed: their kinds, and the text if `exactly`."""
    assert {name: kinds(outputs) for name, outputs in found.items()} == {
        name: kinds(outputs) for name, outputs in shown.items()
    }
    if exactly:
        assert {name: text(outputs) for name, outputs in found.items()} == {
            name: text(outputs) for name, outputs in shown.items()
        }


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(
    "family",
    [name if name in CHOSEN else pytest.param(name, marks=pytest.mark.every) for name in pages.families()],
)
def test_the_planning_notebooks_work_for_every_family(family, name, monkeypatch, capsys):
    """Runs the cells without a kernel, with another model in the first line of the parameters."""
    monkeypatch.chdir(ROOT / "notebooks")
    monkeypatch.setattr("IPython.display.display", lambda *_: None)
    model, space = f"{family}-{next(iter(pages.page(family).SIZES))}", {}
    code = [cell.source for cell in read(name).cells if cell.cell_type == "code"]
    changed = [source.replace('MODEL = "llama3-8b"', f"MODEL = {model!r}") for source in code]
    assert changed != code
    exec("\n".join(changed), space)
    assert "GiB" in capsys.readouterr().out


def mentions(process, folder: Path) -> bool:
    return any(str(folder) in word for word in process.info["cmdline"] or [])


def text(outputs) -> str:
    """Return what a cell printed and displayed, as text."""
    shown = [output.get("text") or "".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    return "".join(shown)


def images(cells) -> int:
    return sum("image/png" in output.get("data", {}) for outputs in cells.values() for output in outputs)


def test_there_are_nine_notebooks_and_each_is_executed():
    assert {path.stem for path in NOTEBOOKS} == set(SMALLER) == set(FOLDERS) and len(NOTEBOOKS) == 9


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_with_their_outputs_and_leave_training_to_the_project(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3" and notebook.cells[0].cell_type == "markdown"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    executed = [cell.execution_count for cell in code]
    assert executed == list(range(1, len(code) + 1)), "once, in order"
    assert images(notebooks.outputs(notebook)) >= 1 and path.stat().st_size < notebooks.SIZE
    assert all(re.fullmatch(r"[a-z-]+", cell.id) for cell in notebook.cells), "ids that an edit would not change"
    assert not re.search(r"\.backward\(|optimizer\.step|Trainer\(", "\n".join(cell.source for cell in code))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_name_no_place_of_the_machine_that_wrote_them(path):
    shown = nbformat.writes(nbformat.read(path, as_version=4))
    assert not [private for private in notebooks.private() if private in shown]
    assert not re.search(r"/(home|root|Users|tmp|mnt)/", shown)


def test_outputs_are_those_of_any_machine():
    here = f"{sys.executable} {ROOT}/scripts/launch.py\n{sys.prefix}/bin/deepspeed\n"
    here += f"10 %\r100 %\nin {ROOT}, {Path.home()}/x"
    assert notebooks.neutral(here) == "python scripts/launch.py\ndeepspeed\n100 %\nin ., ~/x"


@pytest.mark.parametrize("mistake", ["a lost picture", "another text"])
def test_an_output_that_no_longer_agrees_is_noticed(mistake):
    shown, changed = committed("choose_a_config"), committed("choose_a_config")
    agree(changed, shown, exactly=True)
    if mistake == "a lost picture":
        changed["figure"] = []
    else:
        changed["methods"][0].text = changed["methods"][0].text.replace("GiB", "GB")
    with pytest.raises(AssertionError):
        agree(changed, shown, exactly=True)


@pytest.mark.every
def test_the_first_fine_tune_shows_answers_before_and_after(execute, tmp_path):
    cells = execute("first_finetune")
    check_first_fine_tune(cells)
    assert "trained      3 steps" in text(cells["train"])
    [run] = (tmp_path / "runs").iterdir()
    assert (run / "my-model" / "model.safetensors").exists()


def check_first_fine_tune(cells):
    """Check the table of answers, and return the share of right ones after training, in percent."""
    assert images(cells) == 1
    table = text(cells["after"])
    assert table.count("<tr>") == 6 and "<th>before</th>" in table and "<th>after</th>" in table
    return float(re.search(r"exact match on the held-out file: 0\.0% before, (\d+\.\d)% after", table)[1])


@pytest.mark.every
def test_the_experiment_ends_with_the_resulting_command(execute, tmp_path):
    cells = execute("experiment")
    check_experiment(cells, 4)
    assert len(list((tmp_path / "runs").glob("trial-*/summary.json"))) == 4
    sync = text(cells["compare"]).partition("wandb sync ")[2].split()
    assert all(list(Path(folder).glob("*.wandb")) for folder in sync)


def check_experiment(cells, count):
    """Check the picture, a record for W&B per run, each rate's spread, and the resulting command."""
    assert images(cells) == 1 and "spread" in text(cells["compare"])
    assert len(text(cells["compare"]).partition("wandb sync ")[2].split()) == count
    command = text(cells["choice"]).splitlines()[-1]
    assert re.match(r"python scripts/launch\.py llama3-8b lora learning_rate=\d\.\de-\d\d data\.path=", command)


@pytest.mark.every
def test_stages_and_layouts_learn_the_same_and_hold_less(execute):
    check_stages(execute("zero_stages"))


def check_stages(cells):
    """Check what ranks hold in each way, and that the losses agree; return the tokens per second of each."""
    held = {name: list(map(float, sizes.split())) for name, sizes in ROW.findall(text(cells["memory"]))}
    assert len(held) == 7 and images(cells) == 1
    whole, states = held["ZeRO-0"][0], held["ZeRO-0"][2]
    # Half of the moments, and half of the copy of the weights that ZeRO updates.
    assert held["ZeRO-1"][2] == pytest.approx((states + whole) / 2, rel=0.02) and held["ZeRO-1"][0] == whole
    assert held["ZeRO-3"][0] == pytest.approx(whole / 2, rel=0.05)
    assert max(held["tensor 2"][:2]) < whole and max(held["pipeline 2"][:2]) < whole
    losses = {
        name: list(map(float, found.replace(",", "").split())) for name, found in ROW.findall(text(cells["loss"]))
    }
    assert len(losses) == 7 and max(found[2] for found in losses.values()) < 1e-3
    return [found[3] for found in losses.values()]


ROW = re.compile(r"^(\S+(?: \S+)?)  +([\d.,e+-]+(?: +[\d.,e+-]+)+)$", re.MULTILINE)
"""A row of a table that pandas prints: a name of one or two words, and numbers."""


@pytest.mark.every
def test_the_slow_runs_are_explained(execute):
    check_slow_runs(execute("why_is_my_run_slow"))


def check_slow_runs(cells):
    """Check verdicts, picture and tables; return how many times faster each change has made its run."""
    for name in ("healthy", "small", "stages"):
        assert re.match(r"[\w -]+: .+\nwhat to change: .+", text(cells[name])), name
    assert "healthy: it computes " in text(cells["healthy"])
    assert images(cells) == 1 and "predicted_bytes" in text(cells["where"]) and "all-gather" in text(cells["where"])
    return [float(times) for times in re.findall(r"tokens/s, ([\d.]+) times", text(cells["change"]))]


@pytest.mark.every
def test_the_readers_own_code_is_used(execute):
    check_own_code(execute("your_own_code"))


def check_own_code(cells):
    """Check that a mistake is named with its line, and that each piece of code has left its mark."""
    assert images(cells) == 1
    said = text(cells["mistake"])
    assert re.search(r"AttributeError: .*wrong\.py:2\)", said) and "exit status 2" in said
    assert "dropped by data.transform" in text(cells["train"])
    assert re.search(r"fields on \d+ held-out examples: [\d.]+ -> [\d.]+$", text(cells["train"]).strip())
    for name in ("fields_right", "fields_all", "loss_in_bits", "data.transform", "callbacks"):
        assert name in text(cells["read"]), name


@pytest.mark.every
def test_ranks_differ_in_what_they_hold(execute):
    check_ranks(execute("lora_rank"))


def check_ranks(cells):
    """Check that states and exports grow with the rank; return the held-out losses after training."""
    rows = {name: list(map(float, numbers.split())) for name, numbers in ROW.findall(text(cells["compare"]))}
    states, sizes, before, after, *_ = zip(*rows.values(), strict=True)
    assert list(states) == sorted(states) and list(sizes) == sorted(sizes) and len(set(before)) == 1
    assert images(cells) == 1 and [*rows][-1] == "all weights"
    return before[0], after


@pytest.mark.every
def test_a_student_is_distilled_and_quantised(execute):
    check_distilled(execute("distil_and_quantise"))


def check_distilled(cells):
    """Check that both ways began at one loss and copies are smaller; return what answers and teacher taught."""
    rows = {name: list(map(float, numbers.split())) for name, numbers in ROW.findall(text(cells["compare"]))}
    (start, answers, *_), (same, teacher, *_) = rows["answers alone"], rows["teacher"]
    assert start == same and images(cells) == 1
    sizes = [list(map(float, each)) for each in re.findall(r"([\d.]+) -> ([\d.]+) MiB", text(cells["quantise"]))]
    [(whole, int8), (again, nf4)] = sizes
    assert whole == again > int8 > nf4
    return answers, teacher


def check_choice(cells):
    """Check the picture, the command, and the methods."""
    assert images(cells) == 1
    assert "python scripts/launch.py llama3-8b full --gpus 8 deepspeed=" in text(cells["search"])
    assert "zero0.json: Does not fit: " in text(cells["why"])
    methods = re.findall(r"^ *(\w+): +([\d.]+) GiB", text(cells["methods"]), re.MULTILINE)
    assert [name for name, _ in methods] == ["full", "lora", "qlora"]


def check_memory(cells):
    """Check that every switch shows in the bar."""
    assert images(cells) == 5

    def needs(cell):
        return [float(size) for size in re.findall(r"([\d.]+) GiB at the", text(cells[cell]))]

    stages, (without, with_checkpointing), offload = needs("stages"), needs("checkpointing"), needs("offload")
    assert stages == sorted(stages, reverse=True) and len(stages) == 4
    assert with_checkpointing < without and offload[1] < offload[0] and offload[4] < offload[3] < offload[2]
    full, lora, qlora = needs("methods")
    assert qlora < lora < full
    assert needs("lengths")[0] < needs("lengths")[1] < needs("lengths")[2] > needs("lengths")[3]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_what_is_promised(path):
    cells = committed(path.stem)
    checks = {
        "first_finetune": lambda: check_first_fine_tune(cells) > 50,
        "experiment": lambda: check_experiment(cells, 6),
        "zero_stages": lambda: min(check_stages(cells)) > 100,
        "choose_a_config": lambda: check_choice(cells),
        "read_the_memory": lambda: check_memory(cells),
        "why_is_my_run_slow": lambda: min(check_slow_runs(cells)) > 1.1,
        "your_own_code": lambda: check_own_code(cells) is None,
        "lora_rank": lambda: max(check_ranks(cells)[1]) < check_ranks(cells)[0],
        "distil_and_quantise": lambda: check_distilled(cells)[0] > 2 * check_distilled(cells)[1],
    }
    assert checks[path.stem]() is not False


def test_the_choice_ends_with_a_command_and_a_picture(execute):
    check_choice(execute("choose_a_config"))


def test_every_switch_of_the_memory_shows_in_the_bar(execute):
    check_memory(execute("read_the_memory"))
