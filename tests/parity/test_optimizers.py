"""Optimizers, rates, adapters' starts and noise: under every ZeRO stage what each trains by itself in one process."""

import json
import math
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.prove import techniques
from deepspeed_recipes.recipe.recipe import Layout, Lora, Recipe
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.model import lora as adapters
from deepspeed_recipes.training.model import noise
from tests.parity import gate, plain, plain_optimizers
from tests.ranks import run_on
from tests.tiers import tiered
from tests.workers import muon

SETTINGS = plain.Settings(learning_rate=1e-3)
UNCLIPPED = replace(SETTINGS, clip=0)
"""For Muon: DeepSpeed would clip updates where PyTorch clips gradients."""
STAGES = range(4)


@pytest.fixture
def train(ranks, tmp_path, model_folder, conversations):
    """Return a function that trains a recipe under a ZeRO stage, with a break after step 3 where that is asked for."""

    def run(stage, settings=SETTINGS, broken=False, function=training_run.main, data=conversations, **changes):
        recipe = gate.recipe_for(
            settings, model_folder, data, f"zero{stage}.json", save_steps=3 * broken, micro_batch_size=2, **changes
        )
        return (gate.run_with_a_break if broken else run_on)(ranks, recipe, tmp_path, function=function)

    return run


# Muon


@pytest.fixture(scope="module")
def by_muon(model_folder, conversations):
    return plain.train(model_folder, conversations, UNCLIPPED, optimize=plain_optimizers.Muon)


@pytest.mark.parametrize(("stage", "broken"), tiered([(n, b) for n in STAGES for b in (False, True)], ()))
def test_muon_trains_the_same_model(train, by_muon, model_folder, stage, broken):
    run = train(stage, UNCLIPPED, broken, muon.main, optimizer="muon")
    gate.agree(run, *by_muon, norms=None)
    assert read_json(run.deepspeed)["gradient_clipping"] == 0


@pytest.mark.every
def test_muon_updates_every_matrix_of_the_layers(train, model_folder):
    """DeepSpeed tags what Muon trains by names and shapes, which a sharded weight has not, and says nothing of it."""
    run = train(2, UNCLIPPED, function=muon.main, optimizer="muon", max_steps=2)
    updated = list(chain(*(read_json(muon.path_of(run.path, rank)) for rank in range(2))))
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    matrices = [list(one.weight.shape) for one in model.model.layers.modules() if isinstance(one, torch.nn.Linear)]
    assert len(matrices) == 14
    for shape in matrices:  # a matrix on the border of two ranks is computed by both
        assert 2 * matrices.count(shape) <= updated.count(shape) <= 2 * (matrices.count(shape) + 2), shape
    assert all(shape in matrices for shape in updated)


@pytest.mark.parametrize("mistake", tiered(("adamw", "rate", "nesterov", "decay"), ()))
def test_another_muon_is_noticed(model_folder, conversations, by_muon, mistake):
    optimize = partial(plain_optimizers.Muon, mistake=mistake)
    noticed(by_muon, plain.train(model_folder, conversations, UNCLIPPED, optimize=optimize))


# 8 bits


@pytest.mark.parametrize(("stage", "broken"), tiered([(n, b) for n in STAGES for b in (False, True)], {(2, False)}))
def test_8_bit_adam_is_bitsandbytes(train, model_folder, conversations, stage, broken):
    run = train(stage, broken=broken, optimizer="adamw_8bit")
    optimize = partial(plain_optimizers.EightBit, stage=stage)
    records, weights = plain.train(model_folder, conversations, SETTINGS, optimize=optimize)
    gate.agree_on_steps(run, records)
    exported = AutoModelForCausalLM.from_pretrained(run.export, dtype=torch.float32).state_dict()
    assert share_off(exported, weights) < CODES


@pytest.mark.every
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_without_zero_the_first_step_in_bf16_is_a_real_one(ranks, tmp_path, model_folder, conversations, optimizer):
    """DeepSpeed would have made one with gradients of zero, after which Adam's updates are too small."""
    losses = []
    for stage in (0, 1):
        run = RunFolder(tmp_path / str(stage))
        options = {"optimizer": optimizer, "precision": "bf16", "micro_batch_size": 2}
        write_recipe(run, gate.recipe_for(SETTINGS, model_folder, conversations, f"zero{stage}.json", **options))
        ranks.check(training_run.main, str(run.path), log=tmp_path / f"log{stage}")
        losses.append([row["loss"] for row in read_jsonl(run.metrics)])
    assert losses[0] == pytest.approx(losses[1], rel=5e-3) and losses[0][-1] < 0.95 * losses[0][0]


CODES = 1e-3
"""Share of the weights that may be off: where a moment lies between two codes, rounding decides which it gets."""


def share_off(weights, expected):
    """Return the share of the weights that differ by more than the gate allows."""
    off = sum(((weight - expected[name]).abs() > 1e-5 + 1e-4 * weight.abs()).sum() for name, weight in weights.items())
    return (off / sum(weight.numel() for weight in weights.values())).item()


@pytest.mark.parametrize("mistake", tiered(("states", "blocks"), {"blocks"}))
def test_other_states_are_noticed(model_folder, conversations, mistake):
    right, wrong = (
        plain.train(
            model_folder,
            conversations,
            SETTINGS,
            optimize=partial(plain_optimizers.EightBit, stage=2, mistake=name),
        )
        for name in ("", mistake)
    )
    assert share_off(wrong[1], right[1]) > 10 * CODES


# Rates


@pytest.mark.parametrize("stage", tiered(STAGES, ()))
def test_layers_learn_at_their_rates(train, model_folder, conversations, stage):
    run = train(stage, layer_decay=0.5)
    optimize = partial(plain_optimizers.layer_wise, decay=0.5)
    gate.agree(run, *plain.train(model_folder, conversations, SETTINGS, optimize=optimize))


@pytest.mark.every
def test_another_decay_of_rates_is_noticed(model_folder, conversations):
    right, wrong = (
        plain.train(model_folder, conversations, SETTINGS, optimize=partial(plain_optimizers.layer_wise, decay=decay))
        for decay in (0.5, 1.0)
    )
    noticed(right, wrong)


# Adapters

LORA = Lora(rank=4, alpha=8)
GENTLE = replace(SETTINGS, learning_rate=2e-4)
"""For adapters: merged, their rounding errors are multiplied by each other's values and by their scale."""
ADAPTERS = {
    "rslora": replace(LORA, rslora=True),
    "plus": replace(LORA, plus_ratio=8.0),
    "pissa": replace(LORA, init="pissa"),
    "all": replace(LORA, rslora=True, plus_ratio=8.0, init="pissa"),
}


def with_adapters(folder, data, lora, mistake=None):
    """Return what plain PEFT trains: the records and the merged weights."""
    used = replace(lora, **(mistake or {}))
    kept = []

    def prepare(model):
        kept.append(adapters.add(model, replace(used, rslora=False, alpha=scaled(used)), Recipe.seed))
        return kept[0]

    optimize = partial(plain_optimizers.lora_plus, ratio=used.plus_ratio)
    records, _ = plain.train(folder, data, GENTLE, prepare=prepare, optimize=optimize)
    return records, kept[0].merge_and_unload().state_dict()


def scaled(lora):
    """Return the alpha with which alpha / rank is rsLoRA's scale."""
    return lora.alpha * math.sqrt(lora.rank) if lora.rslora else lora.alpha


CASES = [(name, stage, broken) for name in ADAPTERS for stage in STAGES for broken in (False, True)]


@pytest.mark.parametrize(("name", "stage", "broken"), tiered(CASES, {("all", 3, False)}))
def test_adapters_train_as_in_peft(train, model_folder, conversations, name, stage, broken):
    run = train(stage, GENTLE, broken, lora=ADAPTERS[name])
    records, weights = with_adapters(model_folder, conversations, ADAPTERS[name])
    gate.agree_on_steps(run, records)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    exported = PeftModel.from_pretrained(base, run.export).merge_and_unload().state_dict()
    for key, weight in exported.items():
        assert plain.worst(weight, weights[key]) <= 1, key


ENDS = replace(LORA, target_modules="q_proj,down_proj,embed_tokens,lm_head")
CASES = [(tied, *layout) for tied in (True, False) for layout in ((0, 1), (1, 1), (2, 1), (3, 1), (1, 2), (3, 2))]


@pytest.mark.parametrize(("tied", "stage", "tensor"), tiered(CASES, {(True, 3, 1), (False, 1, 2)}))
def test_adapters_on_embeddings_and_head_train_as_in_peft(ranks, tmp_path, conversations, tied, stage, tensor):
    folder = techniques.random_qwen3(tmp_path / "model", tie_word_embeddings=tied)
    changes = {"lora": ENDS, "layout": Layout(tensor=tensor), "micro_batch_size": 2, "save_steps": 3}
    recipe = gate.recipe_for(GENTLE, folder, conversations, f"zero{stage}.json", **changes)
    run = gate.run_with_a_break(ranks, recipe, tmp_path)
    records, weights = plain.train(
        folder, conversations, GENTLE, prepare=lambda model: adapters.add(model, ENDS, Recipe.seed)
    )
    gate.agree_on_steps(run, records)
    trained = {name.replace(".default", ""): weight for name, weight in weights.items() if "lora_" in name}
    exported = load_file(run.export / "adapter_model.safetensors")
    assert {name for name in exported if "lora_" in name} == set(trained)
    assert sum(".embed_tokens." in name or ".lm_head." in name for name in trained) == 4
    for name, weight in trained.items():
        assert plain.worst(exported[name], weight) <= 1, name


@pytest.mark.parametrize(
    ("name", "mistake"),
    tiered(
        [("rslora", {"rslora": False}), ("plus", {"plus_ratio": 1.0}), ("pissa", {"init": "zero"})],
        lambda case: case[0] == "pissa",
    ),
)
def test_other_adapters_are_noticed(model_folder, conversations, name, mistake):
    right = with_adapters(model_folder, conversations, ADAPTERS[name])
    noticed(right, with_adapters(model_folder, conversations, ADAPTERS[name], mistake))


def test_pissa_starts_as_the_same_function_with_the_largest_singular_values(model_folder):
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokens = torch.arange(20)[None]
    before, weight = base(tokens).logits, base.model.layers[0].self_attn.q_proj.weight.detach().clone()
    adapted = adapters.add(base, ADAPTERS["pissa"], Recipe.seed)
    assert torch.allclose(adapted(tokens).logits, before, atol=1e-4)
    layer = base.model.layers[0].self_attn.q_proj
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    largest = left[:, :4] * values[:4] @ right[:4]
    taken = weight - layer.base_layer.weight
    assert torch.linalg.matrix_rank(taken, atol=1e-3) == 4
    assert taken.norm() > 0.95 * largest.norm()  # in 16 iterations: the first 10 values lie close together
    again = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    torch.manual_seed(1)  # a run that is resumed has drawn other numbers before
    same = adapters.add(again, ADAPTERS["pissa"], Recipe.seed).base_model.model.model.layers[0].self_attn.q_proj
    assert torch.equal(same.base_layer.weight, layer.base_layer.weight)


def test_rslora_is_pefts(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    options = {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj"]}
    theirs = get_peft_model(model, LoraConfig(**options)).base_model.model.model.layers[0].self_attn.q_proj
    ours = adapters.add(AutoModelForCausalLM.from_pretrained(model_folder), ADAPTERS["rslora"])
    assert ours.base_model.model.model.layers[0].self_attn.q_proj.scaling == theirs.scaling == {"default": 8 / 2}


# Noise

ALPHA = 5.0


@pytest.fixture(scope="module")
def alike(conversations, tmp_path_factory):
    """Write one conversation eight times, so that it does not matter which rank has which."""
    path = tmp_path_factory.mktemp("alike") / "train.jsonl"
    path.write_text(8 * (conversations.read_text().splitlines()[3] + "\n"))
    return path


def noisy(folder, data, alpha=ALPHA, padded=False, alike=False):
    """Return what plain PyTorch trains with the noise of two ranks with four passes each.

    Mistakes: another `alpha`; the length of the `padded` sequence; noise that is `alike` on both ranks.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = json.loads(data.read_text().splitlines()[0])["messages"]
    length = len(tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"])
    passes = []

    def add(module, _, embedded):
        number = len(passes)
        passes.append(number)
        step, rank, one = number // 8, number % 8 // 4, number % 4
        generator = torch.Generator().manual_seed(noise.pass_seed(42, step, one, 0 if alike else rank))
        drawn = 2 * torch.rand(embedded.shape, generator=generator) - 1
        drawn[:, length:] = 0
        size = embedded.shape[1] if padded else length
        return embedded + drawn * alpha / math.sqrt(size * embedded.shape[2])

    def prepare(model):
        model.get_input_embeddings().register_forward_hook(add)
        return model

    return plain.train(folder, data, SETTINGS, prepare=prepare)


CASES = [(stage, broken) for stage in STAGES for broken in (False, True)]


@pytest.mark.parametrize(("stage", "broken"), tiered(CASES, ()))
def test_the_same_noise_trains_the_same_model(ranks, tmp_path, model_folder, alike, stage, broken):
    options = {"neftune_alpha": ALPHA, "micro_batch_size": 1, "save_steps": 3 * broken}
    recipe = gate.recipe_for(SETTINGS, model_folder, alike, f"zero{stage}.json", **options)
    run = (gate.run_with_a_break if broken else run_on)(ranks, recipe, tmp_path)
    gate.agree(run, *noisy(model_folder, alike))


@pytest.mark.parametrize(
    "mistake", tiered(({"alpha": 0.0}, {"alpha": 2 * ALPHA}, {"padded": True}, {"alike": True}), ())
)
def test_other_noise_is_noticed(model_folder, alike, mistake):
    noticed(noisy(model_folder, alike), noisy(model_folder, alike, **mistake))


def noticed(right, wrong):
    """Fail unless the loss and some weights differ by more than the gate allows, the weights by far."""
    (records, weights), (others, their_weights) = right, wrong
    assert abs(others[-1]["loss"] / records[-1]["loss"] - 1) > gate.LOSS
    assert max(plain.worst(their_weights[name], weight) for name, weight in weights.items()) > 10
