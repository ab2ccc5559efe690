"""ds-recipes export --gguf: the tokens that llama.cpp reads, Ollama's Modelfile, and what is refused."""

import random
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from deepspeed_recipes.export.quantize import gguf
from deepspeed_recipes.export.serve import environment
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from deepspeed_recipes.recipe.samples import TINY_MODEL

COARSER_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # src/llama-vocab.cpp
)
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + COARSER_SPLIT
"""Cuts contractions off, inside what is one piece of ours."""


def texts(count):
    """Return texts of letters, digits, marks, white space and all else, and what regular expressions single out."""
    numbers = random.Random(0)
    pieces = [*"aZéß日本ा09٣ \t\n\r.,!'’\"_-–€😀{}", "  ", "'s", "'ll", "name", "date", "\r\n", "<|end|>", "8.459,33"]
    return ["".join(numbers.choices(pieces, k=numbers.randint(1, 60))) for _ in range(count)]


def cut_by(pattern):
    """Return the project's tokenizer with another cut before its merges."""
    tokenizer = Tokenizer.from_file(str(Path(TINY_MODEL) / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return tokenizer


def test_llama_cpps_cut_gives_the_tokens_of_ours():
    assert gguf.pre_tokenizer(Path(TINY_MODEL)) == gguf.COARSER
    ours = Tokenizer.from_file(str(Path(TINY_MODEL) / "tokenizer.json"))
    theirs, wrong = cut_by(COARSER_SPLIT), cut_by(QWEN2)
    asked = texts(3000)
    expected = [ours.encode(text).ids for text in asked]
    assert [theirs.encode(text).ids for text in asked] == expected
    assert [wrong.encode(text).ids for text in asked] != expected


@pytest.mark.parametrize("change", ["split", "normalizer", "word"])
def test_another_tokenizer_has_no_substitute(change, tmp_path):
    values = read_json(Path(TINY_MODEL) / "tokenizer.json")
    if change == "split":
        values["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{L}+"
    elif change == "normalizer":
        values["normalizer"] = {"type": "NFC"}
    else:
        values["model"]["vocab"]["\u0120the"] = len(values["model"]["vocab"])
    write_json(tmp_path / "tokenizer.json", values)
    assert gguf.pre_tokenizer(tmp_path) is None


def test_the_modelfile_says_what_the_chat_template_says():
    """Ollama's template, filled in by hand, is the prompt that the model was trained on."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    written = gguf.modelfile(tokenizer, "model-f16.gguf")
    assert written.startswith("FROM ./model-f16.gguf\n") and 'PARAMETER stop "<|end|>"' in written
    other, own = tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>"])
    both = [line for line in gguf.modelfile(tokenizer, "m.gguf", [own, other]).splitlines() if "stop" in line]
    assert both == ['PARAMETER stop "<|end|>"', 'PARAMETER stop "<|user|>"']
    template = written.partition('TEMPLATE """')[2].partition('"""')[0]
    body, answer = template.removeprefix("{{ range .Messages }}").rsplit("{{ end }}", 1)
    turns = [("system", "Be brief."), ("user", "Who?"), ("assistant", "Ada."), ("user", "When?")]
    filled = ""
    for role, content in turns:
        case = body.partition(f'{{{{ if eq .Role "{role}" }}}}')[2].partition("{{ end }}")[0]
        filled += case.replace("{{ .Content }}", content)
    conversation = [{"role": role, "content": content} for role, content in turns]
    prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert tokenizer.bos_token + filled + answer == prompt


def test_a_template_without_system_turns_and_one_that_refuses():
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    found = gguf.template(tokenizer)
    assert "system" not in found and found.endswith("{{ end }}[assistant]")
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert gguf.template(tokenizer) is None


def test_bad_input_is_answered_in_a_line(tmp_path, refusal, monkeypatch):
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "nowhere"))
    scores = tmp_path / "scores"
    write_json(scores / "config.json", {"architectures": ["Qwen3ForSequenceClassification"]})
    for source, words, said in (
        (TINY_MODEL, ["--gguf", "q2"], "choose f16, q8_0, q4_k_m"),
        (TINY_MODEL, ["--gguf", "f16"], "make gguf"),
        (TINY_MODEL, ["--gguf", "f16", "--quantize", "int8"], "two formats"),
        (TINY_MODEL, ["--gguf", "f16", "--limit", "0"], "--limit 0: must be at least 1"),
        (TINY_MODEL, ["--gguf", "f16", "--allow-drop", "-1"], "--allow-drop -1: must be at least 0"),
        (scores, ["--gguf", "f16"], "returns scores"),
        (tmp_path, ["--gguf", "f16"], "not a model folder"),
    ):
        printed = refusal("export", source, *words, "--output", tmp_path / "new")
        assert said in printed and printed.count("\n") == 1, printed
        assert not (tmp_path / "new").exists()
