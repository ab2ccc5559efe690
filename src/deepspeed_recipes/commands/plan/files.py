"""Writes the files of `ds-recipes plan`: the best plan's DeepSpeed JSON and its launch script."""

import copy
import json
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from ...config.resolve import Numbers, dumps, resolve
from ...planning import table
from ...planning.cost.states import stage_shards
from ...planning.search.plans import Plan, PlanRequest
from ...planning.search.reasons import why
from ...planning.search.strategies import template
from ...recipe import files
from ...recipe.deepspeed_file import fill_prefetch, fill_swap_buffer, parse, with_zero
from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.project import CONFIGS, TYPED
from ...recipe.run_folder import write_json

OURS = re.compile(r"#!/bin/sh\n# \d+ GPUs?\. ")
"""How a script that a plan has written begins."""


def write(request: PlanRequest, plan: Plan, folder: Path) -> None:
    """Write the resolved DeepSpeed JSON, for use in any project, and `launch.sh`, which starts the plan.

    The script takes a hostfile on several nodes, and more key=value.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    resolved, script = folder / "deepspeed.json", folder / "launch.sh"
    ours = script.is_file() and OURS.match(script.read_text(encoding="utf-8", errors="replace"))
    if kept := [file.name for file in (resolved, script) if file.exists() and not ours]:
        raise UserError(f"--write {folder}: has a {kept[0]} that no plan has written; choose another folder.")
    files.write_text(resolved, dumps(for_engine(request, plan)))
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
            "# Usage: launch.sh HOSTFILE [key=value ...]; this folder and the data have the same path on every node.",
            'hosts=$(realpath "${1:?hostfile: a line HOST slots=N per node}") || exit',
            "shift",
        ]
        start = start.replace(f"--hostfile {table.HOSTS}", '--hostfile "$hosts"')
    if checkout := os.environ.get(TYPED):  # the folder in which `python scripts/launch.py` works
        lines.append(f"cd {shlex.quote(checkout)} || exit")
    files.write_text(script, "\n".join([*lines, f'{start} "$@"', ""]))
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
    shards = stage_shards(request.profile, setup)
    fill_swap_buffer(content, int(max(one.largest_module for one in shards) // setup.zero_ranks))
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
