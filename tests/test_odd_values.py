"""Odd values of every override key, on the command line and in recipe.json: refused in a line, or what they say."""

import contextlib
import json
import math
import os
import random
import re
import sys
from pathlib import Path

import pytest

from deepspeed_recipes.commands import main
from deepspeed_recipes.recipe import bounds, overrides, pages
from deepspeed_recipes.recipe.conversions import from_dict, to_dict
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.project import program
from deepspeed_recipes.recipe.recipe import Recipe
from deepspeed_recipes.recipe.samples import TINY_MODEL
from tests import ROOT
from tests.launching import launched
from tests.tiers import tiered

ODD = (
    *("nan", "inf", "-inf", "0", "-1", "1.5", "-0.0", "1e308", "1e-308", "4294967296", "-2147483649"),
    *("9" * 30, "9" * 5000, "0x10", "1_000", "", " ", "none", "None", "null", "true", "False", "TRUE"),
    *("é", "\u202e", "日本", "\udcff", "a\nb", "a\tb", "\x1b[31m", "x" * 300, "/" + "y" * 5000, "[1, 2]", "{}", "{x}"),
    *(
        "../x",
        "~",
        "/",
        "/dev/null",
        ".",
        "http://x",
        "file:///etc/passwd",
        "a,b",
        ",",
        "$(id)",
        "--gpus",
        "*",
        "a=b",
        "%s",
    ),
)
VARIANTS = (
    "full",
    "lora",
    "dpo_lora",
    "kto_lora",
    "orpo_lora",
    "simpo_lora",
    "grpo",
    "distill",
    "classify",
    "embed",
    "reward",
)
KEYS = list(overrides.override_keys())
DRY = ("--gpus", "2", "--dry-run")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Start in an empty folder: some odd values are paths."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["launch.py"])


def check_refusal(said: str) -> None:
    """Check that a message is a user's: short, without a traceback, and without a control character."""
    lines = [line for line in said.splitlines() if line.startswith("launch.py: ")]
    assert lines and "Traceback" not in said, said
    last = said[said.index(lines[-1]) :].strip()
    assert len(last.splitlines()) <= 4 and len(last) < 1500, said
    assert all(character.isprintable() or character == "\n" for character in last), repr(last)


@pytest.mark.parametrize("variant", tiered(VARIANTS, ("dpo_lora",)))
def test_an_odd_value_of_a_key_is_refused_in_a_line_or_taken(variant, tmp_path):
    """All values of all keys are tried in a recipe, and some of some keys in the launcher."""
    page = pages.find("tiny", variant)
    chance = random.Random(variant)
    for key in KEYS:
        for value in ODD:
            try:
                changed = overrides.apply(page, [f"{key}={value}"])
            except UserError as error:
                assert len(str(error).splitlines()) <= 3, error
                continue
            check_meaning(changed, key, value)
            assert from_dict(json.loads(json.dumps(to_dict(changed)))) == changed, key
    for key in chance.sample(KEYS, 8):
        for value in chance.sample(ODD, 2):
            status, said = launched("tiny", variant, f"{key}={value}", *DRY)
            assert status in (0, 2), said
            if status:
                check_refusal(said)


@pytest.mark.every
@pytest.mark.parametrize("key", KEYS)
def test_every_odd_value_goes_through_the_launcher(key):
    method = key.partition(".")[0]
    variant = next((one for one in VARIANTS if one.partition("_")[0] == method), "lora")
    for value in ODD:
        status, said = launched("tiny", variant, f"{key}={value}", *DRY)
        assert status in (0, 2), said
        if status:
            check_refusal(said)


def check_meaning(recipe: Recipe, key: str, text: str) -> None:
    """Check that a value that is taken is what the text says."""
    value = overrides.value_of(recipe, key)
    if isinstance(value, bool):
        assert text.lower() in ("true", "false", "0", "1", "yes", "no", "on", "off"), (key, text, value)
    elif isinstance(value, int | float):
        assert math.isfinite(value) and value == float(text), (key, text, value)
    elif value is None:
        assert text.lower() in ("none", "null"), (key, text)
    else:
        assert value == text, (key, text)


@pytest.mark.parametrize("value", [None, True, 10**30, -1, math.nan, math.inf, "x", "", [], {}, [1], {"a": 1}, "a\0b"])
def test_an_odd_value_in_recipe_json_is_refused_or_taken(value):
    plain = to_dict(pages.find("tiny", "lora"))
    for key in KEYS:
        section, _, name = key.rpartition(".")
        changed = json.loads(json.dumps(plain))
        (changed.setdefault(section, {}) if section else changed)[name] = value
        with contextlib.suppress(UserError):
            from_dict(changed)
    for section in ("lora", "model", "data", "layout", "dpo"):
        if value is not None or section != "lora":
            with pytest.raises(UserError):
                from_dict(plain | {section: value if not isinstance(value, dict) else [value]})


def test_a_bound_is_that_of_the_field_on_every_way_in():
    page = pages.find("tiny", "full")
    for key, value in (("seed", 2**32), ("adam_beta2", 1.5), ("adam_epsilon", -1.0), ("hang_minutes", 99999999999.0)):
        with pytest.raises(UserError, match=f"^{key}=.*: must be (at|above)") as typed:
            overrides.apply(page, [f"{key}={value}"])
        with pytest.raises(UserError) as written:
            from_dict(to_dict(page) | {key: value})
        assert str(typed.value) == str(written.value)
    assert overrides.apply(page, [f"seed={2**32 - 1}"]).seed == 2**32 - 1


def test_each_side_of_a_bound_is_open_or_closed():
    for bound, inside, outside in (
        (bounds.Bounds(least=1), (1, 2), (0, -1)),
        (bounds.Bounds(above=0), (1e-9,), (0, -1)),
        (bounds.Bounds(most=1), (1, 0), (2,)),
        (bounds.Bounds(least=0, below=1), (0, 0.5), (1, -1)),
        (bounds.Bounds(least=0.01, zero=True), (0, 0.01), (0.001, -1)),
        (bounds.Bounds(least=0, steps=True), (0, 0.5, 1.0, 7), (1.5, 2.5)),
    ):
        assert not any(bound.broken_by(value) for value in inside)
        assert all(bound.broken_by(value) for value in outside)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("hang_minutes=1e-12", "at least 0.01 and at most 525600, or 0"),
        ("schedule.warmup=2.5", "from 1 on a whole number of steps"),
        ("adam_beta2=0", "above 0 and below 1"),
        ("wandb.tags=,", "names nothing"),
        ("tracking=, ,", "names nothing"),
        ("data.path=,", "names nothing"),
        ("wandb.project=a/b", "none of /"),
        (f"wandb.project={'x' * 129}", "128 characters"),
        (f"wandb.tags=a,{'x' * 65}", "64 characters"),
    ],
)
def test_what_would_mean_nothing_or_fail_later_is_refused(word, said):
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        overrides.apply(pages.find("tiny", "full"), [word])
    assert str(caught.value).startswith(word.partition("=")[0])
    overrides.apply(pages.find("tiny", "full"), ["hang_minutes=0", "schedule.warmup=2.0", "wandb.tags=a,,b"])
    overrides.apply(pages.find("tiny", "full"), ["wandb.project=/Shared/x", "tracking=mlflow"])


ODD_OPTIONS = {
    "launch": (("tiny", "full", "--dry-run"), ("--gpus", "--max-restarts", "--nodes")),
    "plan": (
        ("llama3-8b", "--gpu", "H100"),
        ("--gpus", "--nodes", "--gpu-memory", "--host-memory", "--sequence-length"),
    ),
    "check": (("c.json",), ("--world-size", "--gpu-memory", "--sequence-parallel", "--pipeline", "--model")),
    "resolve": (("zero3.json",), ("--world-size", "--model")),
    "shrink": ((str(TINY_MODEL), "--output", "o"), ("--layers", "--intermediate", "--hidden")),
    "generate": ((str(TINY_MODEL), "hi"), ("--max-new-tokens", "--temperature", "--top-p", "--top-k")),
    "benchmark": (("overhead",), ("--minutes", "--rounds", "--gpus", "--micro-batch", "--length")),
}


@pytest.mark.parametrize("command", tiered(ODD_OPTIONS, ("check", "resolve", "shrink")))
def test_an_odd_value_of_an_option_is_refused_in_a_line(command, capsys):
    Path("c.json").write_text('{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}')
    words, options = ODD_OPTIONS[command]
    for option in options:
        for value in ("nan", "-1", "x", "", " ", "-inf", "9" * 30):
            try:
                status = main.run(command, [*words, f"{option}={value}"])
            except SystemExit as end:
                status = end.code
            said = capsys.readouterr().err
            assert status == 2, (option, value, said)
            assert said.startswith(f"{program(command)}: ") and len(said.strip().splitlines()) <= 3, said


REFUSED = {
    "doctor --checkpoint-gib 0": "--checkpoint-gib 0: must be above 0.",
    "doctor --json dir": "--json dir: a folder, not a file; name a file.",
    "doctor --json /": "--json /: a folder, not a file; name a file.",
    "doctor --json file/below": "--json file/below: Not a directory; name a folder.",
    "doctor --json /proc/nothing": "--json /proc/nothing: No such file or directory; check its name and the folders",
    "doctor --prove --json dir": "--json dir: a folder, not a file; name a file.",
    "doctor --prove --reports file": "--reports file: a file, not a folder; name a folder.",
    "doctor --hostfile binary": "--hostfile binary: not UTF-8 text.",
    "doctor --hostfile empty": "empty: no hosts; write one `name slots=8` per line.",
    "doctor --hostfile users": "users:1: ada@node1: a hostfile has names and IPv4 addresses only; write",
    "benchmark packing --output file": "--output file: a file, not a folder; name a folder.",
    "doctor --prove --nvme dir": "--nvme dir: not with --prove; leave it out.",
    "doctor --prove --build": "--build: not with --prove; leave it out.",
    "doctor --only zero3": "--only zero3: only with --prove; leave it out.",
    "generate TINY hi --model x": "--model x: only with --server; leave it out.",
    "evaluate TINY --model x": "--model x: only with a server's address; leave it out.",
    "evaluate TINY --include dir": "--include dir: only with --tasks; leave it out.",
    "evaluate TINY --tasks arc --metric loss": "--metric loss: --tasks have their own examples and metrics",
    "export TINY --output new --limit 5": "--limit 5: only with --quantize or --gguf, which measure; leave it out.",
    "export TINY --output new --quantize nf4 --weight 2": "--weight 2: only with --add; leave it out.",
    "benchmark packing --rounds 3": "--rounds 3: only overhead and scaling read it; leave it out.",
    "report --output new.html": "--output new.html: name the run folders that the report is of.",
    "report dir --output dir": "--output dir: a folder, not a file; name a file.",
    "sweep tiny full seed=1,2 --gpus 0": "--gpus 0: must be at least 1.",
    "sweep tiny full seed=1,2 --max-restarts -1": "--max-restarts -1: must be at least 0.",
    "sweep tiny full seed=1,2 --most 0": "--most 0: must be at least 2.",
    "sweep tiny full learning_rate=1e-4,nan": "learning_rate=nan: must be ",
    "shrink TINY --layers 2 --output file": "file: a file, not a folder; name a folder.",
    "shrink TINY --layers 2 --output caf\udce9": "control characters, or not UTF-8; choose another name.",
    "export TINY --output \x1b[31m": "control characters, or not UTF-8; choose another name.",
    "export TINY --output loop": "loop",
    "serve TINY --log dir": "--log dir: a folder, not a file; name a file.",
    "serve TINY --host \udcff": "choose another with --host or --port N.",
    f"serve TINY --name {'x' * 300}": "use a short name without a slash",
    "evaluate TINY --data unreadable": "unreadable: Input/output error; try again once the disk or the server answers.",
    "publish wide a/b": "wide: not a model folder",
}


@pytest.mark.parametrize("words", REFUSED)
def test_an_option_that_cannot_be_met_is_refused_before_the_work(words, capsys, monkeypatch):
    for name in ("dir", "wide"):
        Path(name).mkdir()
    Path("file").write_text("text")
    Path("empty").write_text("# none\n")
    Path("binary").write_bytes(b"\xff\xfe\0")
    Path("users").write_text("ada@node1 slots=8\n")
    Path("loop").symlink_to("loop")
    Path("unreadable").symlink_to("/proc/self/mem")
    before = sorted(Path().iterdir())
    listed = Path.rglob  # our own modules list their folder when they are imported
    bad = "all of a disk is listed"
    monkeypatch.setattr(Path, "rglob", lambda at, *to: listed(at, *to) if ROOT in at.parents else pytest.fail(bad))
    command, *rest = [str(TINY_MODEL) if word == "TINY" else word for word in words.split()]
    assert main.run(command, rest) == 2
    said = capsys.readouterr()
    assert REFUSED[words] in said.err and len(said.err.strip().splitlines()) <= 3, said.err
    assert said.err.startswith(f"{program(command)}: ") and not said.out, said.out
    assert sorted(Path().iterdir()) == before


def test_a_system_prompt_may_be_empty_and_no_other_value(capsys):
    for words in (["--include", ""], ["--time="], ["--master-addr", " "]):
        with pytest.raises(SystemExit):
            main.run("launch", ["tiny", "full", *words])
        assert f"{words[0].rstrip('=')}: the value is missing" in capsys.readouterr().err


@pytest.mark.parametrize("command", main.COMMANDS)
def test_a_file_without_an_end_is_refused_and_not_waited_for(command, refusal):
    """A pipe would be opened by many readers, some of them other libraries."""
    os.mkfifo("pipe")
    for words in (["pipe"], ["tiny", "full", "data.path=a.jsonl,pipe"], ["x", "--model=pipe"], ["--adapter=x=pipe"]):
        assert "pipe: a named pipe, not a file; name a file." in refusal(command, *words)
    assert "/dev/zero: a device, not a file; name a file." in refusal(command, "--hostfile=/dev/zero")


@pytest.mark.parametrize("command", ["check", "resolve"])
def test_a_models_config_is_a_file_that_ends_and_is_not_nested_without_end(command, refusal):
    Path("deep.json").write_text("[" * 100_000 + "]" * 100_000)
    Path("model").mkdir()
    os.mkfifo("model/config.json")
    for value, said in (
        ("/dev/zero", "/dev/zero: a device, not a file"),
        ("model", "model/config.json: a named pipe"),
        ("deep.json", "deep.json: not JSON (nested too deeply)"),
        ("gone/config.json", "gone"),
    ):
        assert said in refusal(command, "zero3.json", "--model", value)


def test_what_a_shell_writes_into_is_read(capsys):
    """A shell's <(...) is a pipe, too, and /dev/null is an empty file."""
    reader, writer = os.pipe()
    os.write(writer, b'{"train_micro_batch_size_per_gpu": 1}')
    os.close(writer)
    assert main.run("check", [f"/dev/fd/{reader}", "--trainer", "plain"]) == 0
    os.close(reader)
    assert main.run("check", ["/dev/null"]) == 2
    assert "the file is empty" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [("resolve", "{}"), ("plan", "llama3-8b", "--gpus", "{}"), ("check", "--format", "{}")]
)
def test_a_message_neither_steers_the_terminal_nor_fills_it(words, capsys):
    for value in ("x" * 5000, "9" * 5000, "\x1b[31mred\x1b]0;title\x07", "\u202e", "caf\udce9"):
        with contextlib.suppress(SystemExit):
            assert main.run(words[0], [word.format(value) for word in words[1:]]) == 2
        said = capsys.readouterr().err
        assert 10 < len(said) < 1000 and all(one.isprintable() or one == "\n" for one in said), ascii(said)


@pytest.mark.parametrize("name", ["caf\udce9", "a\nb", "\x1b[31m"])
def test_a_sweeps_folder_has_a_name_that_its_trials_can_have(name, refusal):
    words = ["tiny", "full", "learning_rate=1e-3,2e-3", "--output-dir", name]
    assert "control characters, or not UTF-8; choose another name." in refusal("sweep", *words)
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("launch", "tiny", "full", "--dry-run", "--gpus", "2", "--gpus", "3"),
        ("plan", "tiny", "--gpus", "2", "--nodes", "1", "--gpus=3"),
        ("generate", "folder", "--temperature", "1", "--temperature", "0.5"),
        ("serve", "folder", "--port", "1", "--port", "2"),
        ("export", "folder", "--output", "one", "--output", "two"),
    ],
    ids=lambda words: words[0],
)
def test_an_option_with_two_values_is_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.run(words[0], [*words[1:]])
    assert "given twice, as " in capsys.readouterr().err


def test_an_option_may_be_repeated_with_the_same_value(capsys):
    assert main.run("launch", ["tiny", "full", "--dry-run", "--gpus", "2", "--gpus", "2"]) == 0


@pytest.mark.parametrize(
    ("value", "text"), [("a\x1b[2J", "a\\x1b[2J"), ("\x00", "\\x00"), (None, "none"), (True, "true")]
)
def test_a_value_is_shown_without_what_a_terminal_obeys(value, text):
    assert bounds.shown(value) == text
