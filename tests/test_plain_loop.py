"""recipes/plain_loop.py: it trains as its docstring says, and writes nothing where nothing was trained."""

import json
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.prove.techniques import conversation
from deepspeed_recipes.recipe.samples import TINY_MODEL
from recipes import plain_loop
from tests.conftest import write_rows
from tests.launching import BIN, ROOT, run
from tests.ranks import free_port


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Write sixteen conversations, a blank line and a conversation without an answer."""
    rows = [conversation(f"Count to {n}.", " ".join(map(str, range(n)))) for n in range(1, 17)]
    path = write_rows(tmp_path_factory.mktemp("chats") / "chats.jsonl", rows)
    path.write_text(path.read_text() + "\n" + json.dumps({"messages": rows[0]["messages"][:1]}) + "\n")
    return path


@pytest.mark.engine
def test_docstring_command(chats, tmp_path):
    words = plain_loop.__doc__.split("DS_ACCELERATOR=cpu ")[1].split(" ...")[0].split()
    assert words[0] == "deepspeed" and words[-1] == "recipes/plain_loop.py"
    command = [str(BIN / "deepspeed"), "--master_port", str(free_port()), *words[1:]]
    options = ["--steps", "6", "--micro-batch", "2", "--length", "64", "--log-every", "2", "--dtype", "fp32"]
    output = run([*command, str(TINY_MODEL), str(chats), str(tmp_path / "model"), *options], ROOT)
    records = [json.loads(line[line.index("{") :]) for line in output.splitlines() if '{"step"' in line]
    assert [record["step"] for record in records] == [2, 4, 6]
    assert records[-1]["loss"] < records[0]["loss"] - 0.5 and all(record["grad_norm"] > 0 for record in records)
    assert "1 of 17 conversations are dropped: 0 are longer than --length 64, and 1 have no assistant's" in output
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (TINY_MODEL, tmp_path / "model")
    )
    assert before.keys() == after.keys() and not any(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("rate", "dtype", "expected"),
    [
        (
            "1e30",
            "fp32",
            r"step 2: the loss is [\d.]+, the gradient's norm inf: lower --lr 1e\+30, or check .*chats",
        ),
        pytest.param(
            "1e-30",
            "bf16",
            r"the weights have not changed after 2 steps: --lr 1e-30 is too small\.",
            marks=pytest.mark.every,
        ),
    ],
)
def test_a_run_that_trains_nothing_stops_and_writes_nothing(chats, tmp_path, rate, dtype, expected):
    command = [str(BIN / "deepspeed"), "--no_local_rank", "--num_gpus", "1", "--master_port", str(free_port())]
    words = [str(TINY_MODEL), str(chats), str(tmp_path / "model"), "--steps", "2", "--micro-batch", "2"]
    options = ["--length", "64", "--log-every", "1", "--lr", rate, "--dtype", dtype, "--schedule", "constant"]
    done = subprocess.run(
        [*command, str(ROOT / "recipes/plain_loop.py"), *words, *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and re.search(expected, done.stderr), done.stdout + done.stderr
    assert not (tmp_path / "model").exists()


def test_data_without_anything_to_learn_is_refused(chats, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    with pytest.raises(
        SystemExit, match="17 of 17 conversations are longer than --length 8, and in 0 the chat template"
    ):
        plain_loop.documents(chats, tokenizer, 8)
    asked = write_rows(tmp_path / "asked.jsonl", [{"messages": [{"role": "user", "content": "Why?"}]}] * 2)
    with pytest.raises(
        SystemExit, match="0 of 2 conversations are longer than --length 64, and in 2 the chat template"
    ):
        plain_loop.documents(asked, tokenizer, 64)


@pytest.mark.parametrize("option", ["--steps 0", "--lr 0", "--lr nan", "--lr -1", "--micro-batch 0", "--log-every 0"])
def test_impossible_options(monkeypatch, capsys, option):
    monkeypatch.setattr(sys, "argv", ["plain_loop.py", "model", "data", "output", *option.split()])
    with pytest.raises(SystemExit) as ended:
        plain_loop.options()
    assert ended.value.code == 2
    name, value = option.split()
    assert f"{name} {float(value) if name == '--lr' else value}: must be above 0 and finite" in capsys.readouterr().err
