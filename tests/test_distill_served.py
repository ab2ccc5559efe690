"""A teacher on a server says what the same teacher says that is loaded; and a run learns from it."""

import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.methods import Distill
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from deepspeed_recipes.recipe.samples import TINY_MODEL, TINY_TEACHER
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.data.collate import Collator
from deepspeed_recipes.training.methods.distillation import divergence, likeliest
from deepspeed_recipes.training.methods.distillation.likeliest import PLACES, PlacesCollator, Served
from tests.conftest import random_qwen3
from tests.ranks import free_port
from tests.small import small
from tests.test_serve import NO_SERVING, serving

KEPT = 20


class Answers(BaseHTTPRequestHandler):
    """Answers in vLLM's form with what a model of transformers says; `test_of_vllm` compares it with vLLM."""

    def do_GET(self):
        self.say({"data": [{"id": "teacher"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            tokens = self.server.tokenizer(asked["prompt"], add_special_tokens=asked["add_special_tokens"])
            self.say({"tokens": tokens["input_ids"]})
        elif asked["prompt_logprobs"] > KEPT:
            self.say({"error": {"message": "Requested prompt logprobs of 21, greater than max allowed: 20"}}, 400)
        elif asked["max_tokens"] != 1:
            self.say({"error": {"message": "every token to write costs a pass, and vLLM wants one at least"}}, 400)
        else:
            choices = [self.choice(at, tokens, asked) for at, tokens in enumerate(asked["prompt"])]
            self.say({"choices": choices[::-1]})

    @torch.no_grad()
    def choice(self, at, tokens, asked):
        log_probs = self.server.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        found = [None]
        for of_place, token in zip(log_probs, tokens[1:], strict=False):
            order = of_place.argsort(descending=True).tolist()
            ranks = {one: rank for rank, one in enumerate(order, 1)}
            likely = dict.fromkeys([token, *order[: asked["prompt_logprobs"]]])  # the prompt's own comes first
            found.append({str(one): {"rank": ranks[one], "logprob": of_place[one].item()} for one in likely})
        return {"index": at, "prompt_logprobs": found}

    def say(self, value, status=200):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        """Say nothing."""


@contextmanager
def answering(folder, more_tokens=()):
    """Yield the address of a server that holds a model, with more tokens than its own."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        server.tokenizer = AutoTokenizer.from_pretrained(folder)
        server.tokenizer.add_tokens(list(more_tokens))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def url():
    """Return the address of a server that holds the teacher."""
    with answering(TINY_TEACHER) as address:
        yield address


def of(address, **settings):
    return replace(pages.find("tiny", "distill"), method=Distill(teacher=address, top_k=KEPT, **settings))


def batch():
    """Return two packed sequences of three documents, in which some tokens are learned."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 1000, (2, 30), generator=generator).tolist()
    lengths = [[12, 18], [30]]
    labels = [[-100] * 4 + one[4:12] + [-100] * 6 + one[18:] for one in tokens]
    names = ("input_ids", "labels", "seq_lengths")
    sequences = [dict(zip(names, one, strict=True)) for one in zip(tokens, labels, lengths, strict=True)]
    return PlacesCollator(Collator(0))(sequences)


def says_what_the_loaded_teacher_says(address, tolerance):
    served = Served.of(of(address), 1152)
    served.check(AutoTokenizer.from_pretrained(TINY_MODEL))
    inputs = batch()
    tokens, log_probs = served.likeliest(inputs, inputs[PLACES], KEPT)
    model = AutoModelForCausalLM.from_pretrained(TINY_TEACHER, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
    whole = logits.flatten(0, 1)[inputs[PLACES]].log_softmax(-1)
    assert len(tokens) == len(inputs[PLACES]) == 2 * (8 + 12)
    torch.testing.assert_close(log_probs[:, 0], whole.max(-1).values, rtol=0, atol=tolerance)
    expected = divergence.of_outcomes(whole, tokens.long())
    torch.testing.assert_close(log_probs[:, :-1], expected[:, :-1], rtol=0, atol=tolerance)
    torch.testing.assert_close(log_probs.exp(), expected.exp(), rtol=0, atol=tolerance)
    assert (tokens[:, 0] == whole.argmax(-1)).float().mean() > 0.95


def test_a_teacher_on_a_server_says_what_it_says_when_loaded(url):
    says_what_the_loaded_teacher_says(url, 1e-4)


@NO_SERVING
@pytest.mark.every
def test_of_vllm():
    with serving(TINY_TEACHER, "--engine", "vllm") as address:
        says_what_the_loaded_teacher_says(address, 0.05)


@pytest.mark.every
def test_a_run_learns_the_same_from_it_as_from_the_loaded_teacher(ranks, tmp_path, model_folder, conversations):
    runs = []
    folder = random_qwen3(tmp_path / "teacher", seed=1)
    with answering(folder) as address:
        for name, teacher in (("served", address), ("loaded", str(folder))):
            run = RunFolder(tmp_path / name)
            settings = Distill(teacher=teacher, top_k=KEPT)
            options = {"method": "distill", "distill": settings, "packing": True, "adam_epsilon": 1e-5}
            write_recipe(run, small(model_folder, conversations, "zero2.json", **options))
            ranks.check(training_run.main, str(run.path), log=tmp_path / f"{name}.log")
            runs.append(run)
    served, loaded = (read_jsonl(run.metrics) for run in runs)
    assert read_json(runs[0].likeliest / likeliest.MARK)["teacher"] == address
    for row, other in zip(served, loaded, strict=True):
        assert row["divergence"] == pytest.approx(other["divergence"], rel=1e-3)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_another_tokenizer_more_than_it_says_and_no_server_are_refused(url, model_folder):
    served = Served.of(of(url), 1152)
    inputs = batch()
    with pytest.raises(UserError, match=r"/v1/completions answered 400: .*greater than max allowed: 20"):
        served.likeliest(inputs, inputs[PLACES], KEPT + 1)
    with pytest.raises(UserError, match=r"finds token \d+ likely, and the model that learns has only 10"):
        replace(served, vocabulary=10).likeliest(inputs, inputs[PLACES], KEPT)
    with answering(model_folder, ["def"]) as other, pytest.raises(UserError, match="teacher has another tokenizer"):
        Served.of(of(other), 1152).check(AutoTokenizer.from_pretrained(TINY_MODEL))
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"distill.teacher={nobody}: no answer .*is vLLM running there") as error:
        Served.of(of(nobody), 1152)
    assert len(str(error.value).splitlines()) == 1
