"""Kubernetes manifests: strictly valid by the published schemas, and consistent in themselves.

Jobs for machines that a cloud rents: valid by SkyPilot's and SageMaker's own checks where those are installed.

Templates of job scripts and manifests: every value is quoted, none may be missing, and any text survives.
"""

import ast
import copy
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import jinja2
import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from packaging.utils import canonicalize_name

from deepspeed_recipes.commands import launch
from deepspeed_recipes.launching import cloud, kubernetes, node, paths
from deepspeed_recipes.launching.cloud import sagemaker_node
from deepspeed_recipes.launching.options import Allocation
from deepspeed_recipes.launching.templates import fill, shell, yaml_block, yaml_scalar
from deepspeed_recipes.recipe import overrides, pages, run_folder
from deepspeed_recipes.recipe.conversions import from_dict, to_dict
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.project import PACKAGE
from deepspeed_recipes.recipe.run_folder import COMPLETE, RunFolder, read_jsonl, write_json
from tests import ROOT
from tests.versions import pins

SCHEMAS = Path(__file__).parent / "kubernetes_schemas"
CORE = {"Job": "batch.v1", "Service": "core.v1", "ConfigMap": "core.v1"}
RECIPES = (
    ("tiny", "full", 1, 1, ()),
    ("tiny", "dpo_lora", 1, 2, ()),
    ("tiny", "grpo", 1, 1, ("callbacks=/runs/mine.py:Mine", "data.metric=exact_match,/runs/mine.py:score")),
    ("tiny", "distill", 1, 1, ("distill.top_k=4", "distill.cache=/runs/cache")),
    ("llama3-8b", "full", 2, 8, ("global_batch_size=128",)),
    ("llama3-8b", "lora", 1, 4, ("wandb.mode=disabled",)),
    ("llama3-8b", "qlora", 1, 1, ("data.path=/runs/data/train.jsonl", "data.validation=none", "data.metric=loss")),
    ("llama3-70b", "full_offload", 4, 8, ("global_batch_size=256",)),
    ("qwen3-8b", "full", 2, 4, ("layout.tensor=2", "deepspeed=tensor_parallel.json")),
    ("mixtral-8x7b", "expert", 2, 8, ("global_batch_size=128",)),
    ("mistral-7b", "lora", 1, 8, ("sequence_length=8192", "layout.sequence=2", "deepspeed=sequence_parallel.json")),
    ("gemma3-4b", "full", 3, 8, ("model.path=/runs/models/gemma", "seed=1")),
)
FREE = ("labels", "annotations", "limits", "requests", "selector", "data", "nodeSelector", "matchLabels")
"""Maps whose keys are the user's."""


def strict(schema):
    """Return a schema that refuses every field it does not know, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(part) for key, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


@pytest.fixture(scope="module")
def validators():
    """Return a validator for each kind of object."""
    core = strict(json.loads((SCHEMAS / "core.json").read_text()))
    found = {}
    for kind, group in CORE.items():
        schema = {"$ref": f"#/components/schemas/io.k8s.api.{group}.{kind}", "components": {"schemas": core}}
        found[kind] = jsonschema.Draft7Validator(schema)
    for kind in ("JobSet", "TrainJob", "TrainingRuntime"):
        schema = strict(json.loads((SCHEMAS / f"{kind}.json").read_text()))
        schema["properties"]["metadata"] = {
            "$ref": "#/components/schemas/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
        }
        found[kind] = jsonschema.Draft7Validator(schema | {"components": {"schemas": core}})
    return found


def recipe_of(family, variant, changes):
    return paths.locate(overrides.apply(pages.find(family, variant), changes), kubernetes.MOUNT)


def objects(name, variant, nodes, gpus, changes, environment=None):
    """Return every object of every file, as a reader of the YAML gets them."""
    recipe = recipe_of(name, variant, changes)
    options = {"image": "registry/recipes:1", "volume": "claim", "environment": environment or {"NCCL_DEBUG": "INFO"}}
    asked = kubernetes.allocation(recipe.name, nodes, gpus)
    texts = kubernetes.manifests(asked, recipe, RunFolder(Path("/home/ada/20261121-120000")), **options)
    return {file: list(yaml.safe_load_all(text)) for file, text in texts.items()}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: "-".join(recipe[:2]))
def test_manifests_are_valid_and_consistent(recipe, validators):
    name, variant, nodes, gpus, changes = recipe
    files = objects(name, variant, nodes, gpus, changes)
    kinds = {file: [one["kind"] for one in found] for file, found in files.items()}
    assert kinds == {
        "job.yaml": ["ConfigMap", "Service", "Job"],
        "jobset.yaml": ["ConfigMap", "JobSet"],
        "trainjob.yaml": ["ConfigMap", "TrainingRuntime", "TrainJob"],
    }
    for found in files.values():
        for one in found:
            validators[one["kind"]].validate(one)
        (run,) = {one["metadata"]["name"] for one in found}
        # What controllers add to it still has to be a host's name.
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", run) and len(f"{run}-node-0-{nodes}") <= 63
        spec, master = pod_and_master(found[-2] if found[-1]["kind"] == "TrainJob" else found[-1])
        (container,) = spec["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": str(gpus)}
        assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in spec["volumes"]}
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": kubernetes.USER,
            "runAsGroup": kubernetes.USER,
            "fsGroup": kubernetes.USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        confined = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == confined and spec["automountServiceAccountToken"] is False
        words = container["command"][3:]
        assert words[words.index("--master-addr") + 1] == master
        assert words[words.index("--nodes") + 1] == str(nodes) and words[words.index("--gpus") + 1] == str(gpus)
        assert words[0].startswith("/runs/") and spec["restartPolicy"] == "Never"
        carried = from_dict(json.loads(found[0]["data"]["recipe.json"]))
        asked = recipe_of(name, variant, changes)
        assert carried.deepspeed == "/recipe/deepspeed.json"
        assert json.loads(found[0]["data"]["deepspeed.json"]) == json.loads(Path(asked.deepspeed).read_text())
        assert str(ROOT) not in found[0]["data"]["recipe.json"]
        in_image = from_dict(json.loads(json.dumps(to_dict(asked)).replace(str(ROOT), kubernetes.PROJECT)))
        assert carried == replace(in_image, deepspeed=carried.deepspeed)


def pod_and_master(one):
    """Return the pod's spec and the name that the first pod will have there."""
    run = one["metadata"]["name"]
    if one["kind"] == "Job":
        spec = one["spec"]["template"]["spec"]
        return spec, f"{run}-0.{spec['subdomain']}"  # kubernetes.io: Job > Completion mode: $(job-name)-$(index)
    jobset = one["spec"] if one["kind"] == "JobSet" else one["spec"]["template"]["spec"]
    (job,) = jobset["replicatedJobs"]
    assert jobset["network"]["enableDNSHostnames"]
    return job["template"]["spec"]["template"]["spec"], f"{run}-{job['name']}-0-0.{run}"


def places(value, path=()):
    """Yield the path of every map whose keys are Kubernetes' own."""
    if isinstance(value, dict) and (not path or path[-1] not in FREE):
        yield path
        for key, part in value.items():
            yield from places(part, (*path, key))
    if isinstance(value, list):
        for index, part in enumerate(value):
            yield from places(part, (*path, index))


def test_a_field_that_no_schema_knows_is_refused_everywhere(validators):
    count = 0
    for one in {one["kind"]: one for found in objects(*RECIPES[2]).values() for one in found}.values():
        for path in places(one):
            wrong = copy.deepcopy(one)
            inside = wrong
            for key in path:
                inside = inside[key]
            inside["replicaz"] = 1
            assert not validators[one["kind"]].is_valid(wrong), (one["kind"], path)
            count += 1
    assert count > 100


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("job.yaml", ("spec", "completions"), "two"),
        ("job.yaml", ("spec", "template", "spec", "containers"), {}),
        ("jobset.yaml", ("spec", "failurePolicy", "rules", 0, "action"), "GiveUp"),
        ("jobset.yaml", ("spec", "replicatedJobs", 0, "template", "spec", "backoffLimit"), "0"),
        ("trainjob.yaml", ("spec", "trainer", "numNodes"), -1),
        ("trainjob.yaml", ("spec", "runtimeRef"), {"kind": "TrainingRuntime"}),
    ],
)
def test_a_wrong_value_is_refused(file, path, value, validators):
    one = objects(*RECIPES[2])[file][-1]
    inside = one
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    assert not validators[one["kind"]].is_valid(one)


def test_secrets_are_references_and_local_paths_are_left_out(validators):
    token = "hf_" + "a1B2" * 8
    environment = {
        "HF_TOKEN": token,
        "WANDB_API_KEY": "0123456789" * 4,
        "HF_HOME": "/home/ada/hf",
        "NCCL_DEBUG": "INFO",
    }
    environment |= {"http_proxy": "http://ada:pass@proxy:1", "GLOO_SOCKET_IFNAME": "wlan0", "WANDB_MODE": "offline"}
    text = json.dumps(objects(*RECIPES[0], environment=environment))
    for hidden in (token, "0123456789", "/home/ada", "pass@proxy", "wlan0"):
        assert hidden not in text
    job = objects(*RECIPES[0], environment=environment)["job.yaml"][-1]
    env = {one["name"]: one for one in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["WANDB_MODE"]["value"] == "offline" and env["HF_HOME"]["value"].startswith("/runs/")
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {
        "name": "deepspeed-recipes",
        "key": "HF_TOKEN",
        "optional": True,
    }


def test_a_file_that_pods_cannot_see_is_refused(tmp_path, refused):
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    said = refused("tiny", "full", "--kubernetes", f"data.path={mine}", "--output-dir", tmp_path / "run")
    assert f"data.path={mine}" in said and "/runs/mine.jsonl" in said
    assert len(said.strip().splitlines()) == 1 and not (tmp_path / "run").exists()
    (tmp_path / "mine.py").write_text("def mine(example):\n    return example\n")
    for wrong, hint in (
        (["data.transform=mine.py:mine"], "copy it to the volume and set data.transform=/runs/mine.py:mine."),
        (["--nodes", 0], "at least 1"),
        (["--resume", "--output-dir", tmp_path], "start it again with kubectl replace --force -f FILE"),
        (["--slurm"], "not both"),
        (["--partition", "p"], "needs --slurm"),
    ):
        assert hint in refused("tiny", "full", "--kubernetes", *wrong)


def test_the_launcher_keeps_the_manifests_in_the_run_folder(tmp_path, capsys, printed_by, monkeypatch):
    for name in kubernetes.left_out(os.environ):
        monkeypatch.delenv(name)
    here = {"HF_TOKEN": "hf_" + "a1B2" * 8, "NCCL_TOPO_FILE": "/etc/topo.xml", "HF_HOME": "/hf", "NCCL_DEBUG": "INFO"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    words = ["tiny", "full", "--kubernetes", "--nodes", "2", "--max-restarts", "5"]
    words += ["--output-dir", str(tmp_path / "run")]
    assert launch.main([*words, "--dry-run"]) == 0 and not (tmp_path / "run").exists()
    shown, said = capsys.readouterr()
    assert "not in the job's files, as secrets or of this machine: HF_TOKEN, NCCL_TOPO_FILE; set them" in said
    done = printed_by("launch", *words)
    for name in ("job.yaml", "jobset.yaml", "trainjob.yaml"):
        text = (tmp_path / "run" / "kubernetes" / name).read_text()
        assert text in shown and f"kubectl apply -f {tmp_path}/run/kubernetes/{name}" in done
    assert (tmp_path / "run" / "recipe.json").exists()
    assert "backoffLimit: 10\n" in shown and shown.count("maxRestarts: 5\n") == 2
    for more, restarts in ((["--max-restarts", "0"], 0), ([], 3)):
        assert launch.main([*words[:5], *more, "--dry-run"]) == 0
        assert capsys.readouterr().out.count(f"maxRestarts: {restarts}\n") == 2, "0 is none, not the default"


def test_the_image_has_the_checkout_where_the_manifests_say():
    text = (ROOT / "Dockerfile").read_text()
    assert f"WORKDIR {kubernetes.PROJECT}\n" in text and f"PYTHONPATH={kubernetes.PROJECT}/src " in text
    # It is set up as any machine is, by what `make install` does, with the same pins.
    assert "-m venv" in text and "-m venv" in (ROOT / "Makefile").read_text()


def test_every_pinned_file_has_its_hash_in_the_image():
    pip = next(line for line in (ROOT / "Dockerfile").read_text().splitlines() if "pip install" in line)
    assert "--require-hashes -r requirements.lock" in pip
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.+!]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    locked = dict(line.split(" ")[0].split("==") for line in lines)
    assert len(locked) == len(lines)
    wanted = {canonicalize_name(name): version for name, version in pins().items()}
    assert {name: locked.get(name) for name in wanted} == wanted
    # Beyond the pins only what torch's CUDA build brings along.
    assert all(re.match("nvidia-|cuda-|triton$", name) for name in locked.keys() - wanted.keys())
    assert any(name.startswith("nvidia-") for name in locked)


def test_the_image_is_pinned_and_not_roots():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    bases = [line for line in lines if line.startswith("FROM ")]
    assert bases and all(re.fullmatch(r"FROM [\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", line) for line in bases)
    users = [line for line in lines if line.startswith("USER ")]
    assert users[-1] == f"USER {kubernetes.USER}:{kubernetes.USER}"
    # What a run writes to belongs to that user.
    owner = f"--chown={kubernetes.USER}:{kubernetes.USER}"
    assert all(owner in line for line in lines if line.startswith("COPY "))
    assert lines.index(users[-1]) < next(index for index, line in enumerate(lines) if "-m venv" in line)


CREDENTIALS = (
    *(".env", "deploy/.env.local", ".netrc", ".deepspeed_env", "keys/server.pem", "server.key", ".ssh/id_ed25519"),
    *("id_rsa", "home/id_ecdsa.pub", ".aws/credentials", "gcp-credentials.json", ".kube/config", "secrets.yaml"),
    *("hf_token.txt", ".pypirc", ".git/config"),
)
WANTED = (
    "recipes/tiny.py",
    "src/deepspeed_recipes/samples/tiny_model/tokenizer.json",
    "configs/zero3.json",
    "constraints.txt",
)


def ignored(path, patterns):
    """Return whether .dockerignore leaves a file out of the image: a pattern matches it or a folder that holds it."""
    parents = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    regexes = (re.escape(one).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*") for one in patterns)
    return any(re.fullmatch(regex, parent) for regex in regexes for parent in parents)


def test_no_credentials_get_into_the_image():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert not any(line.startswith("!") for line in patterns)
    assert [path for path in CREDENTIALS if not ignored(path, patterns)] == []
    assert [path for path in WANTED if ignored(path, patterns)] == []
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    if tracked.returncode == 0:  # a checkout: the image holds all of it
        assert [path for path in tracked.stdout.splitlines() if ignored(path, patterns)] == []


def test_a_restarted_node_forgets_the_lost_attempt(tmp_path):
    run = RunFolder(tmp_path / "run")
    write_json(tmp_path / "recipe.json", to_dict(pages.find("tiny", "full")))
    node.prepare(run, tmp_path / "recipe.json", 2)
    assert run.recipe.read_text() == (tmp_path / "recipe.json").read_text()
    write_json(run.deepspeed, {})
    (run.checkpoints / "checkpoint-5").mkdir(parents=True)
    run.metrics.write_text('{"step": 1}\n')
    node.prepare(run, None, 2)  # half a checkpoint and no whole one: from the start
    assert not run.metrics.exists() and not list(run.checkpoints.iterdir())
    run_folder.accept_recipe(run)  # the ranks do, before their first record
    for step in (5, 10):
        (run.checkpoints / f"checkpoint-{step}").mkdir(parents=True)
    write_json(run.checkpoints / "checkpoint-5" / COMPLETE, {"world_size": 2, "layout": {}})
    run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 9)))
    write_json(run.summary, {"stopped": True})
    assert not run_folder.is_finished(run)
    node.prepare(run, None, 2)
    assert [row["step"] for row in read_jsonl(run.metrics)] == [1, 2, 3, 4, 5]
    assert [path.name for path in run.checkpoints.iterdir()] == ["checkpoint-5"] and not run.summary.exists()
    write_json(run.summary, {"stopped": False})
    assert run_folder.is_finished(run)
    assert node.main([str(run.path), "--nodes", "2", "--gpus", "1", "--master-addr", "x", "--master-port", "1"]) == 0


def test_a_node_does_not_resume_the_run_of_another_recipe(tmp_path):
    run, recipe = RunFolder(tmp_path / "run"), tmp_path / "recipe.json"
    write_json(run.recipe, to_dict(pages.find("tiny", "full")))
    write_json(run.summary, {"stopped": False})
    words = [str(run.path), "--recipe", str(recipe), "--nodes", "1", "--gpus", "1", "--master-addr", "x"]
    for changes, said in (((), None), (("seed=7",), "has a run with other settings; the job's are seed=7;")):
        write_json(recipe, to_dict(overrides.apply(pages.find("tiny", "full"), changes)))
        with pytest.raises(UserError, match=said) if said else nullcontext():
            assert node.main([*words, "--master-port", "1"]) == 0


def test_a_node_asks_for_what_the_run_needs(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        node.main([str(tmp_path)])
    assert "required: --nodes, --gpus, --master-addr, --master-port" in capsys.readouterr().err


@pytest.mark.parametrize(("variable", "value"), [("SLURM_NODEID", "1"), ("JOB_COMPLETION_INDEX", "3")])
def test_a_node_knows_its_number(variable, value, monkeypatch):
    assert node.node_rank() == 0
    monkeypatch.setenv(variable, value)
    assert node.node_rank() == int(value)


def test_two_names_never_become_one_object():
    recipe = replace(pages.find("tiny", "full"), family="Qwen3_MoE", size="30b.a3b")
    values = kubernetes.values_of(Allocation("x", 1, 1, True), recipe, RunFolder(Path("RUN_1")), "i", "v")
    assert values["name"] == "qwen3-moe-30b-a3b-full-run-1"
    dated = [RunFolder(Path(f"20261128-12000{second}-of-the-first-sweep")) for second in (0, 1)]
    first, second = (kubernetes.values_of(Allocation("x", 1, 1, True), recipe, one, "i", "v")["name"] for one in dated)
    assert first != second and first[:37] == second[:37] and len(first) == len(second) == 44
    for words in (["--kubernetes", "--gpus", "0"], ["--kubernetes", "--nodes", "0"], ["--slurm", "--nodes", "0"]):
        with pytest.raises(UserError, match=f"{words[1]} 0: must be at least 1"):
            launch.main(["tiny", "full", *words])


@pytest.fixture
def job(tmp_path):
    """Return a function that writes a job of an engine, and gives its folder."""

    def write(engine, *words):
        run = RunFolder(tmp_path / "run")
        assert launch.main(["tiny", "full", f"--{engine}", "--output-dir", str(run.path), *map(str, words)]) == 0
        return run.path / engine

    return write


def test_a_skypilot_task_runs_the_node_of_each_machine(job):
    folder = job(
        "skypilot", "--nodes", 2, "--gpus", 8, "--image", "here/image:1", "--volume", "mine", "global_batch_size=64"
    )
    task = yaml.safe_load((folder / "skypilot.yaml").read_text())
    assert (task["num_nodes"], task["volumes"]) == (2, {"/runs": "mine"})
    assert task["resources"]["accelerators"] == "H100:8" and task["resources"]["image_id"] == "docker:here/image:1"
    for path, file in task["file_mounts"].items():
        assert Path(path).parent == Path("/recipe") and (folder / file).is_file()
    stubs = 'python() { shift 2; printf \'%s\\n\' "$@"; }\ncd() { :; }\nexec() { "$@"; }\n'
    variables = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", stubs + task["run"]], env=variables, capture_output=True, text=True)
    words = done.stdout.split()
    assert words[0] == "/runs/tiny-3m-full-run", done
    assert words[1:] == [
        *("--recipe", "/recipe/recipe.json", "--nodes", "2", "--gpus", "8", "--node-rank", "1"),
        *("--master-addr", "10.0.0.1", "--master-port", "29500"),
    ]
    recipe = from_dict(json.loads((folder / "recipe.json").read_text()))
    assert recipe.deepspeed == "/recipe/deepspeed.json" and str(recipe.model.path).startswith("/workspace/")


@pytest.mark.skipif(not importlib.util.find_spec("sky"), reason="no SkyPilot (pip install skypilot)")
def test_skypilots_schema_accepts_the_task(job):
    from sky.utils import schemas

    jsonschema = pytest.importorskip("jsonschema")
    task = yaml.safe_load((job("skypilot") / "skypilot.yaml").read_text())
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


def test_a_sagemaker_script_names_the_run_and_its_files(job):
    folder = job("sagemaker", "--nodes", 2, "--gpus", 8, "global_batch_size=64", "--max-restarts", 2, "save_steps=10")
    text = (folder / "sagemaker_job.py").read_text()
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and node.targets[0].id in ("NAME", "NODES", "GPUS", "ENVIRONMENT")
    }
    assert (values["NAME"], values["NODES"], values["GPUS"]) == ("tiny-3m-full-run", 2, 8)
    assert values["ENVIRONMENT"]["HF_HOME"] == "/opt/ml/input/data/runs/huggingface"
    assert "max_retry_attempts=2," in text and "INSTANCE = 'ml.p5.48xlarge'\n" in text
    asked, recipe = Allocation("x", 1, 2, True), recipe_of("tiny", "full", ())  # no restarts, and no usual instance
    text = cloud.texts("sagemaker", "image", "volume", asked, recipe, RunFolder(folder))["sagemaker_job.py"]
    assert "max_retry_attempts=None," in text and "INSTANCE = None\n" in text
    recipe = from_dict(json.loads((folder / "recipe.json").read_text()))
    assert recipe.deepspeed == f"{cloud.RECIPE}/deepspeed.json"
    assert json.loads((folder / "deepspeed.json").read_text())["zero_optimization"]


def test_a_sagemaker_job_gets_the_secrets_that_are_named(job, monkeypatch):
    sdk = {name: MagicMock() for name in ("boto3", "sagemaker")}
    sdk |= {f"sagemaker.{name}": getattr(sdk["sagemaker"], name) for name in ("estimator", "inputs", "s3")}
    for name, module in sdk.items():
        monkeypatch.setitem(sys.modules, name, module)
    script = job("sagemaker") / "sagemaker_job.py"
    main = runpy.run_path(str(script))["main"]
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setattr(sys, "argv", ["job", "--role", "r", "--check", "--secret", "HF_TOKEN"])
    main()
    assert sdk["sagemaker"].estimator.Estimator.call_args.kwargs["environment"]["HF_TOKEN"] == "hf_x"
    assert "hf_x" not in script.read_text()
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(SystemExit, match="--secret HF_TOKEN: this variable is not set"):
        main()


@pytest.mark.skipif(not importlib.util.find_spec("sagemaker"), reason="no SageMaker SDK (pip install 'sagemaker<3')")
@pytest.mark.parametrize("more", [("--file-system", "fs-1", "--subnet", "s", "--security-group", "g"), ("--spot",)])
def test_the_sdk_accepts_the_script(job, more):
    script = job("sagemaker") / "sagemaker_job.py"
    words = [sys.executable, str(script), "--role", "arn:aws:iam::123456789012:role/x", "--check", *more]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and "tiny-3m-full-run: 1 x ml." in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("data.path=/home/me/x.jsonl",), "copy it to the volume and set data.path=/opt/ml/input/data/runs/x.jsonl"),
        (("--nodes", 0), "--nodes 0: must be at least 1"),
        (("--gpus", 0), "--gpus 0: must be at least 1"),
        (("--resume",), "--sagemaker --resume: a job resumes by itself; start it again with the command that started"),
        (("--image", "a b"), "--image 'a b': not an image"),
        (("--slurm",), "give one of them, not both"),
        (("--max-restarts", 31, "save_steps=5"), "--max-restarts 31: SageMaker starts a job again at most 30 times."),
    ],
)
def test_what_no_job_can_do_is_refused(tmp_path, words, said, refused):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    words = [str(word).replace("/home/me", str(tmp_path)) for word in words]
    assert said in refused("tiny", "pretrain", "--sagemaker", "--output-dir", tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()


def instance(ml, hosts, own, shared=True):
    """Write what SageMaker writes on an instance, and return the arguments of `place`."""
    (ml / "input" / "config").mkdir(parents=True)
    (ml / "input" / "data" / ("runs" if shared else "recipe")).mkdir(parents=True)
    text = json.dumps({"hosts": hosts, "current_host": own})
    (ml / "input" / "config" / "resourceconfig.json").write_text(text)
    return ("first", 8, "29500", ml)


def test_an_instance_finds_its_place(tmp_path):
    hosts = [f"algo-{number}" for number in range(1, 13)]
    found = sagemaker_node.place(*instance(tmp_path, sorted(hosts), "algo-10"))
    assert found[0] == str(tmp_path / "input" / "data" / "runs" / "first")
    assert found[found.index("--node-rank") + 1] == "9" and found[found.index("--master-addr") + 1] == "algo-1"


def test_one_instance_keeps_its_run_where_sagemaker_saves_it(tmp_path):
    found = sagemaker_node.place(*instance(tmp_path, ["algo-1"], "algo-1", shared=False))
    assert found[0] == str(tmp_path / "checkpoints" / "first") and found[found.index("--nodes") + 1] == "1"


def test_instances_that_share_nothing_are_refused(tmp_path):
    asked = instance(tmp_path, ["algo-1", "algo-2"], "algo-1", shared=False)
    with pytest.raises(UserError, match="2 instances need a file system: add --file-system"):
        sagemaker_node.place(*asked)


def test_the_reason_of_a_failure_is_where_sagemaker_looks_for_it(tmp_path, monkeypatch, capsys):
    instance(tmp_path, ["algo-1"], "algo-1", shared=False)

    def fails(words):
        print("rank 0 on here was killed by SIGKILL", file=sys.stderr)
        return 137

    monkeypatch.setattr(node, "main", fails)
    assert sagemaker_node.main(["first", "--gpus", "1"], tmp_path) == 137
    assert (tmp_path / "output" / "failure").read_text() == "rank 0 on here was killed by SIGKILL"
    assert "killed by SIGKILL" in capsys.readouterr().err
    monkeypatch.setattr(node, "main", lambda words: 0)
    (tmp_path / "output" / "failure").unlink()
    assert sagemaker_node.main(["first", "--gpus", "1"], tmp_path) == 0
    assert not (tmp_path / "output" / "failure").exists()


TEMPLATES = sorted((PACKAGE / "launching").rglob("*.jinja"))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
"""Any text but lone surrogates, which no UTF-8 file can hold."""


def test_every_value_in_a_template_passes_through_a_filter():
    assert {path.name for path in TEMPLATES} >= {"job.sbatch.jinja", "manifest.yaml.jinja", "job_spec.yaml.jinja"}
    for path in TEMPLATES:
        kind = path.suffixes[-2]
        # The commands of a SkyPilot task are shell within YAML.
        wanted = {".sbatch": ("shell",), ".py": ("python",)}.get(kind, ("yaml", "yaml_block", "shell"))
        values = re.findall(r"{{(.*?)}}", path.read_text(encoding="utf-8"))
        for value in values:
            assert re.search(r"\| (\w+)(\(\d+\))? $", value)[1] in wanted, (path.name, value)


def test_a_missing_value_is_an_error(tmp_path):
    (tmp_path / "a.jinja").write_text("{{ name | yaml }} {{ other.name | shell }}\n")
    with pytest.raises(jinja2.UndefinedError, match="'name' is undefined"):
        fill(tmp_path / "a.jinja", other={})
    with pytest.raises(jinja2.UndefinedError, match="no attribute 'name'"):
        fill(tmp_path / "a.jinja", name="x", other={})


@given(TEXT)
def test_the_shell_filter_makes_one_word_of_any_text(text):
    assert shlex.split(shell(text)) == [text]


def test_a_shell_reads_what_was_quoted():
    for text in ("a b", "it's", '"$HOME" `id` $(id)', "new\nline", "*", "", "\\", "ä 😀"):
        done = subprocess.run(["bash", "-c", f"printf %s {shell(text)}"], capture_output=True, text=True, check=True)
        assert done.stdout == text


@given(st.one_of(TEXT, st.booleans(), st.integers(), st.none()))
def test_the_yaml_filter_keeps_any_value_on_one_line(value):
    text = yaml_scalar(value)
    assert len(text.splitlines()) == 1 and yaml.safe_load(f"key: {text}\n") == {"key": value}


@given(st.one_of(TEXT, st.lists(TEXT, min_size=2).map("\n".join)), st.integers(1, 8))
def test_a_block_keeps_any_text(text, indent):
    written = f"outer:\n{' ' * indent}key: {yaml_block(text, indent + 2)}\nlast: 1\n"
    assert yaml.safe_load(written) == {"outer": {"key": text}, "last": 1}


def test_json_is_a_block_for_people_to_read():
    assert yaml_block('{\n  "a": 1\n}\n', 4) == '|\n    {\n      "a": 1\n    }'
    assert yaml_block("{}", 4) == "|-\n    {}"
