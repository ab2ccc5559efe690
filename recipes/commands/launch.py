"""Run a recipe: one launcher for every model, size and variant.

    python scripts/launch.py --list
    python scripts/launch.py tiny full
    python scripts/launch.py tiny lora learning_rate=2e-3 lora.rank=8
    python scripts/launch.py tiny full --resume
    python scripts/launch.py auto MODEL          # a folder or Hub id without a recipe borrows the nearest one

The launcher checks everything that can be checked beforehand, writes the run folder, prints the `deepspeed` command,
starts it and returns its exit status. On Ctrl-C or SIGTERM the run writes a checkpoint and ends; `--resume` continues
it. With `--max-restarts N` the launcher itself resumes after a crash or a hang.
"""

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..docs import keys
from ..launching import other_launchers, paths, preflight, restarts, scheduler
from ..launching.attempts import HostAttempts, LocalAttempts
from ..launching.cloud import jobs
from ..launching.command import compile_ops, deepspeed_command, rank_count, record, visible_gpus
from ..launching.kubernetes import manifests
from ..launching.ray import cluster as ray_cluster
from ..launching.ray import submit
from ..launching.ray.attempts import RayAttempts
from ..launching.ray.cluster import RayCluster
from ..launching.ssh import hostfile
from ..launching.ssh.hostfile import HostPool
from ..machine import run_lock
from ..page_checks import auto, borrowed
from ..planning.cost.time import zero_traffic
from ..planning.hardware.cluster import Cluster
from ..planning.search import forecast, model_recipe
from ..profiling import conclude, nsys, request, window
from ..report import write
from ..spec import deepspeed_file, overrides, pages, run_folder
from ..spec.conversions import to_dict
from ..spec.errors import UserError
from ..spec.project import as_typed, require
from ..spec.recipe import Recipe
from ..spec.run_folder import RunFolder
from ..training import universal_checkpoint
from ..training.tracking import afterwards
from . import list as list_command
from .main import Parser
from .plan import workload


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: the run's own.

    Raises:
        UserError: a mistake on the command line, in the recipe, or in a file that it names.
    """
    options = parse(arguments)
    if options.list:
        print(list_command.listing(options.json, options.recipe))
        return 0
    if not options.recipe:
        raise UserError("name a recipe and a variant, e.g. `launch.py tiny full`; `launch.py --list` lists all.")
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
    recipe = overrides.apply(page, options.overrides)
    if options.profile or options.nsys:
        steps = options.profile or recipe.profile.steps or window.AUTO
        recipe = replace(recipe, profile=replace(recipe.profile, steps=steps, nsys=options.nsys))
    if options.draft:
        recipe = replace(recipe, draft=replace(recipe.draft, enabled=True))

    gpus = visible_gpus()
    pool = pool_of(options)
    if submit.is_dashboard(options.address):
        return submit.run(options.address, options.words, options.submit)
    cluster = ray_cluster.of(options)
    allocation = scheduler.allocation_of(options, recipe)
    reserved = pool or cluster or allocation
    elsewhere = bool(pool or allocation or (cluster and cluster.nodes))  # where this machine may have no ranks
    if reserved:
        ranks = reserved.ranks
    else:  # prepared ranks start on other machines
        ranks = rank_count(options.gpus, 0 if options.prepare else gpus) * (options.nodes or 1)
    known = gpus and not options.prepare and (pool or not elsewhere)
    hardware = hardware_of(pool, ranks) if known else None
    documents = workload.document_length(recipe) if hardware and not recipe.draft.enabled else None
    if recipe.deepspeed == forecast.AUTO:
        recipe = with_best_plan(recipe, page, options.overrides, hardware, documents)

    recipe = paths.locate(recipe, jobs.mount(options))
    check_sizes(recipe)
    preflight.check_config(recipe, ranks)
    file = deepspeed_file.read(recipe.deepspeed)
    preflight.check_layout(recipe, file, ranks)
    if folder:
        universal_checkpoint.check(recipe, folder, file, ranks)
    restarts.check(recipe, options.max_restarts)
    if not allocation:  # a cluster's nodes have an environment of their own
        preflight.check_trackers(recipe)
    examples = preflight.check_data(recipe)
    for warning in (
        preflight.few_updates(recipe, examples, ranks),
        borrowed.warning(recipe, page, overrides.keys_of(options.overrides)),
    ):
        if warning:
            print(as_typed(warning), flush=True)
    plan = None
    if hardware and not options.no_plan:
        plan = forecast.forecast(preflight.with_dimensions(recipe), hardware, documents)
        if plan:
            print(forecast.line(plan), flush=True)

    folder = folder or run_folder.new(recipe, options.output_dir)
    recipe = with_profile(recipe, folder, ranks, per_host(options, pool or cluster, ranks))
    if recipe.profile.nsys and not options.dry_run:
        nsys.check(gpus, here=not reserved)
    if pool:
        hostfile.check_command(folder.path, options.master_addr)
    if not options.dry_run:
        run_folder.check_writable(folder)
    if allocation:
        return scheduler.submit(options, allocation, recipe, folder)
    if options.dry_run:
        print(json.dumps(to_dict(recipe), indent=2))
        watcher = nsys.command(folder) if recipe.profile.nsys else []
        command = deepspeed_command(folder, ranks, pool, options.master_addr)
        print(shlex.join([*watcher, *(ray_cluster.command(cluster, folder, ranks) if cluster else command)]))
        return 0
    if options.prepare:
        return prepare(recipe, folder, per_host(options, pool, ranks), options.nodes or 1)
    require("deepspeed")
    if not elsewhere:  # with several hosts, the preflight says what each of them lacks
        compile_ops(recipe, ranks, gpus)
    attempts: HostAttempts | RayAttempts | LocalAttempts
    if pool:
        attempts = HostAttempts(pool, folder, options.master_addr)
    else:
        attempts = RayAttempts(cluster, folder) if cluster else LocalAttempts(folder, ranks, gpus)
    with run_lock.hold(folder.path):
        if options.resume:
            restarts.prepare(recipe, folder, ranks, restarts.intact_checkpoint(recipe, folder))
        run_folder.write_recipe(folder, recipe)
        try:
            status = restarts.run_with_restarts(
                recipe, folder, ranks, options.max_restarts, attempts.start, attempts.available
            )
            forecast.compare(folder, plan)
        finally:
            conclude.at_end(folder, zero_traffic.of_run)
            write.at_end(folder)  # of a run that has failed, too; here, so that it costs the ranks nothing
        afterwards.upload(folder)
        if status == 2 and not folder.metrics.exists():
            # Leave nothing after a mistake that only the ranks could find.
            shutil.rmtree(folder.path, ignore_errors=True)
        return status


def prepare(recipe: Recipe, folder: RunFolder, ranks: int, nodes: int) -> int:
    """Write the run folder, print how other launchers start `ranks` on each node, and return 0."""
    with run_lock.hold(folder.path):
        run_folder.write_recipe(folder, recipe)
        record(folder)
    print(f"{folder.path} is prepared for {nodes * ranks} ranks, which any of these starts, and restarts:")
    for name, command in other_launchers.commands(folder, ranks, nodes).items():
        print(f"{name:12} {command}")
    return 0


def page_of(options: argparse.Namespace) -> tuple[Recipe, RunFolder | None]:
    """Return the recipe to start from and, with --resume, the run that it continues.

    Only the page and the command line may allow changed data or other people's code, a model's or a reward function's,
    never a file in a run folder.

    Raises:
        UserError: no such recipe, or nothing to resume.
    """
    if options.recipe == auto.AUTO:
        page = auto.borrow(options.model, options.variant)
        print(as_typed(auto.said(page)), flush=True)
    else:
        page = pages.find(options.recipe, options.variant)
    if not options.resume:
        return page, None
    folder = run_folder.to_resume(page, options.output_dir)
    run_lock.check(folder.path)
    held = run_folder.read_recipe(folder)
    if options.recipe == auto.AUTO and held.model.path != paths.locate(page).model.path:
        raise UserError(f"{folder.path} has a run of {held.model.path}, not of {options.model}; add --output-dir.")
    if held.traits.rollouts and held.reward != page.reward and "reward" not in overrides.keys_of(options.overrides):
        raise UserError(
            f"reward={held.reward}: a run folder's word is not enough to run that code; if it is yours, repeat "
            "reward=FILE.py:FUNCTION with --resume."
        )
    model = replace(held.model, trust_remote_code=page.model.trust_remote_code)
    return replace(held, model=model, data=replace(held.data, changed=False), profile=page.profile), folder


def with_profile(recipe: Recipe, folder: RunFolder, ranks: int, on_each: int) -> Recipe:
    """Return the recipe with the steps and ranks to record, if any, and say what the traces need.

    Raises:
        UserError: no such steps or ranks, or no room.
    """
    config = preflight.with_dimensions(recipe).model.config
    known = replace(recipe, model=replace(recipe.model, config=config))
    found, line = request.checked(known, ranks, on_each, folder.path)
    if line:
        print(line, flush=True)
    return replace(recipe, profile=found.profile)


def per_host(options: argparse.Namespace, pool: HostPool | RayCluster | None, ranks: int) -> int:
    """Return how many ranks run on each machine."""
    return pool.most_ranks if pool else ranks // (options.nodes or 1)


def pool_of(options: argparse.Namespace) -> HostPool | None:
    """Return the selected hosts; None: no hostfile.

    Raises:
        UserError: the hostfile or the selection is wrong, or options contradict each other.
    """
    used = [flag for flag in ENGINES if getattr(options, flag)]
    if len(used) > 1:
        raise UserError(f"--{used[0]} and --{used[1]}: give one of them, not both.")
    for flag, needs in NEEDS.items():
        if getattr(options, flag) and not set(needs) & set(used):
            raise UserError(f"--{flag.replace('_', '-')} needs --{' or --'.join(needs)}.")
    if not options.hostfile:
        return None
    return hostfile.read(options.hostfile, options.include, options.exclude, options.nodes, options.gpus)


ENGINES = ("hostfile", "slurm", "kubernetes", "ray", "sagemaker", "skypilot", "prepare")
"""Options each of which says what starts the ranks."""
NEEDS = {
    "nodes": ENGINES,
    **dict.fromkeys(("address", "submit"), ("ray",)),
    **dict.fromkeys(("include", "exclude", "master_addr"), ("hostfile",)),
    **dict.fromkeys(("partition", "time"), ("slurm",)),
    "image": ("kubernetes", "sagemaker", "skypilot"),
    "volume": ("kubernetes", "skypilot"),
}
"""Options for several machines, and which others they need one of."""


def check_sizes(recipe: Recipe) -> None:
    """Refuse sizes that no model can have, before anything computes with them.

    Raises:
        UserError: names the model's config.json, the key and its value.
    """
    file = Path(recipe.model.path, "config.json")
    if file.exists():
        config = run_folder.read_json(file)
        inner = config.get("text_config") or config if isinstance(config, dict) else None
        if not isinstance(inner, dict):
            raise UserError(f"{file}: not a Hugging Face config.json, which is one JSON object.")
        model_recipe.check_sizes(inner, str(file))


def hardware_of(pool: HostPool | None, ranks: int) -> Cluster | None:
    """Return the hardware for the planner: this machine, or hosts like it; None if the hosts differ."""
    if pool is None:
        return forecast.machines(ranks)
    equal = pool.ranks == pool.most_ranks * len(pool.hosts)
    return forecast.machines(pool.most_ranks, len(pool.hosts)) if equal else None


def with_best_plan(
    recipe: Recipe, page: Recipe, changes: Sequence[str], hardware: Cluster | None, documents: float | None
) -> Recipe:
    """Return the recipe with what the planner chooses for these GPUs; without GPUs, with its page's DeepSpeed file.

    Raises:
        UserError: nothing fits.
    """
    recipe = replace(recipe, deepspeed=page.deepspeed)
    if hardware is None or recipe.draft.enabled:
        print(f"deepspeed=auto: the planner needs GPUs; using the recipe's own {page.deepspeed}", flush=True)
        return recipe
    located = preflight.with_dimensions(paths.locate(recipe))
    best = forecast.choose(located, overrides.keys_of(changes), hardware, documents)
    print(f"deepspeed=auto: {' '.join(overrides.differences(located, best)) or best.deepspeed}", flush=True)
    return replace(best, model=recipe.model)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; options and key=value may come in any order."""
    parser = Parser("launch", __doc__, epilog=keys.overview(), add_help=False)
    parser.add_argument("-h", "--help", nargs="?", action=Help, metavar="KEY", help="show this, or explain a key")
    parser.add_argument("recipe", nargs="?", metavar="RECIPE[-SIZE]", help="e.g. tiny, or PATH/TO/page.py; see --list")
    parser.add_argument("variant", nargs="?", metavar="VARIANT", help="for example full or lora; see --list")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="change the recipe; the keys are listed below"
    )
    parser.add_argument("--list", action="store_true", help="list recipes, sizes and variants; with RECIPE its own")
    parser.add_argument("--json", action="store_true", help="with --list: as JSON")
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="ranks per machine (default: all GPUs; without GPUs 2 CPU ranks; with --kubernetes 1)",
    )
    parser.add_argument("--output-dir", type=Path, metavar="D", help="run folder (default: a dated one in runs/)")
    parser.add_argument("--resume", action="store_true", help="resume from the newest complete checkpoint")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="resume from the newest checkpoint after a crash or a hang, at most N times (default: 0)",
    )
    parser.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        help="record these steps (without a value: 4:6) and say where their time went, in the run folder's profile/",
    )
    parser.add_argument("--nsys", action="store_true", help="record them with Nsight Systems instead, on GPUs")
    parser.add_argument("--draft", action="store_true", help="train a shrunken, randomly initialised model instead")
    parser.add_argument("--no-plan", action="store_true", help="start even if the planner says that it does not fit")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the recipe and the command; write and start nothing"
    )
    several = parser.add_argument_group("several machines (scripts/README.md)")
    several.add_argument("--hostfile", type=Path, metavar="F", help="hosts over ssh, one `name slots=N` per line")
    several.add_argument(
        "--include", default="", metavar="H", help="only these hosts, in DeepSpeed's form host1@host2:0,2"
    )
    several.add_argument("--exclude", default="", metavar="H", help="all but these hosts, in the same form")
    several.add_argument("--nodes", type=int, metavar="N", help="number of hosts (default: all) or cluster nodes (1)")
    several.add_argument(
        "--master-addr", metavar="A", help="address for the rendezvous of the ranks (default: the first host's)"
    )
    several.add_argument("--slurm", action="store_true", help="write a batch script, submit it, and follow its log")
    several.add_argument(
        "--partition", metavar="P", help="with --slurm; set the account and so on by SBATCH_ACCOUNT ..."
    )
    several.add_argument("--time", metavar="T", help="with --slurm: time limit; the job saves before it and requeues")
    several.add_argument(
        "--kubernetes", action="store_true", help="write manifests: Job, JobSet and Kubeflow's TrainJob"
    )
    several.add_argument("--ray", action="store_true", help="on a Ray cluster; without --address on this machine")
    several.add_argument(
        "--address", metavar="A", help="with --ray: HOST:6379 of a cluster, auto, or http://HOST:8265, its dashboard"
    )
    several.add_argument(
        "--submit", action="store_true", help="with a dashboard's address: submit the job that is printed"
    )
    several.add_argument("--sagemaker", action="store_true", help="write the script of a SageMaker training job")
    several.add_argument("--skypilot", action="store_true", help="write a SkyPilot task, for machines of any cloud")
    several.add_argument(
        "--prepare",
        action="store_true",
        help="write the run folder; print how torchrun, mpirun or srun starts its ranks",
    )
    several.add_argument("--image", metavar="I", help=f"of jobs: the project's image (default: {manifests.IMAGE})")
    several.add_argument(
        "--volume", metavar="V", help=f"with --kubernetes, --skypilot: shared volume (default: {manifests.VOLUME})"
    )
    words = window.words(sys.argv[1:] if arguments is None else arguments)
    options, unknown = parser.parse_known_intermixed_args(words)
    options.words = words
    if unknown:  # without the value, which may be a credential
        name = unknown[0].partition("=")[0]
        hint = f"write a recipe's key as {name.lstrip('-')}=VALUE"
        known = as_typed("launch.py --help lists options and keys.")
        parser.exit(2, f"{parser.prog}: {name}: no such option; {hint}. {known}\n")
    return options


class Help(argparse.Action):
    """`--help`, or `--help KEY` for what a key means."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        """Print it and end."""
        if values is None:
            parser.print_help()
        else:
            print(keys.explained(values))
        parser.exit()
