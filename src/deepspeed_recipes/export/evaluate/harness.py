"""Runs tasks of lm-evaluation-harness with its own command, and reads each example's value from its output files."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...machine import children
from ...recipe.errors import UserError
from ...recipe.run_folder import read_json, read_jsonl
from ...training import export
from ...training.model_folder import base_model, card
from ...training.server import Server
from .score import Scores


@dataclass(frozen=True)
class Found:
    """A model's scores by one metric of a task."""

    task: str
    metric: str
    """The metric's name, with the answer's filter if the task has several: `exact_match (strict-match)`."""
    scores: Scores
    higher_is_better: bool


def command(python: Path, model: Path | Server, tasks: str, folder: Path | None, limit: int | None) -> list[str]:
    """Return the harness's command for one model, with the `python` of its environment.

    `tasks` are names with commas; `folder` has the user's own as YAML. `limit` is the number of examples of each task,
    None for all. No argument may contain a comma, with which the harness separates them.
    """
    chat = True
    if isinstance(model, Server):
        address = f"{model.address}/v1/chat/completions"
        given: dict[str, object] = {"model": model.model, "base_url": address, "tokenizer_backend": None}
        kind = "local-chat-completions"
    else:
        kind, given = "hf", {"pretrained": model}
        chat = not model.is_dir() or card.look(model).chat
        if (model / base_model.ADAPTER).exists():
            given = {"pretrained": base_model.find(model), "peft": model, "tokenizer": model}
        given |= {"parallelize": True} if export.device_map(Path(str(given["pretrained"]))) else {}
    for value in given.values():
        if "," in str(value):
            raise UserError(f"--tasks: {value}: lm-evaluation-harness accepts no comma in a path; rename the folder.")
    arguments = ",".join(f"{name}={value}" for name, value in given.items())
    words = [str(python), "-m", "lm_eval", "--model", kind, "--model_args", arguments, "--tasks", tasks]
    words += ["--apply_chat_template"] if chat else []
    words += ["--include_path", str(folder)] if folder else []
    return [*words, *(["--limit", str(limit)] if limit else [])]


def run(words: Sequence[str], variables: Mapping[str, str]) -> list[Found]:
    """Run the harness on one model, with its progress on the terminal, and return its results."""
    with children.scratch("ds-recipes-tasks-") as place:
        words = [*words, "--output_path", str(place), "--log_samples"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": dict(variables), "text": True}
        with children.running(words, **options) as running:
            output = []
            for line in running.stdout or ():
                if "%|" not in line:
                    output.append(line.strip())
                elif sys.stderr.isatty():  # a progress bar
                    print(f"\r{line.rstrip()}", end="\n" if "100%" in line else "", file=sys.stderr, flush=True)
            running.wait()
        if running.returncode:
            lines = [line for line in output if line] or ["no output"]
            errors = [line for line in lines if "Error" in line or "not found" in line] or lines
            raise UserError(f"--tasks: lm-evaluation-harness failed: {errors[-1][:300]}")
        return read(place)


def read(place: Path) -> list[Found]:
    """Return the harness's results: every metric that has a number for each example."""
    (file,) = place.rglob("results_*.json")
    results = read_json(file)
    found = []
    for task in sorted(results["configs"]):
        rows = [row for samples in place.rglob(f"samples_{task}_*.jsonl") for row in read_jsonl(samples)]
        filters = sorted({row["filter"] for row in rows})
        for kept in filters:
            chosen = sorted((row for row in rows if row["filter"] == kept), key=lambda row: row["doc_id"])
            for metric in chosen[0]["metrics"]:
                if all(isinstance(row[metric], int | float) for row in chosen):
                    name = f"{metric} ({kept})" if len(filters) > 1 else metric
                    better = results["higher_is_better"][task].get(metric, True)
                    values = [float(row[metric]) for row in chosen]
                    answers = [str(row["filtered_resps"][0]) for row in chosen]
                    seconds = float(results["total_evaluation_time_seconds"])
                    found.append(Found(task, name, Scores(values, [1] * len(values), answers, seconds), better))
    return found
