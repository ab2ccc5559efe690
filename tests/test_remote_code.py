"""A model with code of its own: its run's permission holds for its export, and nobody is asked on the terminal."""

import json

import pytest
import torch

from deepspeed_recipes.prove import techniques
from deepspeed_recipes.prove.techniques import small
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Model
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, write_json, write_recipe
from deepspeed_recipes.training import export
from deepspeed_recipes.training.model import load
from deepspeed_recipes.training.model_folder import base_model

CONFIGURATION = """
from transformers import Qwen3Config

class OwnConfig(Qwen3Config):
    model_type = "own"
"""
MODELING = """
from transformers import Qwen3ForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""
IDS = torch.arange(16)[None]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = techniques.random_qwen3(tmp_path_factory.mktemp("own"))
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING)
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    stated = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": classes}
    write_json(folder / "config.json", read_json(folder / "config.json") | stated)
    return folder


@pytest.fixture(autouse=True)
def unpermitted(monkeypatch):
    """Start without the permission, whatever another test has been given, and fail where a question is asked."""
    monkeypatch.setitem(base_model._PERMITTED, "here", False)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))


def test_the_permission_of_a_run_holds_for_its_export(own, tmp_path, monkeypatch):
    recipe = small(own, "unread")
    with pytest.raises(UserError, match=r"model\.trust_remote_code=true"):
        load.load_model(recipe)
    trained = load.load_model(small(own, "unread", model=Model(str(own), trust_remote_code=True))).eval()
    run = RunFolder(tmp_path / "run")
    trained.save_pretrained(run.export)
    assert export.load(run.export), "in the process of the run"
    monkeypatch.setitem(base_model._PERMITTED, "here", False)
    with pytest.raises(UserError, match="--trust-remote-code"):
        export.load(run.export)
    write_recipe(run, small(own, "unread", model=Model(str(own), trust_remote_code=True)))
    with torch.no_grad():
        assert torch.equal(export.load(run.export).eval()(input_ids=IDS).logits, trained(input_ids=IDS).logits)


def test_the_record_that_travels_with_an_export_permits_nothing(own, tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "recipe.json").write_text(json.dumps({"model": {"trust_remote_code": True}}))
    assert not base_model.may_run_code(tmp_path)
    base_model.permit_remote_code()
    assert base_model.may_run_code(tmp_path) and export.load(own)
