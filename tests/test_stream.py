"""Data that is read during training, and what a run prints about its data, on two real ranks."""

import json
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Data
from deepspeed_recipes.recipe.run_folder import (
    RunFolder,
    checkpoints,
    forget_after,
    read_json,
    read_jsonl,
    read_recipe,
    write_recipe,
)
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.checkpoint import fingerprint
from deepspeed_recipes.training.data import collate, sources, tokenize
from deepspeed_recipes.training.model.draft import TINY_MODEL
from tests.conftest import conversation
from tests.ranks import read_logs, run_on
from tests.small import small
from tests.tiers import tiered


def write(path, count, name="q"):
    rows = [conversation(f"{name}{n}?", " ".join(["Yes."] * (1 + n % 7))) for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_MODEL)


def train_and_record(folder):
    """Run as the launcher does, and record which sequences this rank has seen."""
    run = RunFolder(folder)
    batches = collate.Collator.__call__

    def remembered(collator, rows):
        with (run.path / f"seen-{dist.get_rank()}.jsonl").open("a") as file:
            file.writelines(json.dumps(row["input_ids"]) + "\n" for row in rows)
        return batches(collator, rows)

    collate.Collator.__call__ = remembered
    training_run.main(str(folder))
    assert read_recipe(run).data.streaming


@pytest.mark.parametrize("packing", tiered((False, True), {True}))
def test_two_ranks_train_on_different_sequences_of_a_stream(ranks, model_folder, tmp_path, packing):
    # Two files of very different size: shared out by file, one rank would have nothing but the two rows of b.
    path = f"{write(tmp_path / 'a.jsonl', 400, 'a')},{write(tmp_path / 'b.jsonl', 2, 'b')}"
    recipe = small(model_folder, path, max_steps=3, packing=packing, sequence_length=64)
    run = RunFolder(tmp_path / "run")
    write_recipe(run, replace(recipe, data=Data(path, weights="3,1", streaming=True)))
    ranks.check(train_and_record, run.path, log=tmp_path / "log")
    assert [row["step"] for row in read_jsonl(run.metrics)] == [1, 2, 3] and read_json(run.summary)["steps"] == 3

    repeated = {tuple(row["input_ids"]) for row in tokenize.prepare(path.partition(",")[2], recipe, tokenizer())[0]}
    seen = [(run.path / f"seen-{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
    assert all(len(mine) >= 3 * recipe.global_batch_size / 2 for mine in seen) and len(seen[0]) == len(seen[1])
    once = [{tuple(json.loads(row)) for row in mine} - repeated for mine in seen]
    assert not once[0] & once[1] and all(len(mine) > len(seen[0]) / 2 for mine in once)
    screen = read_logs(tmp_path / "log")[0]
    assert "/a.jsonl: streamed in the form messages" in screen and "tokenized during training" in screen
    assert screen.count("example: ") == 2


def train_a_day_later_at_each_start(folder):
    day = 1 + len(checkpoints(RunFolder(folder)))
    later = type("Later", (datetime,), {"now": classmethod(lambda cls, tz=None: cls(2024, 5, day))})
    fingerprint.datetime = chat_template_utils.datetime = later
    training_run.main(str(folder))


def test_a_run_resumes_on_another_day_with_the_date_in_its_template(ranks, model_folder, tmp_path):
    """As that of Llama 3; without the tokens in the cache, which a stream has not, it would be other data."""
    template = tmp_path / "dated.jinja"
    usual = Path(TINY_MODEL, "chat_template.jinja").read_text(encoding="utf-8")
    template.write_text("{{ strftime_now('%d %b %Y') }} " + usual, encoding="utf-8")
    recipe = small(model_folder, write(tmp_path / "a.jsonl", 40), max_steps=2, save_steps=1)
    model = replace(recipe.model, chat_template=str(template))
    run = RunFolder(tmp_path / "run")
    write_recipe(run, replace(recipe, model=model, data=replace(recipe.data, streaming=True)))
    ranks.check(train_a_day_later_at_each_start, run.path, log=tmp_path / "log")
    forget_after(run, run.checkpoints / "checkpoint-1")
    shutil.rmtree(run.export)
    ranks.check(train_a_day_later_at_each_start, run.path, log=tmp_path / "log")
    assert "01 May 2024" in run.data.read_text() and read_json(run.summary)["steps"] == 2


@pytest.mark.parametrize("method", ["sft", "dpo", "reward", "classify"])
def test_cached_tokens_of_an_earlier_day_are_not_those_of_a_dated_template(method, model_folder, tmp_path, monkeypatch):
    rows = [
        {**conversation("q?", "Yes."), **({"label": f"c{at % 2}"} if method == "classify" else {})} for at in range(4)
    ]
    if method in ("dpo", "reward"):
        rows = [{"prompt": "q?", "chosen": "A.", "rejected": f"B{at}."} for at in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = "{{ strftime_now('%d %b') }} " + tokenizer.chat_template
    recipe = small(model_folder, tmp_path / "a.jsonl", method=method, packing=False)
    read = []
    for day in (1, 2):
        now = classmethod(lambda cls, tz=None, day=day: cls(2024, 5, day))
        monkeypatch.setattr(chat_template_utils, "datetime", type("Later", (datetime,), {"now": now}))
        found = training_run.method(method).datasets(recipe, tokenizer).training[0]
        read.append(tokenizer.decode(next(found[key] for key in ("input_ids", "prompt_ids") if key in found)))
    assert "01 May" in read[0] and "02 May" in read[1]


def test_a_stream_never_ends_and_never_repeats_its_order(model_folder, tmp_path):
    path = write(tmp_path / "a.jsonl", 5)
    recipe = small(model_folder, path)
    raw = sources.mix(sources.read(path, recipe, streaming=True), None, 1)
    rows = iter(tokenize.stream(raw, recipe, tokenizer()))
    rounds = [[tuple(next(rows)["input_ids"]) for _ in range(5)] for _ in range(4)]
    assert all(set(found) == set(rounds[0]) for found in rounds)
    assert len(set(map(tuple, rounds))) > 1
    again = iter(tokenize.stream(raw, recipe, tokenizer()))
    assert [tuple(next(again)["input_ids"]) for _ in range(5)] == rounds[0], "a resumed run finds the same order"
    whole, _ = tokenize.prepare(path, recipe, tokenizer())
    assert {tuple(row["input_ids"]) for row in whole} == set(rounds[0])


def test_an_empty_stream_ends(model_folder, tmp_path):
    path = write(tmp_path / "a.jsonl", 5)
    recipe = small(model_folder, path, sequence_length=8)
    raw = sources.mix(sources.read(path, recipe, streaming=True), None, 1)
    with pytest.raises(UserError, match="longer than sequence_length=8"):
        next(iter(tokenize.stream(raw, recipe, tokenizer())))


def test_so_many_examples_are_drawn_by_the_seed():
    found = Dataset.from_dict({"text": [f"text {number}" for number in range(40)]})
    drawn = sources.draw(found, 12, seed=1)["text"]
    assert len(set(drawn)) == 12 and set(drawn) < set(found["text"]) and set(drawn) != set(found["text"][:12])
    assert list(sources.draw(found, 20, seed=1)["text"])[:12] == list(drawn)
    assert list(sources.draw(found, 12, seed=2)["text"]) != list(drawn)


def test_a_run_says_what_its_data_is(ranks, model_folder, tmp_path):
    path = f"{write(tmp_path / 'a.jsonl', 30, 'a')},{write(tmp_path / 'b.jsonl', 10, 'b')}"
    recipe = small(model_folder, path, max_steps=1)
    recipe = replace(recipe, data=Data(path, validation_share=0.25, max_examples=20))
    run = run_on(ranks, recipe, tmp_path)
    first, second = read_logs(tmp_path / "log")
    for part in ("a.jsonl: 30 examples in the form messages", "b.jsonl: 10 examples in the form messages"):
        assert part in first
    assert "held out: 10 examples, by data.validation_share" in first
    assert "training: 20 of 30 examples, by data.max_examples, drawn with seed" in first
    assert "training: 20 examples, " in first and "held out: 10 examples, " in first
    assert " tokens  ###" in first and "Yes.<|end|>»" in first
    assert "examples in the form" not in second
    assert read_jsonl(run.evaluations)[0]["loss"] > 0
