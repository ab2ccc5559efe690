"""The user's own loss, callback, metric and transform train and measure what plain PyTorch and a plain Trainer do."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from deepspeed_recipes.recipe import own_code as named
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Data, Layout
from deepspeed_recipes.recipe.run_folder import (
    RunFolder,
    newest_checkpoint,
    read_json,
    read_jsonl,
    read_recipe,
    write_recipe,
)
from deepspeed_recipes.training.checkpoint import universal
from deepspeed_recipes.training.trainer import RunTrainer
from tests.conftest import write_rows
from tests.parity import gate, plain
from tests.ranks import read_logs, run_on
from tests.workers import own_code as code

SETTINGS = plain.Settings()
FILE = str(Path(code.__file__))


@pytest.fixture(scope="module")
def questions(tmp_path_factory, conversations):
    """Write the eight conversations in a form that nothing reads, and two more that are to be dropped."""
    rows = [json.loads(line)["messages"] for line in conversations.read_text().splitlines()]
    rows = [{"q": ask["content"], "a": answer["content"], "skip": False} for ask, answer in rows]
    skipped = {"q": "?", "a": "!", "skip": True}
    return write_rows(tmp_path_factory.mktemp("questions") / "train.jsonl", [skipped, *rows[:4], skipped, *rows[4:]])


def recipe_of(model_folder, questions, conversations, **changes):
    data = Data(
        path=str(questions), validation=str(questions), metric=f"{FILE}:overlap,exact_match", transform=f"{FILE}:asked"
    )
    recipe = gate.recipe_for(SETTINGS, model_folder, conversations, "zero2.json", save_steps=3)
    changes = {"data": data, "loss": f"{FILE}:focal", "callbacks": f"{FILE}:Recorder", "micro_batch_size": 2} | changes
    recipe = replace(recipe, **changes)
    return replace(recipe, code=named.digests(recipe))


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory, model_folder, questions, conversations):
    """Return the folder of a run with all four, on two ranks, resumed after three of six steps on one rank."""
    folder = tmp_path_factory.mktemp("own")
    recipe = recipe_of(model_folder, questions, conversations)
    run = run_on(ranks, recipe, folder, function=code.train, words=[str(folder)])
    (folder / "rank-0.jsonl").rename(folder / "events.jsonl")
    whole = read_jsonl(run.evaluations)
    gate.forget_after(run, run.checkpoints / "checkpoint-3")
    gate.shutil.rmtree(run.export)
    assert universal.is_needed(Layout(), run, 1)
    universal.convert(newest_checkpoint(run))
    ranks.check(code.train, str(run.path), str(folder), log=folder / "resumed", world_size=1)
    return run, folder, whole


def focal_alone(model_folder, conversations, mistake=False):
    """Return the losses and the final weights of plain PyTorch with the focal loss."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = plain.adamw(model, SETTINGS)
    found = plain.examples(conversations, tokenizer, SETTINGS)
    width = max(tokens.shape[1] for tokens, _ in found)
    tokens = torch.cat([pad(one, (0, width - one.shape[1])) for one, _ in found])
    learned = torch.cat([pad(one, (0, width - one.shape[1])) for _, one in found])
    labels = tokens.masked_fill(~learned, -100)
    losses = []
    for _ in range(SETTINGS.steps):
        logits = model(input_ids=tokens, use_cache=False).logits
        count = (labels[:, 1:] != -100).sum()
        if mistake:
            loss = torch.stack([code.focal(logits[at : at + 2], labels[at : at + 2], count) for at in range(0, 8, 2)])
            counts = [(labels[at : at + 2, 1:] != -100).sum() for at in range(0, 8, 2)]
            loss = (loss * count / torch.stack(counts)).mean()
        else:
            loss = code.focal(logits, labels, count)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_the_loss_is_that_of_plain_pytorch(trained, model_folder, conversations):
    """The run reads its data through the transform: what it drops or changes otherwise would change the losses."""
    run, _, _ = trained
    losses, weights = focal_alone(model_folder, conversations)
    logged = [row["loss"] for row in read_jsonl(run.metrics)]
    assert logged == pytest.approx(losses, rel=gate.LOSS)
    exported = AutoModelForCausalLM.from_pretrained(run.export, dtype=torch.float32).state_dict()
    assert max(plain.worst(exported[name], weights[name]) for name in weights) <= 1
    wrong, _ = focal_alone(model_folder, conversations, mistake=True)
    assert max(abs(ours - theirs) for ours, theirs in zip(wrong, losses, strict=True)) > 100 * gate.LOSS


def test_the_callback_sees_the_events_of_a_plain_trainer(trained, tmp_path, monkeypatch, model_folder, conversations):
    run, folder, _ = trained
    monkeypatch.setenv("EVENTS", str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    rows = [
        {"input_ids": tokens[0], "labels": tokens[0].masked_fill(~learned[0], -100)}
        for tokens, learned in plain.examples(conversations, tokenizer, SETTINGS)
    ]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=1, gradient_accumulation_steps=2, logging_steps=1,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(
        AutoModelForCausalLM.from_pretrained(model_folder), arguments, train_dataset=rows, callbacks=[code.Recorder()]
    ).train()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert events == [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert (folder / "rank-1.jsonl").exists(), "every rank calls it"
    for row in read_jsonl(run.metrics):
        assert row["loss_in_bits"] == pytest.approx(row["loss"] / 0.6931471805599453)


@pytest.mark.every
def test_a_pipeline_has_the_same_events(ranks, trained, tmp_path, model_folder, questions, conversations):
    _, folder, _ = trained
    pipeline = gate.recipe_for(SETTINGS, model_folder, conversations, "pipeline.json", layout=Layout(pipeline=2))
    changes = {"deepspeed": pipeline.deepspeed, "layout": pipeline.layout, "loss": None, "micro_batch_size": 4}
    recipe = recipe_of(model_folder, questions, conversations, **changes | {"data": Data(path=str(conversations))})
    recipe = replace(recipe, code=named.digests(recipe))
    run = run_on(ranks, recipe, tmp_path, function=code.train, words=[str(tmp_path)])
    assert (tmp_path / "rank-0.jsonl").read_text() == (folder / "events.jsonl").read_text()
    assert all("loss_in_bits" in row for row in read_jsonl(run.metrics))


def test_the_metric_is_that_of_plain_generation(trained, model_folder, conversations):
    """The values of two ranks and of one are equal, also those that depend on the order of the answers."""
    run, _, whole = trained
    measured = read_jsonl(run.evaluations)
    for at, folder in ((0, model_folder), (-1, run.export)):
        expected = code.overlap(*answers_of(folder, model_folder, conversations))
        for row in (measured[at], whole[at]):
            assert row["overlap"] == row["overlap_mean"] == pytest.approx(expected["mean"], abs=1e-6)
            assert row["overlap_ordered"] == pytest.approx(expected["ordered"], abs=1e-6)
            assert "exact_match" in row
    assert measured[-1]["overlap"] != measured[0]["overlap"], "training changes it"
    summary = read_json(run.summary)
    assert (summary["metric"], summary["after"]) == ("overlap", measured[-1]["overlap"])
    answers, references = answers_of(run.export, model_folder, conversations)
    assert code.overlap(answers[::-1], references[::-1])["ordered"] != expected["ordered"], "the order matters"


def answers_of(folder, model_folder, conversations):
    """Return the greedy answers of a model to each question, and the expected ones."""
    tokenizer, model = AutoTokenizer.from_pretrained(model_folder), AutoModelForCausalLM.from_pretrained(folder)
    answers, references = [], []
    for line in conversations.read_text().splitlines():
        ask, answer = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template([ask], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        tokens = model.generate(prompt, do_sample=False, max_new_tokens=96)[0, prompt.shape[1] :]
        text = tokenizer.decode(tokens)
        answers.append(text.partition(tokenizer.eos_token)[0].strip())
        references.append(answer["content"].strip())
    return answers, references


def test_dropped_examples_are_counted(trained):
    _, folder, _ = trained
    assert "2 dropped by data.transform" in read_logs(folder / "log")[0]


def test_a_run_does_not_resume_with_another_transform(trained, ranks, tmp_path):
    run, _, _ = trained
    copy = RunFolder(tmp_path / "run")
    gate.shutil.copytree(run.path, copy.path)
    gate.forget_after(copy, copy.checkpoints / "checkpoint-3")
    other = tmp_path / "own_code.py"
    other.write_text(Path(FILE).read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    recipe = read_recipe(copy)
    recipe = replace(recipe, data=replace(recipe.data, transform=f"{other}:asked"))
    write_recipe(copy, replace(recipe, code=named.digests(recipe)))
    assert ranks.run(code.train, str(copy.path), str(tmp_path), log=tmp_path / "log", world_size=1) == [2]
    said = read_logs(tmp_path / "log")[0]
    assert "was trained with another data.transform" in said and "data.changed=true accepts it" in said


FAILING = """
import os
from transformers import TrainerCallback
from tests.workers.own_code import *

calls = 0

def late(outputs, labels, num_items_in_batch):
    global calls
    calls += 1
    if calls > 2 + 2 * 4 and os.environ["RANK"] == "1":
        raise ValueError("no such token")
    return focal(outputs.logits, labels, num_items_in_batch)

def by_rank(answers, references):
    return float(os.environ["RANK"])

class OnOneRank(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if os.environ["RANK"] == "0" and state.global_step == 2:
            control.should_save = True
        if os.environ["RANK"] == "1" and state.global_step == 3:
            control.should_training_stop = True

    def on_log(self, args, state, control, **kwargs):
        if os.environ["RANK"] == "0" and state.global_step == 2:
            control.should_evaluate = True
"""


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    path = tmp_path_factory.mktemp("failing") / "mine.py"
    path.write_text(FAILING, encoding="utf-8")
    return path


def test_a_loss_that_raises_on_one_rank_is_named_and_the_checkpoint_kept(
    ranks, tmp_path, model_folder, questions, conversations, failing
):
    run = RunFolder(tmp_path / "run")
    recipe = recipe_of(model_folder, questions, conversations, loss=f"{failing}:late")
    write_recipe(run, replace(recipe, data=replace(recipe.data, validation=None, metric="loss")))
    statuses = ranks.run(code.train, str(run.path), str(tmp_path), log=tmp_path / "log")
    assert statuses[1] == 2
    said = read_logs(tmp_path / "log")[1]
    assert f"loss={failing}:late: step 5: ValueError: no such token ({failing}:12);" in said
    assert f"{run.checkpoints / 'checkpoint-3'} is kept; correct the file, and add --resume." in said
    assert newest_checkpoint(run) == run.checkpoints / "checkpoint-3"


def test_a_metric_that_differs_between_ranks_is_refused_before_training(
    ranks, tmp_path, model_folder, questions, conversations, failing
):
    run = RunFolder(tmp_path / "run")
    recipe = recipe_of(model_folder, questions, conversations)
    write_recipe(run, replace(recipe, data=replace(recipe.data, metric=f"{failing}:by_rank"), code={}))
    assert ranks.run(code.train, str(run.path), str(tmp_path), log=tmp_path / "log") == [2, 2]
    said = read_logs(tmp_path / "log")[0]
    assert "returned {'by_rank': 0.0} on rank 0 and {'by_rank': 1.0} on rank 1 for the same answers" in said
    assert not run.metrics.exists()


def test_what_the_callback_of_one_rank_asks_for_happens_on_all(
    ranks, tmp_path, model_folder, questions, conversations, failing
):
    recipe = recipe_of(model_folder, questions, conversations, callbacks=f"{failing}:OnOneRank", save_steps=0)
    recipe = replace(recipe, data=replace(recipe.data, metric="loss"), logging_steps=10)
    run = run_on(ranks, recipe, tmp_path, function=code.train, words=[str(tmp_path)])
    assert newest_checkpoint(run) == run.checkpoints / "checkpoint-2"
    assert [row["step"] for row in read_jsonl(run.evaluations)] == [0, 2, 3]
    assert [row["step"] for row in read_jsonl(run.metrics)] == [1, 2, 3] and run.export.exists()
    summary = read_json(run.summary)
    assert summary["steps"] == 3
    assert re.fullmatch(r"after step 3 of \d+: callbacks=.*OnOneRank asked for it", summary["stopped_early"])


def test_an_evaluation_without_held_out_examples_is_refused():
    context = SimpleNamespace(evaluation=None, recipe=SimpleNamespace(callbacks="mine.py:Mine"))
    trainer = SimpleNamespace(context=context, state=SimpleNamespace(global_step=2))
    with pytest.raises(
        UserError, match=r"mine\.py:Mine: control\.should_evaluate is set after step 2, and no examples"
    ):
        RunTrainer.evaluate(trainer)
