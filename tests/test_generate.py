"""generate.py: one question as ever, a chat with its history, sampling, and a server."""

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from deepspeed_recipes.commands import generate
from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.recipe.run_folder import COMPLETE, RunFolder, sizes, write_json, write_recipe
from deepspeed_recipes.recipe.samples import TINY_MODEL, TINY_VISION
from deepspeed_recipes.training import export
from deepspeed_recipes.training.model.generate import generate as greedy
from deepspeed_recipes.training.model.generate import stream
from tests import ROOT
from tests.small import small

FIRST, SECOND = "Ada Brandt paid 51 euros.", "Tore Vandal paid 12 euros."


@pytest.fixture
def typed(monkeypatch):
    """Return a function that types lines."""
    return lambda *lines: monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


@pytest.fixture(scope="module")
def tiny():
    return export.load(generate.Path(TINY_MODEL)).eval(), export.load_tokenizer(generate.Path(TINY_MODEL))


@pytest.fixture
def server():
    """Count the turns of a conversation, in three pieces."""
    questions = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.answer(json.dumps({"data": [{"id": "counter"}]}))

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            questions.append(asked)
            said = f"{len(asked['messages'])} turns"
            pieces = [
                json.dumps({"choices": [{"delta": {"content": piece}}]}) for piece in (said[:1], said[1:4], said[4:])
            ]
            self.answer("".join(f"data: {piece}\n\n" for piece in (*pieces, "[DONE]")))

        def answer(self, text):
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}", questions
    running.shutdown()
    running.server_close()


def test_a_chat_answers_with_what_was_said_before(tiny, typed, printed_by):
    typed(FIRST, "", SECOND, "/reset", FIRST, "/exit", SECOND)
    said = printed_by("generate", TINY_MODEL, "--max-new-tokens", "8").splitlines()
    (first,) = greedy(*tiny, [[{"role": "user", "content": FIRST}]], 8)
    history = [{"role": "user", "content": FIRST}, {"role": "assistant", "content": first}]
    (second,) = greedy(*tiny, [[*history, {"role": "user", "content": SECOND}]], 8)
    (alone,) = greedy(*tiny, [[{"role": "user", "content": SECOND}]], 8)
    assert [line.strip() for line in said] == [first, second, first] and second != alone


def test_one_question_is_answered_as_ever_and_a_system_prompt_counts(tiny, capsys):
    asked = [{"role": "user", "content": FIRST}]
    with_system = [{"role": "system", "content": "Answer in prose."}, *asked]
    for words, turns in (([], asked), (["--system", "Answer in prose."], with_system)):
        assert run_command("generate", [TINY_MODEL, FIRST, "--max-new-tokens", "8", *words]) == 0
        assert capsys.readouterr().out == greedy(*tiny, [turns], 8)[0] + "\n"


def test_a_runs_export_or_newest_checkpoint_is_asked(tiny, tmp_path, capsys, refusal):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    write_recipe(run, small(TINY_MODEL, tmp_path))
    words = [str(run.path), FIRST, "--max-new-tokens", "8"]
    assert "this run has neither an export nor a complete checkpoint yet." in refusal("generate", *words)
    checkpoint = run.checkpoints / "checkpoint-3"
    for folder in (checkpoint, run.export):
        shutil.copytree(TINY_MODEL, folder)
        if folder == checkpoint:
            write_json(checkpoint / COMPLETE, {"world_size": 1, "layout": {}, "files": sizes(checkpoint)})
        assert run_command("generate", words) == 0
        said = capsys.readouterr()
        assert said.out == greedy(*tiny, [[{"role": "user", "content": FIRST}]], 8)[0] + "\n"
        assert f"{run.path}: a run; its model is {folder}\n" in said.err


def plain_answer(words, *files, new=8):
    """Return what plain transformers answers to a question about images, as the processor renders it."""
    seen = AutoProcessor.from_pretrained(TINY_VISION)
    model = AutoModelForImageTextToText.from_pretrained(TINY_VISION).eval()
    parts = [*({"type": "image"} for _ in files), {"type": "text", "text": words}]
    chat = seen.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    images = [Image.open(file).convert("RGB") for file in files]
    inputs = seen(text=[chat], images=[images] if images else None, add_special_tokens=False, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    return seen.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Return two images."""
    folder = tmp_path_factory.mktemp("drawn")
    for name, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        Image.new("RGB", (48, 32), colour).save(folder / f"{name}.png")
    return folder / "red.png", folder / "blue.png"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_an_image_is_answered_as_plain_transformers_does(drawn, capsys, count):
    asked = "What is in the top left?"
    words = [word for file in drawn[:count] for word in ("--image", str(file))]
    assert run_command("generate", [TINY_VISION, asked, "--max-new-tokens", "8", *words]) == 0
    assert capsys.readouterr().out.strip() == plain_answer(asked, *drawn[:count])


MISTAKEN_IMAGES = {
    "a text model": ([TINY_MODEL, "What?", "--image", "RED"], "is a text model, without an image processor; leave out"),
    "no such file": ([TINY_VISION, "What?", "--image", "none.png"], "--image (none.png): no such file"),
    "not an image": ([TINY_VISION, "What?", "--image", __file__], "not an image that Pillow reads"),
    "a chat": ([TINY_VISION, "--image", "RED"], "--image: add a question about it"),
    "a folder": ([TINY_VISION, "What?", "--image", "."], "--image (.): no such file"),
}


@pytest.mark.parametrize("mistake", MISTAKEN_IMAGES)
def test_an_image_that_cannot_be_shown_is_refused(drawn, refusal, mistake):
    words, said = MISTAKEN_IMAGES[mistake]
    message = refusal("generate", *[str(drawn[0]) if word == "RED" else word for word in words])
    assert said in message and message.count("\n") == 1


def test_a_server_gets_the_bytes_of_an_image(server, drawn, refusal):
    address, asked = server
    assert run_command("generate", ["--server", address, "What?", "--image", str(drawn[0])]) == 0
    (turn,) = asked[-1]["messages"]
    picture, text = turn["content"]
    assert text == {"type": "text", "text": "What?"} and picture["type"] == "image_url"
    kind, _, coded = picture["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64" and base64.b64decode(coded) == drawn[0].read_bytes()
    assert "no such file" in refusal("generate", "--server", address, "What?", "--image", "none.png")


def test_an_answer_comes_in_pieces_and_a_seed_repeats_it(tiny):
    asked = [{"role": "user", "content": FIRST}]
    pieces = list(stream(*tiny, asked, 16, do_sample=False))
    assert len(pieces) > 3 and "".join(pieces).strip() == greedy(*tiny, [asked], 16)[0]
    options = {"do_sample": True, "temperature": 3.0, "top_p": 1.0, "top_k": 0}
    drawn = ["".join(stream(*tiny, asked, 16, **options, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_server_gets_the_conversation_and_the_options(server, typed, capsys):
    address, asked = server
    typed(FIRST, SECOND)
    words = ["--server", address, "--system", "Count.", "--temperature", "0.5", "--top-p", "0.9", "--seed", "3"]
    assert run_command("generate", words) == 0
    assert capsys.readouterr().out.splitlines() == ["2 turns", "4 turns"]
    assert asked[1]["messages"][2] == {"role": "assistant", "content": "2 turns"}
    assert (asked[0]["model"], asked[0]["temperature"], asked[0]["top_p"], asked[0]["seed"]) == ("counter", 0.5, 0.9, 3)
    assert run_command("generate", ["--server", f"{address}/v1", "Hello"]) == 0
    assert capsys.readouterr().out == "1 turns\n" and asked[2]["temperature"] == 0


@pytest.mark.parametrize(
    ("choice", "rest", "said"),
    [
        ({"delta": {"content": "Yes."}}, {}, "the answer broke off."),
        ({"delta": {"content": "Yes."}}, {"error": "too long"}, 'the server answered an error: "too long"'),
        ({"delta": {"reasoning_content": "Hm."}}, "DONE", "without text, only with reasoning_content."),
        ({"delta": {"content": "Yes."}, "finish_reason": "stop"}, {}, None),
        ({"message": {"role": "assistant", "content": "Yes."}}, "DONE", None),
    ],
)
def test_a_servers_answer_without_an_end_or_a_text_is_refused(choice, rest, said, monkeypatch, capsys):
    lines = [json.dumps({"choices": [choice]}), f"[{rest}]" if rest == "DONE" else json.dumps(rest)]
    replies = [f"data: {one}\n".encode() for one in lines]
    monkeypatch.setattr("deepspeed_recipes.training.server._request", lambda *_: replies)
    assert run_command("generate", ["--server", "http://a", "--model", "m", FIRST]) == (2 if said else 0)
    printed = capsys.readouterr()
    assert said in printed.err if said else printed.out == "Yes.\n"


def test_bad_input_is_answered_in_a_line(server, typed, capsys, refusal):
    address, _ = server
    long = "word " * 2000
    for words, said in (
        ([], "name a model folder, or a server"),
        ([TINY_MODEL, "a", "--server", address], "and not both"),
        ([TINY_MODEL, "a", "--temperature", "-1"], "--temperature -1.0: must be at least 0"),
        ([TINY_MODEL, "a", "--top-p", "0.5"], "add --temperature above 0"),
        ([TINY_MODEL, "a", "--temperature", "1", "--top-p", "2"], "--top-p 2.0: must be above 0"),
        ([TINY_MODEL, "a", "--temperature", "1", "--top-k", "0"], "--top-k 0: must be at least 1"),
        ([TINY_MODEL, long], "the model's context is 1024"),
        (["--server", "http://127.0.0.1:9", "a"], "is a server running there?"),
        (["--server", address, "a", "--adapter", "x"], "--adapter: a server has its own models"),
    ):
        printed = refusal("generate", *words)
        assert said in printed and len(printed.splitlines()) == 1, printed
    typed(long, FIRST)
    assert run_command("generate", [TINY_MODEL, "--max-new-tokens", "2"]) == 0
    assert "/reset starts again" in capsys.readouterr().err


def test_nothing_but_the_answer_is_on_stdout():
    """DeepSpeed says there that it has found no GPU, unless its variable is set."""
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    command = [
        sys.executable,
        str(ROOT / "scripts" / "generate.py"),
        str(TINY_MODEL),
        "Hi",
        "--max-new-tokens",
        "2",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout and "accelerator" not in done.stdout
