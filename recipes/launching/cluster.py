"""A run that is given to a cluster, SLURM's or Kubernetes', which starts `node.py` on each of its nodes."""

import argparse
import json
import shutil
from dataclasses import replace

from recipes.launching import kubernetes, restarts, slurm
from recipes.launching.command import rank_environment, record
from recipes.spec import run_folder
from recipes.spec.errors import UserError
from recipes.spec.recipe import Recipe, to_dict
from recipes.spec.run_folder import RunFolder


def job_of(options: argparse.Namespace, recipe: Recipe) -> slurm.Job | None:
    """Return what a cluster is asked for; None: no cluster.

    Raises:
        UserError: the cluster does not have it.
    """
    if options.kubernetes:
        if options.resume:
            raise UserError("--kubernetes --resume: apply the run's manifests again; pods resume by themselves.")
        job = kubernetes.job(recipe.name, options.nodes, options.gpus)
    elif options.slurm:
        asked = (options.nodes, options.gpus, options.partition, options.time)
        job = slurm.job(recipe.name, *asked, dry_run=options.dry_run)
    else:
        return None
    return replace(job, restarts=options.max_restarts)


def submit(options: argparse.Namespace, job: slurm.Job, recipe: Recipe, folder: RunFolder) -> int:
    """Give the run to a cluster: submit a SLURM job and follow it, or write Kubernetes manifests.

    Raises:
        UserError: files that pods do not see; SLURM refuses the job.
    """
    environment = rank_environment(job.per_node, int(job.gpus))
    if options.slurm:
        texts = {str(slurm.path(folder)): slurm.script(job, folder, environment)}
    else:
        given = {"image": options.image or kubernetes.IMAGE, "volume": options.volume or kubernetes.VOLUME}
        given["environment"] = environment
        texts = kubernetes.texts(kubernetes.manifests(job, recipe, folder, given))
    if options.dry_run:
        print(json.dumps(to_dict(recipe), indent=2))
        for name, text in texts.items():
            print(f"# {name}\n{text}", end="")
        return 0
    new = not folder.recipe.exists()
    if options.resume:
        restarts.make_ready(recipe, folder, job.ranks)
    run_folder.write_recipe(folder, recipe)
    record(folder)
    if options.kubernetes:
        print(kubernetes.how_to(kubernetes.write(folder, texts)))
        return 0
    try:
        number = slurm.submit(folder, *texts.values(), environment)
    except UserError:
        if new:
            shutil.rmtree(folder.path)
        raise
    return slurm.follow(number, folder)
