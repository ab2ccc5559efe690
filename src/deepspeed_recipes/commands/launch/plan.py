"""Plans a run: everything that is decided and checked before the first file is written or the first rank starts."""

import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...launching import chat_template, cloud, paths, preflight, restarts, scheduler
from ...launching.command import rank_count, visible_gpus
from ...launching.options import Allocation, LaunchOptions
from ...launching.ray import cluster as ray_cluster
from ...launching.ray.cluster import RayCluster
from ...launching.ssh import hostfile
from ...launching.ssh.hostfile import HostPool
from ...machine import run_lock, system
from ...planning.hardware.cluster import Cluster
from ...planning.model_profile import counts
from ...planning.search import forecast
from ...planning.search.plans import Plan
from ...recipe import compatibility, deepspeed_file, layout, overrides, own_code, pages, run_folder
from ...recipe.dimensions import check_sizes
from ...recipe.errors import UserError
from ...recipe.files import text_of
from ...recipe.methods import Grpo
from ...recipe.recipe import Recipe, changed, names
from ...recipe.run_folder import RunFolder, read_json
from ...recipe.sections import Lora
from ...report.profiler import window
from ...training.checkpoint import universal
from ...training.data import text_files, updates
from ...training.model_folder import base_model
from ..plan import workload
from . import borrowed

DRAFT_LENGTH, DRAFT_BATCH = 512, 2
"""Longest sequence of a draft without GPUs, and its sequences per rank and step."""


@dataclass(frozen=True)
class Request:
    """The recipe of the command line."""

    page: Recipe
    """The recipe before the command line's changes: the page's, or with --resume the run's."""
    recipe: Recipe
    folder: RunFolder | None
    """The folder of the run to resume, or None for a new run."""


@dataclass(frozen=True)
class Machines:
    """The machines of a run: only this machine without a pool, Ray cluster or allocation, unless with --prepare."""

    pool: HostPool | None
    cluster: RayCluster | None
    allocation: Allocation | None
    gpus: int
    """GPUs of this machine, which may not be part of the run."""
    ranks: int
    ranks_each: int
    """Largest number of ranks on a machine."""
    hardware: Cluster | None
    """The hardware for the planner, or None if it is unknown or the hosts differ."""

    @property
    def reserved(self) -> bool:
        """True if a hostfile, a Ray cluster or a scheduler determines the machines."""
        return bool(self.pool or self.cluster or self.allocation)

    @property
    def elsewhere(self) -> bool:
        """True if this machine may have no ranks."""
        return bool(self.pool or self.allocation or (self.cluster and self.cluster.nodes))


@dataclass(frozen=True)
class LaunchPlan:
    """A checked run: what starts, where, and in which folder."""

    options: LaunchOptions
    recipe: Recipe
    """The recipe with absolute paths, as the ranks read it."""
    folder: RunFolder
    machines: Machines
    forecast: Plan | None
    """The planner's estimate, or None if it has none or was not asked."""


def plan_launch(options: LaunchOptions, request: Request) -> LaunchPlan:
    """Return the plan of a launch; choose the file for `deepspeed=auto`, check the run, and print warnings."""
    machines = machines_of(options, request.recipe.name)
    documents = None
    if machines.hardware and not request.recipe.draft.enabled:
        documents = workload.document_length(request.recipe)
    keys = overrides.keys_of(options.overrides)
    chosen = with_deepspeed_file(request, keys, machines.hardware, documents)
    if options.model and not request.folder:
        chosen = borrowed.with_amount(chosen, machines.ranks, keys)
    if options.draft and not (machines.gpus or machines.reserved):
        chosen = small_draft(chosen, machines.ranks, keys)
    located = paths.locate(chosen, cloud.mount(options.engine))
    check(located, request, machines, options)
    estimate = None
    if machines.hardware and not options.no_plan:
        estimate = forecast.forecast(preflight.with_dimensions(located), machines.hardware, documents)
        if estimate:
            print(forecast.line(estimate), flush=True)
    folder = request.folder or run_folder.new(located, options.output_dir)
    for name in (*names(located.data.path), *names(located.data.validation)):
        inside = folder.path.is_relative_to(name)
        read = text_files.files_of(Path(name), located.data.split)[0] if inside else ()
        if any(text_files.suffix(file) != ".arrow" for file in read):  # of a saved data set, others are not read
            raise UserError(
                f"{folder.path}: the run would be inside {name}, whose files are all read as data; choose another "
                "--output-dir, or name the files in data.path."
            )
    places = {"--output-dir": str(folder.path), "data.path": located.data.path, "model.path": located.model.path}
    if options.slurm and (own := [key for key, paths in places.items() if re.search("(^|,)/(tmp|dev/shm)/", paths)]):
        print(
            f"warning: {', '.join(own)} in /tmp: in most clusters each node has its own; use a shared folder",
            flush=True,
        )
    asked = preflight.with_dimensions(located)
    found, line = window.checked(asked, machines.ranks, machines.ranks_each, folder.path)
    if line:  # the disk space that the traces of `--profile` need
        print(line, flush=True)
    recipe = replace(located, profile=found.profile)
    if recipe.profile.nsys and (options.engine or not options.dry_run):
        window.check_nsys(machines.gpus, options.engine)
    if machines.pool:
        hostfile.check_command(folder.path, options.master_addr)
    if not options.dry_run or (options.output_dir and not machines.elsewhere):
        run_folder.check_writable(folder)
    return LaunchPlan(options, recipe, folder, machines, estimate)


ACCUMULATION = "gradient_accumulation_steps"


def with_batch(options: LaunchOptions) -> LaunchOptions:
    """Return the options with the global batch for the accumulation steps that other tools ask for, on these ranks."""
    given = [word.partition("=")[2] for word in options.overrides if word.startswith(f"{ACCUMULATION}=")]
    others = tuple(word for word in options.overrides if not word.startswith(f"{ACCUMULATION}="))
    both = options.resume or "global_batch_size" in overrides.keys_of(others)
    if both or len(given) != 1 or not given[0].isdecimal():
        return options
    found = borrowed.borrow(options.model, options.variant) if options.model else None
    recipe = overrides.apply(found or pages.find(options.recipe, options.variant), others)
    copies = layout.data_parallel_size(recipe.layout, machines_of(options, recipe.name).ranks)
    word = f"global_batch_size={recipe.micro_batch_size * int(given[0]) * copies}"
    print(
        f"{ACCUMULATION}={given[0]} is read as {word}: {recipe.micro_batch_size} x {given[0]} x {copies} data-parallel "
        f"rank{'s' * (copies != 1)}",
        file=sys.stderr,
    )
    return replace(options, overrides=(*others, word))


def requested(options: LaunchOptions) -> Request:
    """Return the recipe of the page or of the run to resume, with the command line's changes.

    Only the page and the command line may permit changed data or the code of a model or a reward function; a file in a
    run folder never may.
    """
    if options.model is None:
        page = pages.find(options.recipe, options.variant)
    else:
        page = borrowed.borrow(options.model, options.variant)
        print(borrowed.said(page, overrides.keys_of(options.overrides)), flush=True)
    folder = None
    if options.output_dir and os.path.isfile(options.output_dir / run_lock.NAME):
        run_lock.check(options.output_dir)  # first: a run without a checkpoint would be called one to remove
    if options.resume:
        folder = run_folder.to_resume(page, options.output_dir)
        page = resumed(page, folder, options)
    recipe = overrides.apply(page, options.overrides, resumed=bool(folder))
    keys = overrides.keys_of(options.overrides)
    # W&B's library does not read its variables where it is given a value.
    for variable, given in sorted(os.environ.items()) if "wandb" in names(recipe.tracking) else ():
        key = overrides.FOREIGN_NAMES.get(variable.lower(), "") if variable.startswith("WANDB_") else ""
        value = {"dryrun": "offline", "run": "online"}.get(given, given)
        if value and key.startswith("wandb.") and key not in keys:
            same, recipe = recipe, overrides.apply(recipe, [f"{key}={value}"])
            if recipe != same:
                print(f"{variable}: {key}={value}", file=sys.stderr, flush=True)
    if not folder:
        recipe = with_own_split(recipe, keys)
    before, lora = page.lora or Lora(), recipe.lora
    if lora and lora.rank != before.rank and "lora.alpha" not in keys and not (lora.rslora or folder):
        print(
            f"lora.rank={lora.rank}: lora.alpha stays {lora.alpha}, so adapters are scaled by "
            f"{lora.alpha / lora.rank:.3g} (alpha / rank) instead of {before.alpha / before.rank:.3g}; "
            f"lora.alpha={max(1, round(lora.rank * before.alpha / before.rank))} keeps the scale",
            file=sys.stderr,
            flush=True,
        )
    kept = bool(folder) or "learning_rate" in keys  # a resumed run cannot gain adapters
    if recipe.learning_rate != page.learning_rate and not kept:
        print(
            f"adapters on a recipe of all weights: learning_rate={recipe.learning_rate:.3g} instead of "
            f"{page.learning_rate:g}, unless you set it",
            file=sys.stderr,
            flush=True,
        )
    if folder:
        run_folder.check_goes_on(folder, recipe)
    nsys = options.nsys or (recipe.profile.nsys and "profile.nsys" in keys)
    if options.profile or nsys:
        steps = options.profile or recipe.profile.steps or window.AUTO
        recipe = replace(recipe, profile=replace(recipe.profile, steps=steps, nsys=nsys))
    if options.draft:
        recipe = replace(recipe, draft=replace(recipe.draft, enabled=True))
    for line in compatibility.unread(compatibility.Case(recipe), keys):
        print(line, file=sys.stderr, flush=True)
    experts = recipe.lora and recipe.lora.target_parameters
    if experts and "lora.target_modules" in keys and "lora.target_parameters" not in keys:
        print(
            f"lora.target_parameters={experts}, from the page, have adapters too; leave them out with "
            "lora.target_parameters=none",
            file=sys.stderr,
            flush=True,
        )
    if recipe.data.changed and not folder:
        print("data.changed=true is not read: the run starts anew; add --resume", file=sys.stderr, flush=True)
    return Request(page, recipe, folder)


def with_own_split(recipe: Recipe, keys: Collection[str]) -> Recipe:
    """Hold out the validation or test split of a data set of `save_to_disk`, unless the user chooses another."""
    listed = Path(recipe.data.path, text_files.SAVED[1])
    if {"data.validation", "data.validation_share"} & {*keys} or "data.path" not in keys or not listed.is_file():
        return recipe
    splits = [one for one in read_json(listed)["splits"] if one != recipe.data.split]
    found = next((one for one in ("validation", "valid", "val", "dev", "eval", "test") if one in splits), None)
    if found:
        change = f"data.validation={listed.with_name(found)}"
        recipe = overrides.apply(recipe, [change])
        print(f"{change}: that split is held out; data.validation=none holds out examples of the other", flush=True)
    return recipe


def resumed(page: Recipe, folder: RunFolder, options: LaunchOptions) -> Recipe:
    """Return the recipe of the run in `folder`, with the page's permissions.

    Refuses a run of another model, one that names code, and one that another process writes.
    """
    run_lock.check(folder.path)
    held = run_folder.read_recipe(folder)
    if options.model is not None and held.model.path != paths.locate(page).model.path:
        raise UserError(f"{folder.path} has a run of {held.model.path}, not of {options.model}; add --output-dir.")
    for key in own_code.of_recipe(held).keys() - overrides.keys_of(options.overrides):
        if (value := overrides.value_of(held, key)) != overrides.value_of(page, key):
            raise UserError(
                f"{key}={value}: refusing to run code named only in a run folder; if you trust it, add {key}=... to "
                "--resume."
            )
    model = replace(held.model, trust_remote_code=page.model.trust_remote_code)
    return replace(held, model=model, data=replace(held.data, changed=False), profile=page.profile)


def machines_of(options: LaunchOptions, name: str) -> Machines:
    """Return the machines on which the ranks of the run `name` start; a cluster has to answer and to have the GPUs."""
    pool = None
    if options.hostfile:
        pool = hostfile.read(options.hostfile, options.include, options.exclude, options.nodes, options.gpus)
    gpus, nodes = visible_gpus(), options.nodes or 1
    cluster, allocation = ray_cluster.of(options), scheduler.allocation_of(options, name)
    if reserved := pool or cluster or allocation:
        ranks = reserved.ranks
    else:  # prepared ranks start on other machines
        ranks = rank_count(options.gpus, 0 if options.prepare else gpus) * nodes
    counted = pool or cluster
    ranks_each = counted.most_ranks if counted else ranks // nodes
    machines = Machines(pool, cluster, allocation, gpus, ranks, ranks_each, hardware=None)
    if options.prepare or (machines.elsewhere and not (pool and gpus)):
        return machines
    if not gpus:
        hardware: Cluster | None = forecast.cpu_ranks(ranks)
    elif pool is None:
        hardware = forecast.machines(ranks)
    else:
        equal = pool.ranks == pool.most_ranks * len(pool.hosts)
        hardware = forecast.machines(pool.most_ranks, len(pool.hosts)) if equal else None
    return replace(machines, hardware=hardware)


def with_deepspeed_file(
    request: Request, changed: Sequence[str], hardware: Cluster | None, documents: float | None
) -> Recipe:
    """Return the recipe with a DeepSpeed file for `deepspeed=auto`: the planner's choice or, without GPUs, the page's.

    The planner keeps the keys in `changed`, which the user has set. `hardware` is None if the GPUs are unknown;
    `documents` is the documents' mean length in tokens, if known.
    """
    if request.recipe.deepspeed != forecast.AUTO:
        return request.recipe
    recipe = replace(request.recipe, deepspeed=request.page.deepspeed)
    if hardware is None or recipe.draft.enabled:
        how = "" if recipe.draft.enabled else "; ds-recipes plan ... --gpu NAME --gpus N names one that fits"
        print(f"deepspeed=auto: the GPUs are unknown here, so the recipe keeps its {recipe.deepspeed}{how}", flush=True)
        return recipe
    located = preflight.with_dimensions(paths.locate(recipe))
    best = forecast.choose(located, changed, hardware, documents)
    print(f"deepspeed=auto: {' '.join(overrides.differences(located, best)) or best.deepspeed}", flush=True)
    return replace(best, model=recipe.model)


def small_draft(recipe: Recipe, ranks: int, given: Collection[str]) -> Recipe:
    """Return a draft that CPU ranks train in a minute: short sequences, and few per step; print what is reduced."""
    smaller: dict[str, int] = {}
    if recipe.sequence_length > DRAFT_LENGTH and "sequence_length" not in given:
        smaller["sequence_length"] = DRAFT_LENGTH
    if recipe.global_batch_size > DRAFT_BATCH * ranks and not {"global_batch_size", "micro_batch_size"} & {*given}:
        smaller["global_batch_size"] = DRAFT_BATCH * ranks
        smaller["micro_batch_size"] = recipe.method.least_micro_batch
    length = {key: value for key, value in smaller.items() if key == "sequence_length"}
    found = changed(recipe, **smaller) or changed(recipe, **length) or recipe  # GRPO's batches are whole groups
    if said := [one for one in overrides.differences(recipe, found) if not one.startswith("micro_batch_size")]:
        print(f"draft without GPUs: {' '.join(said)}, unless you set them", file=sys.stderr, flush=True)
    return found


def check(recipe: Recipe, request: Request, machines: Machines, options: LaunchOptions) -> None:
    """Check everything that can be checked before a rank starts, and print warnings about likely mistakes."""
    model = Path(recipe.model.path, "config.json")
    if model.exists():  # refuse sizes that no model can have, before anything computes with them
        config = base_model.config_of(model.parent)
        check_sizes(text_of(config), str(model))
    preflight.check_model(recipe)
    preflight.check_config(recipe, machines.ranks, machines.ranks_each)
    file = deepspeed_file.read(recipe.deepspeed)
    preflight.check_layout(recipe, file, machines.ranks, machines.ranks_each)
    given = overrides.keys_of(options.overrides)
    if file.content.get("scheduler") and (key := next((one for one in given if one.startswith("schedule.")), None)):
        raise UserError(f"{key}: the scheduler block of {recipe.deepspeed} replaces it; remove the block, or {key}.")
    counts.check_trained(preflight.with_dimensions(recipe), given)
    if request.folder:
        universal.check(recipe, request.folder, file, machines.ranks)
        if changed := overrides.differences(request.page, recipe, resumed=True):
            print(f"resuming with changed settings: {' '.join(changed)}", flush=True)
        for line in own_code.changed(recipe, request.page.code, recipe.code):
            print(f"resuming with a changed file: {line}", flush=True)
    restarts.check(recipe, options.max_restarts or 0)
    ranks_here = not (machines.elsewhere or options.prepare)
    if ranks_here and not machines.gpus and recipe.precision == "bf16" and not system.computes_bf16():
        slow = "precision=bf16: this CPU has no instructions for it; precision=fp32 takes about a tenth of the time"
        print(slow, file=sys.stderr, flush=True)
    if not machines.allocation:  # a cluster's nodes have their own environment
        preflight.check_trackers(recipe)
        system.check_cache()
    examples = preflight.check_data(recipe, listed=options.dry_run)
    chat_template.check(recipe)
    warnings: list[str | None] = []
    if options.dry_run and recipe.max_steps:  # the ranks print it otherwise
        warnings += updates.unreached(recipe, recipe.max_steps)
    # The ranks alone can count packed or cut sequences; elsewhere each example is one.
    if examples is not None and not (recipe.packing or recipe.method.name == "pretrain" or recipe.data.weights):
        sequences = examples
        if isinstance(recipe.method, Grpo):  # a sequence is an answer
            sequences *= recipe.method.group_size * recipe.method.iterations
        size = updates.Size(examples, sequences, sequences, None)
        warnings.append(updates.advice(recipe, size, machines.ranks))
    for warning in filter(None, [*warnings, borrowed.warning(recipe, request.page, given)]):
        print(warning, flush=True)
