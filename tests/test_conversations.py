"""Conversations built at random: the tokens and the mask of plain transformers, from every kind of file the same."""

import contextlib
import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, product

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import AutoTokenizer
from trl.chat_template_utils import has_generation_markers

from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.samples import REASONING
from deepspeed_recipes.training.data import chat_templates, sources, tokenize
from deepspeed_recipes.training.data.forms import formats, keys
from deepspeed_recipes.training.model.draft import TINY_MODEL
from tests.small import small
from tests.test_masks import FOLDER, SYSTEM, TOOL_TURNS, TOOLS, TURNS, tokenizer_with
from tests.tiers import tiered

TEMPLATES = sorted({file.stem for file in FOLDER.glob("*.jinja") if not file.stem.endswith("_training")})
TEMPLATES += ["chatml", "tiny"]
FEW = (
    "chatml",
    "deepseek_r1_distill",
    "diffusion_gemma",
    "gemma4_v5",
    "gptoss",
    "llama3_1",
    "phi3",
    "qwen3",
    "smolvlm",
)
ADDED = "<act>"
"""A special token that a user has added for the model to write."""
WORDS = st.text(st.characters(exclude_categories=["Cs", "Co", "Cc"], exclude_characters="m<>"), max_size=12)
FLAGS = (("train", False), ("loss", False), ("weight", 0), ("weight", 0.0), ("masked", True))
SETTINGS = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@dataclass(frozen=True)
class Style:
    """What all conversations of a file have in common, since a column of Parquet has one type."""

    field: str = "messages"
    parts: bool = False
    arguments_as_text: bool = False
    flag: tuple[str, object] = FLAGS[0]
    reasoning: str = REASONING[0]
    reasons: bool = False
    calls: bool = False


STYLES = st.builds(
    Style,
    field=st.sampled_from(["messages", "conversations"]),
    parts=st.booleans(),
    arguments_as_text=st.booleans(),
    flag=st.sampled_from(FLAGS),
    reasoning=st.sampled_from(REASONING),
    reasons=st.booleans(),
    calls=st.booleans(),
)


@dataclass
class Drawn:
    """A conversation as a file has it and as `apply_chat_template` takes it; every text of it has a mark."""

    row: dict
    turns: list[dict]
    tools: list[dict] | None
    learned: set[str]
    """The marks in the loss."""
    unlearned: set[str]
    """The marks of turns that a flag leaves out of it."""
    forgettable: set[str]
    """The marks of reasoning before the last question."""


@st.composite
def conversations(draw: Callable, style: Style) -> Drawn:
    """Return a conversation with every kind of turn, and in some turns the keys of others, set to null."""
    number = count()
    written, turns, learned, unlearned, forgettable = [], [], set(), set(), set()

    def text() -> str:
        return f"{draw(WORDS)} m{next(number)}m"

    def add(role: str, content: str | None, said: tuple[str, ...] = (), **more: object) -> None:
        usual = {"user": "human", "assistant": "gpt"}.get(role, role) if style.field == "conversations" else role
        shown = [{"type": "text", "text": content}] if style.parts and content is not None else content
        names = ("from", "value") if style.field == "conversations" else ("role", "content")
        row = dict(zip(names, (usual, shown), strict=True)) | more
        turn = {"role": role, "content": content or "", **more}
        if role == "assistant" and (calls := turn.get("tool_calls")) and style.arguments_as_text:
            named = [one["function"] for one in calls]
            row["tool_calls"] = [
                {"type": "function", "function": one | {"arguments": json.dumps(one["arguments"])}} for one in named
            ]
        out = draw(st.booleans())
        if out:
            row[style.flag[0]] = style.flag[1]  # on turns of others it says nothing
        if draw(st.booleans()):
            row |= {"tool_calls": row.get("tool_calls"), "name": row.get("name")}
        if role == "assistant":
            (unlearned if out else learned).update(mark(one) for one in said)
        written.append(row)
        turns.append(turn)

    if draw(st.booleans()):
        add("system", text())
    tools = None
    exchanges = draw(st.integers(1, 3))
    for at in range(exchanges):
        add("user", text())
        if style.calls and draw(st.booleans()):
            value = f"v m{next(number)}m"
            call = {"type": "function", "function": {"name": "add", "arguments": {"first": value}}}
            tools = [
                {
                    "type": "function",
                    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
                }
            ]
            beside = text() if draw(st.booleans()) else None
            add("assistant", beside, (value, *filter(None, [beside])), tool_calls=[call])
            add("tool", text(), name="add")
        answer = (ADDED if draw(st.booleans()) else "") + text()
        reasoning = {style.reasoning: text()} if style.reasons and draw(st.booleans()) else {}
        if at < exchanges - 1:
            forgettable |= {mark(one) for one in reasoning.values()}
        add("assistant", answer, (answer, *reasoning.values()), **reasoning)
    row = {style.field: written, "tools": tools}
    return Drawn(row, turns, tools, learned, unlearned, forgettable)


def mark(text: str) -> str:
    return text.rpartition(" ")[2]


def marks(drawn: Drawn) -> set[str]:
    said = json.dumps(drawn.turns)
    return {f"m{number}m" for number in range(200) if f"m{number}m" in said}


def with_added(name: str):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL) if name == "tiny" else tokenizer_with(name)
    tokenizer.add_special_tokens({"additional_special_tokens": [ADDED]}, replace_extra_special_tokens=False)
    return tokenizer


TOKENIZERS = {}


def tools_of(name: str):
    """Return a template's tokenizer, the template that is trained with, and what makes tokens of an example."""
    if name not in TOKENIZERS:
        tokenizer, recipe = with_added(name), small(TINY_MODEL, "unread")
        template, _ = chat_templates.marker(recipe, tokenizer)
        TOKENIZERS[name] = tokenizer, template, tokenize.of_conversation(recipe, tokenizer)
    return TOKENIZERS[name]


def shows_reasoning(tokenizer, template) -> bool:
    """Return whether a template shows the reasoning of a last turn, so that it may forget that of earlier ones."""
    asked, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
    turns = ([asked, answer | {name: "m0m"}] for name in REASONING)
    try:
        return any("m0m" in tokenizer.apply_chat_template(one, chat_template=template, tokenize=False) for one in turns)
    except (TemplateError, TypeError):
        return False


def plain(tokenizer, template, drawn: Drawn) -> tuple[list[list[int]], bool]:
    """Return what transformers gives for each form of a conversation that shows all; and whether one is rendered."""
    found, rendered = [], False
    may_miss = drawn.forgettable if shows_reasoning(tokenizer, template) else set()
    names = REASONING if any(name in turn for turn in drawn.turns for name in REASONING) else ()
    for parts, name in product((False, True), (None, *names)):
        turns = []
        for turn in drawn.turns:
            reasoning = next((turn[one] for one in REASONING if one in turn), None)
            turn = {key: value for key, value in turn.items() if key not in REASONING or name is None}
            if name and reasoning:
                turn[name] = reasoning
            if parts:
                turn["content"] = [{"type": "text", "text": turn["content"]}] if turn["content"] else []
            turns.append(turn)
        options = {"tools": drawn.tools, "chat_template": template}
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, **options)
        except (TemplateError, TypeError):
            continue
        rendered = True
        if all(one in text for one in marks(drawn) - may_miss) and (
            not drawn.tools or "Adds." in text or '"name": "add"' in text
        ):
            found.append(tokenizer.apply_chat_template(turns, return_dict=True, **options)["input_ids"])
    return found, rendered


def ours(name: str, drawn: Drawn) -> tuple[list[int], list[int]]:
    (example,) = formats.converted([("here", drawn.row)], "sft")
    row = tools_of(name)[2](example)
    return row["input_ids"], row["labels"]


def learned_at(labels: list[int]) -> set[int]:
    return {at for at, label in enumerate(labels) if label != tokenize.IGNORED}


def flipped(drawn: Drawn, style: Style, which: bool | None) -> Drawn:
    """Return the conversation with no flags (None), or with the assistant's turns flagged that were not."""
    name, value = style.flag
    who, said = ("from", "gpt") if style.field == "conversations" else ("role", "assistant")
    rows = []
    for turn in drawn.row[style.field]:
        bare = {key: one for key, one in turn.items() if key != name}
        rows.append(bare | ({name: value} if which and turn[who] == said and name not in turn else {}))
    return replace(drawn, row={**drawn.row, style.field: rows})


def check(name: str, drawn: Drawn, style: Style) -> bool:
    """Check what becomes of a conversation; return whether it was refused."""
    tokenizer, template, _ = tools_of(name)
    expected, rendered = plain(tokenizer, template, drawn)
    try:
        ids, labels = ours(name, drawn)
    except UserError as error:
        if not has_generation_markers(template) and "renders a turn differently" in str(error):
            return True  # Gemma 4 puts the text beside a tool call after the tool's result
        assert not expected, f"refused, and transformers shows all of it: {error}"
        assert not rendered or "drops" in str(error), str(error)
        return True
    assert ids in expected
    assert all(label in (tokenize.IGNORED, token) for token, label in zip(ids, labels, strict=True))
    said = tokenizer.decode([label for label in labels if label != tokenize.IGNORED])
    found = {one for one in marks(drawn) if one in said}
    assert found - drawn.forgettable == drawn.learned - drawn.forgettable and not found & drawn.unlearned
    (same, every), (other, rest) = (ours(name, flipped(drawn, style, which)) for which in (None, True))
    assert ids == same == other, "a flag changes no token"
    assert learned_at(labels) | learned_at(rest) == learned_at(every) and not learned_at(labels) & learned_at(rest)
    if has_generation_markers(template):
        options = {"chat_template": template, "return_dict": True, "return_assistant_tokens_mask": True}
        with contextlib.suppress(TemplateError):  # the template wants parts
            usual = tokenizer.apply_chat_template(drawn.turns, drawn.tools, **options)
            if usual["input_ids"] != ids:
                return False
            assert learned_at(every) == {at for at, one in enumerate(usual["assistant_masks"]) if one and at}
    return False


@pytest.mark.parametrize("name", tiered(TEMPLATES, FEW))
@settings(SETTINGS, max_examples=8)
@given(data=st.data())
def test_tokens_and_mask_are_those_of_transformers(name, data):
    style = data.draw(STYLES)
    check(name, data.draw(conversations(style)), style)


@pytest.mark.every
@pytest.mark.parametrize("name", TEMPLATES)
@settings(SETTINGS, max_examples=60)
@given(data=st.data())
def test_tokens_and_mask_are_those_of_transformers_often(name, data):
    style = data.draw(STYLES)
    check(name, data.draw(conversations(style)), style)


def test_a_flag_that_is_not_read_is_noticed(monkeypatch):
    turns = [{"role": "user", "content": "Hi? m0m"}, {"role": "assistant", "content": "Yes. m1m"}]
    turns += [{"role": "user", "content": "So? m2m"}, {"role": "assistant", "content": "No. m3m"}]
    row = {"messages": [*turns[:1], turns[1] | {"train": False}, *turns[2:]], "tools": None}
    drawn = Drawn(row, turns, None, learned={"m3m"}, unlearned={"m1m"}, forgettable=set())
    assert not check("chatml", drawn, Style())
    monkeypatch.setattr(keys, "is_learned", lambda where, flagged, whole=False: True)
    with pytest.raises(AssertionError):
        check("chatml", drawn, Style())


REASONED = TURNS[1] | {"reasoning_content": "Since."}
KINDS = {
    "turns": (TURNS, None),
    "system": ([SYSTEM, *TURNS[:2]], None),
    "tools": (TOOL_TURNS, TOOLS),
    "reasoning": ([TURNS[0], REASONED], None),
    "earlier reasoning": ([TURNS[0], REASONED, *TURNS[2:]], None),
}
KEEPS = "TRL's version keeps the think blocks of earlier turns, so that each turn is trained as it was written"
DIFFERS = {
    "glm4moe": (set(KINDS), "TRL's version ends a turn in the token that begins the next, where generation stops"),
    "qwen3": ({"turns", "tools", "earlier reasoning"}, KEEPS),
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), ({"turns", "earlier reasoning"}, KEEPS)),
}
"""Templates, the kinds of conversations that are trained in other tokens than the template itself gives, and why."""
READS_PARTS = {"idefics3", "llava_next", "smolvlm"}
"""Templates that show content only as lists of parts."""


@pytest.mark.parametrize("name", tiered(TEMPLATES, {*FEW, *READS_PARTS, "glm4moe"}))
def test_what_is_trained_is_what_the_template_itself_renders_or_differs_for_a_reason(name):
    tokenizer, _, to_tokens = tools_of(name)
    differing = set()
    for kind, (turns, tools) in KINDS.items():
        try:
            ids = to_tokens({"messages": turns, "tools": tools, "given": 0})["input_ids"]
        except UserError:
            continue  # the template shows less than the conversation says; see the test above
        if name in READS_PARTS:
            turns = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        if tokenizer.apply_chat_template(turns, tools, return_dict=True)["input_ids"] != ids:
            differing.add(kind)
    assert differing == DIFFERS.get(name, (set(), ""))[0]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_saved(path, rows):
    Dataset.from_list(rows).save_to_disk(path)


def write_csv(path, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows({key: value and json.dumps(value) for key, value in row.items()} for row in rows)


WRITERS = {"a.jsonl": write_jsonl, "a.parquet": write_parquet, "saved": write_saved, "a.csv": write_csv}


@settings(SETTINGS, max_examples=4)
@given(data=st.data())
def test_every_kind_of_file_gives_the_same_conversations(tmp_path_factory, data):
    style = data.draw(STYLES)
    rows = [data.draw(conversations(style)).row for _ in range(8)]
    expected = list(formats.converted([("here", row) for row in rows], "sft"))
    for name, write in WRITERS.items():
        path = tmp_path_factory.mktemp("kind") / name
        write(path, rows)
        [source] = sources.read(str(path), small(TINY_MODEL, path))
        found = [{key: value for key, value in one.items() if value is not None} for one in source.examples]
        assert found == [{key: value for key, value in one.items() if value is not None} for one in expected], name
