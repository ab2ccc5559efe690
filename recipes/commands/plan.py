"""Predict which configurations fit, how fast they are, which one to choose, and why, before a GPU is rented.

    python scripts/plan.py llama3-8b                                         # full fine-tuning on this machine's GPUs
    python scripts/plan.py llama3-70b --method lora --gpu H100 --gpus 8
    python scripts/plan.py path/to/config.json --gpu A100-80GB --gpus 8 --nodes 4 --sequence-length 8192
    python scripts/plan.py llama3-8b --method qlora --gpu-memory 24 --explain
    python scripts/plan.py qwen3-32b --gpu p5.48xlarge --nodes 2 --write plans/qwen3 --figure plans/qwen3.png

A plan is a file in configs/, a layout, a micro-batch size and whether to checkpoint. Plans that cannot run are left
out, those that need more than 95 % of a GPU's memory do not fit, and those above 80 % are marked as tight. Plans are
ranked by predicted tokens per second and GPU; a simpler plan is preferred if it reaches 95 % of a more complex one's
speed. `micro-batch` is the sequences of a forward pass x passes per optimizer step. Planning needs neither a GPU nor
the weights, and for a recipe not even a network.

key=value changes the recipe as in launch.py. The planner keeps what you set there (deepspeed=zero3.json,
layout.tensor=8, micro_batch_size=2, gradient_checkpointing=false, global_batch_size=128).

Exit status: 0; 2 for a mistake on the command line; 1 if nothing fits (the table shows what comes nearest).
"""

import argparse
import contextlib
import difflib
import json
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from ..planning.hardware.cluster import Cluster, cluster
from ..planning.search import model_recipe, strategies, suggestions
from ..planning.search.plans import Plan, PlanRequest, SearchResult
from ..planning.search.reasons import why
from ..planning.show import table
from ..spec import limits, overrides
from ..spec.errors import UserError, cannot_write
from ..spec.project import CONFIGS, IMPORT_ROOT, INSTALLED, as_typed, program
from ..spec.recipe import Layout, Recipe
from ..spec.run_folder import write_json
from ..zero_config.resolve import Numbers, dumps, resolve
from .main import Parser

PLANS_DRAWN = 8
NODE = 16
"""The most GPUs of one node."""


def main(words: Sequence[str] | None = None) -> int:
    """Print the plans, and return the exit status: 1 where nothing fits.

    Raises:
        UserError: a mistake on the command line, or a file that cannot be read or written.
    """
    arguments = parser().parse_intermixed_args(words)
    request = request_of(arguments)
    result = strategies.search(request)
    if arguments.json:
        print(json.dumps(table.as_json(request, result), indent=2))
    else:
        table.show(request, result, console(), arguments.explain)
    if result.best is None:
        print(f"{program('plan')}: {as_typed(suggestions.sentence(request, result))}", file=sys.stderr)
        return 1
    if arguments.write:
        with system_errors_of("--write", arguments.write):
            write(request, result.best, arguments.write)
    if arguments.figure:
        with system_errors_of("--figure", arguments.figure):
            draw(result, arguments.figure)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = Parser("plan", __doc__)
    result.add_argument(
        "model", help="RECIPE[-SIZE] (also a page's path), a Hub id, or the path to a config.json or its folder"
    )
    result.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="change the recipe, as in launch.py"
    )
    result.add_argument("--method", default="full", help="full (default), lora or qlora")
    result.add_argument("--gpus", type=int, metavar="N", help="GPUs of one node")
    result.add_argument("--nodes", type=int, default=1, metavar="M", help="nodes (default 1)")
    result.add_argument("--gpu", metavar="NAME", help="H100, A100-80GB, p5.48xlarge ... (default: this machine)")
    result.add_argument("--gpu-memory", type=float, metavar="GIB", help="instead of --gpu, for any other GPU")
    result.add_argument("--host-memory", type=float, metavar="GIB", help="of one node (default: unknown, not checked)")
    result.add_argument("--nvme", type=float, metavar="GIB", help="of one node's local drives (default: none)")
    result.add_argument(
        "--network", type=float, metavar="GBITS", help="between nodes (default: what is usual for the GPU)"
    )
    result.add_argument("--sequence-length", type=int, metavar="S", help="in tokens (default: the recipe's)")
    result.add_argument("--json", action="store_true", help="print the answer as JSON")
    result.add_argument(
        "--explain", action="store_true", help="give reasons for every plan, and show plans that do not fit"
    )
    result.add_argument("--write", type=Path, metavar="DIR", help="write the best plan's DeepSpeed JSON and launch.sh")
    result.add_argument("--figure", type=Path, metavar="FILE", help="draw each plan's memory as a PNG")
    return result


def request_of(arguments: argparse.Namespace) -> PlanRequest:
    """Return the request that the command line makes.

    Raises:
        UserError: names a flag, its value and what to write instead.
    """
    if arguments.method not in model_recipe.METHODS:
        near = difflib.get_close_matches(arguments.method, model_recipe.METHODS, n=1)
        hint = f"did you mean {near[0]}? One" if near else "one"
        raise UserError(f"--method {arguments.method}: {hint} of {', '.join(model_recipe.METHODS)}.")
    if arguments.gpus is not None and arguments.gpus > NODE:
        raise UserError(
            f"--gpus {arguments.gpus}: counts the GPUs of one node, at most {NODE}; for {arguments.gpus} in all write "
            f"for instance --gpus 8 --nodes {max(2, arguments.gpus // 8)}."
        )
    recipe = model_recipe.find(arguments.model, arguments.method)
    hardware = cluster(
        arguments.gpu,
        arguments.gpus,
        arguments.nodes,
        arguments.gpu_memory,
        arguments.host_memory,
        arguments.nvme,
    )
    if arguments.network is not None:
        if not 0 < arguments.network < math.inf:
            raise UserError(f"--network {arguments.network:g}: must be above 0, in Gbit/s of one node.")
        hardware = replace(hardware, network_gbs=arguments.network / 8)
    method = next((word for word in arguments.overrides if word in model_recipe.METHODS), None)
    if method:
        raise UserError(f"{method}: the method is an option here: --method {method}.")
    changes = [change for change in arguments.overrides if change != "deepspeed=auto"]  # planning does that anyway
    keys = [change.partition("=")[0] for change in changes]
    if arguments.sequence_length is not None:
        if "sequence_length" in keys:
            raise UserError(f"--sequence-length {arguments.sequence_length} and sequence_length=...: give one of them.")
        changes.append(f"sequence_length={arguments.sequence_length}")
    if "model.path" in keys:
        raise UserError("model.path=...: the model is the first word, a Hub id or the path to its config.json.")
    changed = overrides.apply(recipe, changes)
    if (method := model_recipe.method_of(changed)) != arguments.method:
        raise UserError(
            f"--method {arguments.method}: your key=value settings make it {method}; write --method {method}."
        )
    check_layout(changed, hardware, keys)
    return strategies.plan_request(changed, hardware, keys)


def check_layout(recipe: Recipe, hardware: Cluster, keys: Sequence[str]) -> None:
    """Refuse layout sizes that are impossible, whatever the planner would choose for the others.

    Raises:
        UserError: names the size, why it is impossible, and the nearest possible one.
    """
    given = {name: size for name, size in asdict(recipe.layout).items() if f"layout.{name}" in keys}
    file = strategies.template(recipe.deepspeed if "deepspeed" in keys else "zero1.json", hardware)
    alone = replace(recipe, layout=Layout(**given), micro_batch_size=1, global_batch_size=hardware.gpus)
    limits.check(alone, hardware.gpus, file)


def console() -> Console:
    """Return the console for the table: as wide as the terminal, or wide enough for it where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


@contextlib.contextmanager
def system_errors_of(flag: str, path: Path) -> Iterator[None]:
    """Turn a system error, such as a folder that cannot be written, into one that names the option.

    Raises:
        UserError: names the flag, the path and the reason.
    """
    try:
        yield
    except OSError as error:
        reason = cannot_write(error, path) or f"{path}: cannot be written ({error.strerror})."
        raise UserError(f"{flag} {reason}") from None


def write(request: PlanRequest, plan: Plan, folder: Path) -> None:
    """Write the resolved DeepSpeed JSON, to use anywhere, and `launch.sh`, which starts the plan here."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    resolved = folder / "deepspeed.json"
    resolved.write_text(dumps(for_engine(request, plan)), encoding="utf-8")
    script = folder / "launch.sh"
    script.write_text(launch_script(request, plan, folder), encoding="utf-8")
    script.chmod(0o755)
    print(f"written: {resolved}, {script}", file=sys.stderr)


def for_engine(request: PlanRequest, plan: Plan) -> dict:
    """Return the plan's configuration as the engine gets it."""
    recipe, setup = plan.recipe, plan.setup
    numbers = Numbers(
        micro_batch_size=setup.micro_batch_size,
        gradient_accumulation_steps=setup.gradient_accumulation_steps,
        world_size=setup.world_size,
        tensor=setup.layout.tensor,
        pipeline=setup.layout.pipeline,
        sequence=setup.layout.sequence,
        hidden_size=request.profile.hidden_size,
        precision=recipe.precision,
        gradient_clipping=recipe.max_grad_norm,
        learning_rate=recipe.learning_rate,
        adam_beta2=recipe.adam_beta2,
        adam_epsilon=recipe.adam_epsilon,
        weight_decay=recipe.weight_decay,
    )
    config = resolve(dict(plan.file.content), numbers)
    for block, key, size in (
        ("tensor_parallel", "autotp_size", setup.layout.tensor),
        ("expert_parallel", "autoep_size", setup.layout.expert),
    ):
        # In a pipeline the stages are split before DeepSpeed gets them.
        if size > 1 and setup.layout.pipeline == 1:
            config[block] = config.get(block, {}) | {key: size}
    return config


def launch_script(request: PlanRequest, plan: Plan, folder: Path) -> str:
    """Return a shell script that starts the launcher, on several nodes with a hostfile; it takes further key=value."""
    shipped = CONFIGS / plan.recipe.deepspeed
    recipe = plan.recipe
    if plan.file.content != json.loads(shipped.read_text(encoding="utf-8")):
        template = folder / recipe.deepspeed
        write_json(template, plan.file.content)
        recipe = replace(recipe, deepspeed=str(template))
    ranks = plan.setup.world_size
    lines = ["#!/bin/sh", f"# {ranks} GPU{'s' * (ranks > 1)}. {why(request, plan)}"]
    start = table.command(recipe, request.cluster)
    if request.cluster.nodes > 1:
        lines += [
            "# Usage: launch.sh HOSTFILE [key=value ...]; this folder and the data have the same path on every node."
        ]
        lines += ['hosts=$(realpath "${1:?hostfile: a line HOST slots=N per node}") || exit', "shift"]
        start = start.replace(f"--hostfile {table.HOSTS}", '--hostfile "$hosts"')
    where = [] if INSTALLED else [f"cd {shlex.quote(str(IMPORT_ROOT))} || exit"]
    return "\n".join([*lines, *where, f'{start} "$@"', ""])


def draw(result: SearchResult, file: Path) -> None:
    """Write the figure.

    Raises:
        UserError: a format other than PNG, or matplotlib is not installed.
    """
    if file.suffix.lower() != ".png":
        raise UserError(f"--figure {file}: the format is PNG; name it {file.with_suffix('.png')}.")
    try:
        from ..planning.show import figure  # matplotlib, half a second
    except ImportError:
        raise UserError(f"--figure {file}: needs matplotlib: pip install 'deepspeed-recipes[train]'") from None

    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(figure.png(figure.labels(result.plans[:PLANS_DRAWN])))
