"""Writes the files of `ds-recipes plan`: the best plan's DeepSpeed JSON and its launch script."""

import contextlib
import copy
import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ...config.resolve import Numbers, dumps, resolve
from ...planning import table
from ...planning.search.plans import Plan, PlanRequest
from ...planning.search.reasons import why
from ...planning.search.strategies import template
from ...recipe import files
from ...recipe.deepspeed_file import fill_prefetch, parse, with_zero
from ...recipe.errors import UserError, cannot_write
from ...recipe.files import Json
from ...recipe.project import CONFIGS, TYPED
from ...recipe.run_folder import write_json


@contextlib.contextmanager
def system_errors_of(flag: str, path: Path) -> Iterator[None]:
    """Turn a system error, such as a folder that cannot be written, into a message that names the option."""
    try:
        yield
    except OSError as error:
        reason = cannot_write(error, path) or f"{path}: cannot be written ({error.strerror})."
        raise UserError(f"{flag} {reason}") from None


def write(request: PlanRequest, plan: Plan, folder: Path) -> None:
    """Write the resolved DeepSpeed JSON, for use in any project, and `launch.sh`, which starts the plan."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    resolved = folder / "deepspeed.json"
    files.write_text(resolved, dumps(for_engine(request, plan)))
    script = folder / "launch.sh"
    files.write_text(script, launch_script(request, plan, folder))
    script.chmod(0o755)
    print(f"written: {resolved}, {script}", file=sys.stderr)


def for_engine(request: PlanRequest, plan: Plan) -> Json:
    """Return the plan's configuration as the engine receives it."""
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
        max_grad_norm=recipe.max_grad_norm,
        learning_rate=recipe.learning_rate,
        adam_beta2=recipe.adam_beta2,
        adam_epsilon=recipe.adam_epsilon,
        weight_decay=recipe.weight_decay,
    )
    layer = max(kind.parameters for kind in request.profile.layer_kinds)
    content = copy.deepcopy(dict(template(recipe.deepspeed, plan.cluster).content))
    fill_prefetch(content, request.profile.hidden_size, layer)
    config = resolve(content, numbers)
    for block, key, size in (
        ("tensor_parallel", "autotp_size", setup.layout.tensor),
        ("expert_parallel", "autoep_size", setup.layout.expert),
    ):
        # In a pipeline the stages are split before DeepSpeed receives them.
        if size > 1 and setup.layout.pipeline == 1:
            config[block] = config.get(block, {}) | {key: size}
    if setup.zero_stage == 3 and Path(recipe.deepspeed).name == recipe.deepspeed:  # a name in configs/, not a path
        # Reduce gradients layer by layer, or in smaller buckets: those of a layer are reduced while the previous layer
        # is computed. In small models a bucket of the shipped size would hold several layers, and nothing would be left
        # to compute while the last bucket is reduced.
        file = parse(config)
        if shipped := file.zero.get("reduce_bucket_size"):
            return dict(with_zero(file, reduce_bucket_size=min(shipped, layer)).content)
    return config


def launch_script(request: PlanRequest, plan: Plan, folder: Path) -> str:
    """Return a shell script that starts the launcher, with a hostfile on several nodes; it accepts more key=value."""
    recipe = plan.recipe
    shipped, content = CONFIGS / recipe.deepspeed, template(recipe.deepspeed, plan.cluster).content
    if content != json.loads(shipped.read_text(encoding="utf-8")):
        own = folder / recipe.deepspeed
        write_json(own, content)
        recipe = replace(recipe, deepspeed=str(own))
    ranks = plan.setup.world_size
    lines = ["#!/bin/sh", f"# {ranks} GPU{'s' * (ranks > 1)}. {why(request, plan)}"]
    start = table.command(recipe, request.cluster)
    if request.cluster.nodes > 1:
        lines += [
            "# Usage: launch.sh HOSTFILE [key=value ...]; this folder and the data have the same path on every node."
        ]
        lines += ['hosts=$(realpath "${1:?hostfile: a line HOST slots=N per node}") || exit', "shift"]
        start = start.replace(f"--hostfile {table.HOSTS}", '--hostfile "$hosts"')
    checkout = os.environ.get(TYPED)  # the folder in which `python scripts/launch.py` works
    where = [f"cd {shlex.quote(checkout)} || exit"] if checkout else []
    return "\n".join([*lines, *where, f'{start} "$@"', ""])
