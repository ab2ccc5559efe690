"""serve.py: real servers answer with the tokens of plain transformers; what cannot be served is refused."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from fastapi import HTTPException
from fastapi.testclient import TestClient
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.cli.serving.utils import Modality

from deepspeed_recipes.commands import serve
from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.export import certificate
from deepspeed_recipes.export.serve import engines, environment, one_model, process, served
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Draft
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from deepspeed_recipes.recipe.samples import CHAT, TINY_MODEL
from deepspeed_recipes.training import export
from deepspeed_recipes.training import server as client
from deepspeed_recipes.training.model import draft
from deepspeed_recipes.training.model.generate import generate
from deepspeed_recipes.training.model_folder import base_model, complete, expected
from tests import ROOT
from tests.ranks import free_port
from tests.servers import NO_SERVING, eventually, serving
from tests.tiers import tiered

LENGTH = 48
NO_LORA = "ValueError: BloomForCausalLM does not support LoRA yet."


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Write the model that ships with the project as an export, and two adapters of it that change its answers."""
    folder = tmp_path_factory.mktemp("models")
    export.write(Path(TINY_MODEL), folder / "whole", merge=False)
    for seed, name in enumerate(("one", "other")):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(folder / "whole", dtype=torch.float32)
        adapter = get_peft_model(base, LoraConfig(r=4 * (seed + 1), lora_alpha=64, target_modules="all-linear"))
        for key, weight in adapter.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(weight, std=0.02)
        adapter.save_pretrained(folder / name)
        for file in (*(folder / "whole").glob("token*"), *(folder / "whole").glob("*.jinja")):
            shutil.copy2(file, folder / name)
        config = folder / name / base_model.ADAPTER
        write_json(config, read_json(config) | {base_model.KEY: "../whole"})
    for name in ("whole", "one", "other"):
        model, tokenizer = export.load(folder / name).eval(), export.load_tokenizer(folder / name)
        examples = expected.sequences(tokenizer)
        found = expected.measured(lambda tokens, model=model: model(input_ids=tokens).logits, examples)
        if name == "whole":
            base = found
        expected.write(folder / name, examples, model.dtype, found, None if name == "whole" else base)
    return folder


def prompts(count):
    lines = Path(CHAT.validation).read_text().splitlines()[:count]
    return [json.loads(line)["messages"][:1] for line in lines]


def plain(folder, conversations):
    """Return the greedy answers of plain transformers."""
    return generate(export.load(folder).eval(), export.load_tokenizer(folder), conversations, LENGTH)


def asked(url, model, conversations):
    options = {"temperature": 0, "max_tokens": LENGTH}
    return [str(answer).strip() for answer in client.answers(client.connect(url, model), conversations, options)]


def test_transformers_serve_answers_as_plain_transformers_does(models):
    conversations = prompts(3)
    with serving(models / "whole", "--engine", "transformers", "--name", "tiny") as url:
        assert certificate.of_server(client.Server(url, "tiny"), models / "whole").agrees
        other = certificate.of_server(client.Server(url, "tiny"), models / "one")  # a server without its adapter
        assert other.like_base and not other.agrees and not other.causes
        assert asked(url, "tiny", conversations) == plain(models / "whole", conversations)
        assert client.connect(url) == client.Server(url, "tiny")
        with pytest.raises(UserError, match="pinned"):
            asked(url, "other", conversations[:1])
        elsewhere = {"model": TINY_MODEL}
        for path, body in {
            "/v1/chat/completions": elsewhere | {"messages": conversations[0]},
            "/v1/completions": elsewhere | {"prompt": "a"},
            "/v1/responses": elsewhere | {"input": "a"},
        }.items():
            assert posted(url + path, body | {"model": "tiny"}) == 200, path
            assert posted(url + path, body) == 400, path
            assert posted(url + path, body | {"model": "tiny", "n": 2}) == 400, path
        body = {"model": "tiny", "messages": conversations[0], "max_completion_tokens": 1, "n": 1}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as said:
            answer = json.load(said)
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("tiny", 1)
        closed = ("/load_model", "/reset", "/v1/audio/transcriptions", "/v1/systemone", "/v1/load_lora_adapter")
        assert {posted(url + path, elsewhere) for path in closed} == {404}
        assert asked(url, "tiny", conversations[:1]) == plain(models / "whole", conversations[:1])


def test_a_server_that_answers_otherwise_is_ended(models, tmp_path):
    folder = tmp_path / "changed"
    shutil.copytree(models / "whole", folder)
    content = read_json(folder / base_model.EXPECTED)
    content["texts"][0]["logprobs"][0] -= 1
    write_json(folder / base_model.EXPECTED, content)
    words = ["serve", str(folder), "--engine", "transformers", "--port", str(free_port())]
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed_recipes.commands", *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and "DIFFERS from the trained model" in done.stderr, done.stderr
    assert "ready:" not in done.stdout and "--no-certify" in done.stderr


def posted(url, body):
    """Return the status that a server answers with."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("killed", tiered((signal.SIGKILL, signal.SIGHUP), (signal.SIGKILL,)))
def test_a_killed_command_leaves_no_server_and_no_file(models, tmp_path, killed):
    port = free_port()
    words = [str(models / "one"), "--engine", "transformers", "--port", str(port)]  # an adapter is merged on the disk
    command = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "serve.py"), *words],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert any(line.startswith("ready:") for line in command.stdout) and os.listdir(tmp_path)
    servers = psutil.Process(command.pid).children(recursive=True)
    assert len(servers) > 1
    command.send_signal(killed)
    command.communicate()
    assert psutil.wait_procs(servers, 10)[1] == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    eventually(lambda: not os.listdir(tmp_path))


def test_a_request_names_no_file_of_the_machine():
    def messages(url):
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]

    for handler in (one_model.Chat, one_model.Responses):
        for url in ("/etc/passwd", "file:///etc/passwd", "cat.png", "iVBORw0KGgo="):
            with pytest.raises(HTTPException):
                handler.get_processor_inputs_from_messages(messages(url), Modality.VLM)
        for url in ("data:image/png;base64,iVBORw0KGgo=", "https://host/cat.png"):
            (found,) = handler.get_processor_inputs_from_messages(messages(url), Modality.VLM)
            assert found["content"] == [{"type": "image", "url": url}]


def test_a_request_is_answered_as_it_says_or_refused(models, monkeypatch):
    monkeypatch.chdir(models)
    config = read_json(models / "whole" / "tokenizer_config.json")
    write_json(models / "whole" / "tokenizer_config.json", {key: config[key] for key in config if key != complete.KEY})
    client = TestClient(one_model.app("whole"))
    (turns,) = prompts(1)

    def said(route="chat/completions", **body):
        body = {"chat/completions": {"messages": turns}, "responses": {"input": "a"}}.get(route, {"prompt": "a"}) | body
        return client.post(f"/v1/{route}", json=body)

    (choice,) = said(max_tokens=LENGTH).json()["choices"]
    answer = choice["message"]["content"]
    write_json(models / "whole" / "tokenizer_config.json", config)
    assert [answer.strip()] == plain(models / "whole", [turns]), "without the prompt, and without a response_template"
    stop = answer[6:8]
    (cut,) = said(stop=[stop, "never"]).json()["choices"]
    assert cut["message"]["content"] == answer.partition(stop)[0] and cut["finish_reason"] == "stop"
    (cut,) = said(stop=answer.strip()[-1], max_tokens=LENGTH).json()["choices"]
    assert cut["finish_reason"] == "stop", "even if the stop text is within the last token"
    assert said(stop=[], n=1, frequency_penalty=0.0, user="a", max_tokens=1).status_code == 200

    def drawn(seed):
        return said("completions", temperature=1.5, seed=seed, max_tokens=24).json()["choices"][0]["text"]

    alone = [drawn(seed) for seed in range(4)]
    assert len({*alone}) == 4, "also of a model that is greedy by default"
    with client, ThreadPoolExecutor() as pool:
        assert [*pool.map(drawn, range(4))] == alone, "even if they are asked at the same time"
    assert said("responses", max_output_tokens=1).json()["object"] == "response", "not a stream"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    for field, value in {
        **{"top_logprobs": 3, "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "functions": [], "logprobs": 0},
        **{"max_tokens": 0, "max_completion_tokens": -1, "temperature": "hot", "top_p": 2, "seed": 10**30},
        **{"stop": [5], "stream": "no", "messages": "a", "tools": 5, "generation_config": "{}"},
    }.items():
        refused = said(**{field: value})
        assert refused.status_code == 400 and field in refused.text, (field, refused.text)
    assert said(max_tokens=3, max_completion_tokens=4).status_code == 400
    assert "only text" in said(messages=[{"role": "user", "content": [image]}]).text
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    assert "drops 'tools'" in said(tools=[function]).text
    assert "role must be" in said(messages=[{"role": "robot", "content": "a"}]).text
    for field, value in {"previous_response_id": "a", "text": {"format": {"type": "json_object"}}}.items():
        assert field in said("responses", **{field: value}).json()["detail"]
    assert said("completions", suffix="a").status_code == said("completions", stop="a", stream=True).status_code == 400
    for tokens, count in (([1, 2], 1), ([1, 10**6], 1), ([1, -1], 1), ([1, 2], 5)):
        valid = (tokens, count) == ([1, 2], 1)
        assert said("completions", prompt=tokens, prompt_logprobs=count).status_code == (200 if valid else 400)
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "I look.", "tool_calls": [call], "refusal": None, "name": "me"}
    (read,) = one_model.Chat.get_processor_inputs_from_messages([turn], Modality.LLM)
    assert (read["content"], read["name"], read.keys() - turn.keys()) == ("I look.", "me", set()), "nothing is dropped"


def test_vllm_gets_no_way_to_load_something_else(models, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setattr(environment, "python", lambda package: Path(sys.executable))
    engine = engines.vllm(served.find(models / "one", None, []), "127.0.0.1", 8000)
    assert engine.variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == engine.variables["VLLM_SERVER_DEV_MODE"] == "0"
    assert "--trust-remote-code" not in engine.command and "--allowed-local-media-path" not in engine.command
    assert engine.names == ("one", "base")


@pytest.mark.every
def test_transformers_serve_answers_with_an_adapter(models):
    conversations = prompts(3)
    expected = plain(models / "one", conversations)
    assert expected != plain(models / "whole", conversations)
    with serving(models / "one", "--engine", "transformers") as url:
        assert asked(url, "one", conversations) == expected


@NO_SERVING
@pytest.mark.every
def test_vllm_answers_as_plain_transformers_does_with_adapters_side_by_side(models):
    conversations = prompts(50)
    expected = {name: plain(models / name, conversations) for name in ("whole", "one", "other")}
    assert len({tuple(answers) for answers in expected.values()}) == 3
    with serving(models / "one", "--engine", "vllm", "--adapter", f"other={models / 'other'}") as url:
        for name, answers in expected.items():
            assert asked(url, {"whole": "base"}.get(name, name), conversations) == answers


@NO_SERVING
@pytest.mark.every
def test_vllm_answers_as_plain_transformers_does_with_a_merged_adapter(models, tmp_path):
    export.write(models / "one", tmp_path / "merged", merge=True)
    conversations = prompts(50)
    with serving(tmp_path / "merged", "--engine", "vllm") as url:
        assert asked(url, "merged", conversations) == plain(tmp_path / "merged", conversations)


@NO_SERVING
@pytest.mark.every
def test_vllm_answers_as_trained_from_two_cpu_ranks(models):
    """Which the command certifies before it is ready."""
    with serving(models / "whole", "--engine", "vllm", "--tensor-parallel", "2") as url:
        assert asked(url, "whole", prompts(3)) == plain(models / "whole", prompts(3))


@NO_SERVING
@pytest.mark.every
@pytest.mark.parametrize("recipe", ["llama3-1b", "qwen3-0.6b", "gemma3-1b"])
def test_vllm_loads_drafts_of_other_families(recipe, tmp_path, printed_by):
    """With heads of 32, the smallest that its kernels know; and its cache is the one that `plan --serve` counts."""
    found = pages.find(recipe, "full")
    found = replace(found, draft=Draft(enabled=True, layers=2, hidden_size=128))
    draft.write(found, tmp_path / "draft", torch.float32)
    conversations = prompts(5)
    with serving(tmp_path / "draft", "--engine", "vllm", "--log", tmp_path / "log") as url:
        assert asked(url, "draft", conversations) == plain(tmp_path / "draft", conversations)
    if recipe.startswith("gemma3"):  # windows: its count of tokens is an average of two kinds of layers
        return
    [tokens] = re.findall(r"KV cache size: ([\d,]+) tokens", (tmp_path / "log").read_text(encoding="utf-8"))
    planned = (
        json.loads(printed_by("plan", tmp_path / "draft", "--gpu", "H100", "--serve", "1x1024", "--json"))["bf16"][
            "cache_gib"
        ]
        * 2
    )  # the draft is in fp32
    assert planned == pytest.approx(1024 / int(tokens.replace(",", "")), rel=1e-6), "of VLLM_CPU_KVCACHE_SPACE=1"


def test_vllm_is_told_what_the_model_was_trained_with(models, tmp_path, monkeypatch):
    place = tmp_path / "serving"
    (place / "lib" / "python3.11" / "site-packages" / "vllm").mkdir(parents=True)
    monkeypatch.setenv(environment.VARIABLE, str(place))
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    found = served.find(models / "one", "invoices", [f"other={models / 'other'}"])
    words = list(engines.vllm(found, "127.0.0.1", 8000).command)
    assert words[0] == str(place / "bin" / "python")

    def value(option):
        return words[words.index(option) + 1]

    assert value("--model") == str(models / "whole") and value("--served-model-name") == "base"
    assert value("--dtype") == "float32" and value("--tokenizer") == str(models / "one")
    assert value("--chat-template") == str(models / "one" / "chat_template.jinja")
    assert value("--max-lora-rank") == "8" and value("--max-loras") == "2"
    at = words.index("--lora-modules")
    assert words[at + 1 : at + 3] == [f"invoices={models / 'one'}", f"other={models / 'other'}"]
    assert "--generation-config" not in words
    ends = models / "ends"  # an adapter whose answers end with another token than the base's
    shutil.copytree(models / "one", ends)
    write_json(ends / "generation_config.json", {"eos_token_id": [2, 7], "suppress_tokens": [5], "min_length": 0})
    adapter = read_json(ends / base_model.ADAPTER)
    write_json(ends / base_model.ADAPTER, adapter | {"rank_pattern": {"q_proj": 9}})
    found = served.find(ends, None, [])
    words = list(engines.vllm(found, "127.0.0.1", 8000).command)
    unread = [engines.unread_settings(engine, found) for engine in ("vllm", "transformers")]
    shutil.rmtree(ends)
    assert value("--generation-config") == str(ends) and value("--max-lora-rank") == "16"
    assert unread == [["suppress_tokens"], []]


def test_a_split_is_passed_to_vllm(models, monkeypatch):
    monkeypatch.setattr(environment, "python", lambda package: Path(sys.executable))
    found = served.find(models / "whole", None, [])
    words = engines.vllm(found, "127.0.0.1", 8000, engines.Split(2, 3)).command
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert words[words.index("--pipeline-parallel-size") + 1] == "3"
    assert not any("parallel" in word for word in engines.vllm(found, "127.0.0.1", 8000).command)
    monkeypatch.setattr(engines, "_gpus", lambda: 2)
    with pytest.raises(UserError, match="needs 4 GPUs, and this machine has 2"):
        engines.check_split("vllm", found, engines.Split(2, 2))
    monkeypatch.setattr(engines, "_gpus", lambda: 0)
    ranks = engines.vllm(found, "127.0.0.1", 8000, engines.Split(2)).variables["VLLM_CPU_OMP_THREADS_BIND"]
    assert len(ranks.split("|")) == 2, "each on cores of its own"
    with pytest.raises(UserError, match="no stages on CPUs"):
        engines.check_split("vllm", found, engines.Split(1, 2))


def test_the_ready_lines_ask_for_the_first_adapter(models):
    found = served.find(models / "one", None, [])
    server = engines.transformers(found.asked, models, "127.0.0.1", 8000)
    lines = serve.ready(found, server, "http://127.0.0.1:8000")
    assert lines[0].startswith("ready: one by transformers serve"), "which serves the merged model alone"
    assert '"model": "one"' in lines[2] and "model='one'" in lines[6]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "no such folder"),
        (["whole", "--adapter", "other"], "write NAME=FOLDER"),
        (["whole", "--adapter", "x=whole"], "has no adapter"),
        (["one", "--adapter", "one=other"], "give each its own name"),
        (["one", "--adapter", "x=elsewhere"], "is served"),
        (["one", "--engine", "transformers", "--adapter", "x=other"], "several adapters need vLLM"),
        (["one", "--adapter", "x=templated"], "x: was trained with another chat template than one, and a server has"),
        (["one", "--adapter", "x=stopping"], "x: was trained with other tokens at the end of an answer than one"),
        (["one", "--adapter", "x=ia3"], "an adapter of PEFT's type IA3, and servers apply LoRA"),
        (["dora", "--engine", "vllm"], "an adapter with use_dora, which vLLM does not load; merge it first"),
        (["whole", "--name", "a/b"], "without a slash"),
        (["whole", "--port", "70000"], "between 1 and 65535"),
        (["whole", "--tensor-parallel", "0"], "--tensor-parallel 0: must be at least 1"),
        (["whole", "--engine", "transformers", "--tensor-parallel", "2"], "only vLLM splits a model"),
        (["whole", "--engine", "transformers", "--pipeline-parallel", "2"], "only vLLM splits a model"),
        (["whole", "--engine", "vllm"], "make serving"),
        (["four_bits"], "merge it first"),
    ],
)
def test_what_cannot_be_served_is_refused(words, said, models, tmp_path, refusal, monkeypatch):
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "nowhere"))
    for name, source in (("whole", None), ("one", None), ("other", None), ("elsewhere", "one"), ("four_bits", "one")):
        shutil.copytree(models / (source or name), tmp_path / name)
    other = tmp_path / "elsewhere" / base_model.ADAPTER
    write_json(other, read_json(other) | {base_model.KEY: "../one"})
    write_json(tmp_path / "four_bits" / "base_quantization.json", {})
    for name in ("templated", "stopping", "ia3", "dora"):
        shutil.copytree(models / "other", tmp_path / name)
    (tmp_path / "templated" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    write_json(tmp_path / "stopping" / "generation_config.json", {"eos_token_id": [7]})
    write_json(tmp_path / "ia3" / base_model.ADAPTER, {"peft_type": "IA3", base_model.KEY: "../whole"})
    write_json(
        tmp_path / "dora" / base_model.ADAPTER, read_json(tmp_path / "dora" / base_model.ADAPTER) | {"use_dora": True}
    )
    monkeypatch.chdir(tmp_path)
    port = [] if "--port" in words else ["--port", str(free_port())]
    error = refusal("serve", *words, *port)
    assert said in error and error.count("\n") == 1, error


def test_a_port_in_use_is_refused_before_anything_starts(models, capsys):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        assert run_command("serve", [str(models / "whole"), "--port", str(busy.getsockname()[1])]) == 2
    assert "choose another with --host or --port" in capsys.readouterr().err


BROKEN = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        for line in ('WARNING OSError: not this', 'NotImplementedError: no such kernel', 'EngineError: dead'):
            print(line, flush=True)
        self.send_response(400 if b'"plain"' in asked else 500)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_healthy_server_whose_model_cannot_answer_is_not_ready(tmp_path):
    port = free_port()
    engine = engines.Engine("vLLM", (), (sys.executable, "-c", BROKEN, str(port)), dict(os.environ))
    log = tmp_path / "log"
    with (
        pytest.raises(UserError, match="fails at its first answer: NotImplementedError: no such kernel; --log"),
        process.running(engine, "one", "127.0.0.1", port, log),
    ):
        pass
    with process.running(engine, "plain", "127.0.0.1", port, log):
        pass  # a model without a chat template refuses a chat, and answers completions


def test_quantised_weights_are_computed_in_a_type_that_has_kernels(tmp_path, monkeypatch):
    """As vLLM 0.32 says: "cpu_gemm_wna16" not implemented for 'Float'; its GPU kernels (Marlin) have no fp32 either.

    And of 8 bits, with AMX: "int8_scaled_mm_with_quant: expect A to be bfloat16 or half".
    """
    monkeypatch.setattr(environment, "require", lambda *_: Path(sys.executable))

    def computed_in(dtype, **about):
        (tmp_path / "config.json").write_text(json.dumps({"dtype": dtype, **about}))
        words = engines.vllm(served.Served("small", tmp_path, tmp_path), "127.0.0.1", 8000).command
        return words[words.index("--dtype") + 1]

    def quantised(bits):
        return {"quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": bits}}}}}

    assert computed_in("float32") == "float32"
    assert computed_in("float32", **quantised(4)) == computed_in("float32", **quantised(8)) == "bfloat16"
    assert computed_in("float16", **quantised(4)) == computed_in("float16", **quantised(8)) == "float16"


def test_four_bit_weights_are_served_where_there_are_kernels_for_them(tmp_path, monkeypatch):
    """As vLLM 0.32 says on AVX2: '_C' object has no attribute 'cpu_gemm_wna16'."""
    weights = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": weights}))
    model = served.Served("small", tmp_path, tmp_path)
    monkeypatch.setattr(environment, "python", lambda package: Path(sys.executable))
    for known, engine in ((True, "vllm"), (False, "transformers")):
        monkeypatch.setattr(engines, "has_packed_kernels", lambda known=known: known)
        assert engines.choose("auto", model) == engine
    with pytest.raises(UserError, match="need a GPU or a processor with AVX-512; use --engine transformers"):
        engines.choose("vllm", model)
    (tmp_path / "config.json").write_text("{}")
    assert engines.choose("vllm", model) == "vllm"


def test_an_adapter_of_a_model_with_experts_is_merged_before_vllm_serves_it_on_a_cpu(tmp_path, monkeypatch):
    write_json(tmp_path / "config.json", {"num_experts": 4})
    write_json(tmp_path / base_model.ADAPTER, {"r": 4, "target_parameters": None})
    monkeypatch.setattr(environment, "python", lambda package: Path(sys.executable))
    whole = served.Served("small", tmp_path, tmp_path)
    found = replace(whole, adapters=(served.Adapter("attention", tmp_path, 4),))
    assert engines.choose("auto", found) == "transformers", "which merges it"
    with pytest.raises(UserError, match=r"kernels on GPUs only; merge it first .*--merge --output DIR"):
        engines.choose("vllm", found)
    assert engines.choose("auto", whole) == "vllm"
    monkeypatch.setattr(engines, "_on_gpu", lambda: True)
    assert engines.choose("auto", found) == "vllm"
    assert engines.MIXED not in engines.vllm(found, "127.0.0.1", 8000).command
    write_json(tmp_path / base_model.ADAPTER, {"r": 4, "target_parameters": ["mlp.experts.gate_up_proj"]})
    words = engines.vllm(found, "127.0.0.1", 8000).command
    stacked = json.loads(words[words.index("--lora-modules") + 1])
    assert engines.MIXED in words
    assert stacked == {"name": "attention", "path": str(tmp_path), "is_3d_lora_weight": True}


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (
            "sys.exit('ValueError: no such weights')",
            "status 1: ValueError: no such weights; --log FILE keeps its output",
        ),
        (
            "sys.exit('CalledProcessError: registry\\nModuleNotFoundError: no torchvision')",
            "status 1: ModuleNotFoundError: no torchvision",
        ),
        (f"sys.exit({NO_LORA!r})", f"status 1: {NO_LORA} Merge the adapter"),
        ("os.kill(os.getpid(), 9)", "was killed, as Linux does if memory runs out: ds-recipes plan MODEL --serve"),
    ],
)
def test_a_server_that_fails_says_why_and_leaves_nothing(end, why, tmp_path):
    broken = f"import os, subprocess, sys; subprocess.Popen(['sleep', '97']); {end}"
    engine = engines.Engine("vLLM", (), (sys.executable, "-c", broken), dict(os.environ))
    start = time.monotonic()
    with (
        pytest.raises(UserError, match=re.escape(why)),
        process.running(engine, "one", "127.0.0.1", free_port(), tmp_path / "log"),
    ):
        pass
    assert time.monotonic() - start < process.GRACE
    assert subprocess.run(["pgrep", "-f", "sleep 97"], capture_output=True).returncode == 1
