"""Every form in which people write examples, and the messages for wrong ones."""

import contextlib
import csv
import json
import re
from dataclasses import replace

import pytest
from datasets import Dataset

from deepspeed_recipes.launching import paths, preflight
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Data
from deepspeed_recipes.training.data import sources, text_files
from deepspeed_recipes.training.data.forms import formats
from deepspeed_recipes.training.methods.rollouts import scoring
from tests.small import small

CUSTOMER_AND_AGENT = (("customer", "Hi?"), ("agent", "Yes."))


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def tool(content):
    return {"role": "tool", "content": content}


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SHORT = [user("Hi?"), assistant("Yes.")]
SYSTEM = {"role": "system", "content": "Be brief."}


def converted(example, method="sft"):
    """Return an example as a method reads it."""
    (found,) = formats.converted([("here", example)], method)
    return found


def chat(messages, tools=None, given=0):
    return {"messages": messages, "tools": tools, "given": given}


CHATS = {
    "messages": ({"messages": SHORT, "id": 7}, chat(SHORT)),
    "messages with a system prompt": ({"messages": [SYSTEM, *SHORT]}, chat([SYSTEM, *SHORT])),
    "messages with tools": (
        {"messages": [user("Add."), assistant(None, tool_calls=[CALL]), tool("3"), assistant("3")], "tools": [TOOL]},
        chat([user("Add."), assistant("", tool_calls=[CALL]), tool("3"), assistant("3")], [TOOL]),
    ),
    "arguments as text": (
        {
            "messages": [
                user("Add."),
                assistant(None, tool_calls=[{"function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}]),
            ],
            "tools": json.dumps([TOOL["function"]]),
        },
        chat([user("Add."), assistant("", tool_calls=[CALL])], [TOOL]),
    ),
    "what a table fills in": (
        {"messages": [{**user("Hi?"), "tool_calls": None, "name": None}, assistant("Yes.")], "tools": None},
        chat(SHORT),
    ),
    "content parts": (
        {"messages": [user([{"type": "text", "text": "H"}, {"type": "text", "text": "i?"}]), assistant("Yes.")]},
        chat(SHORT),
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}], "system": "Be brief."},
        chat([SYSTEM, *SHORT]),
    ),
    "sharegpt with tools": (
        {
            "conversations": [
                {"from": "human", "value": "Add."},
                {"from": "function_call", "value": json.dumps(CALL["function"])},
                {"from": "observation", "value": "3"},
                {"from": "gpt", "value": "3"},
            ],
            "tools": json.dumps([TOOL]),
        },
        chat([user("Add."), assistant("", tool_calls=[CALL]), tool("3"), assistant("3")], [TOOL]),
    ),
    "alpaca": ({"instruction": "Hi?", "output": "Yes."}, chat(SHORT)),
    "alpaca with everything": (
        {"instruction": "Add.", "input": "1, 2", "output": "3", "system": "Be brief.", "history": [["Hi?", "Yes."]]},
        chat([SYSTEM, *SHORT, user("Add.\n1, 2"), assistant("3")]),
    ),
    "prompt and completion": ({"prompt": "Hi?", "completion": "Yes."}, chat(SHORT, given=1)),
    "prompt and completion as turns": (
        {"prompt": [*SHORT, user("So?")], "completion": [assistant("No.")]},
        chat([*SHORT, user("So?"), assistant("No.")], given=3),
    ),
}


@pytest.mark.parametrize("form", CHATS)
def test_every_chat_becomes_messages(form):
    row, expected = CHATS[form]
    assert converted(row) == expected


PAIR = {"prompt": [user("Hi?")], "chosen": [assistant("Yes.")], "rejected": [assistant("No.")], "tools": None}
PAIRS = {
    "turns": PAIR,
    "strings": {"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."},
    "an answer as a turn beside conversations": {
        "conversations": [{"from": "human", "value": "Hi?"}],
        "chosen": {"from": "gpt", "value": "Yes."},
        "rejected": {"role": "assistant", "content": "No."},
    },
    "turns as text in a table": {
        "conversations": '[{"from": "human", "value": "Hi?"}]',
        "chosen": '{"from": "gpt", "value": "Yes."}',
        "rejected": '[{"role": "assistant", "content": "No."}]',
    },
    "an instruction": {"instruction": "Hi?", "input": "", "chosen": "Yes.", "rejected": "No."},
    "a question": {"question": "Hi?", "chosen": "Yes.", "rejected": "No."},
    "texts of hh-rlhf": {"chosen": "\n\nHuman: Hi?\n\nAssistant: Yes.", "rejected": "\n\nHuman: Hi?\n\nAssistant: No."},
    "a prompt of hh-rlhf": {"prompt": "\n\nHuman: Hi?\n\nAssistant:", "chosen": "Yes.", "rejected": "No."},
    "answers of hh-rlhf": {"prompt": "Hi?", "chosen": "\n\nAssistant: Yes.", "rejected": "\n\nAssistant: No."},
    "ms-swift's": {"messages": SHORT, "rejected_response": "No."},
    "whole conversations": {"chosen": SHORT, "rejected": [user("Hi?"), assistant("No.")]},
    "whole conversations beside a prompt": {
        "prompt": "Hi?",
        "chosen": SHORT,
        "rejected": [user("Hi?"), assistant("No.")],
    },
}


@pytest.mark.parametrize("form", PAIRS)
def test_every_pair_becomes_prompt_chosen_rejected(form):
    for method in ("dpo", "reward", "orpo", "simpo"):
        assert converted(PAIRS[form], method) == PAIR


def test_the_method_decides_between_fields_that_fit_several_forms():
    row = {"text": "Hi? Yes.", "prompt": "Hi?", "completion": "Yes.", "messages": SHORT}
    assert formats.form_of("here", row, "sft") == "messages"
    assert formats.form_of("here", row, "pretrain") == "text"
    assert formats.form_of("here", row, "sft", "prompt_completion") == "prompt_completion"


def test_columns_of_any_names_are_read(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text('"question, asked",a:b,prompt,id\nHi?,Yes.,other,7\n', encoding="utf-8")
    fields = formats.column_fields("question, asked:prompt,a:b:completion")
    assert fields == {"question, asked": "prompt", "a:b": "completion"}
    assert formats.column_fields(" question, asked : prompt, a:b: completion ") == fields
    rows = formats.renamed_columns(text_files.read(path), fields)
    assert list(formats.converted(rows, "sft")) == [chat(SHORT, given=1)]
    swapped = formats.renamed_columns(
        [("here", {"completion": "Hi?", "prompt": "Yes."})], {"completion": "prompt", "prompt": "completion"}
    )
    assert list(formats.converted(swapped, "sft")) == [chat(SHORT, given=1)]
    recipe = small(tmp_path, path)
    recipe = replace(recipe, data=replace(recipe.data, columns="question, asked:prompt,a:b:completion"))
    preflight.check_data(recipe)
    (source,) = sources.read(str(path), recipe)
    assert source.examples[0]["messages"] == SHORT
    assert source.unread == {"prompt (before data.columns)": 1, "id": 1}
    with pytest.raises(UserError, match="names 'answer'; this example has 'question, asked', 'a:b'"):
        preflight.check_file(path, "sft", Data(path="", columns="answer:completion"))
    with pytest.raises(UserError, match=r"data\.columns: 'picture' is not a field; write COLUMN:FIELD, several"):
        preflight.check_file(path, "sft", Data(path="", columns="id:picture, a:b:completion"))
    with pytest.raises(UserError, match=r"belong to no known form.*data\.columns=question:prompt"):
        formats.form_of("here", {"question": "a", "answer": "b"}, "sft")
    for wrong in ("question", "question:prmpt", "question:prompt,answer", ":prompt"):
        with pytest.raises(UserError, match=f"data.columns={wrong}: write COLUMN:FIELD"):
            formats.column_fields(wrong)


def test_plain_text_is_one_document_until_it_is_long(tmp_path, monkeypatch):
    path = tmp_path / "book.txt"
    path.write_text("\ufeffOnce upon a time.\n\nThe end.\n", encoding="utf-8")
    assert list(text_files.read(path)) == [(f"{path}:1", {"text": "Once upon a time.\n\nThe end.\n"})]
    monkeypatch.setattr(text_files, "DOCUMENT", 10)
    parts = list(text_files.read(path))
    assert [where for where, _ in parts] == [f"{path}:1", f"{path}:2"]
    assert "".join(part["text"] for _, part in parts) == "Once upon a time.\n\nThe end.\n"
    recipe = small(tmp_path, tmp_path, method="pretrain")
    assert preflight.check_data(recipe) == len(parts), "a folder is checked as its files are"
    assert [len(source.examples) for source in sources.read(str(tmp_path), recipe)] == [2]
    (tmp_path / "rows.jsonl").write_text(line(text="a"))
    (source,) = sources.read(str(tmp_path), recipe)
    assert source.examples[:] == {"text": ["a"]}, "a text file beside others is a note"
    with pytest.raises(UserError, match="form text, for the variant pretrain"):
        preflight.check_file(path, "sft")
    path.write_text(" \n")
    with pytest.raises(UserError, match=r"book\.txt is empty; add examples"):
        preflight.check_file(path, "pretrain")


@pytest.mark.parametrize("label", [True, False, 0, "True"])
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_judged_answers_are_not_taken_for_answers_to_imitate(label, method):
    row = {"prompt": "Hi?", "completion": "Go away.", "label": label}
    with pytest.raises(UserError, match="answers that were judged good or bad, for the variant kto_lora"):
        formats.form_of("here", row, method)
    assert formats.form_of("here", row, "sft", "prompt_completion") == "prompt_completion"
    assert formats.form_of("here", row | {"label": "billing"}, "sft") == "prompt_completion"
    assert formats.form_of("here", row | {"text": "a"}, "pretrain") == "text"


LABELS = [(True, True), (1, True), (1.0, True), ("True", True), ("good", True)]
LABELS += [(False, False), (0, False), ("false", False), ("bad", False)]
JUDGED = {
    "judged": {"prompt": "Hi?", "completion": "Yes."},
    "judged_messages": {"messages": SHORT},
    "judged_sharegpt": {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]},
    "judged_alpaca": {"instruction": "Hi?", "output": "Yes."},
}


def test_examples_without_a_system_prompt_get_the_recipes(tmp_path):
    own = {"role": "system", "content": "Be kind."}
    rows = [
        {"messages": SHORT},
        {"messages": [own, *SHORT]},
        {"prompt": "Hi?", "completion": "Yes.", "system": "Be kind."},
        {"instruction": "Hi?", "output": "Yes."},
    ]
    for row, turn in zip(rows, (SYSTEM, own, own, SYSTEM), strict=True):
        path = tmp_path / "one.jsonl"
        path.write_text(json.dumps(row))
        recipe = recipe_on(path, system=SYSTEM["content"])
        (source,) = sources.read(str(path), recipe)
        assert source.examples[0]["messages"] == [turn, *SHORT] and not source.unread
        assert source.examples[0]["given"] in (0, 2), "the prompt that is not learned has one turn more"
    reading = formats.reading_of(recipe.data)
    located = formats.prepared([("here", {"prompt": "Hi?", "unit": "km"})], reading)
    (read,) = formats.converted(located, "grpo")
    assert read["messages"] == [SYSTEM, user("Hi?")] and read["fields"] == {"unit": "km"}
    located = formats.prepared([("here", {"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."})], reading)
    (read,) = formats.converted(located, "dpo")
    assert read["prompt"] == [SYSTEM, user("Hi?")]
    with pytest.raises(UserError, match=r"data.system=.*reads texts, which no template renders"):
        overrides.apply(pages.find("tiny", "pretrain"), ["data.system=Be brief."])


def test_the_system_prompt_of_a_table_is_a_system_turn():
    read = converted({"system_prompt": "Be brief.", "prompt": "Hi?", "completion": "Yes."})
    assert read["messages"] == [{"role": "system", "content": "Be brief."}, user("Hi?"), assistant("Yes.")]


@pytest.mark.parametrize("form", JUDGED)
@pytest.mark.parametrize("key", ["label", "kto_tag"])
def test_judged_answers_are_read_for_kto(form, key):
    for label, good in LABELS:
        read = converted({**JUDGED[form], key: label}, "kto")
        assert read == {"prompt": [user("Hi?")], "completion": [assistant("Yes.")], "label": good, "tools": None}
    assert formats.form_of("here", {**JUDGED[form], "label": True}, "kto") == form


FLAGS = [
    *({name: value} for name in ("train", "training", "trainable", "loss", "weight") for value in (False, 0, 0.0, "0")),
    *({"loss_scale": 0}, {"loss_mask": 0}, {"masked": True}, {"train": True, "weight": 0}),
    *({"calculate_loss": 0}, {"compute_loss": False}, {"ignore": True}),
]


@pytest.mark.parametrize("flag", FLAGS, ids=str)
def test_a_turn_that_is_not_to_be_learned_is_marked(flag):
    out = {"train": False}
    turns = [user("Hi?") | flag, assistant("Yes.", **flag), user("So?"), assistant("No.")]
    read = converted({"messages": turns})
    assert read["messages"] == [user("Hi?"), assistant("Yes.", **out), user("So?"), assistant("No.")]
    numeric = isinstance(flag.get("loss"), int | float | str) and not isinstance(flag.get("loss"), bool)
    read = converted({"messages": SHORT, **flag})
    assert read["messages"] == (SHORT if numeric else [user("Hi?"), assistant("Yes.", **out)])


@pytest.mark.parametrize("flag", [{"train": True}, {"weight": 1.0}, {"weight": "1"}, {"masked": False}, {"train": ""}])
def test_a_turn_that_is_to_be_learned_is_not_marked(flag):
    assert converted({"messages": [user("Hi?"), assistant("Yes.", **flag)]}, "distill") == chat(SHORT)


def test_what_a_question_is_about_is_read_whatever_its_column_is_called():
    asked = {"question": "Why?", "history": [["Hi?", "Yes."]], "system": "Be brief."}
    before = [SYSTEM, *SHORT]
    for name in ("input", "context"):
        for method, answers in (("sft", ("completion",)), ("dpo", ("chosen", "rejected")), ("kto", ("completion",))):
            row = {**asked, name: "A text.", "label": True} if method == "kto" else {**asked, name: "A text."}
            located = [("here", row | {answer: f"Since {answer}." for answer in answers})]
            (read,) = formats.converted(
                formats.renamed_columns(located, formats.column_fields("question:prompt")), method
            )
            found = read["messages"][:-1] if method == "sft" else read["prompt"]
            assert found == [*before, user("Why?\nA text.")], (name, method)
    for asked, passage, whole in (
        ("Water boils at 100 degrees. Why?", "Water boils at 100 degrees.", "Water boils at 100 degrees. Why?"),
        ("Why?\nTea.", "Tea.", "Why?\nTea."),
        ("Add 5 to 10.", "5", "Add 5 to 10.\n5"),  # a short passage is in it by chance
    ):
        for row in ({"prompt": asked, "completion": "b", "context": passage},
                    {"instruction": asked, "output": "b", "input": passage}):  # fmt: skip
            assert converted(row)["messages"][0] == user(whole), row
    read = converted({"prompt": "Why?", "context": "A text."}, "grpo")
    assert read["messages"] == [user("Why?")] and read["fields"] == {"context": "A text."}, "for the reward function"

    read = converted({"prompt": "Why?", "expected": "So."}, "grpo")
    assert scoring.example_of(read)["expected"] == "So.", "the example's own field, where no answer is given"
    answered = {"messages": [user("Why?"), assistant("So.")], "expected": "No."}
    with pytest.raises(UserError, match="has an answer and the field 'expected'"):
        list(formats.converted([("here", answered)], "grpo"))

    row = {"prompt": "Why?", "completion": "So.", "history": [["Hi?", "Yes."]]}
    read = converted(row)
    assert read["given"] == 0 and len(read["messages"]) == 4, "the answers in a history are learned, too"


def test_nulls_and_empty_lists_of_a_table_are_not_there():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2], "c": None}}}
    tool = {"function": {**TOOL["function"], "strict": None}, "type": "function"}
    turns = [user("Hi?") | {"tool_calls": []}, assistant(None, tool_calls=[call], reasoning_content="")]
    twice = [user("a"), assistant("b", reasoning="c", thinking="c\n")]
    read = converted({"messages": twice})
    assert read["messages"] == [user("a"), assistant("b", reasoning="c")], "reasoning that is there twice is given once"
    read = converted({"messages": turns, "tools": [tool]})
    assert read == chat([user("Hi?"), assistant("", tool_calls=[CALL])], [TOOL])
    assert converted({"messages": SHORT, "tools": [], "system": SYSTEM["content"]}) == chat([SYSTEM, *SHORT])
    read = converted({"messages": [SYSTEM, *SHORT], "system": SYSTEM["content"]})
    assert read == chat([SYSTEM, *SHORT]), "a system prompt that is there twice is given once"
    kept = {"name": "add", "arguments": '{"c": null}'}
    read = converted({"messages": [user("a"), assistant("", tool_calls=[kept])]})
    assert read["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"c": None}, "as text it is what it says"
    whole = '{"name": "add", "arguments": {"a": [null], "c": null}}'
    for turn in ({"from": "function_call", "value": whole}, {"from": "gpt", "value": "", "tool_calls": f"[{whole}]"}):
        row = {"conversations": [{"from": "human", "value": "a"}, turn]}
        assert converted(row)["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": [None], "c": None}, turn


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False, "x": None}}, {"enable_thinking": False}),
        ({"chat_template_kwargs": '{"a": [1]}'}, {"a": [1]}),
        ({"enable_thinking": "false"}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {}, "enable_thinking": None}, None),
    ],
)
def test_arguments_of_the_template_are_read(more, options):
    assert converted({"messages": SHORT, **more}).get("options") == options


PROMPTS_OF_PAIRS = {
    "conversations": ({"conversations": [{"from": "human", "value": "May I?"}]}, "May I?"),
    "messages": ({"messages": [user("May I?")]}, "May I?"),
    "instruction": ({"instruction": "May I?", "input": "Tea."}, "May I?\nTea."),
    "empty input": ({"instruction": "May I?", "input": ""}, "May I?"),
    "prompt before others": ({"prompt": "May I?", "messages": [user("no")], "conversations": None}, "May I?"),
    "null prompt": ({"prompt": None, "instruction": "May I?"}, "May I?"),
}


@pytest.mark.parametrize("case", PROMPTS_OF_PAIRS)
def test_pairs_of_llama_factory_are_read(case):
    fields, asked = PROMPTS_OF_PAIRS[case]
    row = {**fields, "chosen": {"from": "gpt", "value": "Yes."}, "rejected": {"from": "gpt", "value": "No."}}
    assert formats.form_of("here", row, "dpo") == "preference"
    read = converted(row, "dpo")
    assert [turn["content"] for side in ("prompt", "chosen", "rejected") for turn in read[side]] == [
        asked,
        "Yes.",
        "No.",
    ]


def calls(*named, **more):
    made = [
        {"function": {"name": name, "arguments": arguments}, **({"id": number} if number else {})}
        for name, arguments, number in named
    ]
    return assistant("", tool_calls=made, **more)


def result(number, content="1"):
    return tool(content) | {"tool_call_id": number}


UNREAD = [
    ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1}, "preference", "dpo", ["margin"]),
    (
        {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 3, "score_rejected": 3.0},
        *("preference", "dpo"),
        [
            "inconsistent at: here",
            "inconsistent: score_chosen is not above score_rejected",
        ],
    ),
    (
        {"prompt": "a", "chosen": "b", "rejected": "c", "chosen_logps": -3, "rejected_logps": -2, "chosen_rating": "1"},
        *("preference", "dpo", ["chosen_logps", "rejected_logps", "chosen_rating"]),
    ),
    (
        {"prompt": "a", "chosen": "b", "rejected": "c", "Chosen_score": 1, "Rejected_score": 2},
        *("preference", "dpo"),
        ["inconsistent at: here", "inconsistent: Chosen_score is not above Rejected_score"],
    ),
    (  # also if the pair cannot be converted, which the conversion reports
        {key: [calls(("see", {}, ""))] for key in ("chosen", "rejected")}
        | {"prompt": "a", "tools": [{"name": "look", "parameters": {}}]},
        *("preference", "dpo"),
        ["inconsistent at: here", "inconsistent: 'see' is not in 'tools'"],
    ),
    (
        {"prompt": "a", "chosen": [assistant("b"), user("c"), assistant("d")], "rejected": "e"},
        *("preference", "dpo"),
        [
            "inconsistent at: here",
            "inconsistent: an answer holds turns of user, which are learned as part of it",
        ],
    ),
    (
        {"prompt": "a", "completion": [assistant("b"), tool("c"), user("d"), assistant("e")], "label": True},
        *("judged", "kto"),
        [
            "inconsistent at: here",
            "inconsistent: an answer holds turns of tool and user, which are learned as part of it",
            "inconsistent: a result follows no call",
        ],
    ),
    ({"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}, "preference", "dpo", []),
    ({"messages": [user("a"), assistant("b"), user("c"), assistant("d")], "label": True}, "judged_messages", "kto", []),
    ({"instruction": "a", "input": "b", "chosen": "b", "rejected": "c", "output": 1}, "preference", "dpo", ["output"]),
    ({"prompt": "a", "messages": SHORT, "chosen": "b", "rejected": "c"}, "preference", "dpo", ["messages"]),
    ({"text": "a", "url": "b", "system": "c"}, "text", "pretrain", ["url", "system"]),
    ({"prompt": "a", "answer": "b"}, "prompt", "grpo", ["reward: answer"]),  # listed apart
    (
        {
            "messages": [user("Hi?") | {"mood": "good", "name": "Jo"}, assistant("Yes.", weight=1)],
            **{"id": 7, "score": None, "chat_template_kwargs": {"a": 1}, "masked": False},
        },
        *("messages", "sft", ["id", "turns.mood", "turns.name", "chat_template_kwargs.a"]),
    ),
    (
        {"messages": [user("Hi?"), calls(("f", {}, "")), {"role": "tool", "content": "a", "name": "f"}]},
        *("messages", "sft", []),
    ),
    (
        {
            "messages": [
                user([{"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}, {"type": "text"}]),
                user([{"type": "image", "image": "a.png", "max_pixels": 9, "min_pixels": None}]),
                calls(("look", {}, "")),
            ],
            "tools": [{"name": "find"}],
        },
        *("messages", "sft"),
        ["images.detail", "images.max_pixels", "inconsistent at: here", "inconsistent: 'look' is not in 'tools'"],
    ),
    ({"messages": SHORT, "label": "a", "train": False}, "labelled_messages", "classify", ["train"]),
    ({"messages": SHORT, "loss": 0}, "messages", "sft", ["loss"]),
    ({"messages": SHORT, "loss": False}, "messages", "sft", []),
    ({"messages": json.dumps([user("a") | {"mood": "good"}, assistant("b")])}, "messages", "sft", ["turns.mood"]),
]


@pytest.mark.parametrize("content", ["a;b\n1;2\n", "a\tb\n1\t2\n", "a|b\n1|2\n", "sep=;\na;b\n1;2\n", "a,b\n1,2\n"])
def test_the_separator_of_a_table_is_read_from_its_first_line(tmp_path, content):
    (tmp_path / "a.csv").write_text(content)
    line = content.count("\n")
    assert list(text_files.read(tmp_path / "a.csv")) == [(f"{tmp_path}/a.csv:{line}", {"a": "1", "b": "2"})]


def test_roles_that_no_turn_has_are_found():
    rows = [("a", {"messages": [{"role": "Customer", "content": "a"}, assistant("b")]})]
    rows.append(("b", {"chat": json.dumps([{"speaker": "agent", "content": "a"}])}))
    reading = formats.reading_of(Data("a", roles="customer:user,agent:assistant,bot:assistant", columns="speaker:role"))
    assert formats.unused_roles(reading, [iter(rows)]) == {"bot"}
    assert formats.unused_roles(reading, [iter(rows[:1])]) == {"agent", "bot"}
    assert not formats.unused_roles(reading | {"transform": "mine.py:change"}, [iter(rows)])
    with pytest.raises(UserError, match="Q becomes two fields"):
        formats.column_fields("Q:prompt,A:completion,Q:input")
    with pytest.raises(UserError, match="Customer has two roles"):
        formats.reading_of(Data("a", roles="customer:user,Customer:assistant"))


@pytest.mark.parametrize(("row", "form", "method", "keys"), UNREAD)
def test_keys_that_nothing_reads_are_found(row, form, method, keys):
    assert formats.unread("here", row, form, method) == keys


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {}}, "required": ["city"]}
OF_XLAM = [{"name": "look", "parameters": {"city": {"type": "str"}, "day": {"type": "str, optional"}}}]


@pytest.mark.parametrize(
    ("turns", "parameters", "found"),
    [
        ([calls(("look", {"city": "a"}, ""))], WEATHER, []),
        ([calls(("find", {}, ""))], WEATHER, ["'find' is not in 'tools'"]),
        ([calls(("look", {"town": "a"}, ""))], WEATHER, ["'look' is called without 'city'", "'look' has no 'town'"]),
        (
            [calls(("look", {"town": "a"}, ""))],
            WEATHER | {"additionalProperties": True},
            ["'look' is called without 'city'"],
        ),
        ([calls(("look", {"town": "a"}, ""))], {"type": "object"}, []),
        ([calls(("look", {"town": "a"}, ""))], None, []),
        ([calls(("look", {"a": 1}, ""))], {"type": "object", "properties": {}}, ["'look' has no 'a'"]),
        ([calls(("look", {"a": 1}, ""))], OF_XLAM[0]["parameters"], ["'look' has no 'a'"]),
        (
            [assistant('<tool_call>{"name": "find", "arguments": {}}</tool_call>')],
            WEATHER,
            ["'find' is not in 'tools'"],
        ),
        ([assistant("<tool_call>{'name': 'find'}</tool_call>")], WEATHER, []),
        ([{"role": "tool", "content": "5"}, assistant("b")], WEATHER, ["a result follows no call"]),
        ([assistant("a"), {"role": "tool", "content": "5"}, assistant("b")], WEATHER, ["a result follows no call"]),
        ([assistant('{"name": "look"}'), {"role": "tool", "content": "5"}, assistant("b")], WEATHER, []),
        (
            [calls(("look", {"city": "a"}, "c1")), assistant("b")],
            WEATHER,
            ["a call has no result before the next turn"],
        ),
        (
            [calls(("look", {"city": "a"}, "c1"), ("look", {"city": "b"}, "c2")), result("c1"), assistant("b")],
            *(WEATHER, ["a call has no result before the next turn"]),
        ),
        (
            [calls(("look", {"city": "a"}, "c1"), ("look", {"city": "b"}, "c1")), result("c1"), tool("2")],
            *(WEATHER, ["several calls or results of a turn have one id"]),
        ),
        ([calls(("look", {"city": "a"}, "")), tool("1"), tool("2")], WEATHER, ["a turn has more results than calls"]),
        (
            [calls(("look", {"city": "a"}, "c1")), result("c1"), calls(("look", {"city": "a"}, "c2")), result("c1")],
            *(WEATHER, ["a result follows another turn's calls", "a call has no result before the next turn"]),
        ),
        (
            [calls(("look", {"city": "a"}, ""), ("look", {"city": "b"}, "")), tool("[1, 2]"), assistant("b")],
            WEATHER,
            [],
        ),
    ],
)
def test_calls_that_do_not_fit_are_named_with_the_first_place(tmp_path, turns, parameters, found):
    """In the launcher and in the ranks alike; public data has such examples, so they are trained."""
    row = {"messages": [user("a"), *turns], "tools": [{"name": "look", "parameters": parameters}]}
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in ({"messages": SHORT}, row, row)))
    [source] = sources.read(str(path), small(tmp_path, path))
    said = source.unread_line("") or ""
    assert len(source.examples) == 3 and bool(said) == bool(found)
    if found:
        listed = ", ".join(f"{one} (2)" for one in found)
        assert said.endswith(f"warning: inconsistencies in 2 examples, first in {path}:2: {listed}")
        assert formats.unread("here", row, "messages", "sft") == [
            "inconsistent at: here",
            *(f"inconsistent: {one}" for one in found),
        ]


@pytest.mark.parametrize("key", ["tool_call_id", "name", "unknown"])
def test_results_are_put_in_the_order_of_their_calls(key):
    made = calls(("look", {}, "c1"), ("find", {}, "c2"))
    second = {"tool_call_id": "c2", "name": "find", "unknown": "c2"}
    first = {"tool_call_id": "c1", "name": "look", "unknown": "c1"}
    given = [tool("2") | {key: second[key]}, tool("1") | {key: first[key]}]
    read = converted({"messages": [user("a"), made, *given, assistant("b")]})
    assert [turn["content"] for turn in read["messages"][2:4]] == (["2", "1"] if key == "unknown" else ["1", "2"])


def line(**row):
    return json.dumps(row)


MISTAKES = {
    "empty turn": (line(messages=[user(" "), assistant("b")]), "sft", ":1: turn 1 of 'messages' (user) is empty"),
    "two users": (line(messages=[user("a"), user("b"), assistant("c")]), "sft", ":1: turns 1 and 2 of 'messages' are"),
    "system twice": (
        line(messages=[{"role": "system", "content": "x"}, {"role": "system", "content": "y"}, *SHORT]),
        "sft",
        ":1: turns 1 and 2 of 'messages' are both system prompts",
    ),
    "result of no call": (
        line(
            messages=[
                user("a"),
                assistant("", tool_calls=[{"id": "c1", "function": {"name": "f", "arguments": {}}}]),
                {"role": "tool", "content": "b", "tool_call_id": "c2"},
                assistant("c"),
            ]
        ),
        "sft",
        ":1: turn 3 of 'messages' answers the tool call 'c2', which no turn before it makes (those have c1)",
    ),
    "answer with a question": (
        line(prompt="a", chosen=[assistant("b"), user("c")], rejected="d"),
        "dpo",
        ":1: 'chosen' ends with a turn of the user, not of the assistant, whose answers are compared; remove",
    ),
    "judged question": (
        line(prompt="a", completion=[assistant("b"), user("c")], label=True),
        "kto",
        ":1: 'completion' ends with a turn of the user",
    ),
    "prompt of another pair": (
        line(prompt="Why?", chosen=SHORT, rejected=[user("Hi?"), assistant("No.")]),
        "dpo",
        ":1: 'prompt' is not in the turns with which 'chosen' and 'rejected' start",
    ),
    "role": (
        line(messages=[{"role": "narrator", "content": "a"}]),
        "sft",
        "unknown role 'narrator'; known roles are system",
    ),
    "no role": (line(messages=[{"content": "a"}]), "sft", "turn 1 of 'messages' needs a 'role'"),
    "turn": (line(messages=["a"]), "sft", "turn 1 of 'messages' must be an object"),
    "image": (line(messages=[user([{"type": "image"}]), assistant("b")]), "sft", "parts that are not text (image)"),
    "image of a turn": (line(messages=[{**user("a"), "image": "b"}, assistant("b")]), "sft", "'image', which no turn"),
    "text of an image": (line(messages=[user([{"type": "image", "text": "c"}]), assistant("b")]), "sft", "(image)"),
    "text of a reasoning": (
        line(messages=[user("a"), assistant([{"type": "reasoning", "text": "c"}, {"type": "text", "text": "b"}])]),
        "sft",
        "parts that are not text (reasoning)",
    ),
    "flag of a part": (
        line(messages=[user("a"), assistant([{"type": "text", "text": "b", "train": False}])]),
        "sft",
        "parts that are not text (text, train, type)",
    ),
    "images of a turn": (line(messages=[user("a") | {"images": ["b"]}, assistant("b")]), "sft", "the example's own"),
    "sound of a turn": (
        line(messages=[user("a"), assistant("b", audio={"id": "c"})]),
        "sft",
        "turn 2 of 'messages' has",
    ),
    "two contents": (
        line(messages=[user("a") | {"value": "b"}, assistant("c")]),
        "sft",
        "'content' and 'value', which",
    ),
    "two roles": (line(messages=[user("a") | {"from": "gpt"}, assistant("c")]), "sft", "'role' and 'from', which mean"),
    "two kinds of calls": (
        line(messages=[user("a"), assistant("", tool_calls=[CALL], function_call=CALL)]),
        "sft",
        "'tool_calls' and 'function_call', which mean the same",
    ),
    "arguments by another name": (
        line(messages=[user("a"), assistant("", tool_calls=[{"name": "f", "parameters": {"b": 1}}])]),
        "sft",
        "a tool call with 'parameters', which is not read",
    ),
    "result of a call": (
        line(messages=[user("a"), assistant("", tool_calls=[{"function": {"name": "f"}, "result": "b"}])]),
        "sft",
        "a tool call with 'result', which is not read",
    ),
    "two system prompts": (
        line(messages=[{"role": "system", "content": "a"}, *SHORT], system="b"),
        "sft",
        "two system prompts that differ",
    ),
    "system prompts to classify": (
        line(messages=[{"role": "system", "content": "a"}, *SHORT], system="b", label="c"),
        "classify",
        "two system prompts that differ",
    ),
    "passage of turns": (line(prompt=[user("a")], context="b", completion="c"), "sft", "'context' follows a question"),
    "weight": (line(messages=[user("a"), assistant("b", weight=0.5)]), "sft", "'weight' 0.5; every token in the loss"),
    "two reasonings": (
        line(messages=[user("a"), assistant("b", reasoning_content="c", thinking="d")]),
        "sft",
        "has 'reasoning_content' and 'thinking', which mean the same",
    ),
    "infinity in a call": (
        line(messages=[user("a"), assistant("", tool_calls=[{"name": "f", "arguments": '{"x": Infinity}'}])]),
        "sft",
        "the arguments of 'f' hold NaN or Infinity",
    ),
    "NaN in a tool": (
        line(messages=SHORT, tools=[TOOL, {"name": "f", "parameters": {"default": float("nan")}}]),
        "sft",
        "'tools' hold NaN or Infinity",
    ),
    "refusal without content": (
        line(messages=[user("a"), {"role": "assistant", "content": None, "refusal": "No."}]),
        "sft",
        "It has 'refusal'; data.transform=",
    ),
    "part of a refusal": (
        line(messages=[user("a"), {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}]),
        "sft",
        "(refusal), which is all that this recipe reads; data.transform=",
    ),
    "part with an image": (
        line(messages=[user([{"type": "image_url", "image_url": {"url": "a.png"}}]), assistant("b")]),
        "sft",
        "(image_url), which is all that this recipe reads; recipes with model.vision=true",
    ),
    "endless": (line(prompt="a", completion="b" * 2**24), "sft", "16,777,230 characters, and tokenizing more than"),
    "part of a turn": (
        line(messages=[user("a"), assistant("b", train_detail=[{"begin_offset": 0, "end_offset": 0, "train": True}])]),
        "sft",
        "turn 2 of 'messages' has 'train_detail'",
    ),
    "weight of an example": (line(messages=SHORT, weight=0.3), "sft", ":1: the example has 'weight' 0.3"),
    "calls of a user": (line(messages=[user("a") | {"tool_calls": [CALL]}]), "sft", "only the assistant calls tools"),
    "reasoning of a user": (line(messages=[user("a") | {"thinking": "b"}]), "sft", "has 'thinking', which must be"),
    "argument of no template": (
        line(messages=SHORT, chat_template_kwargs={"tokenize": False}),
        "sft",
        "'chat_template_kwargs' names 'tokenize'",
    ),
    "video": (line(messages=SHORT, videos=["a.mp4"]), "sft", "'videos' holds video, which no recipe reads"),
    "image beside text": (line(prompt="a", completion="b", image="a.png"), "sft", "model.vision=true"),
    "image to classify": (line(text="a", label="b", image="a.png"), "classify", "'image' holds images"),
    "place of an image": (line(messages=[user("<image>\nHi?"), assistant("b")]), "sft", "has a placeholder, <image>"),
    "place in a prompt": (line(instruction="Hi?\n<image>", output="b"), "sft", "has a placeholder, <image>"),
    "passage of another kind": (line(prompt="a", completion="b", context=["c"]), "sft", "'context' must be a string"),
    "two names": (line(prompt="a", completion="b", label=True, kto_tag=True), "kto", "'kto_tag' and 'label' mean"),
    "answer not to learn": (
        line(prompt="a", chosen=[assistant("b", train=False)], rejected="c"),
        "dpo",
        "a flag excludes this answer from the loss",
    ),
    "judged conversation": (
        line(messages=SHORT, kto_tag=False),
        "sft",
        "answers that were judged good or bad, for the variant kto_lora",
    ),
    "call": (line(messages=[user("a"), assistant("", tool_calls=[{"name": 1}])]), "sft", "A call needs a name"),
    "arguments": (
        line(messages=[user("a"), assistant("", tool_calls=[{"name": "f", "arguments": "{"}])]),
        "sft",
        "should be JSON",
    ),
    "tools": (line(messages=SHORT, tools=[1]), "sft", "'tools' must be a list of function descriptions"),
    "tool of null": (
        line(messages=SHORT, tools=[TOOL, {"type": "function", "function": None}]),
        "sft",
        "'tools': the function 2 has no name; add it",
    ),
    "tool that is no function": (line(messages=SHORT, tools=[{"type": "search"}]), "sft", "the function 1 has no name"),
    "no answer": (line(conversations=[{"from": "human", "value": "a"}]), "sft", "no assistant turn in 'conversations'"),
    "alpaca": (line(instruction="a", output=5), "sft", "'output' must be a string; it is of type int; data.transform="),
    "empty output": (line(instruction="a", output=""), "sft", "the field 'output' is empty"),
    "history": (line(instruction="a", output="b", history=["c"]), "sft", "'history' must be a pair"),
    "no history": (line(instruction="a", output="b", history=5), "sft", "'history' must be a list of pairs"),
    "second row": (line(instruction="a", output="b") + "\n" + line(prompt="a"), "sft", ":2: the field 'instruction'"),
    "equal": (line(prompt="a", chosen="b", rejected="b"), "dpo", "'chosen' and 'rejected' are equal"),
    "no prompt": (line(chosen="a", rejected="b"), "dpo", "the field 'prompt' must be"),
    "another name": (
        line(asked="q", chosen="a", rejected="b"),
        "dpo",
        "'rejected'; name the right one with data.columns=NAME:prompt",
    ),
    "nothing shared": (line(chosen=SHORT, rejected=[user("c"), assistant("d")]), "dpo", "must continue the prompt"),
    "unknown fields": (line(question="a", answer="b"), "sft", "('question', 'answer') belong to no known form"),
    "other method": (line(text="a"), "sft", "form text, for the variant pretrain; the method sft reads messages"),
    "chat for pretraining": (line(messages=SHORT), "pretrain", "the method pretrain reads text (text)"),
    "no pairs": (line(messages=SHORT), "reward", "variant full, lora or distill; the method reward reads preference"),
    "pairs for a chat": (
        line(chosen="a", rejected="b"),
        "sft",
        "preference, for the variant dpo_lora, orpo_lora, simpo_lora, dpo_full or reward",
    ),
    "label": (
        line(prompt="a", completion="b", label=5),
        "kto",
        ":1: 'label' must be true (a good answer) or false, or words such as good and bad, up and down; it is 5; data",
    ),
    "label in words": (
        line(prompt="a", completion="b", label="so-so"),
        "kto",
        "up and down; it is 'so-so'; data.transform",
    ),
    "pairs for kto": (
        line(prompt="a", chosen="b", rejected="c"),
        "kto",
        "the method kto reads judged (prompt, completion",
    ),
    "no label": (
        line(prompt="a", completion="b"),
        "kto",
        "prompt_completion, for the variant full, lora or distill; the method kto reads",
    ),
    "text": (line(text=3), "pretrain", "'text' must be a string"),
}


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ("Frame 1: <image>\nFrame 2: <image>\nWhat moves?", "<image>"),
        ("Which bond is in <image 1>?", "<image 1>"),
        ("<|vision_start|><|image_pad|><|vision_end|>What?", "<|image_pad|>"),
        ("Before <|image_1|> or after?", "<|image_1|>"),
        ("<start_of_image>What?", "<start_of_image>"),
        ("What is <image> in SVG?", None),
        ("Correct this:\n<image>\n<url>a.png</url>\n</image>", None),
        ("Why <imagery>, not <|images|>?", None),
    ],
)
def test_an_image_that_is_only_written_is_refused(tmp_path, asked, written):
    path = tmp_path / "seen.jsonl"
    path.write_text(line(messages=[user(asked), assistant("b")]) + "\n")
    refused = pytest.raises(UserError, match=f"has a placeholder, {re.escape(written or '')}, but the example names no")
    with refused if written else contextlib.nullcontext():
        preflight.check_file(path, "sft")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_examples_are_named(mistake, tmp_path):
    content, method, hint = MISTAKES[mistake]
    path = tmp_path / "bad.jsonl"
    path.write_text(content + "\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        preflight.check_file(path, method)
    assert hint in str(caught.value) and str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


FILES = {
    "no column": ("a.csv", b"question,answer\n1,2\n", "'question', 'answer'"),
    "cells": (
        "a.csv",
        b'instruction,output\n"a, b",c\nd, e, f\n',
        ":3: not as many cells as the header has columns",
    ),
    "quotes": ("a.csv", b'instruction,output\n"a" b,c\n', ":2: not a table"),
    "csv encoding": ("a.csv", b"instruction,output\na,b\n\xff,c\n", ":3: not UTF-8"),
    "csv empty": ("a.csv", b"", "empty"),
    "csv header only": ("a.csv", b"instruction,output\n", "empty"),
    "array": ("a.json", b'[{"text": "a"},\n{"text": }]', ":2: not JSON"),
    "array of arrays": ("a.json", b"[[1]]", "row 1: a list, not a JSON object"),
    "array empty": ("a.json", b"[]", "empty"),
    "object": ("a.json", b'{"data": [\n{"text": "a"}]}', ":1: not JSON"),
    "two columns of a name": ("a.csv", b"prompt,prompt,completion\na,b,c\n", ":1: has the column 'prompt' twice"),
    "gzip": ("a.jsonl", b"\x1f\x8b\x08\x00", "is compressed with gzip, not text; unpack it"),
    "Parquet": ("a.jsonl", b"PAR1abc", "is Parquet without the suffix"),
    "Arrow stream": ("a", b"\xff\xff\xff\xff\x10\x01\0\0", "is Arrow, as a stream, without the suffix .arrow"),
    "UTF-16": ("a.csv", "a,b".encode("utf-16"), "is UTF-16, not text"),
    "UTF-16 without a mark": (
        "a.txt",
        "a b".encode("utf-16-le"),
        ":1: has a NUL byte, which no text has; is it UTF-16",
    ),
    "suffix": ("a.html", b"<p>", ":1: not JSON (Expecting value); one JSON object per line is expected (raw text has "),
    "suffix in capitals": ("A.CSV", b"question,answer\n1,2\n", "A.CSV:2: its fields ('question', 'answer')"),
    "array in lines": ("a.jsonl", b"[{}]", ":1: a list, not a JSON object; an array of objects is read from a .json"),
    "cut off": ("a.parquet", b"PAR1abc", "a.parquet: cannot be read as parquet"),
    "a key twice": ("a.jsonl", b'{"text": "a", "text": "b"}', ":1: not JSON (the key 'text' twice in an object)"),
    "text of a table": ("a.csv", b"messages\n[{'role': 'user'}]\n", "should be JSON and is not"),
}


@pytest.mark.parametrize("mistake", FILES)
def test_bad_files_are_named(mistake, tmp_path):
    name, content, hint = FILES[mistake]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        preflight.check_file(tmp_path / name, "sft")
    assert hint in str(caught.value) and name in str(caught.value)


def test_text_files_keep_what_tables_and_loaders_change(tmp_path):
    path = tmp_path / "table.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([["prompt", "completion"], ["a\nb", "042"], ["c", "2024-01-01"], ["d", "NA"]])
    assert [row["completion"] for _, row in text_files.read(path)] == ["042", "2024-01-01", "NA"]
    assert [where for where, _ in text_files.read(path)] == [f"{path}:2", f"{path}:4", f"{path}:5"]
    path.write_text("prompt;completion\na,b;c\n", encoding="utf-8")
    assert list(text_files.read(path)) == [(f"{path}:2", {"prompt": "a,b", "completion": "c"})]
    path = tmp_path / "array.json"
    path.write_text('\ufeff [{"text": "2024-01-01"}]', encoding="utf-8")
    assert list(text_files.read(path)) == [(f"{path}: row 1", {"text": "2024-01-01"})]


OPTIONS = {
    "weights": (Data("a.jsonl,b.jsonl", weights="1,2,3"), {}, "names 2 sources; give as many numbers above 0"),
    "weights of words": (Data("a.jsonl,b.jsonl", weights="much,little"), {}, "data.weights=much,little"),
    "weight of zero": (Data("a.jsonl,b.jsonl", weights="1,0"), {}, "above 0"),
    "share": (Data("a.jsonl", validation_share=1.0), {}, "below 1"),
    "stream without an end": (Data("a.jsonl", streaming=True), {"max_steps": None}, "add max_steps=1000"),
    "stream split": (Data("a.jsonl", streaming=True, validation_share=0.1), {}, "a stream cannot be split"),
    "stream of so many": (
        Data("a.jsonl", streaming=True, max_examples=5),
        {},
        "data.max_examples=5 with data.streaming=true: a stream cannot be sampled; use data.max_examples=none",
    ),
    "stream of pairs": (Data("a.jsonl", streaming=True), {"method": "dpo"}, "DPO reads all pairs"),
    "stream for rewards": (Data("a.jsonl", streaming=True), {"method": "reward"}, "reward modelling reads all pairs"),
    "form": (Data("a.jsonl", form="text"), {}, "data.form=text: is for the variant pretrain"),
}


@pytest.mark.parametrize("mistake", OPTIONS)
def test_options_that_contradict_each_other_are_named(mistake, tmp_path, monkeypatch):
    data, changes, hint = OPTIONS[mistake]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(line(messages=SHORT))
    (tmp_path / "b.jsonl").write_text(line(messages=SHORT))
    with pytest.raises(UserError) as caught:
        preflight.check_data(replace(small(tmp_path, tmp_path), data=data, **changes))
    assert hint in str(caught.value)


def test_the_sample_reward_needs_prompts_with_answers(tmp_path):
    (tmp_path / "a.jsonl").write_text(line(prompt="Hi?", answer="Yes."))
    grpo = replace(pages.find("tiny", "grpo"), data=Data(str(tmp_path / "a.jsonl")))
    with pytest.raises(UserError, match="no prompt has an answer, with which the reward exact_match compares"):
        preflight.check_data(grpo)
    assert preflight.check_data(replace(grpo, data=replace(grpo.data, columns="answer:completion"))) == 1
    assert preflight.check_data(replace(grpo, reward=grpo.reward.replace("exact_match", "short"))) == 1


def test_judged_answers_are_of_both_kinds(tmp_path):
    for name, labels in (("good", (True, True)), ("both", (True, False))):
        rows = [line(prompt="a", completion="b", label=label) for label in labels]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    Dataset.from_list([{"prompt": "a", "completion": "b", "label": True}]).to_parquet(tmp_path / "table.parquet")
    good, both, table = (str(tmp_path / name) for name in ("good.jsonl", "both.jsonl", "table.parquet"))
    kto = small(tmp_path, tmp_path, method="kto")
    for path, held_out in ((both, None), (f"{good},{both}", both), (f"{good},{table}", None), (table, table)):
        preflight.check_data(replace(kto, data=Data(path, validation=held_out)))
    for data, key in ((Data(good), "data.path"), (Data(both, validation=good), "data.validation")):
        with pytest.raises(UserError, match=f"^{key}: all 2 answers .* true, .*; add answers with the label false.$"):
            preflight.check_data(replace(kto, data=data))


def test_several_paths_are_located_one_by_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(line(messages=SHORT))
    (tmp_path / "template.jinja").write_text("")
    (tmp_path / "config.json").write_text("{}")
    recipe = small(tmp_path, "a.jsonl, someone/data-1.7B")  # a version, and no suffix of a file
    recipe = replace(recipe, model=replace(recipe.model, chat_template="template.jinja"))
    found = paths.locate(recipe)
    assert found.data.path == f"{tmp_path / 'a.jsonl'},someone/data-1.7B"
    assert found.model.chat_template == str(tmp_path / "template.jinja")
    with pytest.raises(UserError, match=r"data.path=b.jsonl: no such file"):
        paths.locate(small(tmp_path, "a.jsonl,b.jsonl"))


@pytest.mark.parametrize(
    ("example", "given", "fields"),
    [
        ({"messages": SHORT, "unit": "km"}, 1, {"unit": "km"}),
        ({"prompt": "2 + 2?", "unit": "km", "tests": [1, 2]}, 1, {"unit": "km", "tests": [1, 2]}),
        ({"prompt": SHORT[:1], "system": "Be brief."}, 2, {}),
        ({"conversations": [{"from": "human", "value": "2 + 2?"}], "solution": "4"}, 1, {"solution": "4"}),
        ({"question": 1, "prompt": "2 + 2?", "completion": "4"}, 1, {"question": 1}),
        ({"instruction": "Add.", "input": "2 + 2", "output": "4"}, 1, {}),
    ],
)
def test_prompts_are_read_with_or_without_an_answer_and_keep_their_other_fields(example, given, fields):
    (read,) = formats.converted([("file:1", example)], "grpo")
    assert (read["given"], read["fields"]) == (given, fields)
    assert all(turn["role"] != "assistant" for turn in read["messages"][:given])
    assert len(read["messages"]) - given == int("messages" in example or "completion" in example or "output" in example)


def test_a_prompt_is_for_the_model_to_answer():
    with pytest.raises(UserError, match="file:1: 'prompt' must end with a user's turn"):
        list(formats.converted([("file:1", {"prompt": SHORT})], "grpo"))
    with pytest.raises(UserError, match="belong to no known form"):
        list(formats.converted([("file:1", {"prompt": "2 + 2?", "response": "4"})], "sft"))


def chats(*turns):
    return line(messages=[{"role": role, "content": content} for role, content in turns])


GOOD = chats(("user", "Hi?"), ("assistant", "Yes."))


def recipe_on(path, **data):
    recipe = small(path, path)
    return replace(recipe, data=replace(recipe.data, path=str(path), **{"validation": None, **data}))


def test_an_example_may_lack_a_renamed_column(tmp_path):
    path = tmp_path / "asked.jsonl"
    rows = [{"q": "Hi?"}, {"q": "Hi?", "a": "Yes."}, {"q": "Hi?", "a": "No.", "s": "Be brief."}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    columns = {"columns": "q:prompt,a:completion,s:system"}
    (source,) = sources.read(str(path), recipe_on(path, **columns, bad="skip"))
    assert len(source.skipped) == 1 and len(source.examples) == 2
    with pytest.raises(UserError, match=r":1: the field 'completion' must be"):
        sources.read(str(path), recipe_on(path, **columns))
    with pytest.raises(UserError, match=r":1: data.columns names 'b'; this example has 'q'"):
        sources.read(str(path), recipe_on(path, columns="q:prompt,b:completion", bad="skip"))


def test_several_sources_with_columns_of_their_own(tmp_path):
    rows = [
        {"question": "Hi?", "answer": "Yes."},
        {"frage": "Hi?", "completion": "Yes."},  # one renamed, the other under its usual name
        {"messages": SHORT, "note": "kept out"},  # none of the columns
    ]
    files = [tmp_path / f"{number}.jsonl" for number in range(len(rows))]
    for file, row in zip(files, rows, strict=True):
        file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    columns = "question:prompt,answer:completion,frage:prompt"
    recipe = recipe_on(",".join(map(str, files)), columns=columns)
    preflight.check_data(recipe)
    found = sources.read(recipe.data.path, recipe)
    assert [one.forms for one in found] == [["prompt_completion"], ["prompt_completion"], ["messages"]]
    assert all(next(iter(one.examples))["messages"] == SHORT for one in found)
    held_out = recipe_on(files[0], columns="question:prompt,answer:completion", validation=str(files[2]))
    preflight.check_data(held_out)
    assert sources.read(held_out.data.validation, held_out)[0].examples[0]["messages"] == SHORT
    alpaca = tmp_path / "alpaca.jsonl"
    alpaca.write_text(json.dumps({"prompt": "Sum up.", "input": "Long.", "completion": "Short."}))
    both = tmp_path / "both.jsonl"
    both.write_text(json.dumps({"question": "Hi?", "frage": "No?", "answer": "Yes."}))
    for path, given, message in (
        (recipe.data.path, f"{columns},anser:completion", "'anser', which neither data.path nor"),
        (f"{files[0]},{files[2]}", "qestion:prompt,anser:completion", "names 'qestion', which neither"),
        (f"{files[1]},{both}", columns, "'question' and 'frage' are both prompt"),
        (f"{files[1]},{alpaca}", "frage:prompt,input:prompt", "renames 'input' to prompt, and this example has both"),
        (
            f"{files[1]},{files[0]}",
            "frage:prompt,answer:completion",
            "names 'frage'; this example has 'question'",
        ),
    ):
        for check in (preflight.check_data, lambda one: sources.read(one.data.path, one)):
            with pytest.raises(UserError, match=message):
                check(recipe_on(path, columns=given))


def test_each_file_of_a_source_has_one_form(tmp_path):
    rows = [{"instruction": "Hi?", "output": "Yes."}]
    rows += [{"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}], "id": 3}]
    for name, of_file in (("a.jsonl", rows[:1] * 2), ("b.json", [rows[1]] * 3)):
        text = json.dumps(of_file) if name == "b.json" else "".join(json.dumps(row) + "\n" for row in of_file)
        (tmp_path / name).write_text(text)
    (source,) = sources.read(str(tmp_path), recipe_on(tmp_path))
    assert source.line().endswith("5 examples in the form alpaca or sharegpt") and source.unread == {"id": 3}
    turns = [[(turn["role"], turn["content"]) for turn in example["messages"]] for example in source.examples]
    assert turns == [[("user", "Hi?"), ("assistant", "Yes.")]] * 5 and preflight.check_data(recipe_on(tmp_path)) == 5
    (tmp_path / "b.json").write_text(json.dumps([rows[1], *rows]))
    named = (
        r"b.json: row 2: is in the form alpaca, and the first example of b.json in the form sharegpt; give each form"
    )
    for check in (preflight.check_data, lambda recipe: sources.read(str(tmp_path), recipe)):
        with pytest.raises(UserError, match=named):
            check(recipe_on(tmp_path))


def test_bad_examples_are_named_together_or_left_out(tmp_path):
    path = tmp_path / "chats.jsonl"
    bad = [chats(("user", ""), ("assistant", "Yes.")), '{"messages": [', chats(("user", "a"), ("user", "b"))] * 4
    path.write_text("\n".join([bad[0], GOOD, *bad[1:], GOOD]) + "\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        preflight.check_data(recipe_on(path))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{path}:1, 5, 8, 11: turn 1 of 'messages' (user) is empty")
    assert lines[1].startswith(f"{path}:3, 6, 9: not JSON")
    assert len(lines) == 4 and lines[-1].startswith("12 of 14 examples cannot be used, of which the first 10 are")
    assert preflight.check_data(recipe_on(path, bad="skip")) == 2
    with pytest.raises(UserError, match="12 of 14 examples cannot be used"):
        sources.read(str(path), recipe_on(path))
    (source,) = sources.read(str(path), recipe_on(path, bad="skip"))
    assert (
        len(source.examples) == 2
        and len(source.skipped) == 12
        and source.skipped[0] == lines[0].replace("1, 5, 8, 11", "1")
    )
    path.write_text(bad[0] + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="is empty"):
        preflight.check_data(recipe_on(path, bad="skip"))


def test_roles_are_renamed_turns_joined_and_empty_system_turns_dropped(tmp_path):
    path = tmp_path / "chats.jsonl"
    turns = [("system", " "), ("Customer", "Hi."), ("customer", "Help?"), ("agent", "Yes."), ("AGENT", "Here.")]
    path.write_text(chats(*turns) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"data.roles=Customer:user,agent:assistant\.$"):
        preflight.check_data(recipe_on(path))
    roles = {"roles": "customer:user, agent:assistant"}
    with pytest.raises(UserError, match=r"data.join_turns=true"):
        preflight.check_data(recipe_on(path, **roles))
    (source,) = sources.read(str(path), recipe_on(path, **roles, join_turns=True))
    (example,) = source.examples
    assert example["messages"] == [user("Hi.\nHelp?"), assistant("Yes.\nHere.")]
    for wrong in ("customer", "customer:client", ":user"):
        with pytest.raises(UserError, match="write NAME:ROLE"):
            formats.reading_of(recipe_on(path, roles=wrong).data)
    table = tmp_path / "chats.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["messages"], [json.dumps(json.loads(chats(*turns))["messages"])]])
    (source,) = sources.read(str(table), recipe_on(table, **roles, join_turns=True))
    assert list(source.examples) == [example]


@pytest.mark.parametrize(
    ("speaker", "text", "others"),
    [
        ("speaker", "text", {}),
        ("from", "msg", {}),
        ("author", "message", {"ts": "2026-01-02T10:00:00"}),
        ("name", "body", {"mood": "very happy"}),
        ("who", "said", {"created": "2 Jan 2026", "id": "message one", "number": "0c1d9a2f-77ab"}),
        ("who", None, {"said": "Where?", "answered": "Here."}),
    ],
)
def test_keys_of_turns_are_renamed_as_the_refusal_says(tmp_path, speaker, text, others):
    path = tmp_path / "chats.jsonl"
    turns = [{**others, speaker: name, **({text: said} if text else {})} for name, said in CUSTOMER_AND_AGENT]
    path.write_text(json.dumps({"dialogue": turns}) + "\n", encoding="utf-8")
    for check in (preflight.check_data, lambda recipe: list(sources.read(str(path), recipe)[0].examples)):
        with pytest.raises(UserError) as caught:
            check(recipe_on(path, columns="dialogue:messages"))
    columns = re.search(r"data.columns=(\S+)\.", str(caught.value))[1]
    advised = [f"{speaker}:role"] * (speaker != "from") + [f"{text or 'KEY_OF_THE_TEXT'}:content"]
    assert columns.split(",") == ["dialogue:messages", *advised]
    if text:
        (source,) = sources.read(str(path), recipe_on(path, columns=columns, roles="customer:user,agent:assistant"))
        (one,) = source.examples
        assert [(turn["role"], turn["content"]) for turn in one["messages"]] == [("user", "Hi?"), ("assistant", "Yes.")]


def test_advice_about_columns_names_what_the_user_has_to_write_in_full():
    bad = text_files.BadExamples({"log": "messages", "a,b": "system", "q": "text"})
    for said, advised in (
        ("x. Write data.columns=NAME:prompt.", "x. Write data.columns=log:messages,a,b:system,q:text,NAME:prompt."),
        ("Write data.columns=text:prompt.", "Write data.columns=log:messages,a,b:system,q:prompt."),
        ("Write data.columns=c:messages,d:text.", "Write data.columns=a,b:system,c:messages,d:text."),
        ("no advice: text", "no advice: text"),
    ):
        assert bad.advised(UserError(said)) == advised


@pytest.mark.parametrize("turn", [{"input": "Hi?", "output": "Yes."}, "Hi?"], ids=["Capybara", "LIMA"])
def test_turns_that_do_not_say_who_speaks_are_not_renamed(turn):
    with pytest.raises(UserError, match=r"; data\.transform=FILE\.py:FUNCTION can rewrite such examples\.$"):
        list(formats.converted([("here", {"messages": [turn]})], "sft"))


def test_a_rows_place_is_its_first_line_and_a_quote_left_open_is_found_where_it_begins(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text('prompt,completion\n"a\nb",c\n\nd,e,f\ng,h\n"i,j\nk,l\n', encoding="utf-8")
    found = text_files.BadExamples()
    with pytest.raises(UserError, match=f"{path}:7: not a table"):
        list(text_files.read(path, found))
    assert found.first == [
        f"{path}:5: not as many cells as the header has columns (2); quote cells that hold the "
        "separator or a line break."
    ]


def test_a_folder_is_checked_before_the_ranks_start(tmp_path):
    (tmp_path / "one.jsonl").write_text(GOOD + "\n")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "one.jsonl").write_text("{\n")
    (tmp_path / "two.jsonl").write_text(GOOD + "\n{\n")
    with pytest.raises(UserError, match=r"two.jsonl:2: not JSON"):
        preflight.check_data(recipe_on(tmp_path))
    assert preflight.check_data(recipe_on(tmp_path, bad="skip")) == 2
    (tmp_path / "two.jsonl").rename(tmp_path / "test.jsonl")
    assert preflight.check_data(recipe_on(tmp_path)) is None, "the ranks know which files belong to a split"


def test_columns_are_suggested_by_their_own_names(tmp_path):
    for row, method, said in (
        ({"chat_id": "7", "customer": "a", "agent": "b"}, "sft", "customer:prompt,agent:completion"),
        ({"dialogue": [{"role": "user"}]}, "sft", "dialogue:messages"),
        ({"q": "a", "good": "b", "poor": "c"}, "dpo", "q:prompt,good:chosen,poor:rejected"),
        ({"body": "a", "kind": "b"}, "classify", "body:text,kind:label"),
        ({"number": 3, "role": None}, "sft", "question:prompt,answer:completion"),
        ({"instruction": "a", "context": "b", "response": "c", "category": "d"}, "sft", "response:output"),
        ({"prompt": "a", "response_0": "b", "response_1": "c", "better": 1}, "dpo", "question:prompt,answer:chosen,wo"),
        ({"type": "a", "query": "b", "original_question": "c", "response": "d"}, "sft", "query:prompt,response:comp"),
        ({"solution": "a", "question": "b", "kind": "c"}, "sft", "question:prompt,solution:completion"),
        ({"context": [{"role": "user"}], "response1": "a", "score": 1}, "reward", "question:prompt,answer:chosen"),
        (
            {"source": "a", "instruction": "b", "chosen_model": "c", "rejected_response": "d", "chosen_response": "e"},
            *("dpo", "chosen_response:chosen,rejected_response:rejected"),
        ),
        ({"prompt": "a", "response": "b", "is_safe": True}, "kto", "response:completion,is_safe:label"),
        ({"images": [{"path": "a.png"}], "texts": [{"user": "a"}]}, "sft", "question:prompt,answer:completion"),
        ({"system": "a", "chat": "USER: b"}, "sft", "question:prompt,answer:completion"),
    ):
        with pytest.raises(UserError, match=f"data.columns={said}"):
            formats.form_of("here", row, method)
    for row in ({"chat": "7", "role": "agent", "text": "Hi."}, {"sender": "agent", "message": "Hi."}):
        with pytest.raises(UserError, match=r"is one turn .* and an example is a whole conversation"):
            formats.form_of("here", row, "sft")
