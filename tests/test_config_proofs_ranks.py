"""Rules about parallel layouts, each proven by a run on two ranks."""

import json
import tempfile
from pathlib import Path

import pytest

from deepspeed_recipes.config.lint import judge
from deepspeed_recipes.config.rule import Facts
from tests.launching import ROOT, train_with


def template(name: str, drop: tuple[str, ...] = (), **zero: object) -> dict:
    config = json.loads((ROOT / "configs" / f"{name}.json").read_text())
    config["zero_optimization"].update(zero)
    return {key: value for key, value in config.items() if key not in drop}


@pytest.fixture
def outcome(ranks, tmp_path):
    """Return a function that trains with a config, whose name starts with the template that gives model and data."""

    def train(mode: str, name: str, config: dict) -> dict:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        (folder / f"{name}.json").write_text(json.dumps(config))
        return train_with(ranks, folder, mode, folder / f"{name}.json")

    return train


def rules(config: dict, **facts: object) -> set[str]:
    return {finding.rule for finding in judge(config, Facts(world_size=2, **facts))}


@pytest.mark.every
def test_sequence_parallel_gradients_are_right_at_stage_3_only(outcome):
    variants = {
        "right": template("sequence_parallel"),
        "stage2": template("sequence_parallel", stage=2),
        "noscatter": template("sequence_parallel", reduce_scatter=False),
    }
    # From one checkpoint: under zero.Init a model built from its config gets other random weights.
    seen = {name: outcome("trainer", "sequence_parallel-pretrained", config) for name, config in variants.items()}
    norms = {name: what["grad_norm"][0] for name, what in seen.items()}
    assert norms["stage2"] == pytest.approx(2 * norms["right"], rel=0.01)
    assert norms["noscatter"] > 1.2 * norms["right"]  # only what goes through a bucket is reduced wrongly
    found = {name: rules(config, sequence_parallel_size=2) for name, config in variants.items()}
    assert "sequence-parallel-below-stage-3" in found["stage2"]
    assert "sequence-parallel-without-scatter" in found["noscatter"]
    assert not any(rule.startswith("sequence") for rule in found["right"])


def test_expert_parallel_needs_its_optimizer_and_a_preset(outcome):
    unknown = template("expert_parallel")
    unknown["expert_parallel"] = {**unknown["expert_parallel"], "preset_model": "gpt9"}
    variants = {
        "expert_parallel-preset": unknown,
        "expert_parallel-optimizer": template("expert_parallel", drop=("optimizer",)),
    }
    seen = {name: outcome("trainer", name, config) for name, config in variants.items()}
    assert "Unknown preset_model" in seen["expert_parallel-preset"]["error"]
    assert "marked as MoE" in seen["expert_parallel-optimizer"]["error"]
    assert "unknown-expert-preset" in rules(unknown)
    assert "expert-parallel-without-optimizer" in rules(variants["expert_parallel-optimizer"])


def test_tensor_parallel_refuses_adapters_and_zero3_checkpoints(outcome):
    variants = {
        "tensor_parallel-pretrained": template("tensor_parallel", stage=3),
        "tensor_parallel-lora": template("tensor_parallel"),
    }
    seen = {name: outcome("trainer", name, config) for name, config in variants.items()}
    assert "Weight conversions" in seen["tensor_parallel-pretrained"]["error"]
    assert "error" in seen["tensor_parallel-lora"]
    assert "tensor-parallel-at-stage-3" in rules(variants["tensor_parallel-pretrained"])
    assert "tensor-parallel-with-lora" in rules(variants["tensor_parallel-lora"], lora=True)


def test_the_pipeline_refuses_stage_2(outcome):
    config = template("pipeline", stage=2)
    seen = outcome("plain", "pipeline-stage2", config)
    assert "incompatible with pipeline parallelism" in seen["error"]
    assert "pipeline-with-stage-2-or-3" in rules(config, pipeline_stages=2)
