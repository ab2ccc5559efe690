"""What a chat template drops or refuses is found before the ranks start, as the ranks would find it."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import trl
from jinja2 import TemplateError
from transformers import AutoTokenizer

from deepspeed_recipes.commands import launch
from deepspeed_recipes.launching import chat_template
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.training.data import chat_templates, tokenize
from deepspeed_recipes.training.model import shown
from deepspeed_recipes.training.model.draft import TINY_MODEL
from tests.small import small

SHIPPED = sorted(Path(trl.__file__).with_name("chat_templates").glob("*.jinja"))
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "2 + 2?"}
SAID = {"role": "assistant", "content": "4"}
REASONED = SAID | {"reasoning_content": "two twice"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"one": 2, "two": "\u00e9"}}}],
}
RESULT = {"role": "tool", "name": "add", "content": "4"}
CONVERSATIONS = (
    [ASKED, SAID],
    [SYSTEM, ASKED, SAID, ASKED, SAID],
    [ASKED, REASONED, ASKED, SAID | {"thinking": "two twice"}],
    [ASKED, SAID | {"content": "<think>\ntwo twice\n</think>\n\n4"}],
    [SYSTEM, ASKED, CALLED, RESULT, REASONED],
    [ASKED, SAID, SYSTEM],
)
SFT = {"messages": [ASKED, SAID]}
PAIR = {"prompt": [ASKED], "chosen": [SAID], "rejected": [SAID | {"content": "5"}]}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_MODEL)


@pytest.mark.parametrize("file", SHIPPED, ids=[file.stem for file in SHIPPED])
def test_jinja_alone_renders_as_the_tokenizer_does(tokenizer, file):
    text = file.read_text()
    template = chat_template._Template(text, Path(TINY_MODEL))

    def rendered(renderer, turns, tools, prompt):
        try:
            options = {"chat_template": text, "tokenize": False, "add_generation_prompt": prompt}
            return renderer.apply_chat_template(turns, tools, **options)
        except (TemplateError, TypeError) as error:
            return type(error)

    for asked in product(CONVERSATIONS, (None, TOOLS), (False, True)):
        found, expected = rendered(template, *asked), rendered(tokenizer, *asked)
        if "strftime_now" not in text:
            assert found == expected, asked
        elif isinstance(expected, str):
            assert len(found) == pytest.approx(len(expected), abs=9), "only the date may differ"


def model_with(folder, name):
    """Write a copy of the tiny model's tokenizer with one of TRL's templates, or with a text of its own."""
    folder.mkdir()
    for file in Path(TINY_MODEL).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink()
    shipped = Path(trl.__file__).with_name("chat_templates") / f"{name}.jinja"
    (folder / "chat_template.jinja").write_text(shipped.read_text() if shipped.exists() else name)
    return folder


SCHEMA = {"type": "object", "properties": {"one": {"type": "integer"}}}
ANTHROPIC = {"name": "add", "description": "adds", "input_schema": SCHEMA}
CASES = {
    "tools": (
        "full",
        "llama3",
        {"messages": [ASKED, CALLED, RESULT, SAID], "tools": TOOLS},
        "drops the name of a tool",
    ),
    "parameters": (  # under Anthropic's name, which this template does not read
        "full",
        "gptoss",
        {"messages": [ASKED, CALLED, RESULT, SAID], "tools": [ANTHROPIC]},
        "drops parameters of 'tools'",
    ),
    "reasoning": (
        "full",
        "qwen2_5",
        {"messages": [ASKED, REASONED]},
        "drops reasoning, in 'reasoning_content' of turn",
    ),
    "content": ("full", "gptoss", {"messages": [ASKED, CALLED | {"content": "Hm."}, RESULT, SAID]}, "drops 'content'"),
    "system": ("full", "gemma", {"messages": [SYSTEM, ASKED, SAID]}, "System role not supported"),
    "pairs": ("dpo_lora", "llama3", PAIR | {"tools": TOOLS}, "drops 'tools'"),
    "chosen": (
        "dpo_lora",
        "llama3",
        PAIR | {"chosen": [REASONED]},
        "drops reasoning, in 'reasoning_content' of turn 2",
    ),
    "judged": ("kto_lora", "llama3", {"prompt": [ASKED], "completion": [REASONED], "label": True}, "drops reasoning"),
    "prompts": ("grpo", "gemma", {"prompt": [SYSTEM, ASKED], "completion": "4"}, "System role not supported"),
    "distil": ("distill", "gemma", {"messages": [SYSTEM, ASKED, SAID]}, "System role not supported"),
    "classes": ("classify", "gemma", {"messages": [SYSTEM, ASKED], "label": "sum"}, "System role not supported"),
}
CUT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content[:1] }}<|end|>{% endfor %}"
IMPORTING = "{% import 'x' as y %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
USUAL = {"full": SFT, "dpo_lora": PAIR, "kto_lora": {"prompt": "2 + 2?", "completion": "5", "label": False}}
USUAL |= {"grpo": {"prompt": "2 + 2?", "completion": "4"}, "distill": SFT}
USUAL |= {"classify": {"messages": [ASKED], "label": "other"}}


@pytest.mark.parametrize("name", CASES)
def test_the_launcher_finds_what_the_template_drops(tmp_path, name):
    variant, template, example, message = CASES[name]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in [*[USUAL[variant]] * 96, example]))
    words = [f"model.path={model_with(tmp_path / 'model', template)}", f"data.path={data}", "data.validation=none"]
    with pytest.raises(UserError, match="the model's chat template cannot be trained on this conversation: ") as caught:
        launch.main(["tiny", variant, "--dry-run", *words])
    assert f"{data}:97: " in str(caught.value) and message in str(caught.value)
    assert launch.main(["tiny", variant, "--dry-run", *words, "model.chat_template=chatml"]) in (0, None)


def test_a_template_that_is_no_text_is_refused_before_a_run(tmp_path):
    model = model_with(tmp_path / "model", "llama3")
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": 5}))
    with pytest.raises(UserError, match="its chat_template is of type int, not text"):
        launch.main(["tiny", "full", "--dry-run", f"model.path={model}"])
    with pytest.raises(UserError, match="its chat_template is of type int, not text"):
        chat_templates.load_tokenizer(small(model, tmp_path / "data.jsonl"))


@pytest.mark.parametrize("room", [-1, 0])
def test_a_refused_role_is_answered_with_the_length_that_it_needs(tmp_path, room):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": [ASKED, CALLED, RESULT, SAID], "tools": TOOLS}) + "\n")
    ours = small(TINY_MODEL, data, sequence_length=2048)
    ours = replace(ours, model=replace(ours.model, chat_template="chatml"))
    _, report = tokenize.prepare(str(data), ours, chat_templates.load_tokenizer(ours))
    length = report.longest + room
    with pytest.raises(UserError, match="not tool") as caught:
        launch.main(["tiny", "full", "--dry-run", f"data.path={data}", f"sequence_length={length}"])
    needed = f" sequence_length={-(-report.longest // 64) * 64}, since this example then has {report.longest} tokens."
    assert str(caught.value).endswith(f"model.chat_template=chatml{needed if room else '.'}")


def test_a_template_that_prints_a_list_of_parts_does_not_render_their_texts(tmp_path, tokenizer):
    with pytest.raises(UserError, match="it drops 'content' of turn 1"):
        shown.shown(tokenizer, CUT, [ASKED, SAID])
    recipe = small(model_with(tmp_path / "model", IMPORTING), Path("unread"))
    with pytest.raises(UserError, match=r"cannot be found in what it renders \(no loader"):
        chat_templates.marker(recipe, chat_templates.load_tokenizer(recipe))


def test_the_ranks_find_the_same(tmp_path):
    for name in ("tools", "reasoning", "content", "system"):
        _, template, example, message = CASES[name]
        recipe = small(model_with(tmp_path / name, template), Path("unread"))
        ends = "<|eot_id|>,<|im_end|>,<|return|>,<end_of_turn>"  # of their turns
        tokenizer = chat_templates.load_tokenizer(replace(recipe, model=replace(recipe.model, new_tokens=ends)))
        with pytest.raises(UserError, match=message if name != "tools" else "drops tool calls"):
            tokenize.of_conversation(recipe, tokenizer)({"tools": None, "given": 0, **example})


def test_the_check_needs_no_torch(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": [ASKED, SAID]}) + "\n")
    code = (
        "import sys; from deepspeed_recipes.launching import chat_template, preflight, paths; "
        "from deepspeed_recipes.recipe import overrides, pages; "
        f"recipe = paths.locate(overrides.apply(pages.find('tiny', 'full'), ['data.path={data}'])); "
        "preflight.check_data(recipe); chat_template.check(recipe); "
        "assert 'jinja2' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
