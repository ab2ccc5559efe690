"""Kubernetes: manifests of one run for three kinds of cluster, told apart by what is installed there.

`job.yaml` needs nothing but Kubernetes (an indexed Job), `jobset.yaml` the JobSet controller, `trainjob.yaml` Kubeflow
Trainer. In all of them a pod is a node, runs `recipes.launching.node`, and goes on from the newest whole checkpoint
when it is started again.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.launching import variables
from recipes.launching.slurm import Job
from recipes.spec.errors import UserError
from recipes.spec.pages import ROOT
from recipes.spec.recipe import Recipe, names, to_dict
from recipes.spec.run_folder import RunFolder

IMAGE = "deepspeed-recipes:latest"
VOLUME = "runs"
MOUNT = "/runs"
"""Where pods see the shared volume (ReadWriteMany): run folders, data, Hugging Face's cache."""
PROJECT = "/workspace"
"""Where the image has this checkout (Dockerfile)."""
RECIPE = "/recipe"
SECRET = "deepspeed-recipes"
"""A Secret that may hold HF_TOKEN and WANDB_API_KEY; pods start without it too."""
PORT = 29500
RESTARTS = 3
"""Unless `--max-restarts` says otherwise."""
SHARED_MEMORY = "16Gi"
"""The most that /dev/shm may take of the pod's memory; Docker's 64 MiB are too few for NCCL and data loaders."""
GRACE = 300
"""Seconds between SIGTERM and SIGKILL, for the checkpoint."""
HERE_ONLY = ("DS_ACCELERATOR", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Variables that describe this machine, as paths do."""


def job(name: str, nodes: int | None, ranks: int | None) -> Job:
    """Return what to ask the cluster for: a GPU for each rank.

    Raises:
        UserError: fewer than one.
    """
    nodes, ranks = 1 if nodes is None else nodes, 1 if ranks is None else ranks
    if nodes < 1 or ranks < 1:
        raise UserError("--nodes and --gpus: at least 1.")
    return Job(name, nodes, ranks, gpus=True)


def manifests(asked: Job, recipe: Recipe, folder: RunFolder, options: Mapping[str, Any]) -> dict[str, list[dict]]:
    """Return the objects of each kind of cluster, by file name.

    Args:
        asked: nodes and ranks.
        recipe: with its local paths made absolute.
        folder: whose name the run has on the volume too.
        options: `image`, `volume`, and under `environment` the variables of the ranks.

    Raises:
        UserError: a file that pods do not see.
    """
    name = object_name(f"{recipe.name}-{folder.path.name}")
    material = _object("v1", "ConfigMap", name) | {"data": files(recipe)}

    def pod(master: str) -> dict[str, Any]:
        return pod_template(asked, name, master, options)

    return {
        "job.yaml": [material, _service(name), _job(asked, name, pod(f"{name}-0.{name}"))],
        "jobset.yaml": [material, _jobset(asked, name, pod(f"{name}-node-0-0.{name}"))],
        "trainjob.yaml": [material, *_trainjob(asked, name, pod(f"{name}-node-0-0.{name}"))],
    }


def object_name(text: str) -> str:
    """Return a name that Kubernetes takes: a DNS label, short enough for what controllers add to it."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:44].strip("-")


def files(recipe: Recipe) -> dict[str, str]:
    """Return the recipe and its DeepSpeed configuration as pods get them, their paths as pods see them.

    Raises:
        UserError: a file that is neither in this checkout nor on the volume.
    """
    config = Path(recipe.deepspeed).read_text(encoding="utf-8")
    fields = to_dict(recipe) | {"deepspeed": f"{RECIPE}/deepspeed.json"}
    fields["model"] = fields["model"] | {"path": _seen("model.path", recipe.model.path)}
    fields["model"]["chat_template"] = _seen("model.chat_template", recipe.model.chat_template)
    fields["data"] = fields["data"] | {"path": _each_seen("data.path", recipe.data.path)}
    fields["data"]["validation"] = recipe.data.validation and _each_seen("data.validation", recipe.data.validation)
    return {"recipe.json": json.dumps(fields, indent=2), "deepspeed.json": config}


def _each_seen(key: str, paths: str) -> str:
    return ",".join(_seen(key, path) for path in names(paths))


def _seen(key: str, path: str) -> str:
    if not path.startswith("/") or path.startswith(f"{MOUNT}/"):
        return path
    if Path(path).is_relative_to(ROOT):
        return f"{PROJECT}/{Path(path).relative_to(ROOT)}"
    raise UserError(f"{key}={path}: pods do not see it; copy it to the volume and name it {MOUNT}/{Path(path).name}.")


def pod_template(asked: Job, name: str, master: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod that is one node."""
    words = ["-m", "recipes.launching.node", f"{MOUNT}/{name}", "--recipe", f"{RECIPE}/recipe.json"]
    words += ["--nodes", str(asked.nodes), "--gpus", str(asked.per_node)]
    words += ["--master-addr", master, "--master-port", str(PORT)]
    limits = {"nvidia.com/gpu": str(asked.per_node)}
    container = {
        "name": "node",
        "image": options["image"],
        "command": ["python", *words],
        "env": environment(options["environment"]),
        "ports": [{"containerPort": PORT, "name": "ranks"}],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [
            {"name": "runs", "mountPath": MOUNT},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "recipe", "mountPath": RECIPE, "readOnly": True},
        ],
    }
    volumes = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": options["volume"]}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}},
        {"name": "recipe", "configMap": {"name": name}},
    ]
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "containers": [container],
        "volumes": volumes,
    }
    return {"metadata": {"labels": {"app.kubernetes.io/name": SECRET}}, "spec": spec}


def environment(ours: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what of our environment means something in a pod; secrets by reference only."""
    kept = {
        name: value
        for name, value in variables.travelling(ours).items()
        if name not in HERE_ONLY and not value.startswith(("/", "~"))
    }
    kept["HF_HOME"] = f"{MOUNT}/huggingface"  # one download for all nodes
    plain = [{"name": name, "value": value} for name, value in kept.items()]
    secret = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": name, "optional": True}}}
        for name in variables.SECRETS
    ]
    return plain + secret


def _object(version: str, kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}}


def _service(name: str) -> dict[str, Any]:
    """Return the headless service that gives the pods of a Job their names; they need them before they are ready."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}}
    return _object("v1", "Service", name) | {"spec": spec}


def _indexed(asked: Job, pod: dict[str, Any], restarts: int) -> dict[str, Any]:
    # A mistake of the user's (status 2) would be the same mistake again. A drained node is nobody's failure.
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [2]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "completionMode": "Indexed",
        "completions": asked.nodes,
        "parallelism": asked.nodes,
        "backoffLimit": restarts,
        "podFailurePolicy": {"rules": rules},
        "template": pod,
    }


def _job(asked: Job, name: str, pod: dict[str, Any]) -> dict[str, Any]:
    template = pod | {"spec": pod["spec"] | {"subdomain": name}}
    # When one pod fails the others lose it and fail too: a restart costs as many failures as there are nodes.
    return _object("batch/v1", "Job", name) | {
        "spec": _indexed(asked, template, (asked.restarts or RESTARTS) * asked.nodes)
    }


def _replicated(asked: Job, pod: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    """Return a JobSet's spec: any failure starts all pods again."""
    template = {"metadata": {"labels": labels}, "spec": _indexed(asked, pod, 0)}
    mistake = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": asked.restarts or RESTARTS, "rules": [mistake | {"name": "mistake"}]},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
    }


def _jobset(asked: Job, name: str, pod: dict[str, Any]) -> dict[str, Any]:
    return _object("jobset.x-k8s.io/v1alpha2", "JobSet", name) | {"spec": _replicated(asked, pod, {})}


def _trainjob(asked: Job, name: str, pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a runtime of our own and the TrainJob that asks for it; Trainer makes a JobSet of the two."""
    version = "trainer.kubeflow.org/v1alpha1"
    spec = _replicated(asked, pod, {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"})
    runtime = _object(version, "TrainingRuntime", name)
    runtime["metadata"]["labels"] = {"trainer.kubeflow.org/framework": "deepspeed"}
    runtime["spec"] = {"mlPolicy": {"numNodes": asked.nodes}, "template": {"spec": spec}}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    job = {"runtimeRef": reference, "trainer": {"numNodes": asked.nodes}}
    return [runtime, _object(version, "TrainJob", name) | {"spec": job}]


def texts(found: Mapping[str, list[dict]]) -> dict[str, str]:
    """Return the manifests as YAML, by file name; texts of several lines as blocks, for people to read."""
    import yaml

    def block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    dumper = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    dumper.add_representer(str, block)
    return {name: yaml.dump_all(objects, Dumper=dumper, sort_keys=False) for name, objects in found.items()}


def write(folder: RunFolder, written: Mapping[str, str]) -> Path:
    """Keep the manifests in the run folder and return where."""
    kept = folder.path / "kubernetes"
    kept.mkdir(parents=True, exist_ok=True)
    for file, text in written.items():
        (kept / file).write_text(text, encoding="utf-8")
    return kept


def how_to(kept: Path) -> str:
    """Return what to do with the manifests."""
    return f"""manifests: {kept}
apply one:  kubectl apply -f {kept / "job.yaml"}       (plain Kubernetes)
            kubectl apply -f {kept / "jobset.yaml"}    (with the JobSet controller)
            kubectl apply -f {kept / "trainjob.yaml"}  (with Kubeflow Trainer)
follow it:  kubectl logs -f -l app.kubernetes.io/name={SECRET}"""
