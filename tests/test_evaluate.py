"""evaluate.py: scores of models side by side, their intervals, the paired test, and a server as one of the models."""

import json
import re
import shutil
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import comb
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen3MoeConfig,
)

from deepspeed_recipes.commands import evaluate
from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.export.evaluate import comparison, harness, score
from deepspeed_recipes.export.evaluate.held_out import alone, read
from deepspeed_recipes.export.serve import environment
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import RunFolder, append_jsonl, read_json, write_json, write_recipe
from deepspeed_recipes.recipe.samples import CHAT, PREFERENCES, TINY_MODEL
from deepspeed_recipes.report import run_data, text, write
from deepspeed_recipes.training import export
from deepspeed_recipes.training.data import tokenize
from deepspeed_recipes.training.parallel import scores, whole
from deepspeed_recipes.training.parallel.scores import Layout
from deepspeed_recipes.training.server import Server
from tests import ROOT

SHORT = overrides.apply(pages.find("tiny", "full"), ["data.max_new_tokens=96"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write six conversations: what the model answers to the first three, and something else for the others."""
    folder = tmp_path_factory.mktemp("data")
    lines = (ROOT / "src/deepspeed_recipes/samples/extract/held_out.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    rows = [json.loads(line) for line in lines]
    file = folder / "held_out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with alone():
        found = score.of(export.Path(TINY_MODEL), read(SHORT, file, "exact_match", None))
    for row, answer in list(zip(rows, found.answers, strict=True))[:3]:
        row["messages"][-1]["content"] = answer or "?"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def run(data, tmp_path):
    """Write the folder of a run whose export is the base model itself."""
    folder = RunFolder(tmp_path / "run")
    changes = [f"data.path={data}", f"data.validation={data}", "data.metric=exact_match", "data.max_new_tokens=96"]
    write_recipe(folder, overrides.apply(pages.find("tiny", "full"), changes))
    append_jsonl(folder.metrics, {"step": 4, "loss": 0.5, "tokens": 1000, "seconds": 12.0})
    shutil.copytree(TINY_MODEL, folder.export)
    return folder


@pytest.fixture
def server():
    """Answer every question with the model's name, as OpenAI's protocol has it."""

    class Handler(BaseHTTPRequestHandler):
        names = ("parrot",)

        def log_message(self, *_):
            pass

        def do_GET(self):
            self.answer({"data": [{"id": name} for name in self.names]})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if asked["messages"][-1]["content"] == "fail":
                return self.answer({"error": "no"}, 400)
            self.answer({"choices": [{"message": {"content": f"{asked['model']} {asked['temperature']}"}}]})

        def answer(self, value, status=200):
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}", Handler
    running.shutdown()
    running.server_close()


def test_wilsons_interval_is_where_the_share_is_as_far_off_as_the_level_says():
    """The interval's ends are the shares whose own normal interval ends at what was seen."""
    z = 1.959963984540054
    for right, examples in ((7, 10), (98, 100), (1, 400)):
        low, high = comparison.wilson(right, examples)
        for end in (low, high):
            assert abs(right / examples - end) == pytest.approx(z * (end * (1 - end) / examples) ** 0.5)
    assert comparison.wilson(0, 10)[0] == 0 and comparison.wilson(10, 10)[1] == 1
    assert comparison.wilson(0, 10)[1] == pytest.approx(0.2775, abs=1e-4)


def test_the_sign_test_counts_every_split_that_is_as_uneven():
    for better, worse in ((0, 0), (1, 0), (5, 1), (2, 9), (3, 3)):
        n = better + worse
        as_uneven = [k for k in range(n + 1) if abs(2 * k - n) >= abs(better - worse)]
        assert comparison.sign_test(better, worse) == pytest.approx(sum(comb(n, k) for k in as_uneven) / 2**n)
    assert comparison.sign_test(10, 0) == 2 / 1024


def test_the_bootstrap_covers_what_it_says():
    """Of 200 samples of 50 from a known distribution, about 95 % of the intervals hold its mean."""
    numbers = np.random.default_rng(3)
    held = 0
    for seed in range(200):
        values = numbers.exponential(2.0, 50)
        low, high = comparison.bootstrap(list(values), [1] * 50, seed)
        held += low <= 2.0 <= high
    assert 0.88 <= held / 200 <= 0.98


def test_a_run_is_measured_as_it_measures_itself_and_beside_its_base(run, capsys, printed_by):
    printed = printed_by("evaluate", run.path, "--base")
    assert "exact match on 6 held-out examples" in printed and f"{run.path} before training" in printed
    assert f"{run.path} and {run.path} before training: equal on all 6 examples" in printed
    found = read_json(run.evaluation)
    assert [one["score"] for one in found["models"]] == [0.5, 0.5]
    assert found["models"][0]["values"] == [1, 1, 1, 0, 0, 0]
    with alone():
        held_out = read(run_data.read(run.path).recipe, None, None, None)
        model, tokenizer = export.load(run.export), export.load_tokenizer(run.export)
        sequences, _ = tokenize.tokenized(held_out.examples, replace(held_out.recipe, packing=False), tokenizer)
        found = scores.exact_match(model, tokenizer, sequences, 96, synced_gpus=False, layout=Layout())
    assert found == {"exact_match": 0.5}
    assert run.report_page.exists()
    text.show(write.document(run_data.read(run.path)))
    shown = capsys.readouterr().out
    assert "EVALUATION" in shown and "50.0%" in shown


def test_the_loss_is_the_runs_and_of_every_example(run, data, printed_by):
    found = json.loads(printed_by("evaluate", run.path, "--metric", "loss", "--json"))["models"][0]
    with alone():
        held_out = read(None, data, "loss", None)
        model, tokenizer = export.load(export.Path(TINY_MODEL)).eval(), export.load_tokenizer(export.Path(TINY_MODEL))
        sequences, _ = tokenize.tokenized(held_out.examples, replace(held_out.recipe, packing=False), tokenizer)
        context = SimpleNamespace(recipe=replace(SHORT, micro_batch_size=2))
        trainer = SimpleNamespace(model=model, processing_class=tokenizer, context=context)
        ours = whole.measure(trainer, sequences)["loss"]
    assert found["score"] == pytest.approx(ours, rel=1e-5)
    assert found["low"] < found["score"] < found["high"] and len(found["values"]) == 6


def test_the_loss_is_the_cross_entropy_whatever_the_configuration_adds(data, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3MoeConfig(**sizes, head_dim=8, vocab_size=len(tokenizer), num_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = []
    for added in ({}, {"output_router_logits": True, "router_aux_loss_coef": 1.0}):
        file = tmp_path / "config.json"
        write_json(file, read_json(file) | added)
        with alone():
            found.append(score.of(tmp_path, read(None, data, "loss", None)))
    assert found[0].value == found[1].value


def test_losses_of_different_tokens_are_not_compared(data, tmp_path, capsys):
    """The second tokenizer has one more token, which the answers contain."""
    shutil.copytree(TINY_MODEL, tmp_path / "other")
    other = AutoTokenizer.from_pretrained(TINY_MODEL)
    other.add_tokens(['"city"'])
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    model.resize_token_embeddings(len(other))
    model.save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    words = [str(TINY_MODEL), str(tmp_path / "other"), "--data", str(data), "--metric", "loss", "--json"]
    assert run_command("evaluate", words) == 0
    told = capsys.readouterr()
    assert "have different tokens, so their losses per token do not compare" in told.err
    assert json.loads(told.out)["pairs"] == []


def test_preferences_are_ranked_by_the_answers_likelihood(capsys, printed_by, refusal, tmp_path):
    file = tmp_path / "pairs.jsonl"
    lines = (ROOT / PREFERENCES.validation).read_text(encoding="utf-8").splitlines(keepends=True)[:6]
    file.write_text("".join(lines))
    run = RunFolder(tmp_path / "run")
    write_recipe(run, overrides.apply(pages.find("tiny", "dpo_lora"), [f"data.path={file}", f"data.validation={file}"]))
    shutil.copytree(TINY_MODEL, run.export)
    found = json.loads(printed_by("evaluate", run.path, "--json"))
    model, tokenizer = export.load(run.export).eval(), export.load_tokenizer(run.export)
    expected = []
    for line in lines:
        pair, likelihoods = json.loads(line), []
        for side in ("chosen", "rejected"):
            asked = tokenizer.apply_chat_template(pair["prompt"], add_generation_prompt=True, return_dict=True)
            whole = tokenizer.apply_chat_template(pair["prompt"] + pair[side], return_dict=True)["input_ids"]
            labels = torch.tensor([-100] * len(asked["input_ids"]) + whole[len(asked["input_ids"]) :])
            loss = model(input_ids=torch.tensor([whole]), labels=labels[None]).loss.item()
            likelihoods.append(-loss * (len(whole) - len(asked["input_ids"])))
        expected.append(int(likelihoods[0] > likelihoods[1]))
    assert found["metric"] == "preference_accuracy" and found["models"][0]["values"] == expected
    chats = ["--data", str(ROOT / CHAT.validation), "--limit", "4", "--json"]
    assert "For conversations add --metric exact_match or loss." in refusal("evaluate", run.path, *chats)
    scores = []
    for name in (run.path, TINY_MODEL):
        assert run_command("evaluate", [str(name), *chats, "--metric", "loss"]) == 0
        scores.append(json.loads(capsys.readouterr().out)["models"][0]["score"])
    assert scores[0] == scores[1], "its export is that model"


def test_advice_about_columns_works_where_it_is_given(run, data, tmp_path, capsys, refusal):
    turns = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    table = tmp_path / "table.jsonl"
    rows = [{"pregunta": asked["content"], "esperado": said["content"]} for *_, asked, said in turns]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [str(run.path), "--data", str(table), "--limit", "2"]
    assert run_command("evaluate", command) == 2
    (advised,) = re.findall(r"as in (data\.columns=\S+)\.$", capsys.readouterr().err.strip())
    assert advised == "data.columns=pregunta:prompt,esperado:completion"
    assert run_command("evaluate", [*command, advised]) == 0
    error = refusal("evaluate", *command, "data.columns=pregunta:promt")
    assert "data.columns=pregunta:promt: write COLUMN:FIELD" in error
    assert "describes the examples of --data FILE" in refusal("evaluate", run.path, advised)


def test_examples_that_a_run_was_trained_on_are_named(run, data, tmp_path, capsys):
    """With `--data`, and where a run is compared by the examples that another one held out."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for row in rows[2:]:
        row["messages"][-1]["content"] += "!"
    (new := tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = overrides.apply(pages.find("tiny", "full"), [f"data.path={new}", "data.validation_share=0.5"])
    other = RunFolder(tmp_path / "other")
    write_recipe(other, recipe)
    shutil.copytree(TINY_MODEL, other.export)
    for words, known in (([], 0), (["--data", str(data)], 6), (["--data", str(new)], 2)):
        assert evaluate.main([str(run.path), *words, "--metric", "loss"]) == 0
        assert (f"{run.path} was trained on {known} of these 6 examples" in capsys.readouterr().err) is bool(known)
    assert evaluate.main([str(run.path), "--base", "--data", str(data), "--metric", "loss"]) == 0
    assert "before training was trained on" not in capsys.readouterr().err
    assert evaluate.main([str(other.path), str(run.path), "--metric", "loss"]) == 0
    assert f"{other.path} was trained on" not in (said := capsys.readouterr().err), "by what it held out itself"
    held = read(recipe, None, "loss", None).examples
    known = [row["messages"][-1]["content"] for row in rows[:2]]
    shared = sum(example["messages"][-1]["content"] in known for example in held)
    assert (f"{run.path} was trained on {shared} of these {len(held)} examples" in said) is (shared > 0)


def test_a_server_is_one_of_the_models(run, server, data, printed_by):
    address, _ = server
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows[5]["messages"][-1]["content"] = "parrot 0"
    data_of_server = data.with_name("server.jsonl")
    data_of_server.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = json.loads(printed_by("evaluate", run.path, f"{address}/v1", "--data", data_of_server, "--json"))[
        "models"
    ]
    assert first["values"] == [1, 1, 1, 0, 0, 0] and second["values"] == [0, 0, 0, 0, 0, 1]
    assert read_json(run.evaluation)["pairs"][0]["worse"] == 3 and read_json(run.evaluation)["pairs"][0]["better"] == 1


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"first": 1}}}
SAID = {**CALL, "id": "1", "function": {"name": "add", "arguments": '{"first":1}'}}


@pytest.mark.parametrize(
    ("wanted", "said", "right"),
    [
        ({"content": "Yes."}, {"content": " Yes.\n"}, True),
        ({"content": "Yes."}, {"content": [{"type": "text", "text": "Yes."}]}, True),
        ({"content": "Yes."}, {"content": "<think>\n\n</think>\n\nYes."}, True),
        ({"content": "Yes."}, {"content": "Hm.\n</think>\n\nYes."}, True),
        ({"content": "Yes."}, {"content": "Yes.", "finish_reason": "length"}, False),
        ({"content": "Yes."}, {"content": "Yes.", "tool_calls": [SAID]}, False),
        ({"content": "", "tool_calls": [CALL]}, {"content": None, "tool_calls": [SAID]}, True),
        ({"content": "", "tool_calls": [CALL]}, {"content": ""}, False),
        ({"content": "Yes.", "reasoning_content": "Hm."}, {"content": "Yes.", "reasoning": "Hm. "}, True),
        ({"content": "<think>Hm.</think>Yes."}, {"content": "Yes.", "reasoning_content": "Hm."}, True),
        ({"content": "<think>Hm.</think>Yes."}, {"content": "<think>Er.</think>Yes."}, False),
    ],
)
def test_a_servers_answer_is_compared_by_what_it_says_and_calls(server, tmp_path, monkeypatch, wanted, said, right):
    """The server gets everything before the last answer that is learned and what the chat template reads."""
    address, handler = server
    asked = []

    def answer(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        reason = said.get("finish_reason", "stop")
        self.answer({"choices": [{"message": {"role": "assistant", **said}, "finish_reason": reason}]})

    monkeypatch.setattr(handler, "do_POST", answer)
    before = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "Er."},
        {"role": "tool", "content": "2"},
    ]
    after = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "No.", "train": False}, before[0]]
    turns = [*before, {"role": "assistant", **wanted}, *after]
    file = tmp_path / "tools.jsonl"
    file.write_text(json.dumps({"messages": turns, "tools": TOOLS, "enable_thinking": False}) + "\n")
    found = score.of(Server(address, "parrot"), read(None, file, "exact_match", None))
    assert found.sums == [right] and found.cut_off == ("finish_reason" in said)
    (request,) = asked
    assert request["tools"] == TOOLS and request["chat_template_kwargs"] == {"enable_thinking": False}
    assert len(request["messages"]) == 3
    call, result = request["messages"][1:]
    assert call["tool_calls"][0]["function"]["arguments"] == '{"first": 1}'
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] and call["reasoning_content"] == "Er."
    score.of(Server(address, "parrot"), read(None, file, "exact_match", None, ["data.thinking=strip"]))
    assert "reasoning_content" not in asked[1]["messages"][1]


def test_examples_without_a_learned_answer_are_left_out(tmp_path, capsys):
    asked, unlearned = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": False}
    file = tmp_path / "some.jsonl"
    for learned in (0, 1, 3):
        turns = [[asked, unlearned | {"train": at < learned}] for at in range(3)]
        file.write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))
        if learned:
            assert len(read(None, file, "exact_match", None).examples) == learned
            assert ("2 of 3 examples are left out" in capsys.readouterr().err) == (learned < 3)
        else:
            with pytest.raises(UserError, match="all 3 examples mark every answer as not learned"):
                read(None, file, "exact_match", None)


def test_examples_that_are_too_long_or_have_unread_keys_are_named(tmp_path, capsys):
    file = tmp_path / "some.jsonl"
    answer = {"role": "assistant", "content": "So."}
    rows = ({"messages": [{"role": "user", "content": "Why? " * times}, answer], "contxt": "x"} for times in (1, 400))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_command("evaluate", [str(TINY_MODEL), "--data", str(file), "--metric", "loss"]) == 0
    said = capsys.readouterr().err
    assert "1 of 2 examples are left out: longer than sequence_length=256" in said and "contxt (2)" in said


def test_a_model_without_a_chat_template_is_named(tmp_path, refusal):
    bare, file = tmp_path / "bare", tmp_path / "some.jsonl"
    shutil.copytree(TINY_MODEL, bare, ignore=shutil.ignore_patterns("*.jinja"))
    file.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    for metric in ("loss", "exact_match"):
        error = refusal("evaluate", bare, "--data", file, "--metric", metric)
        assert f"{bare}: its tokenizer has no chat template" in error


def test_labels_that_a_classifier_lacks_are_refused(tmp_path, capsys):
    folder, file = tmp_path / "classifier", tmp_path / "some.jsonl"
    config = AutoConfig.from_pretrained(TINY_MODEL, id2label={0: "ham", 1: "spam"}, label2id={"ham": 0, "spam": 1})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(folder)
    recipe = pages.find("tiny", "classify")
    file.write_text('{"text": "a", "label": "spam"}\n{"text": "b", "label": "Spam"}\n')
    found = read(recipe, file, None, None)
    with pytest.raises(UserError, match=r"the label 'Spam' is not among those of .*classifier's classes"):
        score.of(folder, found)


@pytest.mark.parametrize(
    ("variant", "row", "said"),
    [
        ("classify", '{"text": "a", "label": "b"}\n{"text": "c", "label": "d"}', "accuracy is a metric for a"),
        ("reward", '{"prompt": "a", "chosen": "b", "rejected": "c"}', "preference_accuracy is a metric for a"),
    ],
)
def test_a_language_model_is_not_scored_next_to_its_scores(tmp_path, variant, row, said):
    file = tmp_path / "some.jsonl"
    file.write_text(row)
    with pytest.raises(UserError, match=rf"{said} .* here, and this model writes text; a run's"):
        score.of(export.Path(TINY_MODEL), read(pages.find("tiny", variant), file, None, None))


def test_bad_input_is_answered_in_a_line(run, server, tmp_path, refusal, monkeypatch):
    address, handler = server
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "nowhere"))
    asked = [
        ([tmp_path / "nowhere"], "no such folder"),
        ([tmp_path], "has neither a model nor an adapter"),
        ([TINY_MODEL], "add --data FILE"),
        ([run.path, "--metric", "bleu"], "metric bleu: not supported"),
        (
            [TINY_MODEL, "--metric", "accuracy", "--data", tmp_path / "some.jsonl"],
            "accuracy is a metric for a classifier",
        ),
        ([run.path, "--limit", "0"], "--limit 0: must be at least 1"),
        (["http://127.0.0.1:9", "--data", "x"], "is a server running there?"),
        ([address, "--metric", "loss", "--data", tmp_path / "some.jsonl"], "a server is measured by exact_match only"),
        ([run.path, "--tasks", "gsm8k"], "--tasks needs lm_eval in a separate environment: make serving"),
    ]
    handler.names = ("one",)
    (tmp_path / "some.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    for words, said in asked:
        printed = refusal("evaluate", *words)
        assert said in printed and len(printed.splitlines()) == 1, printed
    handler.names = ("one", "two")
    error = refusal("evaluate", address, "--data", tmp_path / "some.jsonl")
    assert "has several models (one, two); name one with --model NAME" in error


def test_the_harness_gets_the_model_as_it_is(tmp_path, run, monkeypatch):
    words = harness.command(Path("python"), run.export, "gsm8k,mine", tmp_path, 5)
    assert words[words.index("--model_args") + 1] == f"pretrained={run.export}" and words[-2:] == ["--limit", "5"]
    assert "--apply_chat_template" in words
    words = harness.command(Path("python"), Server("http://localhost:8000", "mine"), "gsm8k", None, None)
    assert "base_url=http://localhost:8000/v1/chat/completions" in words[words.index("--model_args") + 1]
    (run.export / "chat_template.jinja").unlink()
    monkeypatch.setattr(export, "device_map", lambda folder: {"device_map": "auto"} if folder == run.export else {})
    words = harness.command(Path("python"), run.export, "gsm8k", None, None)
    assert "--apply_chat_template" not in words
    assert words[words.index("--model_args") + 1].endswith(",parallelize=True"), "one GPU is too small"


TASK = """
task: invoices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{messages[0].content}}}}"
doc_to_target: "{{{{messages[-1].content}}}}"
generation_kwargs: {{until: [], do_sample: false, max_gen_toks: 96}}
filter_list:
  - name: strip
    filter: [{{function: regex, regex_pattern: '(?s)^\\s*(.*?)\\s*$'}}, {{function: take_first}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.skipif(environment.python("lm_eval") is None, reason="needs the environment of `make serving`")
@pytest.mark.every
def test_the_harness_agrees_with_our_exact_match_on_every_example(run, data, tmp_path, printed_by, refusal):
    (tmp_path / "invoices.yaml").write_text(TASK.format(data=data))
    base = shutil.copytree(TINY_MODEL, tmp_path / "base")
    for model in (run.export, base):  # a model's own limit would count, and not the task's
        settings = read_json(model / "generation_config.json")
        write_json(model / "generation_config.json", settings | {"max_new_tokens": None})
    assert run_command("evaluate", [str(run.path)]) == 0
    words = ["--tasks", "invoices", "--include", str(tmp_path)]
    assert "exact match on 6 held-out examples of the task invoices" in printed_by("evaluate", run.path, base, *words)
    found = read_json(run.evaluation)
    (task,) = found["tasks"]
    assert task["models"][0]["values"] == found["models"][0]["values"] == [1, 1, 1, 0, 0, 0]
    ours, theirs = (one["models"][0] for one in (found, task))
    assert [theirs[key] for key in ("score", "low", "high")] == [ours[key] for key in ("score", "low", "high")]
    assert [answer.strip() for answer in theirs["answers"]] == ours["answers"]
    assert (task["pairs"][0]["better"], task["pairs"][0]["worse"]) == (0, 0)
    assert "the task invoices" in run.report_page.read_text()

    printed = refusal("evaluate", TINY_MODEL, "--tasks", "no_such_task")
    assert "Tasks not found: no_such_task" in printed and len(printed.splitlines()) <= 2, printed


def test_tasks_are_compared_as_our_own_metric_is():
    def measured(rouge, perplexity):
        scores = (score.Scores([value] * 6, [1] * 6, [], 0.0) for value in (rouge, perplexity))
        metrics = (("rouge", True), ("perplexity", False))
        return [harness.Found("mine", name, one, higher) for (name, higher), one in zip(metrics, scores, strict=True)]

    first, second = comparison.of_tasks([("a", measured(0.25, 9.0)), ("b", measured(0.5, 8.0))])
    assert (first["metric"], first["models"][1]["score"], first["pairs"][0]["better"]) == ("rouge", 0.5, 6)
    assert second["pairs"][0]["better"] == 6 and second["models"][0]["low"] == pytest.approx(9.0)
    assert "rouge on 6 held-out examples of the task mine" in next(comparison.lines(first))
    assert "sign test" in list(comparison.lines(first))[-1] and "0.2500" in list(comparison.lines(first))[3]


def test_a_loss_that_falls_is_better():
    lower, higher = (score.Scores([value] * 8, [2] * 8, [], 0.0) for value in (1.0, 2.0))
    assert comparison.pair(False, ("a", higher), ("b", lower))["better"] == 8
    assert comparison.pair(True, ("a", higher), ("b", lower))["worse"] == 8
    assert evaluate.parse(["x"]).limit is None
