"""`overhead`: compares a small recipe, run by the command, with the same training without this project.

Tokens per second and peak memory are compared with (a) recipes/plain_loop.py and (b) a bare transformers.Trainer
(`peer_trainer.py`), on the same model, data, ranks, ZeRO stage, dtype, optimizer, batch and logging interval. The first
steps of each run are warm-up. The measurement includes the launcher's allocator setting: the peers run without it, like
a plain `deepspeed` command.

On CPU ranks the three take turns of LOG_EVERY steps: one computes up to its next record while the others are stopped.
The speed of a shared machine changes by a third within minutes, which alone makes consecutive runs differ; a cycle of
turns takes seconds, so that such a change affects all runs alike. On GPUs they run one after the other: stopping a
process does not stop the kernels that it has queued, and such a kernel may be waiting for another rank's.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from ..launching import paths
from ..launching.command import ALLOCATOR, deepspeed_command, rank_environment
from ..machine.children import killed_with_this_process
from ..recipe import pages
from ..recipe.files import Json
from ..recipe.project import PACKAGE, PAGES
from ..recipe.recipe import Precision, Recipe, Schedule, Wandb
from ..recipe.run_folder import RunFolder, write_recipe

POLL = 0.005
"""Seconds between two checks for a new record; a turn is a thousand times as long."""


@dataclass(frozen=True)
class Turn:
    """One turn of a run: the work up to its next record."""

    record: Json
    """The record that ended the turn."""
    tokens: int
    """Tokens since the previous record."""
    seconds: float


@dataclass
class Contender:
    """A running command that appends JSON records, one per line, to a file."""

    command: list[str]
    environment: Mapping[str, str]
    records: Path
    """The file with the records: one that the command writes, or its output."""
    output: Path
    """The file with the command's output."""
    turns: list[Turn] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command in its own session."""
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                self.command, env=dict(self.environment), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def take_turn(self, most: float = float("inf")) -> None:
        """Compute up to the next record, for `most` seconds.

        Raises:
            RuntimeError: the run has ended without another record, or takes longer.
        """
        self.signal(signal.SIGCONT)
        began = time.perf_counter()
        ended = False
        while True:
            lines = self.records.read_bytes().split(b"\n")[:-1] if self.records.exists() else []
            new = [line for line in lines if line.startswith(b"{")][len(self.turns) :]
            if new:
                break
            if ended:  # it had ended before the last check, so there are no more records
                self.finish()
                raise RuntimeError(f"{' '.join(self.command)} ended before its last step")
            if time.perf_counter() - began > most:
                raise RuntimeError(f"{' '.join(self.command)} has not come further in {most:.0f} s\n{self.tail()}")
            time.sleep(POLL)
            ended = self.running.poll() is not None
        seconds = time.perf_counter() - began
        self.signal(signal.SIGSTOP)
        record = json.loads(new[0])
        before = self.turns[-1].record["tokens"] if self.turns else 0
        self.turns.append(Turn(record, record["tokens"] - before, seconds))

    def finish(self) -> None:
        """Let the command run to its end.

        Raises:
            RuntimeError: the command failed; the message ends with its last output.
        """
        self.signal(signal.SIGCONT)
        if self.running.wait():
            raise RuntimeError(f"{' '.join(self.command)}\n{self.tail()}")

    def tail(self) -> str:
        """Return the end of the command's output."""
        return self.output.read_text(errors="replace")[-6000:]

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the command."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.running.pid, number)

    def end(self) -> None:
        """Kill all processes of the command."""
        self.signal(signal.SIGKILL)
        self.running.wait()

    @property
    def running(self) -> subprocess.Popen[bytes]:
        """The process that was started."""
        assert self.process is not None
        return self.process


def take_turns(contenders: list[Contender], last_step: int, most: float = float("inf")) -> None:
    """Run all contenders to the end, one record per turn, reversing the order after every cycle.

    Raises:
        RuntimeError: a contender failed, or took longer than `most` seconds for a turn.
    """
    with contextlib.ExitStack() as stack:
        for one in contenders:
            one.start()
            stack.enter_context(killed_with_this_process(one.running.pid))
            stack.callback(one.end)
            one.take_turn(most)
        order = contenders
        while under_way := [one for one in order if one.turns[-1].record["step"] < last_step]:
            for one in under_way:
                one.take_turn(most)
            order = order[::-1]
        for one in contenders:
            one.finish()


WARM_UP = 20
"""Steps that are not counted: compilation of ops, allocator, ZeRO-3's trace."""
LOG_EVERY = 5
FEWEST = 40
"""The fewest steps of a run whose rate is a median of several turns."""


@dataclass(frozen=True)
class Bench:
    """The settings of a comparison, which are the same for all peers."""

    zero_stage: int
    steps: int
    ranks: int
    gpus: int
    micro_batch: int
    length: int
    dtype: Precision
    folder: Path


OPTIONS = ("zero_stage", "steps", "rounds", "gpus", "micro_batch", "length", "dtype")
"""Names of the options that only `overhead` and `scaling` read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
    group = parser.add_argument_group("overhead and scaling")
    group.add_argument("--zero-stage", type=int, choices=range(4), default=2)
    group.add_argument("--steps", type=int, default=60, help=f"optimizer steps per run, {WARM_UP} of them warm-up")
    group.add_argument("--rounds", type=int, default=2, help="how often each peer runs")
    group.add_argument(
        "--gpus", type=int, metavar="N", help="ranks (default: all GPUs; without GPUs 2 CPU ranks, 4 in scaling)"
    )
    group.add_argument("--micro-batch", type=int, default=8, help="sequences per rank and step")
    group.add_argument("--length", type=int, default=256, help="tokens per sequence")
    group.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")


def overhead(bench: Bench, rounds: int, seconds: float = float("inf")) -> Json:
    """Return every peer's throughput and memory in each run; a round that would exceed `seconds` is not started."""
    from datasets import Dataset

    from ..training.data import chat_templates, tokenize
    from ..training.data.collate import Collator
    from ..training.distributed import describe_environment

    began = time.monotonic()
    # The packed sequences for the bare Trainer, all of one length.
    recipe = recipe_of(bench)
    tokenizer = chat_templates.load_tokenizer(recipe)
    sequences, _ = tokenize.prepare(recipe.data.path, recipe, tokenizer)
    collate = Collator(tokenizer.pad_token_id, multiple=bench.length)
    padded = [collate([one]) for one in sequences]
    columns = {name: [one[name][0].tolist() for one in padded] for name in ("input_ids", "labels", "position_ids")}
    Dataset.from_dict(columns | {"tokens": [one["tokens"] for one in padded]}).save_to_disk(bench.folder / "sequences")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ("recipe", "plain_loop", "trainer")}
    for number in range(rounds):
        taken = time.monotonic() - began
        if number and taken * (number + 1) / number > seconds:
            break
        peers = peers_of(bench, number)
        for group in [[peer] for peer in peers.values()] if bench.gpus else [list(peers.values())]:
            take_turns(group, bench.steps, seconds)
        for name, peer in peers.items():
            measured = steady(peer.turns)
            print(
                f"{name:<11} {measured['tokens_per_second']:>9,.0f} tokens/s {measured['peak_gib']:>7.3f} GiB",
                flush=True,
            )
            runs[name].append(measured)
    settings = {key: value for key, value in vars(bench).items() if key not in ("folder", "gpus")}
    return {
        "benchmark": "overhead",
        "date": date.today().isoformat(),
        "settings": settings,
        "environment": describe_environment() | {"world_size": bench.ranks},
        "runs": runs,
    }


def summarise(runs: list[dict[str, float]], key: str) -> float:
    """Return the median of a measurement over a peer's runs."""
    return statistics.median(run[key] for run in runs)


def table(result: Json) -> str:
    """Return the result as a Markdown table with the ratios to the fastest and to the leanest peer."""
    runs = result["runs"]
    speed = {name: summarise(measured, "tokens_per_second") for name, measured in runs.items()}
    memory = {name: summarise(measured, "peak_gib") for name, measured in runs.items()}
    fastest = max(speed[name] for name in speed if name != "recipe")
    leanest = min(memory[name] for name in memory if name != "recipe")
    lines = ["| | tokens/s | of the faster peer | peak GiB | of the leaner peer |", "|---|---|---|---|---|"]
    for name in runs:
        lines.append(
            f"| {name} | {speed[name]:,.0f} | {speed[name] / fastest:.3f} "
            f"| {memory[name]:.3f} | {memory[name] / leanest:.3f} |"
        )
    return "\n".join(lines)


def recipe_of(bench: Bench) -> Recipe:
    """Return `tiny full` as the benchmark runs it."""
    recipe = pages.find("tiny", "full")
    return paths.locate(
        replace(
            recipe,
            data=replace(recipe.data, validation=None, metric="loss"),
            deepspeed=f"zero{bench.zero_stage}.json",
            learning_rate=1e-4,
            schedule=Schedule("constant", 0),
            max_steps=bench.steps,
            micro_batch_size=bench.micro_batch,
            global_batch_size=bench.micro_batch * bench.ranks,
            sequence_length=bench.length,
            precision=bench.dtype,
            logging_steps=LOG_EVERY,
            eval_steps=None,
            save_steps=0,
            wandb=Wandb("disabled"),
        )
    )


def peers_of(bench: Bench, number: int) -> dict[str, Contender]:
    """Return the peers of a round: the recipe, recipes/plain_loop.py, and the bare transformers.Trainer.

    The last two are scripts under the DeepSpeed launcher, with the user's allocator settings and not the project's.
    """
    recipe, run = recipe_of(bench), RunFolder(bench.folder / f"run{number}")
    write_recipe(run, recipe)
    environment, output = environment_of(bench), bench.folder / f"recipe{number}.log"
    found = {"recipe": Contender(deepspeed_command(run, bench.ranks), environment, run.metrics, output)}
    plain = [str(PAGES / "plain_loop.py"), recipe.model.path, recipe.data.path]
    plain += [str(bench.folder / f"plain{number}"), "--zero-stage", str(bench.zero_stage), "--steps", str(bench.steps)]
    plain += ["--micro-batch", str(bench.micro_batch), "--length", str(bench.length), "--dtype", bench.dtype]
    plain += ["--lr", "1e-4", "--schedule", "constant", "--log-every", str(LOG_EVERY)]
    trainer = [str(PACKAGE / "benchmarks" / "peer_trainer.py"), recipe.model.path, str(bench.folder / "sequences")]
    trainer += [recipe.deepspeed, str(bench.micro_batch), str(bench.steps), str(LOG_EVERY), bench.dtype]
    bare = {name: value for name, value in environment.items() if name not in ALLOCATOR.keys() - os.environ.keys()}
    for name, script, log in (("plain_loop", plain, "plain"), ("trainer", trainer, "trainer")):
        command, output = deepspeed_command(run, bench.ranks), bench.folder / f"{log}{number}.log"
        found[name] = Contender([*command[: command.index("--module")], *script], bare, output, output)
    return found


def environment_of(bench: Bench) -> dict[str, str]:
    """Return the environment of a recipe's ranks, without the network."""
    return rank_environment(bench.ranks, bench.gpus) | {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}


def steady(turns: list[Turn]) -> dict[str, float]:
    """Return tokens per second after the warm-up, and the peak memory of rank 0 in GiB (GPU where there is one).

    The rate is the median over turns, so that a disturbance of the machine affects only its own turn.
    """
    last = turns[-1].record
    return {
        "tokens_per_second": statistics.median(
            turn.tokens / turn.seconds for turn in turns if turn.record["step"] > WARM_UP
        ),
        "peak_gib": last["gpu_peak_gib" if "gpu_peak_gib" in last else "host_peak_gib"],
    }
