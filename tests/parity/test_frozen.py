"""Full training of some of the weights, chosen by their names, compared with plain PyTorch."""

import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from deepspeed_recipes.launching import preflight
from deepspeed_recipes.launching.paths import locate
from deepspeed_recipes.planning.model_profile import counts
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import read_json
from tests.parity import gate, plain
from tests.ranks import read_logs
from tests.tiers import tiered

SETTINGS = plain.Settings(steps=6)
CHOICES = {
    "last_layer": ({"train": r"layers\.1\.|norm\.weight"}, lambda name: "layers.1." in name or "norm.weight" in name),
    "without_embeddings": ({"freeze": "embed_tokens"}, lambda name: "embed_tokens" not in name),
    "both": ({"train": "mlp", "freeze": r"layers\.0\.mlp\.up"}, lambda name: "mlp" in name and "0.mlp.up" not in name),
}
CASES = [(f"zero{stage}.json", choice) for stage in range(4) for choice in CHOICES]


def keeping(chosen):
    def prepare(model):
        for name, weight in model.named_parameters():
            weight.requires_grad_(chosen(name))
        return model

    return prepare


@pytest.mark.parametrize(
    ("config", "choice"), tiered(CASES, {("zero2.json", "without_embeddings"), ("zero3.json", "last_layer")})
)
def test_the_chosen_weights_are_trained_as_in_plain_pytorch(
    ranks, tmp_path, model_folder, conversations, config, choice
):
    settings, chosen = CHOICES[choice]
    recipe = gate.recipe_for(SETTINGS, model_folder, conversations, config, save_steps=3, **settings)
    run = gate.run_with_a_break(ranks, recipe, tmp_path)
    gate.agree(run, *plain.train(model_folder, conversations, SETTINGS, prepare=keeping(chosen)))
    exported = AutoModelForCausalLM.from_pretrained(run.export, dtype=torch.float32).state_dict()
    before = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).state_dict()
    named = {name for name, _ in AutoModelForCausalLM.from_pretrained(model_folder).named_parameters()}
    moved = {name for name in named if not torch.equal(exported[name], before[name])}
    assert moved == {name for name in named if chosen(name)}
    _, others = plain.train(model_folder, conversations, SETTINGS)
    assert max(plain.worst(exported[name], others[name]) for name in named) > 10
    screen = read_logs(tmp_path / "log")[0]
    total, count = (
        int(n.replace(",", "")) for n in re.search(r"model: ([\d,]+) parameters, ([\d,]+) of", screen).groups()
    )
    assert f"trained: {len(moved)} of {len(named)} weights, {count / total:.1%} of the parameters" in screen
    config = read_json(model_folder / "config.json")
    planned = counts.trained_share(replace(recipe, model=replace(recipe.model, config=config)))
    assert planned == pytest.approx(count / total)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["train=no_such"],
            "train=no_such: matches no weight of the model, whose names are model.embed_tokens.weight, ",
        ),
        (["train=."], "train=.: matches all .* weights of the model"),
        (["freeze=weight"], "freeze=weight: matches all .* weights of the model"),
        (["freeze=norm|no_such"], "'no_such' in it matches no weight of the model"),
        ([r"train=layers\.(2|33)\."], "'33' in it matches no weight"),
        ([r"train=layers\.2\.|lm_head"], "'lm_head' in it matches no weight, since .* is tied to model.embed_tokens"),
        (["train=lm_head"], "=lm_head: matches no weight, since this model's lm_head is tied to model.embed_tokens"),
        ([r"train=(?:layers\.(2|3)\.|[|]*norm)(?!x|y)", "freeze=layers|norm"], "nothing is left to train"),
    ],
)
def test_what_matches_nothing_or_everything_is_refused_before_ranks_start(settings, message):
    recipe = locate(overrides.apply(pages.find("tiny", "full"), settings))
    with pytest.raises(UserError, match=message):
        counts.check_trained(preflight.with_dimensions(recipe))


@pytest.mark.parametrize(
    ("variant", "settings", "message"),
    [
        ("full", ["train=["], r"train=\[: not a regular expression"),
        ("lora", ["train=norm"], "train=norm with adapters: adapters freeze the model's own weights"),
        ("reward", ["freeze=norm"], "freeze=norm"),
        ("full", ["freeze=norm", "layout.pipeline=2"], "DeepSpeed needs trained weights on every stage"),
    ],
)
def test_what_cannot_be_combined_is_refused(variant, settings, message):
    with pytest.raises(UserError, match=message):
        overrides.apply(pages.find("tiny", variant), settings)


def test_the_plan_counts_only_trained_weights(answer):
    def peak(*settings):
        words = ("llama3-8b", "--method", "full", "--gpus", "8", "--gpu", "h100", "deepspeed=zero2.json")
        return answer(*words, *settings)["plans"][0]["gpu_breakdown_gib"]

    whole, some = peak(), peak(r"train=layers\.(30|31)\.")
    assert some["optimizer"] < 0.1 * whole["optimizer"] and some["parameters"] == pytest.approx(
        whole["parameters"], rel=0.01
    )
