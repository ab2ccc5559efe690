"""The head for a further token (`model.train_mtp`), compared with a plain loop over transformers' own `MtpModel`."""

from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import MtpModel

from deepspeed_recipes.export import certificate
from deepspeed_recipes.planning.model_profile import counts
from deepspeed_recipes.planning.model_profile.lookup import profile_of
from deepspeed_recipes.recipe import limits, overrides, pages
from deepspeed_recipes.recipe.deepspeed_file import DeepSpeedFile
from deepspeed_recipes.recipe.errors import UserError, errors_only
from deepspeed_recipes.recipe.recipe import Draft, Lora
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from deepspeed_recipes.training import export
from deepspeed_recipes.training.model import draft, load
from deepspeed_recipes.training.model import lora as adapters
from deepspeed_recipes.training.model_folder import base_model, weights
from tests.parity import gate, plain
from tests.ranks import read_logs
from tests.tiers import tiered

SETTINGS = plain.Settings(steps=5, learning_rate=3e-3)
LORA = Lora(rank=4, alpha=8, target_modules="q_proj,o_proj,kv_b_proj")
PAGES = {"glm4_5": "glm4_5-air", "deepseek": "deepseek-v3"}
START = "model.layers.2."
COPIES = {
    f"{START}embed_tokens.weight": "model.embed_tokens.weight",
    f"{START}shared_head.head.weight": "lm_head.weight",
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return a function that writes a base as published: two files, the head with copies of the model's two ends."""

    @cache
    def written(family):
        folder = tmp_path_factory.mktemp(family)
        recipe = pages.find(PAGES[family], "full")
        model = replace(recipe.model, train_mtp=True)
        draft.write(replace(recipe, model=model, draft=Draft(enabled=True)), folder, torch.float32)
        tensors = load_file(folder / weights.WHOLE)
        (folder / weights.WHOLE).unlink()
        tensors |= {copy: tensors[of].clone() for copy, of in COPIES.items()}
        halves = [{}, {}]
        for name, tensor in tensors.items():
            halves[name.startswith(START)][name] = tensor
        index = {}
        for number, half in enumerate(halves, 1):
            save_file(half, folder / f"model-0000{number}-of-00002.safetensors", metadata={"format": "pt"})
            index |= dict.fromkeys(half, f"model-0000{number}-of-00002.safetensors")
        write_json(folder / weights.INDEX, {"metadata": {}, "weight_map": index})
        return folder

    return written


def with_head(folder):
    """Return the model in a folder and its head, both in transformers' own classes."""
    with errors_only("transformers"):  # a class ignores the head of the published sizes alone
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]
    return model, MtpModel.from_pretrained(model)


def train(folder, data, lora=None, seed=0, mistake="", settings=SETTINGS):
    """Return the plain loop's losses and norms, and the trained model and head."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, head = with_head(folder)
    model = adapters.add(model, lora, seed) if lora else model
    both = torch.nn.ModuleDict({"model": model, "head": head.layers})
    optimizer, records = plain.adamw(both, SETTINGS), []
    examples = plain.examples(data, tokenizer, settings)
    count = sum(learned[:, 1:].sum() for _, learned in examples)
    for _ in range(SETTINGS.steps):
        loss = 0
        for tokens, learned in examples:
            output = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
            hidden, places = output.hidden_states[-1], torch.arange(tokens.shape[1])[None]
            hidden = hidden.detach() if mistake == "detached" else hidden
            drafted = head.forward_layer(0, hidden[:, :-1], places[:, 1:], None, input_ids=tokens[:, 1:])
            share = 0.3 if mistake == "weight" else 0.1
            ahead = 1 if mistake == "next" else 2  # the same token as the main head's, or the one after it
            predicted = (output.logits[:, :-1], head._project_to_logits(drafted[:, : -(ahead - 1) or None]))
            for logits, offset, weight in zip(predicted, (1, ahead), (1, share), strict=True):
                losses = cross_entropy(logits[0], tokens[0, offset:], reduction="none")
                loss = loss + weight * (losses * learned[0, offset:]).sum() / count
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(both.parameters(), SETTINGS.clip)
        optimizer.step()
        records.append({"loss": loss.item(), "grad_norm": norm.item()})
    return records, model, head


# In chats no second token of a document has a label, which the end of the document before it could learn by mistake.
PACKED = {"packing": True, "sequence_length": 96, "global_batch_size": 4, "micro_batch_size": 2, "loss_on": "all"}
CASES = [
    (family, f"zero{stage}.json", lora, changes)
    for family in PAGES
    for stage in (0, 2, 3)
    for lora in (None, LORA)
    for changes in ({}, PACKED if lora is None else {"gradient_checkpointing": True})
]


def core(case):
    family, config, lora, changes = case
    chosen = {("glm4_5", "zero3.json", False), ("deepseek", "zero2.json", True)}
    return (family, config, lora is not None) in chosen and bool(changes)


@pytest.mark.parametrize(("family", "config", "lora", "changes"), tiered(CASES, core))
def test_the_head_trains_as_in_a_plain_loop_and_is_exported(
    ranks, tmp_path, bases, conversations, family, config, lora, changes
):
    folder = bases(family)
    recipe = gate.recipe_for(SETTINGS, folder, conversations, config, lora=lora, save_steps=3, **changes)
    recipe = replace(recipe, model=replace(recipe.model, train_mtp=True))
    run = gate.run_with_a_break(ranks, recipe, tmp_path)
    records, model, head = train(
        folder, conversations, lora, recipe.seed, settings=replace(SETTINGS, learn_prompts=recipe.loss_on == "all")
    )
    gate.agree_on_steps(run, records)
    assert "neither loaded nor trained" not in read_logs(tmp_path / "log")[0]

    exported = run.export
    if lora:
        assert certificate.of_folder(run.export).agrees
        exported, model = tmp_path / "merged", model.merge_and_unload()
        export.write(run.export, exported, merge=True)
    found = certificate.of_folder(exported)
    assert found.agrees and not found.causes, found.causes
    for ours, plainly in zip(with_head(exported), (model, head), strict=True):  # as transformers reads it
        named = plainly.state_dict()
        assert all(plain.worst(weight, named[name]) <= 1 for name, weight in ours.state_dict().items())

    before, after = ({}, {})
    for place, held in ((folder, before), (exported, after)):
        for file in weights.files(place):
            held |= load_file(file)
    assert set(before) == set(after), "the names of the base"
    assert all(torch.equal(after[copy], after[of]) for copy, of in COPIES.items())
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    expected = {name for name in before if name.startswith(START) and name not in COPIES and "_bias" not in name}
    assert {name for name in moved if name.startswith(START) and name not in COPIES} == expected
    provenance = read_json(exported / base_model.PROVENANCE)
    assert (provenance["parts"], provenance["mtp"], provenance["further_token"]) == ([], [], [START.rstrip(".")])
    config_before, config_after = (read_json(place / "config.json") for place in (folder, exported))
    assert config_before["num_nextn_predict_layers"] == config_after["num_nextn_predict_layers"] == 1
    # A head that is left as it was is noticed, though the main model answers the same.
    file = next(file for file in weights.files(exported) if f"{START}eh_proj.weight" in weights.header(file))
    untrained = load_file(file) | {f"{START}eh_proj.weight": before[f"{START}eh_proj.weight"]}
    save_file(untrained, file, metadata={"format": "pt"})
    assert any(f"{START}eh_proj.weight" in cause for cause in certificate.of_folder(exported).causes)


@pytest.mark.parametrize("mistake", ["detached", "next", "weight"])
def test_mistakes_in_the_heads_loss_are_larger_than_the_bound(bases, conversations, mistake):
    right, wrong = (train(bases("glm4_5"), conversations, mistake=one)[0] for one in ("", mistake))
    assert max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(right, wrong, strict=True)) > 10 * gate.LOSS


REFUSED = [
    *("layout.pipeline=2", "layout.tensor=2", "layout.sequence=2", "layout.expert=2", "tiled_loss=true"),
    *("neftune_alpha=5", "train=mlp", "freeze=mlp", "router_aux_loss_coef=0.01", "fp8=true", "layer_decay=0.9"),
    *("model.quantization=nf4", "model.new_tokens=<a>", "lora.modules_to_save=lm_head", "loss=loss.py:mine"),
]


@pytest.mark.parametrize("setting", REFUSED)
def test_what_the_head_cannot_be_trained_with_is_refused(setting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loss.py").write_text("def mine(outputs, labels, items):\n    return outputs.logits.sum()\n")
    variant = "lora" if setting.startswith(("lora", "model")) else "full"
    with pytest.raises(UserError, match=r"model\.train_mtp=true with .*: .*; leave it out"):
        overrides.apply(pages.find("glm4_5-air", variant), ["model.train_mtp=true", setting])


@pytest.mark.parametrize(
    ("page", "variant", "settings", "message"),
    [
        ("glm4_5-air", "dpo_lora", [], "train_mtp=true with method=dpo: DPO has a loss of its own"),
        (
            "qwen3_5-0.8b",
            "full",
            [],
            "for deepseek_v3 and glm4_moe alone, and this is qwen3_5.* with 1; leave",
        ),
        ("tiny", "full", [], "and this is qwen3 with 1"),
        ("glm4_5-air", "full", ["model.mtp_loss_weight=0"], "must be above 0"),
    ],
)
def test_a_head_that_cannot_be_trained_is_refused_with_the_reason(page, variant, settings, message):
    with pytest.raises(UserError, match=message):
        recipe = overrides.apply(pages.find(page, variant), ["model.train_mtp=true", *settings])
        limits.check(recipe, 1, DeepSpeedFile(stage=3))
    with pytest.raises(UserError, match=r"mtp_loss_weight=0.3 .*: no head for a further token is trained"):
        overrides.apply(pages.find("tiny", "full"), ["model.mtp_loss_weight=0.3"])


def test_a_base_without_the_head_is_refused(bases, tmp_path):
    folder = tmp_path / "without"
    with_head(bases("deepseek"))[0].save_pretrained(folder)
    model = replace(pages.find("deepseek-v3", "full").model, path=str(folder), train_mtp=True)
    recipe = replace(gate.recipe_for(SETTINGS, folder, folder, "zero0.json"), model=model)
    with pytest.raises(UserError, match=rf"without: its files have no head for a further token .*{START}"):
        load.load_base(recipe)


@pytest.mark.parametrize("family", PAGES)
def test_the_planner_counts_the_heads_parameters(bases, family):
    folder = bases(family)
    held = [one for file in weights.files(folder) for one in weights.header(file).items()]
    sizes = {name: prod(tensor.shape) for name, tensor in held if name not in COPIES and "_bias" not in name}
    own = sum(size for name, size in sizes.items() if name.startswith(START))
    profile = profile_of(read_json(folder / "config.json"))
    assert profile.with_further_token().parameters == sum(sizes.values()) == profile.parameters + own
    model = replace(pages.find(PAGES[family], "lora").model, config=read_json(folder / "config.json"), train_mtp=True)
    assert counts.saved_parameters(replace(pages.find(PAGES[family], "lora"), model=model)) == own


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_plan_has_the_heads_memory_and_time(answer, method):
    words = f"glm4_5-air --method {method} --gpus 8 --nodes 8 --gpu b200 deepspeed=zero3_moe.json".split()
    words += ["micro_batch_size=1", "global_batch_size=64", "tiled_loss=false", "gradient_checkpointing=true"]
    without, plan = (answer(*words, *more)["plans"][0] for more in ([], ["model.train_mtp=true"]))
    before, after = without["gpu_breakdown_gib"], plan["gpu_breakdown_gib"]
    states = "adapters" if method == "lora" else "optimizer"
    assert after[states] > before[states] and plan["step_seconds"] > without["step_seconds"]
    share = sum(after.values()) / sum(before.values())
    assert 1.01 < share < 1.6, share
