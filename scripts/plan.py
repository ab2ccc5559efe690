"""What fits, how fast it will be, which configuration to take, and why: before a GPU is rented.

    python scripts/plan.py llama3-8b                                         # full fine-tuning on this machine's GPUs
    python scripts/plan.py llama3-70b --method lora --gpu H100 --gpus 8
    python scripts/plan.py path/to/config.json --gpu A100-80GB --gpus 8 --nodes 4 --sequence-length 8192
    python scripts/plan.py llama3-8b --method qlora --gpu-memory 24 --explain
    python scripts/plan.py qwen3-32b --gpu p5.48xlarge --nodes 2 --write plans/qwen3 --figure plans/qwen3.png

A plan is a file in configs/, a layout, a micro-batch and whether to checkpoint. What cannot run is left out, what takes
more than 95 % of a GPU is refused, and above 80 % it is marked tight. The rest is ranked by predicted tokens per second
and GPU; a simpler plan is kept while it has 95 % of a more complex one's speed. `rows` are those of a forward pass x
passes per step. Neither a GPU nor the weights are needed, and for a recipe not even a network.

key=value changes the recipe as in launch.py. What you set there (deepspeed=zero3.json, layout.tensor=8,
micro_batch_size=2, gradient_checkpointing=false, global_batch_size=128) stays as you set it.

Exit status: 0, or 2 for a mistake in what was asked for, or 1 where nothing fits (the table shows what comes nearest).
"""

import argparse
import contextlib
import difflib
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402

from recipes.planning import models, report, strategies, ways_out  # noqa: E402
from recipes.planning.hardware import Cluster, cluster  # noqa: E402
from recipes.planning.plans import Found, Job, Plan  # noqa: E402
from recipes.spec import limits, overrides  # noqa: E402
from recipes.spec.errors import UserError  # noqa: E402
from recipes.spec.recipe import Layout, Recipe  # noqa: E402
from recipes.spec.run_folder import write_json  # noqa: E402
from recipes.zero_config.resolve import Numbers, dumps, resolve  # noqa: E402

PLANS_DRAWN = 8
NODE = 16
"""The most GPUs of one node."""


def main(words: Sequence[str] | None = None) -> int:
    """Answer, and return the exit status."""
    arguments = parser().parse_intermixed_args(words)
    try:
        job = asked(arguments)
        found = strategies.search(job)
        if arguments.json:
            print(json.dumps(report.as_json(job, found), indent=2))
        else:
            report.show(job, found, console(), arguments.explain)
        if found.best is None:
            print(f"plan.py: {ways_out.sentence(job, found)}", file=sys.stderr)
            return 1
        if arguments.write:
            with told("--write", arguments.write):
                write(job, found.best, arguments.write)
        if arguments.figure:
            with told("--figure", arguments.figure):
                draw(found, arguments.figure)
    except UserError as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = argparse.ArgumentParser(
        prog="plan.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("model", help="RECIPE[-SIZE], a Hub id, or a path to a config.json or its folder")
    result.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="change the recipe, as in launch.py"
    )
    result.add_argument("--method", default="full", help="full (default), lora or qlora")
    result.add_argument("--gpus", type=int, metavar="N", help="GPUs of one node")
    result.add_argument("--nodes", type=int, default=1, metavar="M", help="nodes (default 1)")
    result.add_argument("--gpu", metavar="NAME", help="H100, A100-80GB, p5.48xlarge ... (default: this machine)")
    result.add_argument("--gpu-memory", type=float, metavar="GIB", help="instead of --gpu, for any other GPU")
    result.add_argument("--host-memory", type=float, metavar="GIB", help="of one node; unknown: not judged")
    result.add_argument("--nvme", type=float, metavar="GIB", help="of one node's local drives (default: none)")
    result.add_argument("--network", type=float, metavar="GBITS", help="of one node to the others (default: the usual)")
    result.add_argument("--sequence-length", type=int, metavar="S", help="tokens of a row (default: the recipe's)")
    result.add_argument("--json", action="store_true", help="print the answer as JSON")
    result.add_argument("--explain", action="store_true", help="say why for every plan, and what does not fit")
    result.add_argument("--write", type=Path, metavar="DIR", help="write the best plan's DeepSpeed JSON and its launch")
    result.add_argument("--figure", type=Path, metavar="FILE", help="draw the memory of each plan (PNG)")
    return result


def asked(arguments: argparse.Namespace) -> Job:
    """Return what the command line asks for.

    Raises:
        UserError: a flag, its value and what to write instead.
    """
    if arguments.method not in models.METHODS:
        near = difflib.get_close_matches(arguments.method, models.METHODS, n=1)
        hint = f"did you mean {near[0]}? One" if near else "one"
        raise UserError(f"--method {arguments.method}: {hint} of {', '.join(models.METHODS)}.")
    if arguments.gpus is not None and arguments.gpus > NODE:
        raise UserError(
            f"--gpus {arguments.gpus}: counts the GPUs of one node, at most {NODE}; for {arguments.gpus} in all write "
            f"for instance --gpus 8 --nodes {max(2, arguments.gpus // 8)}."
        )
    recipe = models.find(arguments.model, arguments.method)
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
    method = next((word for word in arguments.overrides if word in models.METHODS), None)
    if method:
        raise UserError(f"{method}: the method is an option here: --method {method}.")
    changes = [change for change in arguments.overrides if change != "deepspeed=auto"]  # which is what a plan is for
    keys = [change.partition("=")[0] for change in changes]
    if arguments.sequence_length is not None:
        if "sequence_length" in keys:
            raise UserError(f"--sequence-length {arguments.sequence_length} and sequence_length=...: give one of them.")
        changes.append(f"sequence_length={arguments.sequence_length}")
    if "model.path" in keys:
        raise UserError("model.path=...: the model is the first word, a Hub id or the path to its config.json.")
    changed = overrides.apply(recipe, changes)
    limits.check_length(changed)
    if (method := report.method_of(changed)) != arguments.method:
        raise UserError(f"--method {arguments.method}: what you set makes it {method}; write --method {method}.")
    check_layout(changed, hardware, keys)
    return strategies.job(changed, hardware, keys)


def check_layout(recipe: Recipe, hardware: Cluster, keys: Sequence[str]) -> None:
    """Refuse sizes of a layout that cannot be, whatever the planner would choose for the others.

    Raises:
        UserError: names the size, why not, and the nearest that can.
    """
    given = {name: size for name, size in asdict(recipe.layout).items() if f"layout.{name}" in keys}
    file = recipe.deepspeed if "deepspeed" in keys else "zero1.json"
    stage = strategies.template(file, hardware).get("zero_optimization", {}).get("stage", 0)
    alone = replace(recipe, layout=Layout(**given), micro_batch_size=1, global_batch_size=hardware.gpus)
    limits.check(alone, hardware.gpus, limits.Sharding(stage))


def console() -> Console:
    """Return where the table goes: as wide as the terminal, or wide enough where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


@contextlib.contextmanager
def told(flag: str, path: Path) -> Iterator[None]:
    """Say of what cannot be written which option named it.

    Raises:
        UserError: in the place of the system's error.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written ({error.strerror}).") from None


def write(job: Job, plan: Plan, folder: Path) -> None:
    """Write the resolved DeepSpeed JSON, to carry away, and `launch.sh`, which starts the plan here."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    resolved = folder / "deepspeed.json"
    resolved.write_text(dumps(for_engine(job, plan)), encoding="utf-8")
    script = folder / "launch.sh"
    script.write_text(launch_script(job, plan, folder), encoding="utf-8")
    script.chmod(0o755)
    print(f"written: {resolved}, {script}", file=sys.stderr)


def for_engine(job: Job, plan: Plan) -> dict:
    """Return the plan's configuration as the engine gets it."""
    recipe, setup = plan.recipe, plan.setup
    numbers = Numbers(
        micro_batch_size=setup.micro_batch_size,
        gradient_accumulation_steps=setup.accumulation,
        world_size=setup.world_size,
        tensor=setup.layout.tensor,
        pipeline=setup.layout.pipeline,
        sequence=setup.layout.sequence,
        hidden_size=job.anatomy.hidden,
        precision=recipe.precision,
        gradient_clipping=recipe.max_grad_norm,
        learning_rate=recipe.learning_rate,
        adam_beta2=recipe.adam_beta2,
        adam_epsilon=recipe.adam_epsilon,
        weight_decay=recipe.weight_decay,
    )
    config = resolve(dict(plan.config), numbers)
    for block, key, size in (
        ("tensor_parallel", "autotp_size", setup.layout.tensor),
        ("expert_parallel", "autoep_size", setup.layout.expert),
    ):
        # A pipeline's stages are split before DeepSpeed gets them.
        if size > 1 and setup.layout.pipeline == 1:
            config[block] = config.get(block, {}) | {key: size}
    return config


def launch_script(job: Job, plan: Plan, folder: Path) -> str:
    """Return a shell script that starts the launcher, on several nodes with a hostfile; it takes more key=value."""
    shipped = ROOT / "configs" / plan.recipe.deepspeed
    recipe = plan.recipe
    if plan.config != json.loads(shipped.read_text(encoding="utf-8")):
        template = folder / recipe.deepspeed
        write_json(template, plan.config)
        recipe = replace(recipe, deepspeed=str(template))
    ranks = plan.setup.world_size
    lines = ["#!/bin/sh", f"# {ranks} GPU{'s' * (ranks > 1)}. {report.why(job, plan)}"]
    start = report.command(recipe, job.cluster)
    if job.cluster.nodes > 1:
        lines += [
            "# Usage: launch.sh HOSTFILE [key=value ...]; this folder and the data are at one path on every node."
        ]
        lines += ['hosts=$(realpath "${1:?hostfile: a line HOST slots=N per node}") || exit', "shift"]
        start = start.replace(f"--hostfile {report.HOSTS}", '--hostfile "$hosts"')
    return "\n".join([*lines, f"cd {shlex.quote(str(ROOT))} || exit", f'{start} "$@"', ""])


def draw(found: Found, file: Path) -> None:
    """Write the figure.

    Raises:
        UserError: another format than PNG.
    """
    if file.suffix.lower() != ".png":
        raise UserError(f"--figure {file}: is drawn as PNG; name it {file.with_suffix('.png')}.")
    from recipes.planning import figure  # matplotlib, half a second

    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(figure.png(figure.labels(found.plans[:PLANS_DRAWN])))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
