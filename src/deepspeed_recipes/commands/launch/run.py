"""Carries out a plan: submits the run, prepares its folder for another launcher, prints its command, or starts it."""

import json
import shlex
import shutil
import sys
from pathlib import Path

from ...launching import preflight, restarts, scheduler
from ...launching.command import compile_ops, deepspeed_command, other_launchers, record
from ...launching.options import LaunchOptions
from ...launching.ray import cluster
from ...launching.ray.cluster import RayAttempts
from ...launching.restarts import HostAttempts, LocalAttempts
from ...launching.supervise import Outcome
from ...machine import run_lock
from ...planning.cost import communication
from ...planning.search import forecast
from ...recipe import overrides, run_folder
from ...recipe.conversions import to_dict
from ...recipe.project import SAMPLES, require
from ...recipe.recipe import Recipe
from ...report import write
from ...report.profiler import verdict, window
from ...report.sections import settings
from ...training.model_folder import base_model
from ...training.tracking import writer
from .plan import LaunchPlan, plan_launch, requested, with_batch


def run(options: LaunchOptions) -> int:
    """Plan the run, start it, or do what the options ask for instead, and return the exit status."""
    options.check()
    options = with_batch(options)
    request = requested(options)
    if (options.address or "").startswith(("http://", "https://")):  # a Ray cluster's dashboard: it makes the plan
        return cluster.submit_job(str(options.address), options.words, options.submit)
    plan = plan_launch(options, request)
    data, model, here = plan.recipe.data.path, plan.recipe.model.path, str(SAMPLES)
    named = "data.path" in overrides.keys_of(options.overrides)
    if data.startswith(here) and not (named or model.startswith(here) or plan.recipe.draft.enabled):
        print(
            f"data.path is not set: {Path(data).relative_to(SAMPLES)}, a sample of the project, is trained; name your "
            "own with data.path=FILE",
            file=sys.stderr,
        )
    if options.dry_run:
        return show(plan, request.page)
    if plan.machines.allocation:
        return scheduler.submit(options, plan.machines.allocation, plan.recipe, plan.folder)
    if options.prepare:
        return prepare(plan)
    return start(plan)


def show(plan: LaunchPlan, page: Recipe) -> int:
    """Print the recipe, or what differs from its page, and the command or job that would start it; return 0."""
    if plan.options.whole_recipe:
        print(json.dumps(to_dict(plan.recipe), indent=2))
    else:
        changed = list(settings.explained(page, plan.recipe))
        print("\n".join(f"{key}: {before} -> {after}" for key, before, after in changed) or "no changes to the page")
    if plan.machines.allocation:
        texts = scheduler.texts(plan.options, plan.machines.allocation, plan.recipe, plan.folder)
        print("\n".join(f"# {name}\n{text.rstrip()}" for name, text in texts.items()))
        return 0
    print(preflight.unchecked(plan.recipe), file=sys.stderr)
    watcher = window.nsys_command(plan.folder) if plan.recipe.profile.nsys else []
    machines = plan.machines
    if machines.cluster:
        command = cluster.attempt_command(machines.cluster, plan.folder, machines.ranks)
    else:
        command = deepspeed_command(plan.folder, machines.ranks, machines.pool, plan.options.master_addr)
    print(shlex.join([*watcher, *command]))
    return 0


def prepare(plan: LaunchPlan) -> int:
    """Write the run folder, print how other launchers start its ranks, and return 0."""
    with run_lock.hold(plan.folder.path):
        run_folder.write_recipe(plan.folder, plan.recipe)
        record(plan.folder)
    print(f"{plan.folder.path} is prepared for {plan.machines.ranks} ranks; start or restart them with one of:")
    found = other_launchers(plan.folder, plan.machines.ranks_each, plan.options.nodes or 1)
    for name, command in found.items():
        print(f"{name:12} {command}")
    return 0


def start(plan: LaunchPlan) -> int:
    """Start the ranks, wait for them, conclude the run, and return its exit status."""
    require("deepspeed")
    options, recipe, folder, machines = plan.options, plan.recipe, plan.folder, plan.machines
    if not (machines.reserved or recipe.draft.enabled):
        base_model.check_reachable(recipe.model.path)
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
                recipe, folder, machines.ranks, options.max_restarts or 0, attempt, attempts.available
            )
            forecast.compare(folder, plan.forecast)
        finally:
            run_folder.discard_requested(folder)
            verdict.at_end(folder, communication.traffic_of_run)
            write.at_end(folder)  # also for a failed run; in this process, so that it costs the ranks nothing
        if not status:
            writer.upload(folder)
        if status == 2 and not (options.resume or folder.metrics.exists() or run_folder.checkpoints(folder)):
            # Remove the folder after a mistake that only the ranks could detect.
            shutil.rmtree(folder.path, ignore_errors=True)
        return status
