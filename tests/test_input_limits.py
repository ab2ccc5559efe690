"""Files of strangers: what would hang, fill the memory or train something else is refused in a line."""

import json
import os
import re
import resource
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Gemma3Config

from deepspeed_recipes.commands import main
from deepspeed_recipes.machine import system
from deepspeed_recipes.planning.search import model_recipe
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.methods import Classify
from deepspeed_recipes.recipe.run_folder import read_json
from deepspeed_recipes.training.data import chat_templates, sources, text_files, tokenize
from deepspeed_recipes.training.model import draft, load, probe, shown
from deepspeed_recipes.training.model.draft import TINY_MODEL
from deepspeed_recipes.training.model_folder import weights
from tests.launching import LAUNCH
from tests.small import small

DIGITS = "9" * 100_000
TURNS = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def model(tmp_path):
    """Return a copy of the tiny model, to damage."""
    return Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))


def changed(model, **keys):
    config = json.loads((model / "config.json").read_text()) | keys
    (model / "config.json").write_text(json.dumps(config))
    return small(model, Path("unread"))


def one_line(caught, *words):
    text = str(caught.value)
    assert len(text.splitlines()) <= 3 and all(word in text for word in words), text


def test_a_template_that_never_ends_is_stopped(model, monkeypatch):
    monkeypatch.setattr(shown, "RENDER_SECONDS", 0.5)
    with shown.bounded("a template that has to wait"):
        time.sleep(0.7)
    usual = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(LOOP + usual)
    with pytest.raises(UserError) as caught:
        chat_templates.load_tokenizer(small(model, Path("unread")))
    one_line(caught, str(model), "has not ended after 0.5 s")
    only_here = "{% if messages[0].content == 'Hi?' %}" + LOOP + "{% endif %}"
    (model / "chat_template.jinja").write_text(only_here + usual)
    recipe = small(model, Path("unread"))
    to_tokens = tokenize.of_conversation(recipe, chat_templates.load_tokenizer(recipe))
    with pytest.raises(UserError) as caught:
        to_tokens({"messages": TURNS, "tools": None, "given": 0})
    one_line(caught, "has not ended after 0.5 s")


@pytest.mark.parametrize("size", [10, 18], ids=["10 GB", "an exabyte"])
def test_a_template_that_needs_all_memory_is_stopped(model, size):
    before, held = resource.getrlimit(resource.RLIMIT_AS), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (model / "chat_template.jinja").write_text(f"{{{{ 'x' * 10 ** {size} }}}}")
    with pytest.raises(UserError) as caught:
        chat_templates.load_tokenizer(small(model, Path("unread")))
    one_line(caught, "too much memory")
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held
    assert grown * 2**10 < shown.RENDER_BYTES, "10 GB were never held"


def dictionary(path):
    """Write one long text and 20,000 references to it: 2 GB in a few KB."""
    long = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["a" * 100_000]))
    pq.write_table(pa.table({"prompt": long, "completion": pa.array(["b"] * 20_000)}), path)


def pages(path):
    """Write text that compresses to a thousandth and less, in one page."""
    text = pa.table({"prompt": ["a" * 2**28], "completion": ["b" * 2**10]})
    pq.write_table(text, path, compression="zstd", use_dictionary=False, write_statistics=False)


@pytest.mark.parametrize("write", [dictionary, pages], ids=lambda write: write.__name__)
@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.every)], ids=["whole", "streamed"])
def test_a_small_parquet_file_that_unpacks_to_gigabytes_is_refused(write, streaming, tmp_path):
    path = tmp_path / "a.parquet"
    write(path)
    assert path.stat().st_size < 250_000
    with pytest.raises(UserError) as caught:
        for source in sources.read(str(path), small(tmp_path, path), streaming):
            list(source.examples)
    one_line(caught, "a.parquet", "unpacks to over 1000 times")


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_a_large_file_that_is_no_bomb_is_read(streaming, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "UNPACKED_BYTES", 1000)  # in the place of 256 MB
    path = tmp_path / "a.parquet"
    rows = [os.urandom(40).hex() for _ in range(200)]
    pq.write_table(pa.table({"prompt": rows, "completion": rows}), path)
    read = sources.read(str(path), small(tmp_path, path), streaming)
    assert sum(len(list(source.examples)) for source in read) == 200


def test_a_damaged_page_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [os.urandom(40).hex() for _ in range(2000)]
    pq.write_table(pa.table({"prompt": rows, "completion": rows}), path)
    whole = path.read_bytes()
    seen = set()
    for start in (40, len(whole) // 4, len(whole) // 2):
        path.write_bytes(whole[:start] + bytes(200) + whole[start + 200 :])
        try:
            sources.read(str(path), small(tmp_path, path))
        except UserError as error:
            assert "a.parquet" in str(error) and len(str(error).splitlines()) <= 3
            seen.add("cannot be read as parquet" in str(error))
    assert True in seen


@pytest.mark.parametrize(
    "metadata",
    [b'{"info": {"features": {"prompt": {"_type": "Strange"}}}}', b"not json"],
    ids=["an unknown type", "no JSON"],
)
def test_metadata_of_another_library_is_no_traceback(metadata, tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"prompt": ["a"], "completion": ["b"]})
    pq.write_table(table.replace_schema_metadata({b"huggingface": metadata}), path)
    with pytest.raises(UserError) as caught:
        sources.read(str(path), small(tmp_path, path))
    one_line(caught, "a.parquet", "cannot be read as parquet")


@pytest.mark.parametrize("file", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
@pytest.mark.parametrize("content", [b"", b"[]"], ids=["emptied", "overwritten"])
def test_a_damaged_folder_of_save_to_disk_is_named(file, content, tmp_path):
    path = tmp_path / "saved"
    Dataset.from_list([{"messages": TURNS}]).save_to_disk(path)
    (path / file).write_bytes(content)
    with pytest.raises(UserError) as caught:
        sources.read(str(path), small(tmp_path, path))
    one_line(caught, "saved")


@pytest.mark.parametrize("compared", [True, False], ids=["compared", "classified"])
def test_a_role_that_the_template_does_not_know_is_no_traceback(compared):
    tokenizer = chat_templates.load_tokenizer(small(TINY_MODEL, Path("unread")))
    asked = [TURNS[0], {"role": "assistant", "content": "Wait."}, {"role": "tool", "content": "3"}]
    with pytest.raises(UserError) as caught:
        if compared:
            tokenize.answered(tokenizer, {"prompt": asked, "chosen": TURNS[1:]}, "chosen")
        else:
            tokenize.text_tokens(tokenizer, asked, 100)
    one_line(caught, "role must be system, user or assistant, not tool", "It begins: [{'role': 'user'")


BAD_JSON = {
    f'{{"text": "a", "n": {DIGITS}}}': "4300 digits",
    '{"text": "a \\ud800 b"}': "a lone surrogate, \\ud800",
    '{"text": "a", "tools": {"x": ["\\uDFFF"]}}': "a lone surrogate, \\udfff",
    '{"\\ud83d": "a"}': "a lone surrogate, \\ud83d",
}


@pytest.mark.parametrize("line", BAD_JSON, ids=lambda line: BAD_JSON[line][:12])
def test_json_that_python_reads_and_no_tokenizer_can_is_refused_with_its_line(line, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00 \\\\ud800"}\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        list(text_files.read(path))
    one_line(caught, "a.jsonl:2", BAD_JSON[line])
    (tmp_path / "a.json").write_text(f"[{line}]")
    with pytest.raises(UserError) as caught:
        list(text_files.read(tmp_path / "a.json"))
    one_line(caught, "a.json:1", BAD_JSON[line])
    done = subprocess.run(
        [*LAUNCH, "tiny", "pretrain", f"data.path={path}", "--dry-run"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_json_inside_json_is_held_to_the_same(tmp_path):
    for text in (f'[{{"n": {DIGITS}}}]', '[{"name": "\\ud800"}]'):
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps({"messages": TURNS, "tools": text}) + "\n")
        with pytest.raises(UserError) as caught:
            sources.read(str(path), small(tmp_path, path))
        one_line(caught, "a.jsonl:1")


def test_a_number_with_100_000_digits_in_a_file_of_ours_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "hidden_size": {DIGITS}}}')
    with pytest.raises(UserError) as caught:
        read_json(tmp_path / "config.json")
    one_line(caught, "config.json", "4300 digits")
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError) as caught:
        model_recipe.find(str(tmp_path / "config.json"), "full")
    one_line(caught, "config.json")


def cut_off(weights):
    weights.write_bytes(weights.read_bytes()[:100_000])


def fake(weights):
    weights.write_bytes(b"not safetensors at all")


def endless_header(weights):
    weights.write_bytes((10**12).to_bytes(8, "little") + b"{}")


@pytest.mark.parametrize("damage", [cut_off, fake, endless_header], ids=lambda damage: damage.__name__)
def test_a_damaged_safetensors_file_is_named(damage, model):
    damage(model / "model.safetensors")
    with pytest.raises(UserError) as caught:
        load.load_model(small(model, Path("unread")))
    one_line(caught, str(model), ".safetensors file is damaged or cut off")


def write(content):
    return lambda file: file.write_bytes(content)


def no_folder(file):
    file.unlink()
    file.mkdir()


def unreadable(file):
    file.unlink()
    file.symlink_to("/proc/self/mem")


BAD_FILES = {
    "tokenizer.json": (write(b'{"version": "1.0",'), "tokenizer.json:1: not JSON"),
    "tokenizer_config.json": (write(b"[]"), "tokenizer_config.json: not one JSON object"),
    "config.json": (unreadable, "config.json: Input/output error"),
    "generation_config.json": (no_folder, "generation_config.json: Is a directory"),
    "chat_template.jinja": (write(b"{% for a in"), "chat_template.jinja:1: not a template"),
    "model.safetensors": (write(b"version https://git-lfs"), "model.safetensors: Git LFS's pointer"),
    "tokenizer.model": (write(b""), "tokenizer.model: is empty"),
}
AFTER_TRAINING = {
    "export": ("{}", "--output", "out"),
    "generate": ("{}", "hi", "--max-new-tokens", "2"),
    "serve": ("{}", "--engine", "transformers"),
    "evaluate": ("{}", "--limit", "1"),
    "shrink": ("{}", "--layers", "2", "--output", "out"),
    "launch": ("tiny", "full", "model.path={}", "--dry-run", "--gpus", "1"),
}


@pytest.mark.parametrize("command", AFTER_TRAINING)
def test_every_command_names_the_file_that_cannot_be_used(command, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, (damage, said) in BAD_FILES.items():
        shutil.rmtree(model)
        shutil.copytree(TINY_MODEL, model)
        damage(model / name)
        words = [word.format(model) for word in AFTER_TRAINING[command]]
        assert main.run(command, words) == 2, (command, name)
        lines = capsys.readouterr().err.strip().splitlines()
        assert f"{model}/{said}" in lines[-1] and ("; " in lines[-1] or "pointer" in said), lines
        assert list(tmp_path.iterdir()) == [model], "nothing is written"


@pytest.mark.parametrize("command", ["export", "generate", "serve", "evaluate"])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_every_command_names_the_adapters_file_that_cannot_be_used(command, name, tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(TINY_MODEL), "r": 1}))
    save_file(load_file(Path(TINY_MODEL) / "model.safetensors"), adapter / "adapter_model.safetensors")
    (adapter / name).write_bytes((adapter / name).read_bytes()[:20])
    assert f"{adapter / name}:" in refusal(command, *[word.format(adapter) for word in AFTER_TRAINING[command]])


@pytest.mark.parametrize("name", ["HF_DATASETS_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("command", ["launch", "evaluate"])
def test_a_cache_that_cannot_be_written_is_refused(command, name, tmp_path, monkeypatch, refusal):
    for other in ("HF_DATASETS_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    data = str(Path(TINY_MODEL).parent / "extract" / "held_out.jsonl")
    words = {
        "launch": ["tiny", "full", "--dry-run", "--gpus", "1"],
        "evaluate": [str(TINY_MODEL), "--data", data, "--limit", "1"],
    }
    said = refusal(command, *words[command])
    assert f"{name}={tmp_path / 'file'} leads there: set it to a folder that you may write to." in said
    (tmp_path / "file").unlink()
    system.check_cache()


def test_several_files_that_cannot_be_used_are_named_at_once(model):
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    for name in names[:2]:
        (model / name).write_text("{")
    with pytest.raises(UserError) as caught:
        weights.check_intact(model)
    where = "line 1: not JSON (Expecting property name enclosed in double quotes)"
    assert str(caught.value) == (
        f"{model}: 2 files cannot be used: config.json ({where}), generation_config.json ({where}); copy or download "
        "them again."
    )
    for name in names:
        (model / name).write_text("{")
    with pytest.raises(UserError, match=r"5 files .*config.json .*, generation_.*, model.safetensors .* and 2 more;"):
        weights.check_intact(model)
    weights.check_intact(Path("OWNER/NAME"))


def test_a_layer_without_weights_is_refused_and_tied_weights_are_not_missed(model):
    weights = load_file(model / "model.safetensors")
    assert "lm_head.weight" not in weights and load.load_model(small(model, Path("unread")))
    left = {name: weight for name, weight in weights.items() if ".layers.1." not in name}
    save_file(left, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as caught:
        load.load_model(small(model, Path("unread")))
    one_line(caught, "its files lack model.layers.1.input_layernorm.weight", "and 9 more")


ABSURD = {
    "hidden_size": (10**12, 0, -5),
    "num_hidden_layers": (10**9, 0),
    "vocab_size": (10**15, -1),
    "intermediate_size": (10**14,),
    "num_attention_heads": (0, 7),
    "num_key_value_heads": (0,),
}


@pytest.mark.parametrize("key", ABSURD)
def test_sizes_that_no_model_has_are_refused(key, model, tmp_path):
    for value in ABSURD[key]:
        recipe = changed(model, **{key: value})
        if key != "num_hidden_layers":  # transformers would make a list of 10**9
            with pytest.raises(UserError) as caught:
                load.load_model(recipe)
            one_line(caught, str(model))
            assert "holds no .safetensors" not in str(caught.value)
        if (key, value) == ("num_attention_heads", 7):
            continue
        words = ["tiny", "full", f"model.path={model}", "--dry-run"]
        done = subprocess.run([*LAUNCH, *words], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2 and f"{key}={value}" in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("tokenizer_config.json", {"model_max_length": "512"}),
        ("tokenizer_config.json", {"eos_token": 5}),
        ("tokenizer.json", {"version": "9.0"}),
    ],
)
def test_a_tokenizer_with_a_wrong_value_is_refused(model, file, keys):
    (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | keys))
    with pytest.raises(UserError) as caught:
        chat_templates.load_tokenizer(small(model, Path("unread")))
    one_line(caught, "its tokenizer_config.json or tokenizer.json is wrong: ")


def test_sizes_that_are_no_numbers_are_refused(model):
    for keys in (
        {"hidden_size": "big"},
        {"rms_norm_eps": "x"},
        {"dtype": "float99"},
        {"eos_token_id": "</s>"},
        {"hidden_act": "wat"},
        {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
        {"output_attentions": True},
        {"return_dict": False},
        {"is_encoder_decoder": True},
        {"rms_norm_eps": -1e-6},
        {"rope_thetha": 1e4},
        {"rope_theta": 10.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1e4}},
    ):
        with pytest.raises(UserError) as caught:
            load.load_model(changed(model, **keys))
        one_line(caught, "its config.json")
        keys = (
            r"'rope_thetha', which Qwen3Config does not read, and no 'rope_theta'|"
            r"return_dict=false|(output_attentions|is_encoder_decoder)=true|rms_norm_eps=-1e-06: |rope_theta=(0|-1.*): "
            r"|rope_theta=10\.0, and rope_theta=10000\.0 in rope_parameters"
        )
        wrong = rf"is wrong: |{keys}"
        assert re.search(wrong, str(caught.value))
        shutil.copy(TINY_MODEL / "config.json", model)


def test_a_classifier_is_not_trained_to_write(model):
    recipe = changed(model, architectures=["Qwen3ForSequenceClassification"])
    with pytest.raises(UserError, match=r"was trained to classify \(Qwen3ForSequenceClassification\), not to write"):
        load.load_config(recipe)
    assert load.load_config(replace(recipe, method=Classify())).num_labels == 2


@pytest.mark.parametrize("keys", [{"model_type": "lama"}, {"hidden_size": "big"}])
def test_dimensions_of_a_page_that_transformers_cannot_read_are_refused(keys, model):
    recipe, config = small(model, Path("unread")), read_json(model / "config.json")
    wrong = replace(recipe, model=replace(recipe.model, config=config | keys))
    with pytest.raises(UserError, match=r"transformers .* cannot read the page's model\.config: .*(lama|hidden_size)"):
        draft.write(wrong, model, load.DTYPES["fp32"])


def test_names_that_other_configurations_have_are_no_misspellings():
    published = {"eos_token_id": [1, 106], "bos_token_id": 2, "eoi_token_index": 256000, "head_dim": 128}
    load._check_keys(published, Gemma3Config(), "gemma")  # of which Gemma3Config reads `eoi_token_id`
    with pytest.raises(UserError, match=r"'vocab_sise'.*'vocab_size'"):
        load._check_keys({"text_config": {"vocab_sise": 8}}, Gemma3Config(), "gemma")


@pytest.mark.parametrize(
    ("keys", "hint"),
    [
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, "KeyError: 'yarm'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "{'factor'}"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0: must be at least 0"),
    ],
)
def test_the_check_of_packing_names_a_model_that_cannot_be_built(keys, hint, model):
    recipe = replace(changed(model, **keys), packing=True)
    with pytest.raises(UserError) as caught:
        probe.check_packing(recipe, AutoTokenizer.from_pretrained(TINY_MODEL))
    one_line(caught, str(model), hint)
    assert "packing=" not in str(caught.value)
