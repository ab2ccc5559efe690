"""Rules about parallel layouts, each proven by a run on two ranks."""

import json
from pathlib import Path

import pytest

from recipes.zero_config.lint import judge
from recipes.zero_config.rule import Facts
from tests.launching import ROOT, deepspeed_launch, run


def template(name: str, drop: tuple[str, ...] = (), **zero: object) -> dict:
    config = json.loads((ROOT / "configs" / f"{name}.json").read_text())
    config["zero_optimization"].update(zero)
    return {key: value for key, value in config.items() if key not in drop}


def outcomes(folder: Path, mode: str, variants: dict[str, dict]) -> dict[str, dict]:
    """Train each variant; its name begins with the template whose model and data it gets."""
    for name, config in variants.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    files = [str(folder / f"{name}.json") for name in variants]
    run(deepspeed_launch("use_config.py", mode, str(folder / "seen.json"), *files), folder)
    return json.loads((folder / "seen.json").read_text())


def rules(config: dict, **facts: object) -> set[str]:
    return {finding.rule for finding in judge(config, Facts(world_size=2, **facts))}


def test_sequence_parallel_gradients_are_right_at_stage_3_only(tmp_path: Path):
    variants = {
        "right": template("sequence_parallel"),
        "stage2": template("sequence_parallel", stage=2),
        "noscatter": template("sequence_parallel", reduce_scatter=False),
    }
    norms = {}
    for name, config in variants.items():  # Ulysses replaces the attention once per process
        (tmp_path / name).mkdir()
        # From one checkpoint: under zero.Init a model built from its config gets other random weights.
        seen = outcomes(tmp_path / name, "trainer", {"sequence_parallel-pretrained": config})
        norms[name] = seen["sequence_parallel-pretrained"]["grad_norm"][0]
    assert norms["stage2"] == pytest.approx(2 * norms["right"], rel=0.01)
    assert norms["noscatter"] > 1.2 * norms["right"]  # only what goes through a bucket is reduced wrongly
    found = {name: rules(config, sequence_parallel_size=2) for name, config in variants.items()}
    assert "sequence-parallel-below-stage-3" in found["stage2"]
    assert "sequence-parallel-without-scatter" in found["noscatter"]
    assert not any(rule.startswith("sequence") for rule in found["right"])


def test_expert_parallel_needs_its_optimizer_and_a_preset(tmp_path: Path):
    unknown = template("expert_parallel")
    unknown["expert_parallel"] = {**unknown["expert_parallel"], "preset_model": "gpt9"}
    variants = {
        "expert_parallel-preset": unknown,
        "expert_parallel-optimizer": template("expert_parallel", drop=("optimizer",)),
    }
    seen = outcomes(tmp_path, "trainer", variants)
    assert "Unknown preset_model" in seen["expert_parallel-preset"]["error"]
    assert "marked as MoE" in seen["expert_parallel-optimizer"]["error"]
    assert "unknown-expert-preset" in rules(unknown)
    assert "expert-parallel-without-optimizer" in rules(variants["expert_parallel-optimizer"])


def test_tensor_parallel_refuses_adapters_and_zero3_checkpoints(tmp_path: Path):
    variants = {
        "tensor_parallel-pretrained": template("tensor_parallel", stage=3),
        "tensor_parallel-lora": template("tensor_parallel"),
    }
    seen = outcomes(tmp_path, "trainer", variants)
    assert "Weight conversions" in seen["tensor_parallel-pretrained"]["error"]
    assert "error" in seen["tensor_parallel-lora"]
    assert "tensor-parallel-at-stage-3" in rules(variants["tensor_parallel-pretrained"])
    assert "tensor-parallel-with-lora" in rules(variants["tensor_parallel-lora"], lora=True)


def test_the_pipeline_refuses_stage_2(tmp_path: Path):
    config = template("pipeline", stage=2)
    seen = outcomes(tmp_path, "plain", {"pipeline-stage2": config})
    assert "incompatible with pipeline parallelism" in seen["pipeline-stage2"]["error"]
    assert "pipeline-with-stage-2-or-3" in rules(config, pipeline_stages=2)
