"""Run a recipe: one launcher for every model, size and variant.

    ds-recipes launch --list
    ds-recipes launch tiny full
    ds-recipes launch tiny lora learning_rate=2e-3 lora.rank=8
    ds-recipes launch tiny full --resume
    ds-recipes launch auto MODEL          # a folder or Hub id without a recipe borrows the nearest recipe
    ds-recipes launch --from FILE.yaml    # what a file of LLaMA-Factory, Axolotl or TRL becomes here; starts nothing

The launcher checks everything that can be checked before the run, writes the run folder, prints the `deepspeed`
command, starts it and returns its exit status. On Ctrl-C or SIGTERM the run writes a checkpoint and ends; `--resume`
continues it. With `--max-restarts N` the launcher itself resumes after a crash or a hang.
"""

import argparse
import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...launching import other_launchers, paths, preflight, restarts, scheduler
from ...launching.attempts import HostAttempts, LocalAttempts
from ...launching.cloud import jobs
from ...launching.command import compile_ops, deepspeed_command, record
from ...launching.ray import cluster as ray_cluster
from ...launching.ray import submit
from ...launching.ray.attempts import RayAttempts
from ...launching.ssh import hostfile
from ...launching.supervise import Outcome
from ...machine import capacity, run_lock
from ...planning.cost.time import zero_traffic
from ...planning.hardware.cluster import Cluster
from ...planning.search import forecast, model_recipe
from ...planning.search.plans import Plan
from ...recipe import deepspeed_file, overrides, pages, run_folder
from ...recipe.conversions import to_dict
from ...recipe.errors import UserError
from ...recipe.project import require
from ...recipe.recipe import Recipe
from ...recipe.run_folder import RunFolder
from ...report import write
from ...report.profiler import conclude, nsys, request, window
from ...training.checkpoint import universal
from ...training.model_folder import base_model
from ...training.tracking import afterwards
from .. import list as list_command
from ..plan import workload
from . import auto, borrowed, translate
from .machines import Machines, machines_of, pool_of
from .options import check_options, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: the run's own.

    Raises:
        UserError: a mistake on the command line, in the recipe, or in a file that it names.
    """
    options = parse(arguments, __doc__)
    if options.list:
        print(list_command.listing(options.json, options.recipe))
        return 0
    words = [word for word in (options.recipe, options.variant, *options.overrides) if word]
    if options.source:
        return translate.main(options.source, options.gpus, options.nodes, words)
    if Path(words[0] if words else "").suffix in translate.SUFFIXES:
        raise UserError(
            f"{words[0]}: no recipe, but perhaps a file of another tool: ds-recipes launch --from {words[0]}"
        )
    if not options.recipe:
        raise UserError(
            "name a recipe and a variant, e.g. `ds-recipes launch tiny full`; `ds-recipes launch --list` lists all."
        )
    if options.recipe == auto.AUTO:
        options.model, options.variant, options.overrides = auto.words([options.variant, *options.overrides])
    if not options.variant:
        raise UserError(pages.choices(options.recipe))
    try:
        return run(options)
    except KeyboardInterrupt:  # before the ranks start, or between two attempts
        return 130


def run(options: argparse.Namespace) -> int:
    """Check the run, write its folder, start the ranks, wait for them, and return the exit status."""
    page, folder = page_of(options)
    recipe = with_options(overrides.apply(page, options.overrides), options)
    check_options(options)
    pool = pool_of(options)
    if submit.is_dashboard(options.address):
        return submit.run(options.address, options.words, options.submit)
    machines = machines_of(options, recipe, pool)
    documents = workload.document_length(recipe) if machines.hardware and not recipe.draft.enabled else None
    if recipe.deepspeed == forecast.AUTO:
        recipe = with_best_plan(recipe, page, options.overrides, machines.hardware, documents)

    recipe = paths.locate(recipe, jobs.mount(options))
    check(recipe, page, folder, machines, options)
    plan = None
    if machines.hardware and not options.no_plan:
        plan = forecast.forecast(preflight.with_dimensions(recipe), machines.hardware, documents)
        if plan:
            print(forecast.line(plan), flush=True)

    folder = folder or run_folder.new(recipe, options.output_dir)
    recipe = with_profile(recipe, folder, machines)
    if recipe.profile.nsys and not options.dry_run:
        nsys.check(machines.gpus, here=not machines.reserved)
    if machines.pool:
        hostfile.check_command(folder.path, options.master_addr)
    if not options.dry_run:
        run_folder.check_writable(folder)
    if machines.allocation:
        return scheduler.submit(options, machines.allocation, recipe, folder)
    if options.dry_run:
        return show(recipe, folder, machines, options)
    if options.prepare:
        return prepare(recipe, folder, machines.ranks_each, options.nodes or 1)
    return start(recipe, folder, machines, options, plan)


def check(
    recipe: Recipe, page: Recipe, folder: RunFolder | None, machines: Machines, options: argparse.Namespace
) -> None:
    """Check everything that can be checked before a rank starts, and print warnings about likely mistakes.

    Raises:
        UserError: the run cannot work.
    """
    check_sizes(recipe)
    preflight.check_model(recipe)
    preflight.check_config(recipe, machines.ranks)
    file = deepspeed_file.read(recipe.deepspeed)
    preflight.check_layout(recipe, file, machines.ranks)
    if folder:
        universal.check(recipe, folder, file, machines.ranks)
        if changed := overrides.differences(page, recipe):
            print(f"resuming with changed settings: {' '.join(changed)}", flush=True)
    restarts.check(recipe, options.max_restarts)
    if not machines.allocation:  # a cluster's nodes have their own environment
        preflight.check_trackers(recipe)
        capacity.check_cache()
    examples = preflight.check_data(recipe)
    for warning in (
        preflight.few_updates(recipe, examples, machines.ranks),
        borrowed.warning(recipe, page, overrides.keys_of(options.overrides)),
    ):
        if warning:
            print(warning, flush=True)


def show(recipe: Recipe, folder: RunFolder, machines: Machines, options: argparse.Namespace) -> int:
    """Print the recipe and the command that would start it, and return 0."""
    print(json.dumps(to_dict(recipe), indent=2))
    watcher = nsys.command(folder) if recipe.profile.nsys else []
    if machines.cluster:
        command = ray_cluster.command(machines.cluster, folder, machines.ranks)
    else:
        command = deepspeed_command(folder, machines.ranks, machines.pool, options.master_addr)
    print(shlex.join([*watcher, *command]))
    return 0


def start(recipe: Recipe, folder: RunFolder, machines: Machines, options: argparse.Namespace, plan: Plan | None) -> int:
    """Start the ranks, wait for them, conclude the run, and return its exit status."""
    require("deepspeed")
    if not machines.elsewhere:  # with several hosts, the preflight reports what each host lacks
        compile_ops(recipe, machines.ranks, machines.gpus)
    attempts: HostAttempts | RayAttempts | LocalAttempts
    if machines.pool:
        attempts = HostAttempts(machines.pool, folder, options.master_addr)
    elif machines.cluster:
        attempts = RayAttempts(machines.cluster, folder)
    else:
        attempts = LocalAttempts(folder, machines.ranks, machines.gpus)
    with run_lock.hold(folder.path) as lock:

        def attempt(ranks: int) -> Outcome:
            outcome = attempts.start(ranks)
            lock.check()  # the next steps clean up the folder for another attempt
            return outcome

        if options.resume:
            restarts.prepare(recipe, folder, machines.ranks, restarts.intact_checkpoint(recipe, folder))
        run_folder.write_recipe(folder, recipe)
        try:
            status = restarts.run_with_restarts(
                recipe, folder, machines.ranks, options.max_restarts, attempt, attempts.available
            )
            forecast.compare(folder, plan)
        finally:
            conclude.at_end(folder, zero_traffic.of_run)
            write.at_end(folder)  # also for a failed run; in this process, so that it costs the ranks nothing
        afterwards.upload(folder)
        if status == 2 and not (options.resume or folder.metrics.exists() or run_folder.checkpoints(folder)):
            # Remove the folder after a mistake that only the ranks could detect.
            shutil.rmtree(folder.path, ignore_errors=True)
        return status


def prepare(recipe: Recipe, folder: RunFolder, ranks: int, nodes: int) -> int:
    """Write the run folder, print how other launchers start `ranks` on each node, and return 0."""
    with run_lock.hold(folder.path):
        run_folder.write_recipe(folder, recipe)
        record(folder)
    print(f"{folder.path} is prepared for {nodes * ranks} ranks; start or restart them with one of:")
    for name, command in other_launchers.commands(folder, ranks, nodes).items():
        print(f"{name:12} {command}")
    return 0


def page_of(options: argparse.Namespace) -> tuple[Recipe, RunFolder | None]:
    """Return the recipe to start from and, with --resume, the run that it continues.

    Only the page and the command line may permit changed data or the code of a model or a reward function; a file in a
    run folder never may.

    Raises:
        UserError: no such recipe, or nothing to resume.
    """
    if options.recipe == auto.AUTO:
        page = auto.borrow(options.model, options.variant)
        print(auto.said(page), flush=True)
    else:
        page = pages.find(options.recipe, options.variant)
    if not options.resume:
        return page, None
    folder = run_folder.to_resume(page, options.output_dir)
    run_lock.check(folder.path)
    held = run_folder.read_recipe(folder)
    if options.recipe == auto.AUTO and held.model.path != paths.locate(page).model.path:
        raise UserError(f"{folder.path} has a run of {held.model.path}, not of {options.model}; add --output-dir.")
    if held.method.rollouts and held.reward != page.reward and "reward" not in overrides.keys_of(options.overrides):
        raise UserError(
            f"reward={held.reward}: refusing to run code named only in a run folder; if you trust it, add "
            "reward=FILE.py:FUNCTION to --resume."
        )
    model = replace(held.model, trust_remote_code=page.model.trust_remote_code)
    return replace(held, model=model, data=replace(held.data, changed=False), profile=page.profile), folder


def with_options(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """Return the recipe with the settings of --profile, --nsys and --draft."""
    if options.profile or options.nsys:
        steps = options.profile or recipe.profile.steps or window.AUTO
        recipe = replace(recipe, profile=replace(recipe.profile, steps=steps, nsys=options.nsys))
    if options.draft:
        recipe = replace(recipe, draft=replace(recipe.draft, enabled=True))
    return recipe


def with_profile(recipe: Recipe, folder: RunFolder, machines: Machines) -> Recipe:
    """Return the recipe with the steps and ranks to record, if any, and print the disk space that the traces need.

    Raises:
        UserError: no such steps or ranks, or too little disk space.
    """
    config = preflight.with_dimensions(recipe).model.config
    known = replace(recipe, model=replace(recipe.model, config=config))
    found, line = request.checked(known, machines.ranks, machines.ranks_each, folder.path)
    if line:
        print(line, flush=True)
    return replace(recipe, profile=found.profile)


def check_sizes(recipe: Recipe) -> None:
    """Refuse sizes that no model can have, before anything computes with them.

    Raises:
        UserError: names the model's config.json, the key and its value.
    """
    file = Path(recipe.model.path, "config.json")
    if file.exists():
        config = base_model.config_of(file.parent)
        model_recipe.check_sizes(config.get("text_config") or config, str(file))


def with_best_plan(
    recipe: Recipe, page: Recipe, changes: Sequence[str], hardware: Cluster | None, documents: float | None
) -> Recipe:
    """Return the recipe with the planner's choice for these GPUs or, without GPUs, with its page's DeepSpeed file.

    Raises:
        UserError: no plan fits.
    """
    recipe = replace(recipe, deepspeed=page.deepspeed)
    if hardware is None or recipe.draft.enabled:
        print(f"deepspeed=auto: the planner needs GPUs; using the recipe's own {page.deepspeed}", flush=True)
        return recipe
    located = preflight.with_dimensions(paths.locate(recipe))
    best = forecast.choose(located, overrides.keys_of(changes), hardware, documents)
    print(f"deepspeed=auto: {' '.join(overrides.differences(located, best)) or best.deepspeed}", flush=True)
    return replace(best, model=recipe.model)
