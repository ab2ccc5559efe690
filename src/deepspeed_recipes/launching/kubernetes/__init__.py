"""Writes a run's Kubernetes manifests, one file for each kind of cluster, from the template in this folder.

`job.yaml` needs only Kubernetes (an indexed Job), `jobset.yaml` the JobSet controller, `trainjob.yaml` Kubeflow
Trainer. In each of them a pod is a node: it runs `launching.node`, and after a restart resumes from the newest complete
checkpoint.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from ...recipe import own_code
from ...recipe.conversions import to_dict
from ...recipe.errors import UserError, check_no_credential
from ...recipe.files import Json
from ...recipe.project import PACKAGE
from ...recipe.recipe import Recipe, names
from ...recipe.run_folder import RunFolder
from .. import command
from ..options import Allocation
from ..templates import fill

MOUNT = "/runs"
"""Mount point of the shared volume (ReadWriteMany) in pods: run folders, data, Hugging Face's cache."""
PROJECT = "/workspace"
"""Folder of this checkout in the image (Dockerfile)."""
USER = 1000
"""The image's user id (Dockerfile)."""
RECIPE_MOUNT = "/recipe"
APP = "deepspeed-recipes"
"""The label of all pods, and the name of a Secret that may hold HF_TOKEN and WANDB_API_KEY; it is optional."""
PORT = 29500
RESTARTS = 3
"""Default number of restarts, without `--max-restarts`."""
SHARED_MEMORY = "16Gi"
"""Limit of /dev/shm, which counts as the pod's memory."""
GRACE = 300
"""Seconds between SIGTERM and SIGKILL."""
HERE_ONLY = ("DS_ACCELERATOR", "OMP_NUM_THREADS", *command.ALLOCATOR, "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Variables that describe this machine, like paths."""
PATHS = (
    *("model.path", "model.chat_template", "data.path", "data.validation", "distill.teacher", "distill.cache"),
    *own_code.WRITTEN,
)
"""Settings that may name files, or that name code in a file."""
KINDS = ("job", "jobset", "trainjob")


def allocation(name: str, nodes: int | None, ranks: int | None) -> Allocation:
    """Return the allocation to request from the cluster, with a GPU for each rank."""
    return Allocation(name, nodes or 1, ranks or 1, gpus=True)


def manifests(
    asked: Allocation, recipe: Recipe, folder: RunFolder, image: str, volume: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the manifests as YAML, by file name.

    `recipe` has absolute local paths. `environment` has the variables of the ranks. The run has the same name on the
    volume as here.
    """
    values = values_of(asked, recipe, folder, image, volume) | {
        "files": files(recipe),
        "environment": variables(environment),
        "secrets": command.SECRETS,
        "app": APP,
        "user": USER,
        "mount": MOUNT,
        "recipe_mount": RECIPE_MOUNT,
        "grace": GRACE,
        "shared_memory": SHARED_MEMORY,
    }
    template = Path(__file__).with_name("manifest.yaml.jinja")
    return {f"{kind}.yaml": fill(template, kind=kind, **values) for kind in KINDS}


def values_of(asked: Allocation, recipe: Recipe, folder: RunFolder, image: str, volume: str) -> Json:
    """Return the values that the files of every cluster's job name; refuse invalid names of an image or a volume."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.:/@-]*", image, re.ASCII):
        raise UserError(f"--image {image!r}: not an image name; write, for example, registry/name:tag.")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", volume):
        raise UserError(f"--volume {volume!r}: not a volume's name; use lower-case letters, digits, dots and dashes.")
    # A DNS label, short enough for what controllers append to it.
    name = re.sub(r"[^a-z0-9]+", "-", f"{recipe.name}-{folder.path.name}".lower()).strip("-")
    if len(name) > 44:  # the end, often a date, distinguishes runs
        name = f"{name[:37].strip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
    sizes = {"nodes": asked.nodes, "gpus": asked.ranks_per_node, "restarts": asked.restarts}
    return {"name": name, "image": image, "volume": volume, "port": PORT, **sizes}


def files(recipe: Recipe, mount: str = MOUNT, recipe_mount: str = RECIPE_MOUNT) -> dict[str, str]:
    """Return the recipe and its DeepSpeed configuration, with their paths in pods: in this checkout or on the volume.

    `mount` is the shared volume's mount point in pods, and `recipe_mount` the folder of these files there.
    """
    check_no_credential(to_dict(recipe), "in the job's files")
    config = Path(recipe.deepspeed).read_text(encoding="utf-8")
    fields = to_dict(recipe) | {"deepspeed": f"{recipe_mount}/deepspeed.json"}
    for key in PATHS:
        section, _, name = key.rpartition(".")
        inside = fields.get(section, {}) if section else fields
        if paths := inside.get(name):
            inside[name] = ",".join(_in_pod(key, path, mount) for path in names(paths))
    return {"recipe.json": json.dumps(fields, indent=2), "deepspeed.json": config}


def _in_pod(key: str, path: str, mount: str) -> str:
    if not path.startswith("/") or path.startswith(f"{mount}/"):
        return path
    if Path(path).is_relative_to(PACKAGE):
        return f"{PROJECT}/src/deepspeed_recipes/{Path(path).relative_to(PACKAGE)}"
    inside = f"{mount}/{Path(path).name}"
    raise UserError(f"{key}={path}: pods cannot read it; copy it to the volume and set {key}={inside}.")


def variables(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this environment that also apply in a pod, without secrets."""
    kept = {
        name: value
        for name, value in command.forwarded(ours).items()
        if name not in HERE_ONLY and not value.startswith(("/", "~"))
    }
    return kept | {"HF_HOME": f"{MOUNT}/huggingface"}  # one download for all nodes


def left_out(ours: Mapping[str, str]) -> list[str]:
    """Return the names of variables that a run may need but that are not written into a job's files."""
    return sorted({*command.forwarded(ours), *command.withheld(ours)} - {*variables(ours)})


def how_to(written: Path) -> str:
    """Return the commands that use the manifests."""
    job, jobset, trainjob = (shlex.quote(str(written / f"{kind}.yaml")) for kind in KINDS)
    return f"""manifests: {written}
apply one:  kubectl apply -f {job}       (plain Kubernetes)
            kubectl apply -f {jobset}    (with the JobSet controller)
            kubectl apply -f {trainjob}  (with Kubeflow Trainer)
follow it:  kubectl logs -f -l app.kubernetes.io/name={APP}"""
