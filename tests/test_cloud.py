"""Jobs for machines that a cloud rents: valid by SkyPilot's and SageMaker's own checks where those are installed."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deepspeed_recipes.commands import launch
from deepspeed_recipes.launching import cloud, node
from deepspeed_recipes.launching.cloud import sagemaker_node
from deepspeed_recipes.recipe.conversions import from_dict
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import RunFolder


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
    assert "max_retry_attempts=2" in text and "ml.p5.48xlarge" in text
    recipe = from_dict(json.loads((folder / "recipe.json").read_text()))
    assert recipe.deepspeed == f"{cloud.RECIPE}/deepspeed.json"
    assert json.loads((folder / "deepspeed.json").read_text())["zero_optimization"]


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
        (("--resume",), "nothing to resume"),
        (("--image", "a b"), "--image 'a b': not an image"),
        (("--slurm",), "give one of them, not both"),
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
