"""Every template trains, unmodified, by each of the ways in which people use one."""

import json
from pathlib import Path

import pytest

from tests.launching import ROOT, used

CONFIGS = sorted((ROOT / "configs").glob("*.json"))
# The kernels of these exist for CUDA only; tests below give them to DeepSpeed's own config class.
CUDA = ("fp16", "zeropp", "zero3_lora", "superoffload", "deepcompile")
# Templates that share a process, and those whose process groups need one of their own.
TOGETHER = (
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero2_offload",
    "zero3_offload",
    "zero3_offload_params",
    "zero3_nvme",
    "bf16_states",
    "zero3_moe",
    "zenflow",
    "zero3_hpz",
    "pipeline",  # last: the grid of a PipelineModule stays for the rest of the process
)
ALONE = ("tensor_parallel", "sequence_parallel", "expert_parallel")
MODES = ("trainer", "sft", "accelerate", "plain")

STAGES = {
    "zero0": 0,
    "zero1": 1,
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
    "zero3": lambda seen: seen["sharded"] == seen["parameters"] // 2,
    "zero2_offload": lambda seen: seen["offload_optimizer"] and seen["basic"] == "DeepSpeedCPUAdam",
    "zero3_offload": lambda seen: seen["offload_optimizer"] and seen["basic"] == "DeepSpeedCPUAdam",
    "zero3_offload_params": lambda seen: seen["offload_param"] and seen["offload_optimizer"],
    # Two bf16 bytes per parameter, three fp32 states, all of it in files.
    "zero3_nvme": lambda seen: seen["nvme_bytes"] > 14 * seen["parameters"],
    "bf16_states": lambda seen: seen["state_dtypes"] == ["torch.bfloat16"],
    "zero3_moe": lambda seen: seen["leaves"] == 2,
    "zenflow": lambda seen: seen["zenflow"] and seen["basic"] == "ZenFlowCPUAdam",
    "pipeline": lambda seen: seen["optimizer"] == "BF16_Optimizer" and seen["accumulates"] == "torch.float32",
    "zero3_hpz": lambda seen: seen["hpz"] == 2,
    "tensor_parallel": lambda seen: seen["tensor"] == 2 and seen["q_proj"] == [16, 32],
    "sequence_parallel": lambda seen: seen["sequence"] == 2,
    "expert_parallel": lambda seen: seen["experts"] == 2,
}


def test_every_template_is_accounted_for():
    names = {path.stem for path in CONFIGS}
    assert len(names) == 21
    assert names == {*CUDA, *TOGETHER, *ALONE} == {*CUDA, *ACTIVE}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*TOGETHER, *ALONE])
def test_template_trains(mode: str, name: str):
    seen = (used(mode, *TOGETHER) if name in TOGETHER else used(mode, name))[name]
    assert "error" not in seen, seen.get("trace")
    assert seen["world"] == seen["engine_world"] == 2
    assert seen["stage"] == STAGES.get(name, 3)
    assert seen["steps"] == 2
    assert seen["finite"]
    assert ACTIVE[name](seen), seen
    if name == "pipeline" and mode == "plain":
        assert (seen["engine"], seen["stages"]) == ("PipelineEngine", 2)


@pytest.mark.parametrize("name", CUDA)
def test_template_for_cuda_loads(name: str):
    from recipes.zero_config.lint import ask_deepspeed
    from recipes.zero_config.resolve import Numbers, resolve

    template = json.loads((ROOT / "configs" / f"{name}.json").read_text())
    numbers = Numbers(world_size=8, hidden_size=4096, precision="fp16" if name == "fp16" else "bf16")
    assert ask_deepspeed(resolve(template, numbers), world_size=8) is None


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_template_is_strict_json(path: Path):
    from recipes.zero_config.read import read

    document = read(path)
    assert not document.problems
    assert document.value == json.loads(path.read_text())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_template_has_no_finding(path: Path):
    from recipes.zero_config.lint import lint

    assert lint(path, gpu_memory_gib=24) == []
