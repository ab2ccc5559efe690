"""Measure one or several models on held-out examples: runs, checkpoints, adapters, folders and servers.

    ds-recipes evaluate runs/tiny-3m-full/20261121-101500
    ds-recipes evaluate runs/tiny-3m-full/20261121-101500 --base             # compared with the model before training
    ds-recipes evaluate runs/tiny-3m-full/20261121-101500 runs/tiny-3m-lora/20261121-103000
    ds-recipes evaluate my-model http://localhost:8000 --data HELD_OUT.jsonl
    ds-recipes evaluate my-model --data FILE.csv data.columns=question:prompt,answer:completion

The metric and the examples are those of the first run on the command line, unless --metric and --data name others.
Every score has its 95 % interval (Wilson's; bootstrap for a loss), and neighbours in the table are compared on the same
examples with an exact paired test (McNemar's; the sign test for a loss). Results are written to evaluation.json in each
run's folder, and to the run's report. Any server with OpenAI's protocol can be measured; OPENAI_API_KEY is its key.

--tasks measures tasks of lm-evaluation-harness instead (`make serving` installs it), with the same table and test.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from ..export.evaluate import candidates
from ..export.evaluate.candidates import Candidate
from ..export.serve import environment
from ..recipe.errors import UserError, printable
from ..recipe.files import Json
from ..recipe.run_folder import read_json, write_json
from ..report import write
from ..training import server
from .main import Parser, check_least

SETTINGS = ("data.columns=", "data.roles=")
"""Settings of a recipe that say how the file of --data is read."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison, write it into the run folders, and return 0."""
    options = parse(arguments)
    check_least(options, limit=1)
    python = environment.require("lm_eval", "--tasks") if options.tasks else None
    found = [candidates.find(name, options.model) for name in options.models]
    if options.base:
        found = [candidates.base_of(found[0]), *found]
    if python:
        from ..export.evaluate import comparison, harness

        measured = []
        for one in found:
            print(f"lm-evaluation-harness: {options.tasks} of {one.name}", file=sys.stderr, flush=True)
            words = harness.command(python, one.model, options.tasks, options.include, options.limit)
            measured.append((one.name, harness.run(words, environment.variables())))
        tasks = comparison.of_tasks(measured)
        text = "\n\n".join("\n".join(comparison.lines(task)) for task in tasks)
        print(json.dumps(tasks, indent=2) if options.json else text)
        compared: Json = {"tasks": tasks}
    else:
        compared = measure(found, options)
    for run in [one.run for one in found if one.run]:
        before = read_json(run.evaluation, {})  # results by the run's own metric and by tasks are kept together
        kept = before if "tasks" in compared else {key: before[key] for key in before.keys() & {"tasks"}}
        write_json(run.evaluation, kept | compared)
        write.at_end(run)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser("evaluate", __doc__)
    parser.add_argument("models", nargs="+", metavar="RUN|FOLDER|URL", help="models to measure and compare")
    parser.add_argument("--base", action="store_true", help="also measure the first model before its training")
    parser.add_argument("--data", type=Path, metavar="FILE", help="examples to use instead of the run's held-out ones")
    parser.add_argument("--metric", metavar="M", help="metric to use instead of the run's: exact_match, loss, ...")
    parser.add_argument("--limit", type=int, metavar="N", help="measure only the first N examples")
    parser.add_argument("--model", metavar="NAME", help="name of the model on a server that has several")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON, with every answer")
    parser.add_argument("--tasks", metavar="T,...", help="tasks of lm-evaluation-harness, by name")
    parser.add_argument("--include", type=Path, metavar="DIR", help="with --tasks: a folder with your own tasks")
    options = parser.parse_trusting(arguments)
    options.settings = [word for word in options.models if word.startswith(SETTINGS)]
    options.models = [word for word in options.models if word not in options.settings]
    if not options.models:
        parser.error("name a run, a folder or a server to measure")
    if options.settings and not options.data:
        raise UserError(f"{options.settings[0]}: describes the examples of --data FILE; add --data, or leave it out.")
    if options.tasks:
        parser.refuse(options, ("data", "metric"), "--tasks have their own examples and metrics")
    else:
        parser.refuse(options, ("include",), "only with --tasks")
    if not any(map(server.is_address, options.models)):
        parser.refuse(options, ("model",), "only with a server's address")
    return options


def measure(found: Sequence[Candidate], options: argparse.Namespace) -> Json:
    """Measure every model, print the comparison and return it."""
    from transformers import utils

    from ..export.evaluate import comparison, held_out, score

    recipe = next((one.recipe for one in found if one.recipe), None)
    utils.logging.disable_progress_bar()
    with held_out.alone():
        examples = held_out.read(recipe, options.data, options.metric, options.limit, options.settings)
        for one in found:
            if one.recipe is None or (one.recipe == recipe and not options.data):  # its own held-out examples
                continue
            if known := held_out.trained_on(one.recipe, examples.examples):
                of = f"{known} of these {len(examples.examples)} examples"
                text = f"{one.name} was trained on {of}, so its score does not show what it does with new ones"
                print(f"warning: {text}", file=sys.stderr, flush=True)
        scored = [(one.name, score.of(one.model, examples)) for one in found]
        for (first, of_first), (second, of_second) in pairwise(scored):
            if of_first.counts != of_second.counts:
                text = f"{first} and {second} have different tokens, so their losses per token do not compare"
                print(f"warning: {text}", file=sys.stderr, flush=True)
        compared = comparison.of(examples, scored)
    print(json.dumps(compared, indent=2) if options.json else printable("\n".join(comparison.lines(compared))))
    return compared
