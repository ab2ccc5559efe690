"""A checkpoint of other data, another recipe or another model is refused.

A damaged checkpoint is named and skipped; an intact one is not.
"""

import json
import os
import random
import shutil
from dataclasses import replace

import pytest
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.launching import restarts
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import (
    COMPLETE,
    RunFolder,
    newest_checkpoint,
    read_json,
    sizes,
    step_of,
    write_json,
)
from deepspeed_recipes.training.checkpoint import digests, fingerprint
from deepspeed_recipes.training.data import sources, tokenize
from deepspeed_recipes.training.data.load import Datasets
from deepspeed_recipes.training.model import load
from deepspeed_recipes.training.model.draft import TINY_MODEL
from tests.small import small

MARK = {
    "recipe": "tiny-3m-full",
    "model": {"model_type": "qwen3", "hidden_size": 64},
    "tokenizer": "a",
    "together": 8,
    "data": "b",
    "held_out": "h",
    "order": {"seed": 1, "global_batch_size": 8},
}


@pytest.fixture
def checkpoint(tmp_path):
    write_json(tmp_path / COMPLETE, {"fingerprint": MARK})
    return tmp_path


def test_the_same_run_resumes(checkpoint):
    fingerprint.check(MARK, checkpoint, changed=False)
    fingerprint.check(MARK, None, changed=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": "c"}, "trained with other data:"),
        ({"held_out": "c"}, "other held-out examples:"),
        ({"tokenizer": "c"}, "another tokenizer or chat template:"),
        ({"order": {"seed": 2, "global_batch_size": 8}}, r"\(seed=1, now seed=2\)"),
        ({"together": 4}, r"another micro_batch_size x data-parallel ranks.*\(8, now 4\)"),
    ],
)
def test_other_data_is_refused_unless_it_is_accepted(checkpoint, change, said):
    with pytest.raises(UserError, match=said) as refused:
        fingerprint.check(MARK | change, checkpoint, changed=False)
    assert "data.changed=true accepts it" in str(refused.value) and "\n" not in str(refused.value)
    fingerprint.check(MARK | change, checkpoint, changed=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"recipe": "tiny-3m-lora"}, r"another recipe \(tiny-3m-full, now tiny-3m-lora\)"),
        (
            {"model": {"model_type": "qwen3", "hidden_size": 128}},
            r"\(hidden_size=64, now hidden_size=128\).*put back the config.json with which it began",
        ),
    ],
)
def test_another_models_checkpoint_is_never_accepted(checkpoint, change, said):
    for changed in (False, True):
        with pytest.raises(UserError, match=said):
            fingerprint.check(MARK | change, checkpoint, changed)


CHANGES = {
    "rms_norm_eps": ({"rms_norm_eps": 1e-2}, r"\(rms_norm_eps=1e-06, now rms_norm_eps=0.01\)"),
    "rope_theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}, "now rope_parameters=.*700000"),
    "unread": ({"architectures": ["A"], "use_cache": False, "dtype": "float16", "transformers_version": "1"}, None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_config_of_a_base_is_refused_by_key_if_it_changes_what_is_computed(name, tmp_path, model_folder):
    base = shutil.copytree(model_folder, tmp_path / "base")
    change, said = CHANGES[name]

    def mark(saved=None):
        now = MARK | {"model": fingerprint.computing(load.config_of(base, False))}
        if saved is None:
            write_json(tmp_path / COMPLETE, {"fingerprint": now})
        fingerprint.check(now, tmp_path, changed=True)
        return now

    before = mark()
    write_json(base / "config.json", read_json(base / "config.json") | change)
    if said is None:
        assert mark(before) == before
        return
    with pytest.raises(UserError, match=f"another config.json of its model.*{said}"):
        mark(before)


def test_keys_of_another_version_of_transformers_are_not_compared(checkpoint):
    model = MARK["model"] | {"transformers_version": "9"}
    fingerprint.check(MARK | {"model": model | {"new": 1}}, checkpoint, changed=False)
    write_json(checkpoint / COMPLETE, {"fingerprint": MARK | {"model": model}})
    with pytest.raises(UserError, match=r"\(new=None, now new=1\)"):
        fingerprint.check(MARK | {"model": model | {"new": 1}}, checkpoint, changed=False)


def test_other_weights_of_a_base_are_refused_whichever_files_hold_them(checkpoint, tmp_path, model_folder, alone):
    """Checkpoints of adapters have none of their base, which an earlier run may have overwritten in place."""
    tokenizer, data = AutoTokenizer.from_pretrained(TINY_MODEL), Datasets(Dataset.from_list([{}]), None, None, [])

    def of_base(recipe):
        return fingerprint.of_run(recipe, tokenizer, data, "now")["base"]

    base, paths = tmp_path / "base", {"path": str(tmp_path / "base")}
    shutil.copytree(model_folder, base)
    recipe = pages.find("tiny", "lora")
    recipe = replace(recipe, model=replace(recipe.model, **paths))
    before = of_base(recipe)
    whole = pages.find("tiny", "full")
    assert before and of_base(replace(whole, model=replace(whole.model, **paths))) is None
    held = load_file(base / "model.safetensors")
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(base, max_shard_size="200KB")
    (base / "model.safetensors").unlink()
    assert (base / "model.safetensors.index.json").exists() and of_base(recipe) == before
    shutil.copytree(model_folder, base, dirs_exist_ok=True)
    (base / "model.safetensors.index.json").unlink()
    save_file({name: one * 1.001 for name, one in held.items()}, base / "model.safetensors", {"format": "pt"})
    after = of_base(recipe)
    write_json(checkpoint / COMPLETE, {"fingerprint": MARK | {"base": before}})
    with pytest.raises(UserError, match=r"other weights of its base.*put back the weights with which it began"):
        fingerprint.check(MARK | {"base": after}, checkpoint, changed=True)
    fingerprint.check(MARK | {"base": None}, checkpoint, changed=False)  # not on this machine before it is loaded


@pytest.mark.parametrize(("variant", "compares"), [("embed", True), ("kto_lora", True), ("full", False)])
def test_examples_that_are_compared_with_each_other_are_counted(variant, compares, alone, monkeypatch):
    tokenizer, data = AutoTokenizer.from_pretrained(TINY_MODEL), Datasets(Dataset.from_list([{}]), None, None, [])
    recipe = pages.find("tiny", variant)
    monkeypatch.setattr(fingerprint.dist, "get_world_size", lambda: 3)
    found = fingerprint.of_run(recipe, tokenizer, data, "now")["together"]
    assert found == (3 * recipe.micro_batch_size if compares else None)


def test_the_digest_of_data_is_that_of_its_content_and_order(tmp_path, conversations):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    copy = tmp_path / "copy.jsonl"
    recipe = small(TINY_MODEL, copy)

    def digest(lines, streaming=False):
        copy.write_text("".join(f"{line}\n" for line in lines))
        examples = sources.mix(sources.read(str(copy), recipe, streaming), None, recipe.seed)
        if streaming:
            return fingerprint.of_data(tokenize.stream(examples, recipe, tokenizer))
        return fingerprint.of_data(tokenize.tokenized(examples, recipe, tokenizer)[0])

    lines = conversations.read_text().splitlines()
    others = (lines[::-1], [*lines[:-1], lines[-1].replace("please", "Please")], lines[:-1])
    assert digest(lines) == digest(lines)
    assert digest(lines) not in {digest(other) for other in others}
    assert digest(lines, streaming=True) == digest(lines, streaming=True) != digest(lines[::-1], streaming=True)


def test_a_run_without_held_out_examples_may_get_some_and_lose_them(checkpoint):
    fingerprint.check(MARK | {"held_out": None}, checkpoint, changed=False)
    write_json(checkpoint / COMPLETE, {"fingerprint": MARK | {"held_out": None}})
    fingerprint.check(MARK, checkpoint, changed=False)


def test_pieces_of_arrow_do_not_show():
    """Rows that were selected, and the same rows written anew, are the same data."""
    rows = [{"input_ids": list(range(n)), "labels": [n] * n, "said": json.dumps([n])} for n in range(5, 25)]
    whole = Dataset.from_list(rows)
    assert fingerprint.of_data(whole.select([3, 1, 7])) == fingerprint.of_data(
        Dataset.from_list([rows[3], rows[1], rows[7]])
    )
    assert fingerprint.of_data(whole.select([3, 1, 7])) != fingerprint.of_data(whole.select([1, 3, 7]))


def test_a_tokenizer_is_known_by_what_it_does():
    first, same, other = (AutoTokenizer.from_pretrained(TINY_MODEL) for _ in range(3))
    other.chat_template = "{{ messages }}"
    assert fingerprint.of_tokenizer(first) == fingerprint.of_tokenizer(same) != fingerprint.of_tokenizer(other)


FILES = ("model.safetensors", "rng_state_0.pth", "global_step/zero_pp_rank_0_mp_rank_00_optim_states.pt")


@pytest.fixture
def run(tmp_path):
    """Write two complete checkpoints of files that are larger than a block."""
    run, draw = RunFolder(tmp_path), random.Random(0)
    for step in (5, 10):
        folder = run.checkpoints / f"checkpoint-{step}"
        (folder / "global_step").mkdir(parents=True)
        for name in FILES:
            (folder / name).write_bytes(draw.randbytes(2**18 + 1000))
        found = {name: digests.of_file(folder / name) for name in FILES}
        complete = {"step": step, "world_size": 2, "layout": {}, "files": sizes(folder), "digests": found}
        write_json(folder / COMPLETE, complete)
    return run


def flip(file, bit):
    """Change a single bit of a file and leave its size and time."""
    held, content = file.stat(), bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    os.utime(file, ns=(held.st_atime_ns, held.st_mtime_ns))


def test_an_intact_checkpoint_is_taken(run, capsys):
    assert step_of(digests.newest_intact(run)) == 10
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_a_flipped_bit_is_named_and_the_older_checkpoint_is_taken(run, capsys, name, where):
    file = run.checkpoints / "checkpoint-10" / name
    flip(file, int(where * (8 * file.stat().st_size - 1)))
    assert step_of(newest_checkpoint(run)) == 10  # the sizes show nothing
    assert step_of(digests.newest_intact(run)) == 5
    said = capsys.readouterr().err
    assert f"{file} is damaged" in said and said.count("\n") == 1
    assert step_of(newest_checkpoint(run)) == 5  # what the ranks take


def test_without_an_intact_checkpoint_the_run_cannot_be_resumed(run):
    for step in (5, 10):
        flip(run.checkpoints / f"checkpoint-{step}" / FILES[2], 77)
    with pytest.raises(UserError, match="has no complete checkpoint"):
        restarts.intact_checkpoint(pages.find("tiny", "full"), run)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"{}", b'{"files": 3}', b'{"world_size": 2}', b'{"step": 10, "files": {"a'],
)
def test_an_unreadable_complete_json_does_not_block_an_older_checkpoint(run, content):
    (run.checkpoints / "checkpoint-10" / COMPLETE).write_bytes(content)
    assert step_of(newest_checkpoint(run)) == 5
    assert step_of(digests.newest_intact(run)) == 5
