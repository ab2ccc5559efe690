"""Text of a model's folder, a dataset or an answer is quoted for the language that it lands in."""

import json
import re
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from deepspeed_recipes.commands import generate, serve
from deepspeed_recipes.export.evaluate import harness
from deepspeed_recipes.export.quantize import gguf
from deepspeed_recipes.export.serve import engines, served
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError, printable
from deepspeed_recipes.report.page import Code, Document, Note, Section
from deepspeed_recipes.report.write import render
from deepspeed_recipes.training.model_folder import card
from deepspeed_recipes.training.model_folder.record import Record

HOSTILE = (
    'a"b',
    'a"""b',
    '"',
    "a\nFROM evil\nSYSTEM x",
    "{{ .System }}",
    "{",
    "}}",
    "a | b | c",
    "`code` ```",
    "</script><script>alert(1)</script>",
    "$(touch x) `touch x`",
    "---\nlicense: mit",
    "# heading\n\n- list",
    "[a](javascript:x) ![b](http://x)",
    "\x1b]0;title\x07\x1b[2J",
    "--upload=x",
    "\\",
    "é 数字 😀",
)


def read_as_ollama(text):
    """Return (instruction, value) as Ollama's parser reads a Modelfile: no escapes; a value ends with a line's end."""
    found, waiting = [], ""
    for line in text.split("\n"):
        waiting = f"{waiting}\n{line}" if waiting else line
        name, _, value = waiting.partition(" ")
        if name == "PARAMETER":
            name, _, value = value.partition(" ")
        if value.startswith('"""'):
            if len(value) < 6 or not value.endswith('"""'):
                continue
            value = value[3:-3]
        elif value.startswith('"'):
            value = value[1:-1]
        if waiting:
            found.append((name, value))
        waiting = ""
    assert not waiting, text
    return found


def run_as_go(template, turns):
    """Return what a template of Ollama's gives, by Go's rules for the few actions that ours have."""
    action = r'\{\{ (?:("(?:[^"\\]|\\.)*")|([^"}]+|if eq \.Role "\w+")) \}\}'
    said = ""
    for role, content in turns:
        shown, at, skip = "", 0, False
        for found in re.finditer(action, template):
            literal, word = found[1], found[2]
            between = template[at : found.start()]
            assert "{{" not in between and "}}" not in between, between
            shown += "" if skip else between
            at = found.end()
            if literal:
                shown += "" if skip else json.loads(literal)
            elif word.startswith("if eq"):
                skip = word.split('"')[1] != role
            elif word == "end":
                skip = False
            elif word == ".Content":
                shown += "" if skip else content
            else:
                assert word == "range .Messages", word
        said += shown
    return said


class Tokenizer:
    """A tokenizer whose chat template has a text around each turn."""

    bos_token = None

    def __init__(self, text):
        self.eos_token = self.text = text

    def apply_chat_template(self, turns, tokenize, add_generation_prompt=False):
        return "".join(f"<{turn['role']}>{self.text}{turn['content']}{self.text}" for turn in turns)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_modelfile_holds_any_template(text):
    found = read_as_ollama(gguf.modelfile(Tokenizer(text), "m.gguf"))
    assert [name for name, _ in found] == ["FROM", "TEMPLATE", "stop", "temperature"]
    values = dict(found)
    assert values["stop"] == text
    expected = Tokenizer(text).apply_chat_template([{"role": "user", "content": "Hello"}], False)
    assert run_as_go(values["TEMPLATE"], [("user", "Hello")]) == expected


def test_a_model_without_an_end_has_no_stop():
    assert "stop" not in gguf.modelfile(Tokenizer(None), "m.gguf")


@pytest.mark.parametrize("text", HOSTILE)
def test_a_model_card_holds_any_text(text, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    page = pages.find("tiny", "full")

    def lines(text):
        value = text if text.isprintable() else ascii(text)  # a recipe refuses control characters
        data = replace(page.data, path=f"{value}.jsonl", validation=value)
        recipe = replace(page, data=data, size=value, model=replace(page.model, path=f"/m/{value}"))
        environment = {"packages": {text: text}, "world_size": 2, "gpus": [text], "git_commit": text}
        made = str(card.make(tmp_path, Record(recipe, {"environment": environment}), "OWNER/NAME"))
        assert ModelCard(made).data.to_dict().get("license") is None
        return [line for line in made.partition("\n# ")[2].split("\n") if line.strip() and not line.startswith("    ")]

    same, held = lines("x"), lines(text)
    cells = re.compile(r"(?<!\\)\|")
    assert [len(cells.findall(line)) for line in held] == [len(cells.findall(line)) for line in same], held
    assert not any("<script" in line and "`" not in line and "\\<script" not in line for line in held)
    assert "\x1b" not in "".join(held)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_report_holds_any_text(text):
    page = render(Document(text, text, (Section(text, (Note(text), Code(text, text))),)))
    assert "<script" not in page and "\x1b" not in page and "\x07" not in page


def test_a_terminal_is_steered_by_no_answer(capsys, refusal):
    attack = "\x1b]0;title\x07\x1b[2J\r\x9b1mé\n\u202e"
    generate.chat(lambda turns: iter(attack), [], ["hello"])
    shown = capsys.readouterr().out
    assert not set("\x1b\x07\r\x9b\u202e") & set(shown) and "é\n" in shown
    assert printable("a\tb\nc") == "a\tb\nc"
    assert "\x1b" not in refusal("report", f"/nowhere{attack}")


@pytest.mark.parametrize("name", ["-x", "--trust-remote-code", "a\nb", "a/b", "\x1b[2J"])
def test_a_served_name_is_no_option_and_no_line(name):
    with pytest.raises(UserError, match="use a short name"):
        served._check_name("--name", name)


def test_a_printed_command_quotes_a_name(tmp_path):
    found = served.Served("a b; touch x", tmp_path, tmp_path)
    server = engines.transformers("a", tmp_path, "127.0.0.1", 8000)
    assert serve.ready(found, server, "http://h")[-1].endswith("--model 'a b; touch x'")


def test_a_path_is_no_further_argument_of_the_harness(tmp_path):
    place = tmp_path / "m,trust_remote_code=True"
    place.mkdir()
    with pytest.raises(UserError, match="no comma"):
        harness.command(tmp_path, place, "t", None, None)
