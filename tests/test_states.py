"""The planner predicts the model states of a rank to 1 %: all its tensors are measured, each storage once."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from transformers import AutoModelForCausalLM

from deepspeed_recipes.planning.cost.states import WIDTH, state_bytes
from deepspeed_recipes.planning.cost.training_setup import TrainingSetup
from deepspeed_recipes.recipe.layout import balanced, rank_position
from deepspeed_recipes.recipe.recipe import Layout
from deepspeed_recipes.recipe.run_folder import RunFolder, write_recipe
from tests.ranks import read_logs
from tests.small import small
from tests.tiers import tiered
from tests.versions import needs
from tests.workers import measure_layouts, measure_states

HALF = measure_states.LAYERS // 2
MOMENTS = ("forward", "backward", "step")


def cases(ranks: int) -> list[dict[str, Any]]:
    """Return ways to train: on two ranks all of them, on one and four a choice."""
    shared: dict[str, Any] = {"precision": "bf16", "accumulation": 2}
    found = [{**shared, "stage": stage} for stage in range(4)]
    found += [{**shared, "stage": stage, "rank": 4} for stage in (2, 3)]
    found += [{**shared, "stage": 3, "offload": True}]
    if ranks != 2:
        return found
    found += [{**shared, "precision": "fp32", "stage": stage} for stage in range(4)]
    found += [{**shared, "stage": stage, "frozen": HALF} for stage in range(4)]
    found += [{**shared, "stage": stage, "fp32_accumulation": True} for stage in (2, 3)]
    found += [{**shared, "stage": stage, "bf16_states": True} for stage in (1, 2, 3)]
    found += [{**shared, "stage": 3, "sub_group": 10**5}]
    for precision in ("bf16", "fp32"):
        found += [{**shared, "precision": precision, "stage": stage, "expert_ranks": 2} for stage in (1, 2, 3)]
    found += [{**shared, "precision": "fp32", "stage": stage, "offload": True} for stage in (2, 3)]
    found += [{**shared, "stage": 2, "offload": True}]
    for precision in ("bf16", "fp32"):
        found += [{**shared, "precision": precision, "stage": n, "optimizer": "adamw_8bit"} for n in range(4)]
        stages = range(precision == "bf16", 4)
        found += [{**shared, "precision": precision, "stage": n, "optimizer": "muon"} for n in stages]
    found += [{**shared, "accumulation": 1, "stage": stage, "offload": True} for stage in (2, 3)]
    # Last, since DeepSpeed lets go of this optimizer only when it makes another.
    return [*found, {**shared, "stage": 1, "fp32_accumulation": True}]


def predicted(case: dict[str, Any], moment: str = "backward") -> float:
    setup = TrainingSetup(
        case["ranks"],
        zero_stage=case["stage"],
        precision=case["precision"],
        gradient_accumulation_steps=case["accumulation"],
        offload_optimizer="cpu" if case.get("offload") else "none",
        optimizer=case.get("optimizer", "adamw"),
        sub_group_size=case.get("sub_group", 10**9),
        **{name: case[name] for name in ("fp32_accumulation", "bf16_states") if name in case},
    )
    if spread := case.get("expert_ranks"):  # all are trained, and every share of the experts is sharded like a model
        parts = (case["parameters"] - case["routed"], None), (case["routed"] / spread, case["ranks"] // spread)
        return sum(sum(vars(state_bytes(size, setup, ranks=ranks)).values()) for size, ranks in parts)
    matrix = measure_states.WIDTH**2 * WIDTH[case["precision"]]
    beside = 0
    if (case["stage"], moment) == (3, "forward"):
        beside = matrix  # the last weight is still whole
    elif (case.get("optimizer"), case["stage"], moment) == ("muon", 0, "step"):
        # Of one matrix, while its update is orthogonalised, in half precision where the CPU has it: nothing beside the
        # states of a real model.
        beside = (4 if get_accelerator().is_fp16_supported() else 7) * matrix
    frozen = WIDTH[case["precision"]] * (case["parameters"] - case["trainable"])
    frozen /= case["ranks"] if case["stage"] == 3 else 1
    return sum(vars(state_bytes(case["trainable"], setup, moment)).values()) + frozen + beside


def measure(ranks, folder, count, some=slice(None)):
    """Return the cases of `count` ranks with what each rank holds."""
    asked = cases(count)[some]
    ranks.check(measure_states.main, asked, world_size=count, log=folder / "log", timeout=500)
    lines = [line for text in read_logs(folder / "log") for line in text.splitlines() if line.startswith("{")]
    assert len(lines) == count * len(asked)
    return [{**json.loads(line), "ranks": count} for line in lines]


@pytest.fixture(scope="module", params=tiered(("some", "all"), ("some",)))
def measured(request, ranks, tmp_path_factory):
    """Return what two ranks hold, of the first cases or of all."""
    some = slice(4) if request.param == "some" else slice(None)
    return measure(ranks, tmp_path_factory.mktemp("measured"), 2, some)


def test_what_each_rank_holds_is_what_is_predicted_to_one_percent(measured):
    agree(measured)


@pytest.mark.every
@pytest.mark.parametrize("count", [1, 4])
def test_so_it_is_on_other_numbers_of_ranks(ranks, tmp_path, count):
    agree(measure(ranks, tmp_path, count))


def agree(measured):
    """Fail unless every rank holds what is predicted, to one percent."""
    for case in measured:
        for moment in MOMENTS if not case.get("expert_ranks") else ("backward",):
            assert case["bytes"][moment] == pytest.approx(predicted(case, moment), rel=0.01), (moment, case)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stage": lambda case: (case["stage"] + 1) % 4},
        {"precision": lambda case: {"bf16": "fp32", "fp32": "bf16"}[case["precision"]]},
        {"trainable": lambda case: case["trainable"] * 0.9},
        {"ranks": lambda case: case["ranks"] * 2},
    ],
)
def test_another_stage_precision_or_share_is_noticed(measured, wrong):
    ((key, change),) = wrong.items()
    special = ("offload", "expert_ranks", "rank", "bf16_states", "sub_group", "fp32_accumulation", "optimizer")
    others = [case for case in measured if case["ranks"] == 2 and not any(case.get(name) for name in special)]
    assert len(others) == 2 * (4 if len(measured) == 2 * 4 else 12)
    for case in others:
        if key == "precision" and case["stage"] == 0 and case["parameters"] == case["trainable"]:
            continue  # 2 + 2 + 12 and 4 + 4 + 8 bytes: the same
        if key == "ranks" and case["stage"] == 0:
            continue  # nothing is shared
        assert case["bytes"]["backward"] != pytest.approx(predicted({**case, key: change(case)}), rel=0.01), case


def test_another_moment_is_noticed(measured):
    same = ("expert_ranks", "offload", "fp32_accumulation")  # what is the same at each, or is not measured
    for case in [case for case in measured if not any(case.get(name) for name in same)]:
        if case["precision"] == "bf16" and case["stage"] != 1:
            assert case["bytes"]["step"] != pytest.approx(predicted(case, "forward"), rel=0.01), case


@pytest.mark.parametrize(("dtype", "checks"), [(torch.float16, 1), (torch.bfloat16, 0), (torch.float32, 0)])
@needs("deepspeed>=0.19.8")
def test_zero_3_looks_for_infinities_in_fp16_only(dtype, checks):
    """Three bytes per gradient: what the table has for fp16, and not for bf16, is what DeepSpeed's step does."""
    called = []
    optimizer = SimpleNamespace(dtype=dtype, check_overflow=lambda: called.append(1), overflow=None)
    DeepSpeedZeroOptimizer_Stage3._overflow_check_and_loss_scale_update(optimizer, update_scale=False)
    assert len(called) == checks
    precision = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    setup = TrainingSetup(1, precision=precision, sub_group_size=1)
    small_groups = [state_bytes(8e9, setup, moment).gradients for moment in ("backward", "step")]
    assert small_groups[1] - small_groups[0] == pytest.approx(3 * 8e9 * checks, abs=100)


LAYOUTS = {
    "tensor": Layout(tensor=2),
    "sequence": Layout(sequence=2),
    "pipeline": Layout(pipeline=2),
    "pipeline_tensor": Layout(pipeline=2, tensor=2),
}


@pytest.mark.every
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_rank_holds_of_a_split_model_is_what_is_predicted(ranks, tmp_path, model_folder, conversations, name):
    layout = LAYOUTS[name]
    world_size = 2 * layout.tensor * layout.pipeline * layout.sequence
    run = RunFolder(tmp_path / "run")
    recipe = small(model_folder, conversations, "zero1.json", layout=layout, max_steps=1, micro_batch_size=1)
    write_recipe(run, recipe)
    ranks.check(measure_layouts.main, str(run.path), world_size=world_size, log=tmp_path / "log")
    logs = [text.splitlines() for text in read_logs(tmp_path / "log")]
    measured = [json.loads(line) for lines in logs for line in lines if line.startswith("{")]
    assert len(measured) == world_size
    held = stages_of(model_folder, layout)
    for rank, found in enumerate(measured):
        stage = rank_position(layout, rank, world_size).stage
        states = state_bytes(held[stage], TrainingSetup(2 * layout.sequence, zero_stage=1, precision="fp32"))
        assert found["parameters"] == pytest.approx(states.parameters, rel=0.02)
        assert found["all"] == pytest.approx(states.parameters + states.optimizer, rel=0.02)
        assert found["gradients"] == pytest.approx(states.gradients, rel=0.02)
        assert found["all"] != pytest.approx(1.1 * (states.parameters + states.optimizer), rel=0.02)


def stages_of(folder, layout):
    """Return the parameters of each stage, counted on the whole model."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers, split = [], []
    for index in range(model.config.num_hidden_layers):
        own = {name: size for name, size in sizes.items() if name.startswith(f"model.layers.{index}.")}
        layers.append(sum(own.values()))
        split.append(sum(size for name, size in own.items() if name.endswith("_proj.weight")))
    embedding, norm = sizes["model.embed_tokens.weight"], sizes["model.norm.weight"]
    after = norm + (embedding if layout.pipeline > 1 else 0)
    stages = balanced(layers, layout.pipeline)
    own = [whole - part + part / layout.tensor for whole, part in zip(layers, split, strict=True)]
    held = [sum(own[index] for index in stage) for stage in stages]
    held[0] += embedding
    held[-1] += after
    return held
