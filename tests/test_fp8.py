"""Products in 8-bit floats, emulated on CPUs: near those in bf16 and not the same, and none in evaluation."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from deepspeed_recipes.recipe import deepspeed_file, overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Layout
from deepspeed_recipes.training.model import transforms
from tests.small import small
from tests.test_levers import trained

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="no torchao (make fp8)")


@needs_torchao
def test_layers_multiply_in_8_bits_in_training_and_exactly_in_evaluation(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    tokens = torch.arange(40)[None]
    expected = model(tokens).logits
    names = set(model.state_dict())
    transforms.multiply_in_fp8(model, on_gpu=False)
    assert set(model.state_dict()) == names
    replaced = {name for name, one in model.named_modules() if type(one).__name__ == "Float8Linear"}
    assert len(replaced) == 2 * 7 and "lm_head" not in replaced
    assert torch.equal(model.eval()(tokens).logits, expected)
    apart = (model.train()(tokens).logits - expected).abs().max() / expected.abs().max()
    assert 1e-3 < apart < 0.2


CASES = [
    (2, {}),
    pytest.param(3, {"gradient_checkpointing": True}, marks=pytest.mark.every),
    pytest.param(2, {"layout": Layout(sequence=2)}, marks=pytest.mark.every),
]


@needs_torchao
@pytest.mark.parametrize(("stage", "changes"), CASES)
def test_a_run_trains_nearly_as_in_bf16(ranks, tmp_path, model_folder, conversations, stage, changes):
    changes |= {"precision": "bf16"}
    exact = trained(ranks, tmp_path, model_folder, conversations, "bf16", stage, **changes)
    ours = trained(ranks, tmp_path, model_folder, conversations, "fp8", stage, fp8=True, **changes)
    assert len(ours) == len(exact) == 6
    first, reference = ours[0], exact[0]
    assert 1e-4 < abs(first["loss"] / reference["loss"] - 1) < 5e-3, "8-bit products are used, and are near"
    assert first["grad_norm"] == pytest.approx(reference["grad_norm"], rel=0.1)
    for one, other in zip(ours, exact, strict=True):  # these 64 columns average less than a model's thousands
        assert one["loss"] == pytest.approx(other["loss"], rel=0.1)


def test_where_it_cannot_be_is_said(monkeypatch, model_folder, conversations):
    recipe = replace(pages.find("llama3-8b", "full"), precision="bf16")
    for setting, said in (
        ("precision=fp32", "fp8=true with precision=fp32: .*; use precision=bf16"),
        ("lora.rank=8", r"fp8=true with adapters: .*; use fp8=false"),
        ("layout.tensor=2", "fp8=true with layout.tensor=2: .*; use layout.tensor=1"),
        ("layout.pipeline=2", "fp8=true with layout.pipeline=2: .*; use layout.pipeline=1"),
        ("layout.expert=2", "fp8=true with layout.expert=2: .*; use layout.expert=1"),
    ):
        with pytest.raises(UserError, match=said):
            overrides.apply(recipe, ["fp8=true", setting])
    recipe = small(model_folder, conversations, precision="bf16", fp8=True)
    file = deepspeed_file.read(recipe.deepspeed)
    monkeypatch.setattr(transforms.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="fp8=true: torchao is not installed; pip install torchao"):
        transforms.check(recipe, file, on_gpu=False)
    monkeypatch.setattr(transforms.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(UserError, match="fp8=true: A100 does not multiply in 8-bit floats"):
        transforms.check(recipe, file, on_gpu=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    transforms.check(recipe, file, on_gpu=True)
