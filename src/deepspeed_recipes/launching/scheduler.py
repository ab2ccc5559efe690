"""Submits a run to a scheduler, SLURM, Kubernetes or a cloud's, which starts `node.py` on each node."""

import argparse
import json
import os
import shutil
from dataclasses import replace

from ..recipe import run_folder
from ..recipe.conversions import to_dict
from ..recipe.errors import UserError
from ..recipe.recipe import Recipe
from ..recipe.run_folder import RunFolder
from . import restarts
from .allocation import Allocation
from .cloud import jobs
from .command import rank_environment, record
from .kubernetes import manifests
from .slurm import batch_job, partitions
from .templates import write


def allocation_of(options: argparse.Namespace, recipe: Recipe) -> Allocation | None:
    """Return the allocation to request from a cluster, or None if the run does not use a scheduler.

    Raises:
        UserError: the cluster does not have these resources.
    """
    if options.kubernetes:
        if options.resume:
            raise UserError("--kubernetes --resume: apply the run's manifests again; pods resume by themselves.")
        asked = manifests.allocation(recipe.name, options.nodes, options.gpus)
    elif options.sagemaker or options.skypilot:
        if options.resume:
            raise UserError("--resume: start the job again; a run in the same folder resumes by itself.")
        asked = manifests.allocation(recipe.name, options.nodes, options.gpus)
    elif options.slurm:
        wanted = (options.nodes, options.gpus, options.partition, options.time)
        asked = partitions.allocation(recipe.name, *wanted, dry_run=options.dry_run)
    else:
        return None
    return replace(asked, restarts=options.max_restarts)


def submit(options: argparse.Namespace, asked: Allocation, recipe: Recipe, folder: RunFolder) -> int:
    """Submit a SLURM job and follow it, or write the files of another kind of job; return the exit status.

    Raises:
        UserError: a file that pods cannot read, or SLURM rejects the job.
    """
    environment = rank_environment(asked.ranks_per_node, int(asked.gpus))
    if "OMP_NUM_THREADS" not in os.environ:
        del environment["OMP_NUM_THREADS"]  # it is for this machine; each node counts its own cores
    if options.slurm:
        script = batch_job.script(asked, folder, environment)
        texts = {str(batch_job.path(folder)): script}
    elif not options.kubernetes:
        texts = jobs.texts(options, asked, recipe, folder)
    else:
        given = {"image": options.image or manifests.IMAGE, "volume": options.volume or manifests.VOLUME}
        texts = manifests.manifests(asked, recipe, folder, given | {"environment": environment})
    if options.dry_run:
        print(json.dumps(to_dict(recipe), indent=2))
        for name, text in texts.items():
            print(f"# {name}\n{text}", end="")
        return 0
    new = not folder.recipe.exists()
    if options.resume:
        restarts.prepare(recipe, folder, asked.ranks, restarts.intact_checkpoint(recipe, folder))
    run_folder.write_recipe(folder, recipe)
    record(folder)
    if options.kubernetes:
        print(manifests.how_to(write(folder.path / "kubernetes", texts)))
        return 0
    if not options.slurm:
        engine = "sagemaker" if options.sagemaker else "skypilot"
        print(jobs.how_to(engine, write(folder.path / engine, texts)))
        return 0
    try:
        number = batch_job.submit(folder, script, environment)
    except UserError:
        if new:
            shutil.rmtree(folder.path)
        raise
    return batch_job.follow(number, folder)
