"""Writes the files of a SageMaker or SkyPilot job from the templates in this folder.

As on Kubernetes, every node runs `launching.node` in the project's image, with the run folder on shared storage. A job
that restarts after a preemption resumes from the newest complete checkpoint.
"""

import os
import shlex
from pathlib import Path

from ...recipe.errors import UserError
from ...recipe.recipe import Recipe
from ...recipe.run_folder import RunFolder
from .. import kubernetes
from ..options import Allocation
from ..templates import fill

ENGINES = {"sagemaker": "sagemaker_job.py", "skypilot": "skypilot.yaml"}
"""The file that starts the job, by the option of the launcher."""
ML = Path("/opt/ml")
"""SageMaker's folder for a container's inputs and outputs."""
RUNS = f"{ML}/input/data/runs"
"""Folder of the channel `runs`, a file system that all instances share."""
RECIPE = f"{ML}/input/data/recipe"
"""Folder of the channel `recipe`: recipe.json and deepspeed.json."""
INSTANCES = {1: "ml.g6e.xlarge", 4: "ml.g6e.12xlarge", 8: "ml.p5.48xlarge"}
"""The script's default Amazon instance, by number of GPUs; for other numbers the script requires one."""
MOST_RETRIES = 30
"""https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_RetryStrategy.html"""
ACCELERATOR = "H100"
"""The GPU in the SkyPilot file, where the user can change it."""


def mount(engine: str | None) -> str | None:
    """Return the mount point of the shared storage on a job's nodes, or None if the run is not such a job."""
    return {"sagemaker": RUNS, "skypilot": kubernetes.MOUNT, "kubernetes": kubernetes.MOUNT}.get(str(engine))


def texts(engine: str, image: str, volume: str, asked: Allocation, recipe: Recipe, folder: RunFolder) -> dict[str, str]:
    """Return the files of a job by their names."""
    if engine == "sagemaker" and asked.restarts > MOST_RETRIES:
        raise UserError(f"--max-restarts {asked.restarts}: SageMaker starts a job again at most {MOST_RETRIES} times.")
    where, shared = (RECIPE if engine == "sagemaker" else kubernetes.RECIPE_MOUNT), mount(engine)
    values = kubernetes.values_of(asked, recipe, folder, image, volume) | {
        "environment": kubernetes.variables(os.environ) | {"HF_HOME": f"{shared}/huggingface"},
        "mount": shared,
        "recipe_mount": where,
        "accelerator": ACCELERATOR,
        "instance": INSTANCES.get(asked.ranks_per_node),
    }
    template = Path(__file__).with_name(f"{ENGINES[engine]}.jinja")
    return kubernetes.files(recipe, shared or "", where) | {ENGINES[engine]: fill(template, **values)}


def how_to(engine: str, written: Path) -> str:
    """Return the commands that start a job from its files in the folder `written`."""
    file = shlex.quote(str(written / ENGINES[engine]))
    if engine == "sagemaker":
        return (
            f"script:    {file}\n"
            f"check it:  python {file} --role ROLE --check   (without an account; needs the SageMaker SDK)\n"
            f"start it:  python {file} --role ROLE --bucket s3://BUCKET/runs --file-system fs-ID --subnet ID ..."
        )
    return f"task:      {file}\nstart it:  cd {shlex.quote(str(written))} && sky jobs launch skypilot.yaml"
