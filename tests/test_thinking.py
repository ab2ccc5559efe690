"""`data.thinking`: reasoning is learned, read without being learned, or taken out, template by template."""

from dataclasses import replace

import pytest

from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Data
from deepspeed_recipes.training.data import thinking, tokenize
from deepspeed_recipes.training.model.draft import TINY_MODEL
from tests.small import small
from tests.test_masks import tokenizer_with

REASON = "First I add."
FIRST, SECOND = {"role": "user", "content": "Hi?"}, {"role": "user", "content": "So?"}
TEMPLATES = ["chatml", "gemma4_v5", "glm4moe", "nemotron_3_nano", "qwen3", "qwen3_5_think"]


def answer(text, reasoning=REASON):
    """Return a turn with reasoning under every name that a template may read."""
    return {"role": "assistant", "content": text, "reasoning_content": reasoning, "reasoning": reasoning}


def rendered(name, turns, how):
    """Return what becomes of a conversation."""
    recipe = replace(small(TINY_MODEL, "unread"), data=Data("unread", thinking=how))
    return tokenize.of_conversation(recipe, tokenizer_with(name))({"messages": turns, "tools": None, "given": 0})


def tokens_and_learned(name, turns, how):
    """Return the whole text of a conversation, and the text of what is in the loss."""
    tokenizer, row = tokenizer_with(name), rendered(name, turns, how)
    learned = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    return tokenizer.decode(row["input_ids"]), tokenizer.decode(learned)


@pytest.mark.parametrize("name", TEMPLATES)
def test_reasoning_is_learned_read_or_taken_out(name):
    turns = [FIRST, answer("Yes.")]
    whole, learned = tokens_and_learned(name, turns, "learn")
    assert REASON in whole and REASON in learned and "Yes." in learned
    same, learned = tokens_and_learned(name, turns, "read")
    assert same == whole and REASON not in learned and "Yes." in learned and "think" not in learned.partition("Yes.")[0]
    whole, learned = tokens_and_learned(name, turns, "strip")
    assert REASON not in whole and "Yes." in learned
    assert (whole, learned) == tokens_and_learned(name, [FIRST, {"role": "assistant", "content": "Yes."}], "learn")


@pytest.mark.parametrize("name", ["chatml", "glm4moe", "qwen3"])
def test_every_turn_is_treated_alike(name):
    turns = [FIRST, answer("Yes."), SECOND, answer("No.", "Then I subtract.")]
    whole, learned = tokens_and_learned(name, turns, "read")
    assert "Then I subtract." in whole and "Then I" not in learned and REASON not in learned
    assert "Yes." in learned and "No." in learned and "So?" not in learned
    whole, _ = tokens_and_learned(name, turns, "strip")
    assert "Then I" not in whole and REASON not in whole


def test_a_block_in_the_content_counts_too():
    turns = [FIRST, {"role": "assistant", "content": f"<think>\n{REASON}\n</think>\n\nYes."}]
    whole, learned = tokens_and_learned("chatml", turns, "read")
    assert REASON in whole and REASON not in learned and learned.strip().startswith("Yes.")
    whole, learned = tokens_and_learned("chatml", turns, "strip")
    assert "think" not in whole and learned.startswith("Yes.")


def test_a_turn_that_only_reasons_cannot_be_stripped():
    for turn in (answer(""), {"role": "assistant", "content": f"<think>{REASON}</think>"}):
        with pytest.raises(UserError, match=r"data\.thinking=strip: leaves nothing of turn 2"):
            tokens_and_learned("chatml", [FIRST, turn], "strip")


def test_an_empty_block_stays_in_the_loss():
    whole, learned = tokens_and_learned("qwen3", [FIRST, {"role": "assistant", "content": "Yes."}], "read")
    assert "<think>\n\n</think>\n\nYes." in whole and "<think>\n\n</think>\n\nYes." in learned


def test_each_turn_of_the_assistant_is_searched_from_its_first_token_to_its_last(monkeypatch):
    searched = []
    monkeypatch.setattr(thinking, "_block", lambda tokenizer, tokens: searched.append(tokens))
    thinking.unlearned(None, [], range(5), [False, True, True, False, True])
    assert searched == [range(1, 3), range(4, 5)]


def test_a_mask_that_is_one_token_short_is_noticed(monkeypatch):
    found = thinking._block

    def short(tokenizer, tokens):
        block = found(tokenizer, tokens)
        return range(block.start, block.stop - 4)

    monkeypatch.setattr(thinking, "_block", short)
    _, learned = tokens_and_learned("chatml", [FIRST, answer("Yes.")], "read")
    assert not learned.strip().startswith("Yes.")


def test_a_template_without_blocks_is_refused_where_the_data_reasons():
    for how in ("learn", "read"):
        with pytest.raises(
            UserError, match=r"drops reasoning, in 'reasoning_content' of turn 2 .*data\.thinking=strip"
        ):
            tokens_and_learned("llama3", [FIRST, answer("Yes.")], how)
    assert REASON not in tokens_and_learned("llama3", [FIRST, answer("Yes.")], "strip")[0]
    with pytest.raises(UserError, match=r"no known reasoning block, so data\.thinking=read has nothing"):
        tokens_and_learned("gptoss", [FIRST, answer("Yes.") | {"thinking": REASON}], "read")


def test_reasoning_is_given_under_the_name_that_the_template_reads():
    for name in ("reasoning_content", "reasoning", "thinking", "thought"):
        turn = {"role": "assistant", "content": "Yes.", name: REASON}
        assert REASON in tokens_and_learned("qwen3", [FIRST, turn], "learn")[1], name
        assert REASON in tokens_and_learned("gptoss", [FIRST, turn], "learn")[1], name


def test_reasoning_that_a_template_forgets_is_counted_and_not_refused():
    turns = [FIRST, answer("Yes."), SECOND, answer("No.", "Then I subtract.")]
    for name, forgets in (("nemotron_3_nano", True), ("qwen3_5_think", False)):
        row = rendered(name, turns, "learn")
        assert row["forgets"] is forgets
        text = tokenizer_with(name).decode(row["input_ids"])
        assert "Then I subtract." in text and (REASON not in text) is forgets


def test_methods_without_conversations_refuse_the_key():
    recipe = pages.find("tiny-3m", "dpo_lora")
    with pytest.raises(UserError, match=r"data\.thinking=strip with method=dpo: DPO reads no conversations; leave"):
        replace(recipe, data=replace(recipe.data, thinking="strip"))
