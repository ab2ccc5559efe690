"""The strict parser: its messages and their positions, and that no input makes it crash."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_recipes.commands import main
from deepspeed_recipes.config.lint import lint
from deepspeed_recipes.config.read import Unreadable, parse, read
from tests.tiers import examples

ROOT = Path(__file__).resolve().parents[1]

PROBLEMS = [
    ('{"a": 1, "a": 2}', "duplicate", 1, 10),
    ('{"a": {"b": 1,\n  "b": 1}}', "duplicate", 2, 3),
    ('{"a": 1 // why\n}', "comment", 1, 9),
    ('{\n  # why\n"a": 1}', "comment", 2, 3),
    ('{"a": /* why */ 1}', "comment", 1, 7),
    ('{"a": NaN}', "not-a-number", 1, 7),
    ('{"a": -Infinity}', "not-a-number", 1, 7),
    ('{"a": 1e999}', "not-a-number", 1, 7),
    ('{"a": [1, 2,]}', "trailing-comma", 1, 12),
    ('{"a": 1\n "b": 2}', "missing-comma", 1, 8),
    ('{"a": 1,\n}', "trailing-comma", 1, 8),
    ('{"a": True}', "python-word", 1, 7),
]

UNREADABLE = [
    (b"", 1, 1, "empty"),
    (b" \n ", 1, 1, "empty"),
    (b"[1]", 1, 1, "expected an object"),
    (b"{a: 1}", 1, 2, "double quotes"),
    (b"{'a': 1}", 1, 2, "double quotes"),
    (b'{"a" 1}', 1, 6, "colon"),
    (b'{"a": 1 "b": 2}', 1, 9, "comma"),
    (b'{"a": 1', 1, 8, "ends before the }"),
    (b'{"a": yes}', 1, 7, "is not a JSON value"),
    (b'{"a": "x\ny"}', 1, 7, "not closed"),
    (b'{"a": "\\x"}', 1, 7, "escape"),
    (b'{"a": 01}', 1, 7, "expected a value"),
    (b'{"a": 1} x', 1, 10, "after the end"),
    (b'{"a": "\xff"}', 1, 8, "not UTF-8"),
    (b'\n{"a": "\xff"}', 2, 8, "not UTF-8"),
    (b'\xef\xbb\xbf{"a": 1}', 1, 1, "byte order mark"),
    (b"\x00\x01", 1, 1, "expected a value"),
    (b"[" * 10_000, 1, 65, "nested deeper"),
    (b'{"a":' * 10_000, 1, 321, "nested deeper"),
    (b'"' * 1_000_000, 1, 3, "after the end"),
]


@pytest.mark.parametrize(("text", "kind", "line", "column"), PROBLEMS)
def test_what_strict_json_forbids_is_reported_with_its_position(text: str, kind: str, line: int, column: int):
    (problem,) = parse(text).problems
    assert (problem.kind, problem.line, problem.column) == (kind, line, column)


@pytest.mark.parametrize(("data", "line", "column", "words"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_unreadable_input_is_reported_with_its_position(data: bytes, line: int, column: int, words: str):
    with pytest.raises(Unreadable, match=words) as caught:
        parse(data)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert "\n" not in caught.value.what


def test_a_mistake_does_not_hide_the_next():
    text = '{"a": 1, // one\n "a": 2,\n "b": NaN,}'
    kinds = [problem.kind for problem in parse(text).problems]
    assert kinds == ["comment", "duplicate", "not-a-number", "trailing-comma"]


def test_every_key_has_its_position():
    places = parse('{\n "a": {"b": [1,\n {"c": 2}]}}').places
    assert places[("a",)] == (2, 2)
    assert places[("a", "b")] == (2, 8)
    assert places[("a", "b", 1)] == (3, 2)
    assert places[("a", "b", 1, "c")] == (3, 3)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), values))
def test_it_reads_what_python_writes(config: dict):
    for indent in (None, 2):
        document = parse(json.dumps(config, indent=indent))
        assert document.value == config
        assert document.problems == ()


@settings(max_examples=examples(500))
@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:1truefalsnu/#*-. \n\\').map(str.encode))
def test_any_bytes_are_a_document_or_unreadable(data: bytes):
    try:
        document = parse(data)
    except Unreadable as error:
        assert error.line >= 1
        assert error.column >= 1
    else:
        assert isinstance(document.value, dict)


@settings(max_examples=examples(300))
@given(st.dictionaries(st.text(), values))
def test_the_linter_accepts_any_object(config: dict):
    for trainer in ("hf", "plain"):
        lint(config, trainer=trainer, world_size=4, gpu_memory_gib=24, model={"hidden_size": 8})


def test_ten_megabytes_of_random_bytes(tmp_path: Path):
    file = tmp_path / "noise.json"
    file.write_bytes(os.urandom(10 * 2**20))
    with pytest.raises(Unreadable, match="larger than"):
        read(file)


@pytest.mark.parametrize("path", ["nowhere.json", ".", "\0"])
def test_a_path_without_a_file(path: str):
    with pytest.raises(Unreadable):
        read(path)


def test_the_command_reports_positions_and_exit_statuses(tmp_path: Path, capsys):
    def checked(*arguments: str) -> tuple[int, str, str]:
        return main.run("check", [*arguments]), *capsys.readouterr()

    good, bad, broken = (tmp_path / name for name in ("good.json", "bad.json", "broken.json"))
    good.write_text((ROOT / "configs" / "zero2.json").read_text())
    bad.write_text('{"train_batch_size": 8,\n  "gradient_cliping": 1.0}')
    broken.write_bytes(b"{" * 10_000)
    assert checked(str(good))[0] == checked("zero3")[0] == 0, "configs/ has the second"
    status, out, _ = checked(str(bad), "--trainer", "plain")
    assert status == 1
    assert f"{bad}:2:3: error: gradient_cliping = 1.0" in out
    assert "did you mean `gradient_clipping`?" in out
    status, out, _ = checked(str(broken), str(good))
    assert status == 2
    assert f"{broken}:1:2: cannot be read" in out
    for expected, file in ((0, good), (2, broken), (1, bad)):
        status, out, err = checked(str(file), "--json", "--trainer", "hf" if file == good else "plain")
        assert json.loads(out)[0]["status"] == status == expected
        assert err == ""
    (finding,) = json.loads(out)[0]["findings"]
    assert (finding["rule"], finding["key"], finding["line"]) == ("misspelt-key", "gradient_cliping", 2)
    assert {"severity", "value", "what", "fix"} <= set(finding)


def test_linting_is_fast_and_imports_no_torch():
    code = (
        "import sys; sys.argv = ['check', 'configs/zero3.json']; sys.path.insert(0, 'scripts');"
        "import runpy\ntry: runpy.run_path('scripts/check_config.py', run_name='__main__')\n"
        "except SystemExit: pass\nassert not {'torch', 'deepspeed', 'pydantic'} & set(sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: a loaded machine changes it little. About 0.2 s.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
