"""Measure one or several models on held-out examples: runs, checkpoints, adapters, folders and servers.

    python scripts/evaluate.py runs/tiny-3m-full/20261121-101500
    python scripts/evaluate.py runs/tiny-3m-full/20261121-101500 --base             # beside the model before training
    python scripts/evaluate.py runs/tiny-3m-full/20261121-101500 runs/tiny-3m-lora/20261121-103000
    python scripts/evaluate.py my-model http://localhost:8000 --data HELD_OUT.jsonl

The metric and the examples are those of the first run that is named, unless --metric and --data say otherwise. Every
score has its 95 % interval (Wilson's; of a loss by bootstrap), and neighbours in the table are compared on the same
examples by an exact paired test (McNemar's; of a loss the sign test). Results go to evaluation.json in the folder of
each run that is named, and into its report. A server is any that speaks OpenAI's protocol; OPENAI_API_KEY is its key.

--tasks runs tasks of lm-evaluation-harness instead, where that is installed.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...evaluation import candidates, harness
from ...evaluation.candidates import Candidate
from ...report import write
from ...spec.errors import UserError
from ...spec.run_folder import write_json
from ..main import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison, write it into the run folders, and return 0, or the harness's exit status.

    Raises:
        UserError: no such model, no held-out examples, or a metric that cannot be measured.
    """
    options = parse(arguments)
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit {options.limit}: must be at least 1.")
    if options.tasks:
        harness.check()
    found = [candidates.find(name, options.model) for name in options.models]
    if options.base:
        found = [candidates.base_of(found[0]), *found]
    if options.tasks:
        return max(harness.run(one.model, options.tasks, options.include, options.limit) for one in found)
    compared = measure(found, options)
    for one in found:
        keep(one, compared)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser("evaluate", __doc__)
    parser.add_argument("models", nargs="+", metavar="RUN|FOLDER|URL", help="what to measure, side by side")
    parser.add_argument("--base", action="store_true", help="also the model that the first one was before training")
    parser.add_argument("--data", type=Path, metavar="FILE", help="other examples than the run's held-out ones")
    parser.add_argument("--metric", metavar="M", help="another metric than the run's: exact_match, loss, ...")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N examples")
    parser.add_argument("--model", metavar="NAME", help="which model of a server that has several")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON, with every answer")
    parser.add_argument("--tasks", metavar="T,...", help="tasks of lm-evaluation-harness, by name")
    parser.add_argument("--include", type=Path, metavar="DIR", help="with --tasks: a folder with tasks of your own")
    return parser.parse_args(arguments)


def measure(found: Sequence[Candidate], options: argparse.Namespace) -> dict[str, Any]:
    """Measure every model, print the comparison and return it.

    Raises:
        UserError: as `main`.
    """
    from transformers import utils

    from ...evaluation import comparison, held_out, score

    recipe = next((one.recipe for one in found if one.recipe), None)
    utils.logging.disable_progress_bar()
    with held_out.alone():
        examples = held_out.read(recipe, options.data, options.metric, options.limit)
        compared = comparison.of(examples, [(one.name, score.of(one.model, examples)) for one in found])
    print(json.dumps(compared, indent=2) if options.json else "\n".join(comparison.lines(compared)))
    return compared


def keep(one: Candidate, compared: dict[str, Any]) -> None:
    """Write the comparison into the folder of the run that a model is of, and renew the run's report."""
    if one.run is None:
        return
    write_json(one.run.evaluation, compared)
    write.at_end(one.run)
