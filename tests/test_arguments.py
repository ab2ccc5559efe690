"""Every setting of a recipe reaches the Trainer: each has another value than its default here."""

from dataclasses import replace

import pytest
import torch
from transformers import get_scheduler

from deepspeed_recipes.commands.plan import files
from deepspeed_recipes.launching import preflight
from deepspeed_recipes.planning.hardware.cluster import cluster
from deepspeed_recipes.planning.search import strategies
from deepspeed_recipes.recipe import deepspeed_file, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.methods import Dpo
from deepspeed_recipes.recipe.project import CONFIGS
from deepspeed_recipes.recipe.recipe import Schedule
from deepspeed_recipes.recipe.run_folder import RunFolder
from deepspeed_recipes.recipe.samples import TINY_MODEL
from deepspeed_recipes.training.arguments import common_arguments
from deepspeed_recipes.training.methods import preferences, sft
from tests.small import small, with_zero

CHANGED = {
    "learning_rate": 0.03,
    "weight_decay": 0.07,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.3,
    "seed": 7,
    "max_steps": 11,
    "logging_steps": 3,
}


def arguments(tmp_path, module=sft, **changes):
    """Return the Trainer's arguments; without the DeepSpeed file, whose engine is another test's subject."""
    recipe = replace(small(tmp_path, tmp_path / "data.jsonl"), **changes)
    common = common_arguments(recipe, RunFolder(tmp_path / "run"), deepspeed_file.read(recipe.deepspeed), 2, False)
    return module.arguments({name: value for name, value in common.items() if name != "deepspeed"}, recipe)


@pytest.mark.parametrize(("file", "compiles"), [("deepcompile.json", True), ("zero3.json", False)])
def test_deepcompile_is_compiled(tmp_path, file, compiles):
    assert arguments(tmp_path, deepspeed=small(tmp_path, tmp_path, file).deepspeed).torch_compile is compiles


@pytest.mark.parametrize("name", CHANGED)
def test_a_setting_reaches_the_trainer(tmp_path, name):
    default = getattr(arguments(tmp_path), name)
    changed = arguments(tmp_path, **{name: CHANGED[name]})
    assert getattr(changed, name) == CHANGED[name] != default


def test_batches_epochs_and_precision_reach_the_trainer(tmp_path):
    asked = arguments(tmp_path, global_batch_size=24, micro_batch_size=3, epochs=2.5, max_steps=None, precision="bf16")
    assert (asked.per_device_train_batch_size, asked.gradient_accumulation_steps) == (3, 4), "on two ranks"
    assert asked.num_train_epochs == 2.5 and asked.max_steps == -1
    assert asked.bf16 and not asked.fp16


@pytest.mark.parametrize(
    ("data", "on_gpu", "processes"), [({}, True, 2), ({}, False, 0), ({"streaming": True, "workers": 4}, True, 1)]
)
def test_processes_load_data_with_gpus_only_and_one_reads_a_stream(tmp_path, data, on_gpu, processes):
    recipe = small(tmp_path, tmp_path / "data.jsonl")
    recipe = replace(recipe, data=replace(recipe.data, **data))
    common = common_arguments(recipe, RunFolder(tmp_path), deepspeed_file.read(recipe.deepspeed), 2, on_gpu)
    assert common["dataloader_num_workers"] == processes


def test_the_buffers_for_weights_on_nvme_hold_the_largest(tmp_path, monkeypatch):
    """Of 8B's embedding, 1,072 MB in bf16, a rank of two has 263 million numbers; DeepSpeed's buffers hold 100."""
    page = replace(pages.find("llama3-8b", "full"), deepspeed="zero3_nvme.json")
    preflight.check_config(replace(page, deepspeed=str(CONFIGS / page.deepspeed)), 2, 2)
    request = strategies.plan_request(page, cluster("H100", 2, nvme=3000), {"deepspeed"})
    planned = files.for_engine(request, strategies.search(request).best)
    assert planned["zero_optimization"]["offload_param"]["buffer_size"] == 128_256 * 2048 * 101 // 100
    with pytest.raises(UserError, match="a buffer only 200,000,000"):
        own = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_size": 200_000_000}
        preflight.check_config(replace(page, deepspeed=with_zero(tmp_path, page.deepspeed, offload_param=own)), 2, 2)
    monkeypatch.setattr(deepspeed_file, "SWAPPED", 1000)
    recipe = small(TINY_MODEL, tmp_path / "data.jsonl", "zero3_nvme.json")
    file = deepspeed_file.read(recipe.deepspeed)
    config = common_arguments(recipe, RunFolder(tmp_path), file, 2, False)["deepspeed"]
    assert config["zero_optimization"]["offload_param"]["buffer_size"] == 1152 * 128 * 101 // 100


RATES = {"constant": [1, 1, 1], "constant_with_warmup": [0.5, 1, 1], "linear": [0.5, 1, 0.5], "cosine": [0.5, 1, 0.5]}
"""Shares of the learning rate at steps 1, 2 and 6 of 10, after two steps of warm-up."""


@pytest.mark.parametrize("kind", RATES)
def test_the_rate_follows_the_kind_of_schedule(tmp_path, kind):
    asked = arguments(tmp_path, schedule=Schedule(kind=kind, warmup=2))
    rates = rates_of(asked)
    assert [rates[step] for step in (1, 2, 6)] == pytest.approx(RATES[kind])
    assert rates[4] == pytest.approx({"linear": 0.75, "cosine": 0.853553}.get(kind, 1)), "two steps after the peak"


def rates_of(asked):
    """Return the learning rate before every step of ten, as a share of the highest."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(asked.lr_scheduler_type, optimizer, asked.get_warmup_steps(10), 10)
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


def test_dpo_gets_its_beta_and_length(tmp_path):
    asked = arguments(tmp_path, preferences.METHODS["dpo"], method=Dpo(beta=0.37), sequence_length=96)
    assert asked.beta == 0.37 and asked.max_length == 96
