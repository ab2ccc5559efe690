"""The same weights, saved under any layout, are exported as the same bytes."""

import pytest
import torch
from safetensors.torch import load_file

from deepspeed_recipes.recipe.recipe import Layout
from tests.ranks import run_on
from tests.small import small
from tests.tiers import tiered
from tests.workers import mistakes

LAYOUTS = {
    "zero3": ("zero3.json", Layout(), 2),
    "tensor": ("zero1.json", Layout(tensor=2), 2),
    "tensor_zero3": ("zero3.json", Layout(tensor=2), 2),
    "sequence": ("zero2.json", Layout(sequence=2), 2),
    "pipeline": ("zero1.json", Layout(pipeline=2), 2),
    "pipeline_tensor": ("zero0.json", Layout(pipeline=2, tensor=2), 4),
}


@pytest.mark.parametrize("name", tiered(LAYOUTS, {"zero3", "pipeline_tensor"}))
def test_the_bytes_are_the_same(ranks, tmp_path, model_folder, conversations, name):
    config, layout, world_size = LAYOUTS[name]
    # A step that is zero in fp32.
    still = {"learning_rate": 1e-60, "weight_decay": 0.0, "max_steps": 1, "save_steps": 1}
    recipe = small(model_folder, conversations, config, layout=layout, micro_batch_size=2, **still)
    run = run_on(ranks, recipe, tmp_path, world_size, function=mistakes.untrained)
    started = load_file(model_folder / "model.safetensors")
    for folder in (run.export, run.checkpoints / "checkpoint-1"):
        exported = {}
        for file in folder.glob("*.safetensors"):
            exported |= load_file(file)
        assert exported.keys() == started.keys()
        assert all(torch.equal(exported[key], value) for key, value in started.items()), folder.name
