"""Which turns of a conversation are in the loss, and what becomes of conversations that are too long."""

from dataclasses import replace

import pytest
from datasets import Dataset

from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.training.data import load, tokenize
from tests.conftest import conversation, write_rows
from tests.parity import gate, plain
from tests.ranks import run_on
from tests.small import small
from tests.test_masks import MARKED, TINY_MODEL, TURNS, expected, learned, tokenizer_with

BY_HAND = {
    "chatml": [
        ("<|bos|><|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n", ""),
        ("Yes.<|im_end|><|end|>", "first"),
        ("\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n", ""),
        ("No.<|im_end|><|end|>", "last"),
        ("\n", ""),
    ],
    "llama3": [
        ("<|bos|><|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|>", ""),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", ""),
        ("Yes.<|eot_id|>", "first"),
        ("<|start_header_id|>user<|end_header_id|>\n\nSo?<|eot_id|>", ""),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", ""),
        ("No.<|eot_id|>", "last"),
    ],
    "gemma": [
        ("<|bos|><start_of_turn>user\nHi?<end_of_turn>\n<start_of_turn>model\n", ""),
        ("Yes.<end_of_turn>\n", "first"),
        ("<start_of_turn>user\nSo?<end_of_turn>\n<start_of_turn>model\n", ""),
        ("No.<end_of_turn>\n", "last"),
    ],
    "qwen3_instruct_2507": [
        ("<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n", ""),
        ("Yes.<|im_end|>\n", "first"),
        ("<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n", ""),
        ("No.<|im_end|>\n", "last"),
    ],
}
"""The pieces of a rendered conversation, and the answer that each is."""
COUNTED = {"assistant": {"first", "last"}, "last": {"last"}, "all": {"", "first", "last"}}


@pytest.mark.parametrize("loss_on", COUNTED)
@pytest.mark.parametrize("name", BY_HAND)
def test_tokens_and_labels_are_those_made_by_hand(name, loss_on):
    tokenizer = tokenizer_with(name)
    recipe = small(TINY_MODEL, "unread", loss_on=loss_on)
    found = tokenize.of_conversation(recipe, tokenizer)({"messages": TURNS, "tools": None, "given": 0})
    tokens, labels = [], []
    for text, answer in BY_HAND[name]:
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += piece
        labels += piece if answer in COUNTED[loss_on] else [tokenize.IGNORED] * len(piece)
    labels[0] = tokenize.IGNORED  # nothing predicts it
    assert (found["input_ids"], found["labels"]) == (tokens, labels)


@pytest.mark.parametrize("name", MARKED)
def test_only_the_last_answer_is_learned_in_every_template(name):
    assert learned(name, TURNS, loss_on="last") == expected(name, "Yes.", "No.")[-1:]


def test_prompts_are_learned_too_and_contradicting_marks_are_refused():
    (text,) = learned("llama3", TURNS, given=3, loss_on="all")
    assert "Hi?" in text and text.endswith("No.<|eot_id|>")
    marked = [TURNS[0], {**TURNS[1], "train": False}, *TURNS[2:]]
    with pytest.raises(UserError, match=r"marked as not learned .*loss_on=all learns every turn"):
        learned("llama3", marked, loss_on="all")


def test_long_conversations_are_cut_and_counted():
    tokenizer = tokenizer_with("chatml")
    rows = [conversation("Hi?", "Yes."), conversation("Hi?", "No, " * 40), conversation("Hi? " * 40, "Yes.")]
    raw = Dataset.from_list([{**row, "tools": None, "given": 0} for row in rows])
    recipe = small(TINY_MODEL, "unread", sequence_length=64)
    dropped, report = tokenize.tokenized(raw, recipe, tokenizer)
    assert (len(dropped), report.dropped, report.cut) == (1, 2, 0)
    cut, report = tokenize.tokenized(raw, replace(recipe, truncate=True), tokenizer)
    # The third has nothing in the loss before it is cut.
    assert (len(cut), report.dropped, report.cut, report.unlearnable) == (2, 0, 2, 1)
    whole = tokenize.of_conversation(recipe, tokenizer)(raw[1])
    assert cut[1]["input_ids"] == whole["input_ids"][:64] and cut[1]["labels"] == whole["labels"][:64]
    warning = "2 of 3 examples (67%) are cut at sequence_length=64, and the model does not learn how they end"
    assert any(warning in line for line in report.lines("training", 64))


@pytest.mark.parametrize(("metric", "kept", "dropped", "cut"), [("loss", 2, 0, 2), ("exact_match", 1, 2, 0)])
def test_held_out_conversations_are_cut_unless_answers_are_compared(tmp_path, capsys, metric, kept, dropped, cut):
    rows = [conversation("Hi?", "Yes."), conversation("Hi?", "No, " * 40), conversation("Hi? " * 40, "Yes.")]
    path = write_rows(tmp_path / "chats.jsonl", rows)
    recipe = small(TINY_MODEL, path, sequence_length=64)
    data = replace(recipe.data, validation=str(path), metric=metric)
    found = load.tokenized_datasets(replace(recipe, truncate=True, data=data), tokenizer_with("chatml"))
    report = found.description["held_out"]
    assert (len(found.held_out_sequences), report["dropped"], report["cut"]) == (kept, dropped, cut)
    assert found.description["training"]["cut"] == 2
    said = "warning: held out: 2 of 3 examples (67%) are cut at sequence_length=64; the longest has "
    assert (said in capsys.readouterr().out) == (cut > 0)


@pytest.mark.parametrize(
    ("variant", "settings", "message"),
    [
        ("dpo_lora", ["truncate=true"], "method=dpo: only conversations"),
        ("pretrain", ["truncate=true"], "method=pretrain: only conversations"),
        ("dpo_lora", ["loss_on=last"], "method=dpo: only turns of conversations"),
        ("full", ["loss_on=all", "data.metric=exact_match"], "loss_on=all: exact_match finds the last answer"),
        ("full", ["loss_on=all", "data.metric=loss", "data.thinking=read"], "it keeps reasoning out of the loss"),
    ],
)
def test_what_a_method_does_not_read_is_refused(variant, settings, message):
    with pytest.raises(UserError, match=message):
        overrides.apply(pages.find("tiny", variant), settings)


def test_a_run_learns_all_tokens_as_plain_pytorch_does(ranks, tmp_path, model_folder, conversations):
    settings = plain.Settings(steps=3, learn_prompts=True)
    recipe = gate.recipe_for(settings, model_folder, conversations, "zero2.json", loss_on="all")
    run = run_on(ranks, recipe, tmp_path)
    gate.agree(run, *plain.train(model_folder, conversations, settings))
    others, _ = plain.train(model_folder, conversations, plain.Settings(steps=3))
    with pytest.raises(AssertionError):
        gate.agree_on_steps(run, others)
