"""Tokens that a run adds to its model, compared with plain PyTorch and PEFT on a model that has them."""

import json
from dataclasses import replace

import pytest
import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.prove.techniques import random_qwen3
from deepspeed_recipes.recipe.recipe import Lora
from deepspeed_recipes.training import export
from deepspeed_recipes.training.model import lora as adapters
from tests.parity import gate, plain
from tests.tiers import tiered

SETTINGS = plain.Settings(steps=5, learning_rate=1e-2)
LORA = Lora(rank=4, alpha=8)
TOKENS = ("<call>", "</call>", "weather report")
SPECIAL = "</call>"
VALUE = json.dumps([{"content": one, "special": True} if one == SPECIAL else one for one in TOKENS])
CASES = {
    **{f"{kind}_tied_zero{stage}": (kind, True, 0, stage, {}) for kind in ("full", "lora") for stage in range(4)},
    **{f"{kind}_apart_zero{stage}": (kind, False, 0, stage, {}) for kind in ("full", "lora") for stage in range(4)},
    **{f"{kind}_spare_zero3": (kind, False, 5, 3, {}) for kind in ("full", "lora")},
    **{f"lora_tiled_zero{stage}": ("lora", False, 0, stage, {"tiled_loss": True}) for stage in (2, 3)},
    "lora_tiled_tied_zero3": ("lora", True, 0, 3, {"tiled_loss": True}),
    "qlora_tied_zero2": ("qlora", True, 0, 2, {"micro_batch_size": 4}),
    "qlora_apart_zero3": ("qlora", False, 0, 3, {"micro_batch_size": 4}),
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory, conversations):
    """Write eight conversations in which the new tokens occur on both sides."""
    file = tmp_path_factory.mktemp("calls") / "calls.jsonl"
    rows = [json.loads(line) for line in conversations.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["messages"][0]["content"] += f" Use the {TOKENS[2]} and {TOKENS[0]}."
        row["messages"][-1]["content"] = f"{TOKENS[0]}{row['messages'][-1]['content']}{TOKENS[1 + number % 2]}"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def extended(folder, place, multiple, random=False):
    """Write the model with the tokens, as transformers alone adds them; return its folder and the tokens' numbers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    pieces = [tokenizer(one, add_special_tokens=False)["input_ids"] for one in TOKENS]
    for one in TOKENS:
        tokenizer.add_tokens([one], special_tokens=one == SPECIAL)
    numbers = tokenizer.convert_tokens_to_ids(list(TOKENS))
    before = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > before:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=multiple, mean_resizing=False)
    with torch.no_grad():
        for end in (model.get_input_embeddings(), model.get_output_embeddings()):
            old = end.weight[:before].clone()
            end.weight[before:] = old.mean(0)
            for number, own in zip(numbers, pieces, strict=True):
                end.weight[number] = torch.randn(old.shape[1]) * old.std() if random else old[own].mean(0)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place, numbers


def as_peft_does(model, recipe, numbers, tied):
    """Return a model with adapters, whose new rows PEFT's own layer trains."""
    rows = numbers if tied else {"embed_tokens": numbers, "lm_head": numbers}
    adapted = adapters.add(model, recipe.lora, recipe.seed, rows=rows)
    for layer in adapted.modules():
        if isinstance(layer, TrainableTokensLayer):
            layer.__class__ = TrainableTokensLayer
    return adapted


def in_4_bits(folder, dtype):
    """Return the model with 4-bit weights, as one process loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=adapters.nf4(dtype))
    return model.train()  # in evaluation bitsandbytes multiplies in bf16 on some CPUs


def without_new_rows_of_head(model, numbers):
    """Return the model, whose new rows of the head get no gradient."""
    model.lm_head.weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor(numbers), 0))
    return model


@pytest.mark.parametrize("case", tiered(CASES, {"full_apart_zero3", "lora_tied_zero2"}))
def test_new_tokens_are_trained_and_exported(ranks, tmp_path, calls, case):
    kind, tied, spare, stage, changes = CASES[case]
    folder = random_qwen3(tmp_path / "base", padding=spare, tie_word_embeddings=tied)
    lora, bits = (None if kind == "full" else LORA), ("nf4" if kind == "qlora" else None)
    recipe = gate.recipe_for(SETTINGS, folder, calls, f"zero{stage}.json", lora=lora, save_steps=3, **changes)
    recipe = replace(recipe, model=replace(recipe.model, new_tokens=VALUE, quantization=bits or "none"))
    run = gate.run_with_a_break(ranks, recipe, tmp_path)
    whole, numbers = extended(folder, tmp_path / "whole", 1 if lora else 64)

    def right(base):
        return as_peft_does(base, recipe, numbers, tied) if lora else base

    def trained(place, adapt):
        def prepare(model):
            return adapt(in_4_bits(place, model.dtype) if bits else model)

        return plain.train(place, calls, SETTINGS, prepare=prepare)

    records, weights = trained(whole, right)
    gate.agree_on_steps(run, records)
    tokenizer = AutoTokenizer.from_pretrained(run.export)
    assert tokenizer.convert_tokens_to_ids(list(TOKENS)) == numbers
    assert tokenizer.decode(numbers, skip_special_tokens=True) == TOKENS[0] + TOKENS[2]
    model = export.load(run.export, dtype=torch.float32)
    exported = model.state_dict()
    if lora:
        exported = {name: one for name, one in exported.items() if name in weights and "base_layer" not in name}
        assert any("trainable_tokens_delta" in name for name in exported)
        assert (run.export / "adapter_model.safetensors").stat().st_size < 200_000
    else:
        assert set(exported) == set(weights)
    gate.near(exported, weights)
    mistakes = [(extended(folder, tmp_path / "random", 1 if lora else 64, random=True)[0], right)]
    if lora:
        mistakes += [(whole, lambda base: adapters.add(base, lora, recipe.seed))]  # the rows are not trained
        if not tied:  # nor those of the head
            mistakes += [(whole, lambda base: adapters.add(base, lora, recipe.seed, rows={"embed_tokens": numbers}))]
    elif not tied:
        mistakes += [(whole, lambda base: without_new_rows_of_head(base, numbers))]
    for place, wrong in mistakes:
        with pytest.raises(AssertionError):
            gate.agree_on_steps(run, trained(place, wrong)[0])
    if kind == "lora":
        check_merged(run, tmp_path / "merged", model, tied)


def check_merged(run, place, model, tied):
    """Merge the adapter, and compare with it; what is tied stays tied."""
    export.write(run.export, place, merge=True)
    merged = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    assert (merged.get_output_embeddings().weight is merged.get_input_embeddings().weight) == tied
    assert (
        merged.config.vocab_size
        == merged.get_input_embeddings().weight.shape[0]
        >= len(AutoTokenizer.from_pretrained(place))
    )
    tokens = torch.arange(1130, 1155)[None]
    with torch.no_grad():
        assert torch.allclose(merged(tokens).logits, model(tokens).logits, atol=1e-4, rtol=1e-4)
