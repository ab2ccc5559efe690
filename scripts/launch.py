"""Run a recipe: the one launcher for every model, size and variant.

    python scripts/launch.py --list
    python scripts/launch.py tiny full
    python scripts/launch.py tiny lora learning_rate=2e-3 lora.rank=8
    python scripts/launch.py tiny full --resume

It checks what can be checked, writes the run folder, prints and starts the real `deepspeed` command, and passes
its exit status on. Ctrl-C or SIGTERM writes a checkpoint and ends the run; `--resume` goes on with it, and with
`--max-restarts N` the launcher does so by itself after a crash or a hang.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import typing
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.launching import checks, cluster, hosts, kubernetes, restarts
from recipes.launching.attempts import OnThisMachine, OverHosts
from recipes.launching.command import deepspeed_command, rank_count, visible_gpus
from recipes.planning import forecast, report
from recipes.planning.hardware import Cluster
from recipes.spec import overrides, pages, run_folder
from recipes.spec.errors import UserError
from recipes.spec.recipe import Recipe, to_dict
from recipes.training import preflight, universal
from recipes.zero_config.sharding import sharding


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: the run's own, or 2 for a mistake in what was asked for."""
    options = parse(arguments)
    try:
        if options.list:
            print(listing(options.json))
            return 0
        if not options.recipe:
            raise UserError("name a recipe and a variant, e.g. `launch.py tiny full`; `launch.py --list` shows all.")
        if not options.variant:
            raise UserError(pages.choices(options.recipe))
        return run(options)
    except UserError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the ranks were started, or between two attempts
        return 130


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; options and key=value may stand in any order."""
    parser = argparse.ArgumentParser(
        prog="launch.py",
        description=__doc__,
        epilog=key_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE[-SIZE]", help="for instance tiny; see --list")
    parser.add_argument("variant", nargs="?", metavar="VARIANT", help="for instance full or lora; see --list")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the recipe; the keys are below")
    parser.add_argument("--list", action="store_true", help="list recipes, sizes and variants")
    parser.add_argument("--json", action="store_true", help="with --list: as JSON")
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="ranks per machine (default: all GPUs; without GPUs 2 CPU ranks; with --kubernetes 1)",
    )
    several = parser.add_argument_group("several machines (scripts/README.md)")
    several.add_argument("--hostfile", type=Path, metavar="F", help="DeepSpeed's: one `name slots=N` per line")
    several.add_argument("--include", default="", metavar="H", help="of these, as DeepSpeed writes it: host1@host2:0,2")
    several.add_argument("--exclude", default="", metavar="H", help="without these, in the same form")
    several.add_argument("--nodes", type=int, metavar="N", help="how many of them (default: all), or of a cluster's")
    several.add_argument("--master-addr", metavar="A", help="where ranks meet (default: the first host's address)")
    several.add_argument("--slurm", action="store_true", help="write a batch script, submit it, follow its log")
    several.add_argument("--partition", metavar="P", help="with --slurm; account and so on: SBATCH_ACCOUNT ...")
    several.add_argument(
        "--time", metavar="T", help="with --slurm: time limit, before which the job saves and requeues"
    )
    several.add_argument(
        "--kubernetes", action="store_true", help="write manifests: Job, JobSet and Kubeflow's TrainJob"
    )
    several.add_argument("--image", metavar="I", help=f"with --kubernetes (default: {kubernetes.IMAGE})")
    several.add_argument("--volume", metavar="V", help=f"its shared claim (default: {kubernetes.VOLUME})")
    parser.add_argument("--output-dir", type=Path, metavar="D", help="run folder (default: a dated one in runs/)")
    parser.add_argument("--resume", action="store_true", help="go on with the newest whole checkpoint")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="after a crash or a hang go on from the newest checkpoint, at most N times (default: 0)",
    )
    parser.add_argument("--draft", action="store_true", help="train a shrunken, random model of the same class")
    parser.add_argument("--no-plan", action="store_true", help="start what the planner says does not fit on the GPUs")
    parser.add_argument("--dry-run", action="store_true", help="show recipe and command, write and start nothing")
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:  # the value may be a credential, the name is none
        name = unknown[0].partition("=")[0]
        key = f"a key of the recipe is written {name.lstrip('-')}=VALUE"
        parser.exit(2, f"launch.py: {name}: no such option; {key}. launch.py --help lists both.\n")
    return options


def key_help() -> str:
    """Return the override keys with their types, for --help."""
    lines = [f"  {key:<28}{_type_name(hint)}" for key, hint in overrides.override_keys().items()]
    return "override keys (what each means stands in recipes/spec/recipe.py):\n" + "\n".join(lines)


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(typing.get_args(hint))
    return getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint)


def listing(as_json: bool) -> str:
    """Return every family with its sizes and variants; as JSON, every recipe with what tells it from the others."""
    if as_json:
        return json.dumps([entry(recipe) for recipe in pages.listing()], indent=2)
    lines = []
    for family in pages.families():
        module = pages.page(family)
        lines += [f"{family}: {pages.about(module)}", f"  {'sizes':<13} {', '.join(module.SIZES)}"]
        lines += [f"  {name:<13} {pages.about(getattr(module, name))}" for name in pages.variants(module)]
    return "\n".join(lines)


def entry(recipe: Recipe) -> dict[str, Any]:
    """Return one line of the list."""
    return {
        "recipe": f"{recipe.family}-{recipe.size}",
        "family": recipe.family,
        "size": recipe.size,
        "variant": recipe.variant,
        "about": pages.about(getattr(pages.page(recipe.family), recipe.variant)),
        "parameters": recipe.model.parameters,
        "config": recipe.deepspeed,
        "layout": asdict(recipe.layout),
    }


def run(options: argparse.Namespace) -> int:
    """Check, write the run folder, start the ranks, and wait for them."""
    folder = None
    page = pages.find(options.recipe, options.variant)
    if options.resume:
        folder = run_folder.to_resume(page, options.output_dir)
        page = run_folder.read_recipe(folder)
    recipe = overrides.apply(page, options.overrides)
    if options.draft:
        recipe = replace(recipe, draft=replace(recipe.draft, enabled=True))

    gpus = visible_gpus()
    pool = hosts_of(options)
    job = cluster.job_of(options, recipe)
    ranks = (pool or job).ranks if pool or job else rank_count(options.gpus, gpus)
    machines = machines_of(pool, ranks) if gpus and not job else None
    if recipe.deepspeed == forecast.AUTO:
        recipe = chosen(recipe, page, [change.partition("=")[0] for change in options.overrides], machines)

    recipe = preflight.locate(recipe, kubernetes.MOUNT if options.kubernetes else None)
    checks.check_config(recipe, ranks)
    checks.check_layout(recipe, ranks)
    if options.resume:
        universal.check(recipe, folder, sharding(recipe.deepspeed), ranks)
    restarts.check(recipe, options.max_restarts)
    preflight.check_data(recipe)
    plan = None
    if machines and not options.no_plan and (plan := forecast.forecast(preflight.with_dimensions(recipe), machines)):
        print(forecast.line(plan), flush=True)

    folder = folder or run_folder.new(recipe, options.output_dir)
    if job:
        return cluster.submit(options, job, recipe, folder)
    if options.dry_run:
        print(json.dumps(to_dict(recipe), indent=2))
        print(shlex.join(deepspeed_command(folder, ranks, pool, options.master_addr)))
        return 0
    attempts = OverHosts(pool, folder, options.master_addr) if pool else OnThisMachine(folder, ranks, gpus)
    if options.resume:
        restarts.make_ready(recipe, folder, ranks)
    run_folder.write_recipe(folder, recipe)
    status = restarts.keep_going(recipe, folder, ranks, options.max_restarts, attempts.start, attempts.available)
    forecast.compare(folder, plan)
    if status == 2 and not folder.metrics.exists():
        shutil.rmtree(folder.path, ignore_errors=True)  # a mistake that the ranks found leaves nothing behind
    return status


def chosen(recipe: Recipe, page: Recipe, given: list[str], machines: Cluster | None) -> Recipe:
    """Return the recipe with what the planner chooses for these GPUs, or its page's file without any.

    Raises:
        UserError: nothing fits.
    """
    recipe = replace(recipe, deepspeed=page.deepspeed)
    if machines is None or recipe.draft.enabled:
        print(f"deepspeed=auto: the planner knows GPUs only; taking the recipe's own {page.deepspeed}", flush=True)
        return recipe
    located = preflight.with_dimensions(preflight.locate(recipe))
    best = forecast.choose(located, given, machines)
    print(f"deepspeed=auto: {' '.join(report.changes(located, best)) or best.deepspeed}", flush=True)
    return replace(best, model=recipe.model)


def machines_of(pool: hosts.Pool | None, ranks: int) -> Cluster | None:
    """Return what the planner is asked about: this machine, or hosts like it; None: without GPUs, or not all alike."""
    if pool is None:
        return forecast.machines(ranks)
    equal = pool.ranks == pool.widest * len(pool.hosts)
    return forecast.machines(pool.widest, len(pool.hosts)) if equal else None


def hosts_of(options: argparse.Namespace) -> hosts.Pool | None:
    """Return the hosts that were asked for; None: no hostfile.

    Raises:
        UserError: the hostfile or what is taken of it is wrong, or options contradict each other.
    """
    places = [flag for flag in ("hostfile", "slurm", "kubernetes") if getattr(options, flag)]
    if len(places) > 1:
        raise UserError(f"--{places[0]} and --{places[1]}: one of them, not both.")
    for flag, needs in NEEDS.items():
        if getattr(options, flag) and not set(needs) & set(places):
            raise UserError(f"--{flag.replace('_', '-')} needs --{' or --'.join(needs)}.")
    if not options.hostfile:
        return None
    return hosts.read(options.hostfile, options.include, options.exclude, options.nodes, options.gpus)


NEEDS = {
    "nodes": ("hostfile", "slurm", "kubernetes"),
    **dict.fromkeys(("include", "exclude", "master_addr"), ("hostfile",)),
    **dict.fromkeys(("partition", "time"), ("slurm",)),
    **dict.fromkeys(("image", "volume"), ("kubernetes",)),
}
"""Which of the options for several machines mean something only with which others."""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
