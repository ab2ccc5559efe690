"""An exported folder explains itself: the card, the record of the training, and no path of the machine."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.commands import export as export_script
from deepspeed_recipes.launching.paths import locate
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.conversions import from_dict
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import RunFolder, append_jsonl, read_json, write_json, write_recipe
from deepspeed_recipes.recipe.samples import TINY_MODEL
from deepspeed_recipes.training.data.chat_templates import CHATML
from deepspeed_recipes.training.model_folder import base_model, card, complete, record
from deepspeed_recipes.training.model_folder.record import portable, portable_recipe
from tests import ROOT
from tests.test_install import tracked
from tests.versions import needs

CHANGES = ["learning_rate=5e-4", "max_steps=4", "data.path={data}", "data.metric=exact_match", "data.validation={data}"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def finished(folder, variant, data):
    """Write the folder of a run that has trained a variant of `tiny` on a file outside the project."""
    run = RunFolder(folder)
    recipe = overrides.apply(pages.find("tiny", variant), [change.format(data=data) for change in CHANGES])
    write_recipe(run, locate(recipe))
    write_json(run.deepspeed, {"zero_optimization": {"stage": 3, "offload_param": {"nvme_path": "/nvme/mine"}}})
    packages = {"torch": "2.13.0", "deepspeed": "0.19.8"}
    write_json(run.environment, {"packages": packages, "world_size": 2, "gpus": [], "git_commit": COMMIT})
    append_jsonl(run.metrics, {"step": 4, "loss": 0.5, "tokens": 1000, "seconds": 12.0})
    measured = {"metric": "exact_match", "before": 0.25, "after": 0.875, "logit_difference": 1e-7}
    write_json(run.summary, {"stopped": False, **measured})
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    if recipe.lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.save_pretrained(run.export)
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(run.export)
    return run


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Return the exports of a run that trained all weights, of one that trained an adapter, and that one merged."""
    folder = tmp_path_factory.mktemp("exports")
    (folder / "mine.jsonl").write_text("{}\n")
    found = {}
    for name, variant, merge in (("whole", "full", []), ("adapter", "lora", []), ("merged", "lora", ["--merge"])):
        run = folder / f"run-{variant}"
        if not run.exists():
            finished(run, variant, folder / "mine.jsonl")
        found[name] = folder / name
        assert export_script.main([str(run), "--output", str(found[name]), *merge]) == 0
    return found


KINDS = pytest.mark.parametrize("kind", ["whole", "adapter", "merged"])


@KINDS
def test_no_file_of_an_export_names_a_path_of_this_machine(exports, kind):
    files = [path for path in exports[kind].rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    names = {str(path.relative_to(exports[kind])) for path in files}
    assert names >= {"README.md", "training/recipe.json", "training/deepspeed.json", "training/results.json"}
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert str(ROOT) not in text and str(exports[kind].parent) not in text, path
        if path.suffix == ".json" and path.name != "tokenizer.json":  # "/" is a word of the vocabulary
            assert portable(read_json(path)) == read_json(path), path


@KINDS
def test_the_card_survives_a_round_trip_and_says_only_what_is_known(exports, kind, tmp_path):
    loaded = ModelCard.load(exports[kind] / "README.md")
    loaded.save(tmp_path / "again.md")
    assert (tmp_path / "again.md").read_text() == (exports[kind] / "README.md").read_text()
    data = loaded.data.to_dict()
    assert data["library_name"] == ("peft" if kind == "adapter" else "transformers")
    assert data["license"] == "apache-2.0" and data["pipeline_tag"] == "text-generation"
    assert "base_model" not in data and "datasets" not in data  # neither is on the Hub
    (result,) = loaded.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_type) == ("exact_match", 0.875, "mine.jsonl")
    text = loaded.text
    assert "| exact match | 25.0% | 87.5% |" in text and "ZeRO-3" in text and COMMIT in text
    assert "licence of the base model | Apache-2.0" in text and "| torch | 2.13.0 |" in text
    assert "\n\n\n\n" not in text


def test_a_model_of_the_hub_is_named_in_the_cards_metadata():
    recipe = overrides.apply(pages.find("llama3-8b", "qlora"), ["data.path=OWNER/DATA"])
    held = record.Record(portable_recipe(recipe), {"metric": "loss", "before": 2.0, "after": 1.0})
    base = recipe.model.path
    contents = card.Contents(True, base, scores=False, quantized=True, chat=True, labels=(), embeds=False)
    data = card.metadata(held, contents).to_dict()
    assert data["base_model"] == "meta-llama/Llama-3.1-8B-Instruct" and data["license"] == "llama3.1"
    assert data["base_model_relation"] == "adapter" and data["datasets"] == ["OWNER/DATA"]
    assert {"deepspeed", "sft", "lora"} <= set(data["tags"])
    draft = overrides.apply(recipe, ["model.path=owner/other"])
    assert card.licence_of_base(draft) is None
    assert "license" not in card.metadata(record.Record(draft, {}), contents).to_dict()


def test_every_page_states_a_licence_that_the_hub_knows_or_that_has_a_name():
    contents = card.Contents(True, "", scores=False, quantized=True, chat=True, labels=(), embeds=False)
    known = {
        card.licence_of_base(recipe): card.metadata(record.Record(recipe, {}), contents).to_dict()
        for recipe in pages.listing()
    }
    assert len(known) >= 7 and None not in known
    named = {name for name, data in known.items() if data["license"] == "other"}
    assert named >= {"DeepSeek", "Qwen-Research", "Qwen"} and "Apache-2.0" not in named
    tiny = pages.find("tiny", "full")
    assert card.licence_of_base(portable_recipe(locate(tiny))) == card.licence_of_base(tiny) == "Apache-2.0"


@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_the_usage_snippet_runs(exports, kind, capsys):
    """With the folder's own name: the answer is that of the model."""
    text = (exports[kind] / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.+?)```", text, re.DOTALL)
    snippet = snippet.replace("max_new_tokens=256", "max_new_tokens=8").replace(
        '"OWNER/NAME"', repr(str(exports[kind]))
    )
    exec(snippet, {})
    expected = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(exports["merged" if kind == "adapter" else "whole"])
    chat = [{"role": "user", "content": "Hello"}]
    inputs = expected.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert capsys.readouterr().out.strip() == expected.decode(tokens, skip_special_tokens=True).strip()


def test_the_reproduce_command_gives_the_same_recipe_in_a_clone(exports, tmp_path):
    """Of another checkout, elsewhere; the author's own file is put where the command is typed."""
    clone = tmp_path / "clone"
    for name in tracked():
        if not name.startswith("tests/"):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, clone / name, follow_symlinks=False)
    (clone / "mine.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 40)
    example = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (clone / "mine.jsonl").write_text((json.dumps(example) + "\n") * 40)
    (line,) = re.findall(r"^    (python scripts/launch\.py .+)$", (exports["whole"] / "README.md").read_text(), re.M)
    command = [sys.executable, *shlex.split(line)[1:], "--dry-run", "full", "--output-dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    printed = re.search(r"^\{\n.*^\}\n", done.stdout, re.DOTALL | re.MULTILINE)[0]
    moved = json.loads(printed.replace(str(clone), str(ROOT)))
    assert portable_recipe(from_dict(moved)) == record.read(exports["whole"]).recipe
    assert "--gpus 2" in line and "learning_rate=0.0005" in line and str(tmp_path) not in line


def test_what_a_page_has_is_not_typed_and_what_it_settles_is():
    for family in pages.families():
        module = pages.page(family)
        for variant in pages.variants(module):
            recipe = pages.build(module, next(iter(module.SIZES)), variant)
            assert card.changes(portable_recipe(locate(recipe))) == []
    own = portable_recipe(
        overrides.apply(pages.find("tiny", "full"), ["data.path=src/deepspeed_recipes/samples/extract/train.jsonl"])
    )
    assert own.data.validation is None and "data.validation=none" in card.changes(own)


def test_a_local_base_model_is_named_relatively_and_found_where_both_were_moved(tmp_path):
    base, adapter = tmp_path / "here" / "base", tmp_path / "here" / "adapters" / "mine"
    shutil.copytree(TINY_MODEL, base)
    write_json(adapter / "adapter_config.json", {base_model.KEY: str(base), "r": 4})
    complete.finish(adapter, adapter)
    assert read_json(adapter / "adapter_config.json") == {base_model.KEY: "../../base", "r": 4}
    (tmp_path / "here").rename(tmp_path / "there")
    moved = tmp_path / "there" / "adapters" / "mine"
    assert base_model.find(moved) == tmp_path / "there" / "base"
    write_json(tmp_path / "there" / "base" / "config.json", {})
    for name in ("there/base", "./base"):  # as from folders above the adapter
        write_json(moved / "adapter_config.json", {base_model.KEY: name})
        assert base_model.find(moved) == tmp_path / "there" / "base"
    write_json(moved / "adapter_config.json", {base_model.KEY: "../../base"})
    shutil.rmtree(tmp_path / "there" / "base")
    with pytest.raises(UserError, match=r"the base model \.\./\.\./base does not exist"):
        base_model.find(moved)
    cached = "/cache/models--OWNER--NAME/snapshots/0123abcd"
    write_json(moved / "adapter_config.json", {base_model.KEY: cached})
    complete.finish(moved, moved)
    assert base_model.find(moved) == Path("OWNER/NAME")


def test_an_export_of_an_export_keeps_its_record_and_a_strangers_its_card(exports, tmp_path):
    assert export_script.main([str(exports["whole"]), "--output", str(tmp_path / "again")]) == 0
    for name in ("README.md", "training/recipe.json", "training/results.json"):
        assert (tmp_path / "again" / name).read_text() == (exports["whole"] / name).read_text()
    assert export_script.main([TINY_MODEL, "--output", str(tmp_path / "stranger")]) == 0
    assert (tmp_path / "stranger" / "README.md").read_text() == (Path(TINY_MODEL) / "README.md").read_text()
    assert not (tmp_path / "stranger" / "training").exists()


def test_a_checkpoints_card_has_the_score_of_its_step(exports, tmp_path):
    run = RunFolder(tmp_path / "run")
    shutil.copytree(exports["whole"].parent / "run-full", run.path)
    checkpoint = run.checkpoints / "checkpoint-2"
    shutil.copytree(TINY_MODEL, checkpoint)
    for step, score in ((0, 0.25), (2, 0.5), (4, 0.875)):
        append_jsonl(run.evaluations, {"step": step, "exact_match": score})
    assert export_script.main([str(checkpoint), "--output", str(tmp_path / "out")]) == 0
    results = record.read(tmp_path / "out").results
    assert (results["before"], results["after"]) == (0.25, 0.5) and "steps" not in results


@needs("transformers>=5.13")  # older ones parse no responses
def test_a_response_is_parsed_as_the_chat_template_writes_it(exports):
    """What `transformers serve` does: without the template it returns the whole conversation."""
    tokenizer = AutoTokenizer.from_pretrained(exports["whole"])
    assert tokenizer.response_template["start_anchor"] == "<|assistant|>"
    chat = [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    parsed = tokenizer.parse_response('{"name": "Ada"}<|end|>', prefix=prompt)
    assert parsed == {"role": "assistant", "content": '{"name": "Ada"}'}
    wrong = tokenizer.response_template | {"start_anchor": "<|im_start|>assistant\n"}
    assert tokenizer.parse_response("Ada<|end|>", wrong, prefix=prompt)["content"] != "Ada"


@needs("transformers>=5.13")  # older ones parse no responses
def test_response_templates_of_other_families():
    import trl

    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    folder = Path(trl.__file__).parent / "chat_templates"

    def fields(template, stop="<|endoftext|>"):
        tokenizer.chat_template, tokenizer.eos_token = template, stop
        found = complete.of_tokenizer(tokenizer)
        return found["start_anchor"], sorted(found["fields"])

    for name, start, kinds in (
        ("qwen3", "<|im_start|>assistant\n", ["content", "reasoning_content", "tool_calls"]),
        ("qwen3_5_nothink", "<|im_start|>assistant\n", ["content", "reasoning_content", "tool_calls"]),
        ("llama3_2", "<|start_header_id|>assistant<|end_header_id|>\n\n", ["content"]),
        ("gemma3", "<start_of_turn>model\n", ["content"]),
        ("phi3", "<|assistant|>\n", ["content"]),
    ):
        assert fields((folder / f"{name}.jinja").read_text()) == (start, kinds), name
    assert fields(CHATML)[0] == "<|im_start|>assistant\n"
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert complete.of_tokenizer(tokenizer) is None
