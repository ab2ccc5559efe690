"""Submits a run to a scheduler, SLURM, Kubernetes or a cloud's, which starts `node.py` on each node."""

import os
import shlex
import shutil
import sys
from dataclasses import replace

from ..recipe import files, run_folder
from ..recipe.errors import UserError
from ..recipe.recipe import Recipe
from ..recipe.run_folder import RunFolder
from . import cloud, kubernetes, restarts, slurm
from .command import rank_environment, record
from .options import IMAGE, VOLUME, Allocation, LaunchOptions
from .templates import write


def allocation_of(options: LaunchOptions, name: str) -> Allocation | None:
    """Return the allocation to request from a cluster, or None if the run does not use a scheduler."""
    usual = 0
    if options.engine == "slurm":
        wanted = (options.nodes, options.gpus, options.partition, options.time)
        asked = slurm.allocation(name, *wanted, dry_run=options.dry_run or options.write_only)
        asked = slurm.with_options(asked, options)
    elif options.engine in ("kubernetes", *cloud.ENGINES):
        asked = kubernetes.allocation(name, options.nodes, options.gpus)
        usual = kubernetes.RESTARTS
    else:
        return None
    return replace(asked, restarts=usual if options.max_restarts is None else options.max_restarts)


def texts(options: LaunchOptions, asked: Allocation, recipe: Recipe, folder: RunFolder) -> dict[str, str]:
    """Return the files of a job by name: SLURM's script, manifests, or those of a cloud."""
    image, volume = options.image or IMAGE, options.volume or VOLUME
    if options.slurm:
        return {str(slurm.path(folder)): slurm.script(asked, folder, _environment(asked))}
    if options.kubernetes:
        found = kubernetes.manifests(asked, recipe, folder, image, volume, _environment(asked))
    else:
        found = cloud.texts(str(options.engine), image, volume, asked, recipe, folder)
    if left := kubernetes.left_out(os.environ):
        print(
            f"not in the job's files, as secrets or of this machine: {', '.join(left)}; set them in the job if needed",
            file=sys.stderr,
            flush=True,
        )
    return found


def _environment(asked: Allocation) -> dict[str, str]:
    return rank_environment(asked.ranks_per_node, int(asked.gpus), here=False)


def submit(options: LaunchOptions, asked: Allocation, recipe: Recipe, folder: RunFolder) -> int:
    """Submit a SLURM job and follow it, or only write the files of a job; return the exit status."""
    found = texts(options, asked, recipe, folder)
    new = not folder.recipe.exists()
    if options.resume:
        restarts.prepare(recipe, folder, asked.ranks, restarts.intact_checkpoint(recipe, folder))
    run_folder.write_recipe(folder, recipe)
    record(folder)
    if options.slurm:
        files.write_text(slurm.path(folder), found[str(slurm.path(folder))])
        if options.write_only:
            print(f"written; submit it with: {shlex.join(['sbatch', str(slurm.path(folder))])}")
            return 0
        try:
            number = slurm.submit(folder, _environment(asked))
        except UserError:
            if new:
                shutil.rmtree(folder.path)
            raise
        return slurm.follow(number, folder)
    written = write(folder.path / str(options.engine), found)
    print(kubernetes.how_to(written) if options.kubernetes else cloud.how_to(str(options.engine), written))
    return 0
