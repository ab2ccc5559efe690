"""Writes the files of a SageMaker or SkyPilot job from the templates in this folder.

As on Kubernetes, every node runs `launching.node` in the project's image, with the run folder on shared storage. A job
that restarts after a preemption resumes from the newest complete checkpoint.
"""

import argparse
import os
import shlex
from pathlib import Path

from ...recipe.recipe import Recipe
from ...recipe.run_folder import RunFolder
from ..allocation import Allocation
from ..kubernetes import manifests
from ..templates import fill

ENGINES = ("sagemaker", "skypilot")
ML = Path("/opt/ml")
"""SageMaker's folder for a container's inputs and outputs."""
RUNS = f"{ML}/input/data/runs"
"""Folder of the channel `runs`, a file system that all instances share."""
RECIPE = f"{ML}/input/data/recipe"
"""Folder of the channel `recipe`: recipe.json and deepspeed.json."""
INSTANCES = {1: "ml.g6e.xlarge", 4: "ml.g6e.12xlarge", 8: "ml.p5.48xlarge"}
"""The script's default Amazon instance, by number of GPUs."""
ACCELERATOR = "H100"
"""The GPU in the SkyPilot file, where the user can change it."""


def mount(options: argparse.Namespace) -> str | None:
    """Return the mount point of the shared storage on a job's nodes, or None if the run is not such a job."""
    if options.sagemaker:
        return RUNS
    return manifests.MOUNT if options.skypilot or options.kubernetes else None


def texts(options: argparse.Namespace, asked: Allocation, recipe: Recipe, folder: RunFolder) -> dict[str, str]:
    """Return the files of a job by their names.

    Raises:
        UserError: the nodes cannot read a file, or the image or the volume has an invalid name.
    """
    image, volume = options.image or manifests.IMAGE, options.volume or manifests.VOLUME
    manifests.check_names(image, volume)
    engine = "sagemaker" if options.sagemaker else "skypilot"
    where = RECIPE if options.sagemaker else manifests.RECIPE_MOUNT
    found = manifests.files(recipe, mount(options) or "", where)
    values = {
        "name": manifests.object_name(f"{recipe.name}-{folder.path.name}"),
        "nodes": asked.nodes,
        "gpus": asked.ranks_per_node,
        "restarts": asked.restarts or manifests.RESTARTS,
        "image": image,
        "volume": volume,
        "environment": manifests.environment(os.environ) | {"HF_HOME": f"{mount(options)}/huggingface"},
        "port": manifests.PORT,
        "mount": mount(options),
        "recipe_mount": where,
        "accelerator": ACCELERATOR,
        "instance": INSTANCES.get(asked.ranks_per_node, INSTANCES[8]),
    }
    template = {"sagemaker": "sagemaker_job.py", "skypilot": "skypilot.yaml"}[engine]
    return found | {template: fill(Path(__file__).with_name(f"{template}.jinja"), **values)}


def how_to(engine: str, written: Path) -> str:
    """Return the commands that use the files."""
    if engine == "sagemaker":
        script = shlex.quote(str(written / "sagemaker_job.py"))
        return (
            f"script:    {script}\n"
            f"check it:  python {script} --role ROLE --check   (without an account; needs the SageMaker SDK)\n"
            f"start it:  python {script} --role ROLE --bucket s3://BUCKET/runs --file-system fs-ID --subnet ID ..."
        )
    file = shlex.quote(str(written / "skypilot.yaml"))
    return f"task:      {file}\nstart it:  cd {shlex.quote(str(written))} && sky jobs launch skypilot.yaml"
