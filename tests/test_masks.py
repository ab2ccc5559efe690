"""Loss masks: with every chat template that TRL ships for these families, only assistant turns are in the loss.

Runs that take turns: one computes while the others stand still, to the end, and nothing is left behind.
"""

import re
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import trl
from transformers import AutoTokenizer

from deepspeed_recipes.benchmarks.overhead import WARM_UP, Contender, Turn, steady, take_turns
from deepspeed_recipes.commands import main
from deepspeed_recipes.launching import chat_template
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Lora, Model
from deepspeed_recipes.training.data import chat_templates, tokenize
from deepspeed_recipes.training.data.chat_templates import load_tokenizer
from deepspeed_recipes.training.model import generate
from deepspeed_recipes.training.model.draft import TINY_MODEL
from deepspeed_recipes.training.model.load import load_model
from tests.small import small

FOLDER = Path(trl.__file__).parent / "chat_templates"
FAMILIES = (
    *("llama3*", "qwen2_5", "qwen3*", "gemma*", "phi3*", "gptoss", "deepseekv3", "glm4moe"),
    *("lfm2*", "nemotron_3_*", "cohere", "cohere2"),
)
SHIPPED = sorted(
    {file.stem for family in FAMILIES for file in FOLDER.glob(f"{family}.jinja") if not file.stem.endswith("_training")}
)
WITHOUT_TWIN = {
    *("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "llama3_1", "llama3_2"),
    *("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"),
}
"""TRL 1.16 has no twin of these that marks the assistant's tokens; they are rendered turn by turn."""
MARKED = [*SHIPPED, "chatml"]

THINKING = "<think>\n\n</think>\n\n"
"""Qwen's empty think block is in the loss, as in TRL: without it the model would have to think before it answers."""
AROUND = {
    "chatml": ("", "<|im_end|><|end|>"),
    "cohere": ("", "<|END_OF_TURN_TOKEN|>"),
    "cohere2": ("", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    "deepseekv3": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "gemma": ("", "<end_of_turn>\n"),
    "gemma4": ("", "<turn|>\n"),
    "glm4moe": ("\n<think></think>\n", "<|user|>"),
    "gptoss": ("<|start|>assistant<|channel|>final<|message|>", "<|return|>"),
    "lfm2": ("", "<|im_end|>\n"),
    "llama3": ("", "<|eot_id|>"),
    "nemotron_3": ("<think></think>", "<|im_end|>\n"),
    "phi3": ("", "<|end|>\n"),
    "qwen2_5": ("\n", "<|im_end|>\n"),
    "qwen3": (THINKING, "<|im_end|>\n"),
    "qwen3_instruct_2507": ("", "<|im_end|>\n"),
    "qwen3_vl": ("", "<|im_end|>\n"),
}
"""What the templates learn before and after an answer; keys are the starts of their names, the longest counts."""

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "So?"},
    {"role": "assistant", "content": "No."},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"first": 19}}}
TOOL_TURNS = [
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "Result 23"},
    {"role": "assistant", "content": "Yes."},
]
PARAMETERS = {"type": "object", "properties": {"first": {"type": "integer", "description": "A number."}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]


def tokenizer_with(name):
    """Return the shipped tokenizer with the template, its control words as single tokens as in its own tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    if name == "chatml":
        tokenizer.chat_template = chat_templates.CHATML
        return tokenizer
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    twin = FOLDER / f"{name}_training.jinja"
    text = twin.read_text(encoding="utf-8") if twin.exists() else tokenizer.chat_template
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(re.findall(r"<[|｜]?[^\s<>{}'\"]+>", text)))})
    return tokenizer


def learned(name, messages, tools=None, given=0, **changes):
    """Return the text of every stretch that is in the loss."""
    tokenizer = tokenizer_with(name)
    recipe = small(TINY_MODEL, "unread", **changes)
    row = tokenize.of_conversation(recipe, tokenizer)({"messages": messages, "tools": tools, "given": given})
    marked = [label != tokenize.IGNORED for label in row["labels"]]
    assert all(label in (tokenize.IGNORED, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    edges = [index for index in range(1, len(marked)) if marked[index] != marked[index - 1]] + [len(marked)]
    spans = [slice(start, end) for start, end in pairwise(edges) if marked[start]]
    return [tokenizer.decode(row["input_ids"][span]) for span in spans]


def expected(name, *answers):
    before, after = AROUND[max((key for key in AROUND if name.startswith(key)), key=len)]
    spans = [before + answer + after for answer in answers]
    if name == "gptoss":  # it ends a turn in another word where a further one follows
        spans[:-1] = [span.replace("<|return|>", "<|end|>") for span in spans[:-1]]
    if name.startswith("phi3"):  # it ends a conversation in the tokenizer's own end too
        spans[-1] += "<|end|>"
    return spans


def test_every_template_of_the_families_is_known_here():
    assert len(SHIPPED) == 34 and len(MARKED) == 35
    assert {name for name in SHIPPED if not (FOLDER / f"{name}_training.jinja").exists()} == WITHOUT_TWIN


@pytest.mark.parametrize("name", MARKED)
def test_exactly_the_assistants_turns_are_learned(name):
    assert learned(name, TURNS[:2]) == expected(name, "Yes.")
    assert learned(name, TURNS) == expected(name, "Yes.", "No.")
    assert learned(name, TURNS, given=3) == expected(name, "No.")


WITHOUT_SYSTEM = {"gemma"}
WITHOUT_TOOLS = {"cohere", "cohere2", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5"}
WITHOUT_DESCRIPTIONS = {"deepseekv3"}
"""Render calls and not what can be called."""


@pytest.mark.parametrize("name", MARKED)
def test_a_system_prompt_is_not_learned(name):
    if name in WITHOUT_SYSTEM:
        with pytest.raises(UserError, match="System role not supported"):
            learned(name, [SYSTEM, *TURNS])
    else:
        assert learned(name, [SYSTEM, *TURNS]) == expected(name, "Yes.", "No.")


@pytest.mark.parametrize("name", MARKED)
def test_tool_calls_are_learned_and_their_results_are_not(name):
    if name in WITHOUT_TOOLS:
        with pytest.raises(UserError, match="drops tool calls"):
            learned(name, TOOL_TURNS, TOOLS)
        return
    tools = TOOLS
    if name in WITHOUT_DESCRIPTIONS:
        with pytest.raises(UserError, match="drops 'tools'"):
            learned(name, TOOL_TURNS, TOOLS)
        tools = None
    call, answer = learned(name, TOOL_TURNS, tools)
    assert "add" in call and "19" in call and "23" not in call + answer and "Adds." not in call + answer
    before = "<｜tool▁outputs▁end｜>" if name == "deepseekv3" else None  # it has no header of its own there
    assert [answer] == ([before + "Yes.<｜end▁of▁sentence｜>"] if before else expected(name, "Yes."))


@pytest.mark.parametrize("name", ["chatml", "gemma", "gemma3", "llama3", "qwen3_instruct_2507"])
def test_rendering_turn_by_turn_gives_the_marks_that_the_template_has(name):
    tokenizer = tokenizer_with(name)
    for messages in (TURNS[:2], TURNS, TURNS[:3]):
        by_template = chat_templates._by_template(
            tokenizer, chat_templates.training_template(tokenizer), messages, None
        )
        ids, assistant = chat_templates._by_rendering(tokenizer, messages, None)
        assert ids == by_template[0]
        differ = {tokenizer.decode(ids[i]) for i, said in enumerate(assistant) if said != by_template[1][i]}
        assert differ <= {"\n"}, "ChatML here does not learn the line break after a turn's end"


def test_a_template_that_renders_as_one_of_trl_is_marked_as_that_one(tmp_path, refusal):
    """A line break or a comment more is another text; a word more is another template."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    for name in ("qwen3", "llama3", "gemma3"):
        text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
        training = (FOLDER / f"{name}_training.jinja").read_text(encoding="utf-8")
        for changed in (f"{text}\n", f"{{# ours #}}{text}"):
            tokenizer.chat_template = changed
            assert chat_templates.training_template(tokenizer) == training, name
        tokenizer.chat_template = f"{text}{{{{ 'more' }}}}"
        assert chat_templates.training_template(tokenizer) is None, name
    shutil.copytree(TINY_MODEL, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(tokenizer.chat_template)
    run = ["tiny", "lora", f"model.path={tmp_path / 'model'}", "--dry-run"]
    assert "model.chat_template=chatml trains with the project's template" in refusal("launch", *run)
    assert main.run("launch", [*run, "model.chat_template=chatml"]) == 0
    (tmp_path / "model" / "chat_template.jinja").write_text(changed)
    assert main.run("launch", [*run, "model.new_tokens=<start_of_turn>,<end_of_turn>"]) == 0
    assert main.run("launch", run) == 2, "the end of its turn is several tokens"


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = (
        "{% for turn in messages %}{{ turn.role if loop.last else '' }}{{ turn.content + eos_token }}{% endfor %}"
    )
    with pytest.raises(UserError, match=r"differently once another follows.*\n.*generation"):
        chat_templates.marker(small(TINY_MODEL, "unread"), tokenizer)


def test_raw_completions_are_trained_with_the_template_that_is_offered(tmp_path, capsys):
    words = ["tiny", "full", "--dry-run", "model.chat_template=none"]
    assert main.run("launch", words) == 2
    (template,) = re.findall(r"^\{.*\}$", capsys.readouterr().err, re.MULTILINE)
    (tmp_path / "raw.jinja").write_text(template)
    recipe = small(TINY_MODEL, "unread")
    recipe = replace(recipe, model=replace(recipe.model, chat_template=str(tmp_path / "raw.jinja")))
    tokenizer = load_tokenizer(recipe)
    turns = [{"role": "user", "content": "def f(): "}, {"role": "assistant", "content": "return 1"}]
    tokens, learned = chat_templates.marker(recipe, tokenizer)[1](turns, None)
    taught = [token for token, said in zip(tokens, learned, strict=True) if said]
    assert (
        tokenizer.decode(tokens) == "<|bos|>def f(): return 1<|end|>" and tokenizer.decode(taught) == "return 1<|end|>"
    )


@pytest.mark.parametrize(
    ("answer", "loss_on", "end"),
    [
        ("{% generation %}{{ turn.content }}</a>{% endgeneration %}", "assistant", "</a>"),
        ("{% generation %}{{ turn.content }}</a>{% endgeneration %}\n</q>", "assistant", "</a>"),
        ("{% generation %}{{ turn.content }}</a>\n{% endgeneration %}", "assistant", "</a>"),
        ("{{ turn.content }}</a>", "assistant", "</a>"),
        ("{% generation %}{{ turn.content }}</a>{{ eos_token }}{% endgeneration %}", "assistant", "<|end|>"),
        ("{% generation %}{{ turn.content }}{% endgeneration %}</a>", "all", "</a>"),
        ("{% generation %}{{ turn.content }}{% endgeneration %}</a>", "assistant", None),
        ("{% generation %}{{ turn.content }}</b>{% endgeneration %}", "assistant", None),
    ],
)
@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["full", "lora"])
def test_an_export_stops_at_what_ends_the_turn_in_the_loss(tmp_path, model_folder, lora, answer, loss_on, end):
    (tmp_path / "mine.jinja").write_text(
        "{% for turn in messages %}{% if turn.role == 'user' %}<q>{{ turn.content }}</q><a>{% else %}"
        f"{answer}{{% endif %}}{{% endfor %}}"
    )
    recipe = small(model_folder, "unread", lora=lora, loss_on=loss_on)
    model = replace(recipe.model, chat_template=str(tmp_path / "mine.jinja"), new_tokens="<q>,</q>,<a>,</a>")
    recipe = replace(recipe, model=model)
    tokenizer = load_tokenizer(recipe)
    if end is None:
        for check in (chat_template.check, lambda recipe: chat_templates.marker(recipe, tokenizer)):
            with pytest.raises(UserError, match=r"mine\.jinja: .* no control token at its end in the loss"):
                check(recipe)
        return
    chat_template.check(recipe)
    model = load_model(recipe)
    before = generate.ends(model, tokenizer)
    generate.stop_at(model, *chat_templates.ends_of_turn(recipe, tokenizer))
    wanted = {*before, tokenizer.convert_tokens_to_ids(end)}
    assert {*generate.ends(model, tokenizer)} == wanted and (len(wanted) > len(before)) == (end == "</a>")


SAID = "{% generation %}{{ turn.content }}<|end|>{% endgeneration %}"
READ = "{% else %}{{ turn.content }}<|end|>{% endif %}"


@pytest.mark.parametrize(
    ("template", "refused"),
    [
        (SAID, "what the user says"),
        ("{% if turn.role == 'user' or loop.last %}" + SAID + READ, "what the user says"),
        ("{% if loop.last %}" + SAID + READ, "only the last answer"),
        ("{% if turn.role == 'assistant' %}" + SAID + READ, None),
    ],
)
def test_marks_that_hold_questions_or_leave_answers_out_are_refused(template, refused):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = f"{{% for turn in messages %}}{template}{{% endfor %}}"
    accepted = {None: ("assistant", "last", "all"), "only the last answer": ("last", "all")}.get(refused, ("all",))
    for loss_on in ("assistant", "last", "all"):
        with nullcontext() if loss_on in accepted else pytest.raises(UserError, match=f"marks put {refused}"):
            chat_templates.marker(small(TINY_MODEL, "unread", loss_on=loss_on), tokenizer)


AFTER_CALLS = {
    **{"gptoss": "<|call|>", "glm4moe": "<|observation|>"},
    **dict.fromkeys(("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"), "<|tool_response>"),
}
"""What ends a turn of tool calls where it is not what ends an answer."""


@pytest.mark.parametrize("name", SHIPPED)
def test_an_export_stops_after_a_tool_call_too(name):
    tokenizer = tokenizer_with(name)
    ends = tokenizer.convert_ids_to_tokens(chat_templates.ends_of_turn(small(TINY_MODEL, "unread"), tokenizer))
    assert learned(name, TURNS)[-1].rstrip().endswith(ends[0])
    assert ends[1:] == ([AFTER_CALLS[name]] if name in AFTER_CALLS else [])
    if name in AFTER_CALLS:
        called = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        assert learned(name, called, TOOLS)[-1].rstrip().endswith(ends[1])


def test_a_base_models_tokenizer_gets_chatml_and_the_export_carries_it(tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    recipe = small(tmp_path, "unread")
    chosen = load_tokenizer(recipe)
    said = capsys.readouterr().out
    assert "no chat template; ChatML is used, whose <|im_start|> is 10 tokens (model.new_tokens=<|im_start|>" in said
    assert chosen.chat_template == chat_templates.CHATML == chat_templates.marker(recipe, chosen)[0]
    chosen.save_pretrained(tmp_path / "export")
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template == chat_templates.CHATML
    assert load_tokenizer(replace(recipe, method="pretrain")).chat_template is None


def test_the_template_can_be_chosen(tmp_path):
    own = AutoTokenizer.from_pretrained(TINY_MODEL).chat_template
    recipe = small(TINY_MODEL, "unread")
    assert load_tokenizer(recipe).chat_template == own
    assert load_tokenizer(replace(recipe, model=Model(str(TINY_MODEL), chat_template="chatml"))).chat_template != own
    file = tmp_path / "mine.jinja"
    file.write_text("{% for turn in messages %}{{ turn.content }}{% endfor %}")
    mine = replace(recipe, model=Model(str(TINY_MODEL), chat_template=str(file)))
    assert load_tokenizer(mine).chat_template == file.read_text()
    file.write_text("{% for turn in messages %}")
    with pytest.raises(UserError, match=r"mine.jinja: not a chat template in Jinja"):
        load_tokenizer(mine)


def test_of_templates_with_names_the_default_is_used(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    own = tokenizer.chat_template
    tokenizer.chat_template = {"default": own, "rag": "{{ documents }}"}
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(small(tmp_path, "unread")).chat_template == own
    tokenizer.chat_template = {"rag": own, "tool_use": own}
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"have names \(rag, tool_use\), and none is the default; .*chat_template=FILE"):
        load_tokenizer(small(tmp_path, "unread"))


def test_examples_with_tools_are_written_by_the_template_named_for_them(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    named = {"default": tokenizer.chat_template + "\n", "tool_use": "{{- 'With tools. ' }}" + chat_templates.CHATML}
    tokenizer.chat_template = named
    tokenizer.save_pretrained(tmp_path)
    recipe = small(tmp_path, "unread")
    loaded = load_tokenizer(recipe)
    for turns, tools in ((TURNS, None), (TOOL_TURNS, TOOLS)):
        found = tokenize.of_conversation(recipe, loaded)({"messages": turns, "tools": tools, "given": 0})
        text = tokenizer.apply_chat_template(turns, tools=tools, tokenize=False)
        assert loaded.decode(found["input_ids"]) == text and ("With tools." in text) == (tools is not None)
        said = loaded.decode([label for label in found["labels"] if label != tokenize.IGNORED])
        assert "Yes." in said and ('"first": 19' in said) == (tools is not None)
    with pytest.raises(UserError, match="role must be"):  # without tools it is the other template, as in transformers
        tokenize.of_conversation(recipe, loaded)({"messages": TOOL_TURNS, "tools": None, "given": 0})


def test_a_tokenizer_without_an_end_can_pad(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(small(tmp_path, "unread", method="pretrain")).pad_token_id is not None


def test_chatml_renders_the_documented_form():
    tokenizer = tokenizer_with("chatml")
    text = tokenizer.apply_chat_template([SYSTEM, *TURNS[:2]], tokenize=False)
    assert text == (
        "<|bos|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|><|end|>\n"
    )
    asked = tokenizer.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
    assert asked.endswith("Hi?<|im_end|>\n<|im_start|>assistant\n")
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    assert "Yes.<|im_end|>\n" in tokenizer.apply_chat_template(TURNS[:2], tokenize=False)


def test_the_command_tells_how_a_model_marks_its_turns(capsys, monkeypatch):
    def say(name: str) -> int:
        return main.run("page", ["template", name])

    assert say("tiny-3m") == 0
    assert "marks the assistant's tokens itself" in capsys.readouterr().out
    monkeypatch.setattr(chat_templates, "load_tokenizer", lambda recipe: tokenizer_with("qwen3"))
    assert say("tiny-3m") == 0 and "TRL has a version that does" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(pages.page("tiny"), "SIZES", {"9m": Model(path="someone/model")})
    assert say("tiny-9m") == 2 and "someone/model: cannot load the tokenizer" in capsys.readouterr().err
    assert say("tyni") == 2 and "tiny" in capsys.readouterr().err


COUNTS = """
import json, sys, time
for step in range(1, 5):
    total = sum(range(int(sys.argv[1])))
    record = {"step": step, "tokens": 10 * step, "ended": time.perf_counter(), "computed": time.process_time()}
    print(json.dumps(record), flush=True)
    if step == int(sys.argv[2]):
        raise SystemExit("no more")
"""
WITHIN = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {COUNTS!r}, *sys.argv[1:]]))"
"""As launchers do: a process of its own computes."""


def contender(tmp_path, name, work=10_000_000, fails_at=0):
    output = tmp_path / f"{name}.log"
    return Contender([sys.executable, "-c", WITHIN, str(work), str(fails_at)], {}, output, output)


def test_only_one_computes_at_a_time_and_all_come_to_their_end(tmp_path):
    both = [contender(tmp_path, "a"), contender(tmp_path, "b")]
    take_turns(both, last_step=4)
    for one in both:
        assert [turn.record["step"] for turn in one.turns] == [1, 2, 3, 4]
        assert [turn.tokens for turn in one.turns] == [10] * 4
        assert one.running.returncode == 0
    for one in both:
        first, last = (turn.record for turn in (one.turns[0], one.turns[-1]))
        counted = sum(turn.seconds for turn in one.turns[1:])
        assert counted > 0.7 * (last["computed"] - first["computed"]), "all that was computed is counted"
        assert counted < 0.8 * (last["ended"] - first["ended"]), "and the pauses are not"


def test_runs_side_by_side_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(Contender, "signal", lambda self, number: None)
    with pytest.raises(AssertionError):
        test_only_one_computes_at_a_time_and_all_come_to_their_end(tmp_path)


def test_a_run_that_fails_ends_the_others_and_says_why(tmp_path):
    both = [contender(tmp_path, "a", work=10**8), contender(tmp_path, "b", fails_at=2)]
    with pytest.raises(RuntimeError, match="no more"):
        take_turns(both, last_step=4)
    assert all(one.running.poll() is not None for one in both)
    assert not [one for one in psutil.Process().children(recursive=True) if "perf_counter" in " ".join(one.cmdline())]


def test_the_rate_is_the_median_of_turns_after_the_warm_up():
    turns = [Turn({"step": step, "host_peak_gib": 1.0}, 100, seconds) for step, seconds in STEPS]
    assert steady(turns) == {"tokens_per_second": 50.0, "peak_gib": 1.0}


STEPS = [(WARM_UP - 5, 10.0), (WARM_UP, 10.0), (WARM_UP + 5, 2.0), (WARM_UP + 10, 2.0), (WARM_UP + 15, 9.0)]
