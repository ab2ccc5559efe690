"""Every template trains, unmodified, in each of the four ways in which people use one."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import yaml
from deepspeed.accelerator import get_accelerator

from deepspeed_recipes.machine import ops
from deepspeed_recipes.recipe.deepspeed_file import read
from deepspeed_recipes.recipe.recipe import Lora
from deepspeed_recipes.recipe.run_folder import RunFolder, write_recipe
from deepspeed_recipes.training import run as training_run
from tests.launching import BIN, ROOT, WORKERS, accelerate_launch, gpus, run
from tests.ranks import free_port, read_logs
from tests.small import small
from tests.tiers import tiered

LIBAIO = Path("/usr/include/libaio.h").exists()
CONFIGS = sorted((ROOT / "configs").glob("*.json"))
# The kernels of these exist for CUDA only; tests below give them to DeepSpeed's own config class.
CUDA = ("fp16", "zeropp", "zero3_lora", "superoffload", "deepcompile")
RUN = sorted(path.stem for path in CONFIGS if path.stem not in CUDA)
ACCELERATE = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))

STAGES = {
    "zero0": 0,
    "zero1": 1,
    "zero1_bf16_states": 1,
    "zero2": 2,
    "zero2_offload": 2,
    "zenflow": 2,
    "pipeline": 1,
    "tensor_parallel": 1,
    "expert_parallel": 1,
}
# What shows, in the running engine, that the template's feature is there.
ACTIVE = {
    "zero0": lambda seen: seen["optimizer"] == "FP16_UnfusedOptimizer",
    "zero1": lambda seen: seen["optimizer"] == "DeepSpeedZeroOptimizer",
    "zero2": lambda seen: seen["optimizer"] == "DeepSpeedZeroOptimizer",
    "zero3": lambda seen: seen["sharded"] == seen["parameters"] // 2 and seen["persistent"] < seen["parameters"] / 2,
    "zero2_offload": lambda seen: seen["offload_optimizer"] and seen["basic"] == "DeepSpeedCPUAdam",
    "zero3_offload": lambda seen: seen["offload_optimizer"] and seen["basic"] == "DeepSpeedCPUAdam",
    "zero3_offload_params": lambda seen: seen["offload_param"] and seen["offload_optimizer"],
    # Two bf16 bytes per parameter, three fp32 states, all of it in files.
    "zero3_nvme": lambda seen: seen["nvme_bytes"] > 14 * seen["parameters"],
    "bf16_states": lambda seen: seen["state_dtypes"] == ["torch.bfloat16"],
    "zero1_bf16_states": lambda seen: seen["state_dtypes"] == ["torch.bfloat16"],
    "zero3_moe": lambda seen: seen["leaves"] == 2,
    "zenflow": lambda seen: seen["zenflow"] and seen["basic"] == "ZenFlowCPUAdam",
    "pipeline": lambda seen: seen["optimizer"] == "BF16_Optimizer" and seen["accumulates"] == "torch.float32",
    # The small model's weights are all smaller than an adapter of a large one.
    "zero3_adapters": lambda seen: seen["persistent"] == seen["parameters"],
    "zero3_hpz": lambda seen: seen["hpz"] == 2,
    "tensor_parallel": lambda seen: seen["tensor"] == 2 and seen["q_proj"] == [16, 32],
    "sequence_parallel": lambda seen: seen["sequence"] == 2,
    "expert_parallel": lambda seen: seen["experts"] == 2,
}


def template(name: str) -> Path:
    return ROOT / "configs" / f"{name}.json"


def check(seen: dict, name: str) -> None:
    assert "error" not in seen, seen.get("trace")
    assert seen["world"] == seen["engine_world"] == 2
    assert seen["stage"] == STAGES.get(name, 3)
    assert seen["steps"] == 2
    assert seen["finite"]
    assert ACTIVE[name](seen), seen


def often(case: tuple[str, str]) -> bool:
    """Return whether `make test` runs a template this way: each with the Trainer, a few in a plain loop."""
    name, mode = case
    return (mode == "trainer" and name != "zero3_nvme") or (mode == "plain" and name in ("zero1", "zero3", "pipeline"))


def test_every_template_is_accounted_for():
    assert len(CONFIGS) == 23
    assert {path.stem for path in CONFIGS} == {*CUDA, *ACTIVE}


@pytest.mark.parametrize(("name", "mode"), tiered(product(RUN, ("trainer", "sft", "plain")), often))
def test_template_trains(used, mode: str, name: str):
    if name == "zero3_nvme" and not LIBAIO:
        pytest.skip("/usr/include/libaio.h is missing (Debian's libaio-dev): nothing can be written to NVMe")
    seen = used(mode, template(name))
    check(seen, name)
    if mode == "trainer":  # what the launcher compiles is what DeepSpeed asks for, no more and no less
        assert set(seen["ops"]) == {op.name for op in (ops.SHARED_MEMORY, *ops.needed(read(template(name))))}
    if name == "pipeline" and mode == "plain":
        assert (seen["engine"], seen["stages"]) == ("PipelineEngine", 2)


@pytest.fixture(scope="module")
def accelerate():
    """Return a function that runs `accelerate launch` in a folder with a file of configs/accelerate."""
    return lambda folder, *arguments: run(accelerate_launch(*arguments), folder)


@pytest.fixture(scope="module")
def launched(accelerate, tmp_path_factory) -> Path:
    """Train with every template under one real `accelerate launch`, each in a fork of the two ranks."""
    folder = tmp_path_factory.mktemp("accelerate")
    (folder / "configs").symlink_to(ROOT / "configs")  # the YAML's path starts where one launches
    files = [str(template(name)) for name in RUN if LIBAIO or name != "zero3_nvme"]
    accelerate(folder, "zero3.yaml", str(WORKERS / "use_config.py"), "accelerate", str(folder), *files)
    return folder


@pytest.mark.every
@pytest.mark.parametrize("name", RUN)
def test_template_trains_under_accelerate_launch(launched: Path, name: str):
    if name == "zero3_nvme" and not LIBAIO:
        pytest.skip("/usr/include/libaio.h is missing (Debian's libaio-dev): nothing can be written to NVMe")
    check(json.loads((launched / name / "seen.json").read_text()), name)


@pytest.mark.every
@pytest.mark.parametrize("file", ACCELERATE, ids=lambda file: file.stem)
def test_every_accelerate_file_starts_its_ranks_with_its_template(accelerate, tmp_path: Path, file: Path):
    """What reaches the ranks; that a template trains when it reaches them is the test above."""
    content = yaml.safe_load(file.read_text())
    script = [str(WORKERS / "write_environment.py"), str(tmp_path)]
    if content["num_machines"] == 1:
        accelerate(tmp_path, file.name, *script)
    else:  # two hosts of one rank, both of them this machine
        hosts = ["--main_process_ip", "127.0.0.1", "--num_processes", "2"]
        hosts += ["--main_process_port", str(free_port())]
        with ThreadPoolExecutor() as both:
            list(both.map(lambda rank: accelerate(tmp_path, file.name, *hosts, "--machine_rank", rank, *script), "01"))
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert {rank["WORLD_SIZE"] for rank in seen} == {"2"}
    for rank in seen:
        if content["distributed_type"] == "FSDP":
            assert (rank["ACCELERATE_USE_FSDP"], rank["FSDP_VERSION"]) == ("true", "2")
        else:
            named = content["deepspeed_config"]["deepspeed_config_file"]
            assert rank["ACCELERATE_USE_DEEPSPEED"] == "true"
            assert rank["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == named
            stage = json.loads((ROOT / named).read_text())["zero_optimization"]["stage"]
            assert rank["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == str(stage == 3).lower()


@pytest.mark.parametrize("name", CUDA)
def test_template_for_cuda_loads(name: str):
    from deepspeed_recipes.config.lint import ask_deepspeed
    from deepspeed_recipes.config.resolve import Numbers, resolve

    numbers = Numbers(world_size=8, hidden_size=4096, precision="fp16" if name == "fp16" else "bf16")
    assert ask_deepspeed(resolve(json.loads(template(name).read_text()), numbers), world_size=8) is None


@pytest.mark.parametrize("name", CUDA)
def test_template_for_cuda_trains_where_there_is_a_gpu(tmp_path: Path, name: str):
    needed = 8 if name == "zeropp" else 1
    if gpus() < needed:
        pytest.skip(f"needs {needed} GPU{'s' * (needed > 1)}, and this machine has {gpus()}")
    head = [str(BIN / "deepspeed"), "--no_local_rank", "--num_gpus", str(needed), "--master_port", str(free_port())]
    script = [str(WORKERS / "use_config.py"), "trainer", str(tmp_path), str(template(name))]
    run([*head, *script], tmp_path, on_gpu=True)
    seen = json.loads((tmp_path / name / "seen.json").read_text())
    assert "error" not in seen, seen.get("trace")
    assert (seen["stage"], seen["steps"], seen["world"]) == (2 if name == "fp16" else 3, 2, needed)
    assert seen["finite"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_template_is_strict_json(path: Path):
    from deepspeed_recipes.config.read import read

    document = read(path)
    assert not document.problems
    assert document.value == json.loads(path.read_text())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_template_has_no_finding(path: Path):
    """But for what DeepSpeed does without ZeRO in 16 bits, whatever else a file says."""
    from deepspeed_recipes.config.lint import lint

    found = [finding.rule for finding in lint(path, gpu_memory_gib=24)]
    assert found == (["step-of-zeros"] if path.stem == "zero0" else [])


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("zeropp", {}, "zeropp.json: zero_quantized_weights is computed by GPUs, of which this machine has none"),
        ("zero3_lora", {"lora": Lora()}, "zero_quantized_nontrainable_weights is computed by GPUs"),
        ("fp16", {"precision": "fp16"}, "precision=fp16: the processors of this machine do not compute in fp16"),
    ],
)
def test_what_only_gpus_compute_is_refused_on_others(ranks, tmp_path, model_folder, conversations, name, changes, said):
    if name == "fp16" and get_accelerator().is_fp16_supported():
        pytest.skip("processors with AVX512-FP16 compute in fp16")
    folder = RunFolder(tmp_path / "run")
    write_recipe(folder, small(model_folder, conversations, f"{name}.json", **changes))
    assert ranks.run(training_run.main, str(folder.path), log=tmp_path / "log") == [2, 2]
    assert said in read_logs(tmp_path / "log")[0]
