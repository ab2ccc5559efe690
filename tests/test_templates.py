"""Templates of job scripts and manifests: every value is quoted, none may be missing, and any text survives."""

import re
import shlex
import subprocess

import jinja2
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_recipes.launching.templates import fill, shell, yaml_block, yaml_scalar
from deepspeed_recipes.recipe.project import PACKAGE

TEMPLATES = sorted((PACKAGE / "launching").rglob("*.jinja"))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
"""Any text but lone surrogates, which no UTF-8 file can hold."""


def test_every_value_in_a_template_passes_through_a_filter():
    assert {path.name for path in TEMPLATES} >= {"job.sbatch.jinja", "manifest.yaml.jinja", "job_spec.yaml.jinja"}
    for path in TEMPLATES:
        kind = path.suffixes[-2]
        # The commands of a SkyPilot task are shell within YAML.
        wanted = {".sbatch": ("shell",), ".py": ("python",)}.get(kind, ("yaml", "yaml_block", "shell"))
        values = re.findall(r"{{(.*?)}}", path.read_text(encoding="utf-8"))
        for value in values:
            assert re.search(r"\| (\w+)(\(\d+\))? $", value)[1] in wanted, (path.name, value)


def test_a_missing_value_is_an_error(tmp_path):
    (tmp_path / "a.jinja").write_text("{{ name | yaml }} {{ other.name | shell }}\n")
    with pytest.raises(jinja2.UndefinedError, match="'name' is undefined"):
        fill(tmp_path / "a.jinja", other={})
    with pytest.raises(jinja2.UndefinedError, match="no attribute 'name'"):
        fill(tmp_path / "a.jinja", name="x", other={})


@given(TEXT)
def test_the_shell_filter_makes_one_word_of_any_text(text):
    assert shlex.split(shell(text)) == [text]


def test_a_shell_reads_what_was_quoted():
    for text in ("a b", "it's", '"$HOME" `id` $(id)', "new\nline", "*", "", "\\", "ä 😀"):
        done = subprocess.run(["bash", "-c", f"printf %s {shell(text)}"], capture_output=True, text=True, check=True)
        assert done.stdout == text


@given(st.one_of(TEXT, st.booleans(), st.integers(), st.none()))
def test_the_yaml_filter_keeps_any_value_on_one_line(value):
    text = yaml_scalar(value)
    assert len(text.splitlines()) == 1 and yaml.safe_load(f"key: {text}\n") == {"key": value}


@given(st.one_of(TEXT, st.lists(TEXT, min_size=2).map("\n".join)), st.integers(1, 8))
def test_a_block_keeps_any_text(text, indent):
    written = f"outer:\n{' ' * indent}key: {yaml_block(text, indent + 2)}\nlast: 1\n"
    assert yaml.safe_load(written) == {"outer": {"key": text}, "last": 1}


def test_json_is_a_block_for_people_to_read():
    assert yaml_block('{\n  "a": 1\n}\n', 4) == '|\n    {\n      "a": 1\n    }'
    assert yaml_block("{}", 4) == "|-\n    {}"
