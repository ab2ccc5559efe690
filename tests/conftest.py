"""What every test stands on: no network, CPU ranks over gloo, and a model small enough to compare exactly."""

import os
from pathlib import Path

# Before anything imports DeepSpeed or Hugging Face libraries.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{Path(__file__).parents[1] / 'src'}:{Path(__file__).parents[1]}",
    "DS_RECIPES_SCRIPTS": str(Path(__file__).parents[1]),
    "PYTHONWARNINGS": "ignore::FutureWarning:torch.distributed.c10d_logger",
}
os.environ.pop("WANDB_API_KEY", None)

from deepspeed_recipes.machine import ops

os.environ |= ops.environment()

import contextlib
import json
import re
import signal
from collections.abc import Iterable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import hypothesis
import pytest

from deepspeed_recipes.prove import techniques
from deepspeed_recipes.prove.techniques import conversation, random_qwen3
from tests import durations, versions
from tests.launching import LAUNCH, train_with
from tests.ranks import PRELOADED, Ranks

# A shell's background job ignores Ctrl-C, and so would whatever the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis fails an example that takes 200 ms; on a loaded machine any can. `make test-all` tries 100 examples each.
hypothesis.settings.register_profile("all", deadline=None)
hypothesis.settings.register_profile("some", deadline=None, max_examples=40)
hypothesis.settings.load_profile("some")

STARTS = dict.fromkeys(("ranks", "launcher", "accelerate", "execute", "happened", "attempt"), "engine")
STARTS |= dict.fromkeys(("hosts", "cluster"), "server")
"""The mark of a test that uses a fixture, itself or through another one: `make quick` leaves these tests out."""


__all__ = ["conversation", "random_qwen3", "write_rows"]

BUFFERS = pytest.StashKey[set[Path]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts ranks, what starts servers and what is slow."""
    slow = durations.read()
    for item in items:
        for name in STARTS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(STARTS[name])
        if item.nodeid in slow:
            item.add_marker("slow")
        for word, requirement in versions.CASES.items():
            if word in item.nodeid.partition("[")[2] and not versions.has(requirement):
                item.add_marker(versions.needs(requirement))


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory):
    """Keep the data sets' cache of a test run to itself."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))


def pytest_configure(config: pytest.Config) -> None:
    """Note which buffers DeepSpeed's ranks had in /dev/shm before the tests."""
    config.stash[BUFFERS] = shared_buffers()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the buffers that scripts other than ours leave behind: 66 MB per rank, in memory."""
    if not hasattr(config, "workerinput"):  # another worker's ranks may still use theirs
        for buffer in shared_buffers() - config.stash[BUFFERS] - mapped_buffers():
            buffer.unlink(missing_ok=True)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was left out because it needs the serving environment."""
    from deepspeed_recipes.export.serve import environment

    missing = [] if environment.python("vllm") else ["make serving"]
    missing += [] if environment.has_llama_cpp() else ["make gguf"]
    missing += [] if find_spec("ray") else ["make ray"]
    missing += [] if find_spec("torchao") else ["make fp8"]
    if missing:
        how = f"{' and '.join(missing)}, then make test-all"
    elif config.option.markexpr:
        how = "make test-all"
    else:
        return
    terminalreporter.write_line(f"left out: tests with vLLM, llm-compressor, lm-eval, llama.cpp or Ray ({how})")


def shared_buffers() -> set[Path]:
    """Return what DeepSpeed's ranks have put in /dev/shm."""
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))


def mapped_buffers() -> set[Path]:
    """Return those of living ranks, which may be another test run's: without its buffer one would spin for good."""
    found: set[Path] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended
            found |= {Path(name) for name in re.findall(r"/dev/shm/deepspeed_allreduce_buffer_\S+", maps.read_text())}
    return found


@pytest.fixture(scope="session")
def ranks(caches):
    """Start ranks as forks of a process that has imported the stack once."""
    with Ranks(PRELOADED) as started:
        yield started


@pytest.fixture(scope="session")
def launcher() -> list[str]:
    """Return the words that start the launcher: a test that asks for them starts real ranks."""
    return LAUNCH


@pytest.fixture(scope="session")
def used(ranks, tmp_path_factory):
    """Return a function that says what the engine was after two steps with a template, each trained once."""
    folder = tmp_path_factory.mktemp("used")
    return cache(partial(train_with, ranks, folder))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """Make a random Qwen3 whose wrong gradients show: large initial weights, so that its output is not uniform."""
    return random_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory) -> Path:
    """Make another one for it to learn from: wider, deeper, with a head of its own, padded as large models' are."""
    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "initializer_range": 0.1, "tie_word_embeddings": False}
    return random_qwen3(tmp_path_factory.mktemp("teacher"), seed=1, padding=16, **sizes)


def write_rows(path: Path, rows: Iterable[dict]) -> Path:
    """Write examples as JSON lines, and return the file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def conversations(tmp_path_factory) -> Path:
    """Write eight conversations whose answers differ in length, so that a wrong weighting shows."""
    return techniques.conversations(tmp_path_factory.mktemp("data") / "train.jsonl")


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> Path:
    """Write eight pairs whose answers differ in length, so that a wrong weighting shows."""
    rows = []
    for n in range(1, 24, 3):
        right, wrong = " ".join(map(str, range(n))), " ".join(map(str, range(n + n % 5, 0, -1)))
        sides = {"prompt": ("user", f"Count to {n}."), "chosen": ("assistant", right), "rejected": ("assistant", wrong)}
        rows.append({name: [{"role": role, "content": said}] for name, (role, said) in sides.items()})
    path = tmp_path_factory.mktemp("pairs") / "train.jsonl"
    return write_rows(path, rows)


@pytest.fixture(scope="session")
def judged(pairs, tmp_path_factory) -> Path:
    """Write the good answers of four pairs and the bad ones of the other four, labelled."""
    path = tmp_path_factory.mktemp("judged") / "train.jsonl"
    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    sides = [("chosen", True), ("rejected", False)] * 4
    judged = [
        {"prompt": row["prompt"], "completion": row[side], "label": label}
        for row, (side, label) in zip(rows, sides, strict=True)
    ]
    return write_rows(path, judged)


@pytest.fixture(scope="session")
def labelled(tmp_path_factory) -> Path:
    """Write eight texts of different lengths in three classes of different sizes, so that a wrong weighting shows."""
    counts = {"few": (1, 4, 7), "some": (10, 13, 16, 19), "many": (22,)}
    rows = [{"text": f"Count to {n}: {' '.join(map(str, range(n)))}", "label": of} for of in counts for n in counts[of]]
    path = tmp_path_factory.mktemp("labelled") / "train.jsonl"
    return write_rows(path, rows)


@pytest.fixture(scope="session")
def matching(tmp_path_factory) -> Path:
    """Write eight anchors with a text that each should find and two that it should not; two should find the same."""
    rows = []
    for n in range(1, 24, 3):
        last = min(n, 19)  # the last two are equal
        texts = {"anchor": f"Count to {n}.", "positive": " ".join(map(str, range(last)))}
        rows.append(texts | {"negative": [" ".join(map(str, range(n + n % 5 + more, 0, -1))) for more in range(2)]})
    path = tmp_path_factory.mktemp("matching") / "train.jsonl"
    return write_rows(path, rows)


@pytest.fixture
def alone():
    """Be the only rank."""
    from torch import distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Return a function that gives the launcher's answer to a mistake, in an empty folder."""
    from deepspeed_recipes.commands.main import run

    monkeypatch.chdir(tmp_path)

    def answer(*arguments):
        try:
            status = run("launch", [*map(str, arguments)])
        except SystemExit as end:  # argparse
            status = end.code
        assert status == 2
        return capsys.readouterr().err

    return answer


@pytest.fixture
def ended(capsys):
    """Return a function that runs a command, which has to end with a status, and gives what it prints."""
    from deepspeed_recipes.commands.main import run

    def of(status, command, *words):
        assert run(command, [*map(str, words)]) == status
        return capsys.readouterr()

    return of


@pytest.fixture
def refusal(ended):
    """Return a function that runs a command, which has to end with status 2, and gives what it prints as an error."""
    return lambda *words: ended(2, *words).err


@pytest.fixture
def printed_by(ended):
    """Return a function that runs a command, which has to succeed, and gives what it prints."""
    return lambda *words: ended(0, *words).out


@pytest.fixture
def answer(capsys):
    """Return a function that gives the planner's JSON for a command line."""
    from deepspeed_recipes.commands import plan

    def ask(*words):
        assert plan.main([*words, "--json"]) in (0, 1)
        return json.loads(capsys.readouterr().out)

    return ask
