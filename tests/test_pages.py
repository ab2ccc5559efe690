"""The recipe pages: what they say is true, and every variant can be launched."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from recipes.planning import index
from recipes.planning.hardware import Cluster, find
from recipes.planning.plans import TIERS
from recipes.planning.strategies import cost, job, search
from recipes.spec import overrides, pages
from recipes.spec.errors import UserError
from recipes.spec.recipe import Recipe
from recipes.spec.run_folder import read_json
from recipes.training import preflight

FAMILIES = [*pages.families(), pages.TEMPLATE]
ALL = [(family, size) for family in FAMILIES for size in pages.page(family).SIZES]
VARIANTS = [(family, size, name) for family, size in ALL for name in pages.variants(pages.page(family))]


def test_pages_are_found():
    assert ("tiny", "3m") in ALL and len(VARIANTS) >= 300 and len(pages.families()) >= 18
    assert not {"plain_loop", pages.TEMPLATE} & set(pages.families())


def test_the_index_is_what_the_pages_give():
    assert index.PATH.read_text(encoding="utf-8") == index.render(), "python -m recipes.planning.index"


@pytest.mark.parametrize("family", pages.families())
def test_pages_carry_what_is_predicted_and_measured(family):
    text = (pages.ROOT / "recipes" / f"{family}.py").read_text(encoding="utf-8")
    assert index.with_tables(text, family) == text, "python -m recipes.planning.index"


def test_a_prediction_is_that_of_the_variant_on_the_fewest_gpus():
    recipe = pages.find("llama3-70b", "lora")
    plan = index.smallest(recipe)
    assert plan.fits and plan.recipe == recipe and plan.setup.world_size == 4
    half = replace(plan.cluster, gpus_per_node=2)
    assert not cost(job(recipe, half), recipe).fits
    row = next(line for line in index.predicted("llama3") if line.split()[0] == "lora")
    assert row.endswith(f"4 x {plan.gpu_gib:.0f}")
    layout = index.smallest(pages.find("bloom-176b", "pipeline"))
    assert layout.setup.world_size % 36 == 0, "GPUs come in multiples of what the layout takes"


def test_the_smallest_hardware_has_nothing_offloaded_and_the_next_smaller_does_not_do():
    plan = index.least(pages.find("granite-8b", "full"))
    assert (plan.setup.world_size, plan.cluster.gpu.name) == (2, "H100")
    assert plan.setup.offload_optimizer == "none" and not plan.setup.bf16_states
    alone = search(job(pages.find("granite-8b", "full"), Cluster(find("H200"))))
    assert alone.best is None or alone.best.recipe.deepspeed not in TIERS[0]


def test_another_prediction_would_be_noticed():
    text = (pages.ROOT / "recipes" / "llama3.py").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("    qlora") and " x " in line)
    assert index.with_tables(text.replace(row, row.replace("1 x", "2 x")), "llama3") == text
    without = text.replace("\n".join(index.predicted("llama3")) + "\n\n", "")
    assert without != text and index.with_tables(without, "llama3") == text


def test_a_size_that_does_not_exist_is_answered_with_the_nearest():
    with pytest.raises(
        UserError, match=r"unknown size of llama3 '7b'; did you mean '70b'.* There are: 1b, 3b, 8b, 70b"
    ):
        pages.find("llama3-7b", "lora")
    with pytest.raises(UserError, match="unknown variant of mixtral 'qlora'; did you mean 'lora'"):
        pages.find("mixtral-8x7b", "qlora")
    for wrong, right in (("dpo", "dpo_lora"), ("LoRA", "lora"), ("offload", "full_offload")):
        with pytest.raises(UserError, match=f"'{wrong}'; did you mean '{right}'"):
            pages.find("llama3-8b", wrong)
    with pytest.raises(UserError, match="variant of llama3 'sft'; there are: full, lora"):
        pages.find("llama3-8b", "sft")
    with pytest.raises(UserError, match=r"model\.path=Qwen/Qwen3-8B, with the recipe of a model like it"):
        pages.find("Qwen/Qwen3-8B", "lora")


@pytest.mark.parametrize(("family", "size", "variant"), VARIANTS)
def test_every_variant_is_a_recipe_with_a_first_line(family, size, variant):
    recipe = pages.find(f"{family}-{size}", variant)
    assert isinstance(recipe, Recipe)
    assert recipe.name == f"{family}-{size}-{variant}"
    about = getattr(pages.page(family), variant).__doc__.splitlines()[0]
    assert about.endswith(".") and len(about) > 20
    preflight.check_data(preflight.locate(recipe))


@pytest.mark.parametrize(("family", "size"), ALL)
def test_the_page_states_the_dimensions_and_the_published_size(family, size):
    module = pages.page(family)
    model = module.SIZES[size]
    before = copy.deepcopy(dict(model.config))
    config = AutoConfig.for_model(**model.config)
    assert model.config == before, "state what transformers adds in place, or the page changes while it is used"
    with torch.device("meta"):
        counted = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert counted == pytest.approx(model.parameters, rel=0.01)
    row = next(line.split() for line in module.__doc__.splitlines() if line.split()[:1] == [size])
    stated = dict(zip(["size", "layers", "hidden", "heads", "parameters", "context"], row, strict=False))
    context = getattr(config, "max_position_embeddings", None)
    assert int(stated["layers"]) == config.num_hidden_layers
    assert int(stated["hidden"]) == config.hidden_size
    assert int(stated["heads"]) == config.num_attention_heads
    assert stated["parameters"] == pages.human(model.parameters)
    assert stated["context"] == (f"{context:,}" if context else "-")
    assert model.path in row


@pytest.mark.parametrize(("family", "size"), ALL)
def test_the_docstring_lists_the_variants_with_their_configs(family, size):
    module = pages.page(family)
    for name in pages.variants(module):
        recipe = getattr(module, name)(size)
        stage = json.loads((pages.ROOT / "configs" / recipe.deepspeed).read_text())["zero_optimization"]["stage"]
        row = next(line for line in module.__doc__.splitlines() if line.split()[:1] == [name])
        assert f"ZeRO-{stage}" in row and ("adapters" in row) == (recipe.lora is not None)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_run_and_change_lines_of_the_docstring_are_right(family):
    """Two commands, the second with overrides."""
    commands = [line.split() for line in pages.page(family).__doc__.splitlines() if "scripts/launch.py" in line]
    assert len(commands) >= 2 and any("=" in word for word in commands[1])
    for words in commands:
        _, _, recipe, variant, *changes = words[: words.index("#")] if "#" in words else words
        overrides.apply(pages.find(recipe, variant), [change for change in changes if "=" in change])


def test_the_shipped_model_has_the_dimensions_of_the_page():
    stated = pages.page("tiny").SIZES["3m"].config
    shipped = read_json(pages.ROOT / "recipes" / "samples" / "tiny_model" / "config.json")
    assert stated.items() <= shipped.items()
