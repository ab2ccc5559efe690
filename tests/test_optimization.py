"""What optimizers, adapters' starts and noise go with, and what is said of the rest."""

from contextlib import nullcontext
from dataclasses import asdict, replace

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoModelForCausalLM

from deepspeed_recipes.recipe import deepspeed_file, limits, overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Layout, Lora
from deepspeed_recipes.recipe.run_folder import COMPLETE, RunFolder, write_json, write_recipe
from deepspeed_recipes.recipe.sections import IMPOSSIBLE
from deepspeed_recipes.training import optimizer
from deepspeed_recipes.training.arguments import deepspeed_config
from deepspeed_recipes.training.checkpoint import universal
from deepspeed_recipes.training.data.collate import Collator
from deepspeed_recipes.training.model import lora as adapters
from deepspeed_recipes.training.model import noise
from tests import ROOT


def changed(*words, variant="full"):
    return overrides.apply(pages.find("tiny", variant), words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optimizer=galore_adamw"], "flat pieces of all weights together, .*; use one of adamw, adamw_8bit, muon"),
        (["optimizer=badam"], "one block of layers at a time"),
        (["optimizer=apollo"], "gradients it could project"),
        (["optimizer=sgd"], "must be one of adamw, adamw_8bit, muon"),
        (["optimizer=adamw_torch_fused"], r"use optimizer=adamw\.$"),
        (
            ["optimizer=paged_adamw_8bit"],
            "adamw_8bit .the moments stay on the GPU; a config that offloads",
        ),
        (["optim=adamw_8bit"], "use 'optimizer'"),
        (["use_rslora=true"], r"use 'lora\.rslora'"),
        (["neftune_noise_alpha=5"], "use 'neftune_alpha'"),
        (["loraplus_lr_ratio=16"], r"use 'lora\.plus_ratio'"),
        (["optimizer=muon", "max_grad_norm=1"], "whose norm is far above 1 .*; set max_grad_norm=0"),
        (["optimizer=muon", "lora.rank=8"], "updates of whole matrices.*; use optimizer=adamw, or a full variant"),
        (["layer_decay=1.1"], "at most 1"),
        (["layer_decay=0"], "must be above 0"),
        (["neftune_alpha=-1"], "must be at least 0"),
        (["lora.plus_ratio=0"], "must be above 0, for instance 16"),
        (["lora.init=pissa", "model.quantization=nf4"], "which 4-bit weights do not allow; use lora.init=zero"),
        (["lora.init=pissa", "lora.dora=true"], "DoRA's magnitudes"),
        (["lora.init=olora"], "must be one of zero, pissa"),
        (["lora.fused=true", "lora.dora=true"], "DoRA rescales the sum of both outputs.*; use lora.fused=false"),
        (["lora.fused=true", "gradient_checkpointing=selective"], "add to them in place; use lora.fused=false"),
        (["lora.fused=true", "compile=regional"], "compiled layers fuse scaling and addition themselves"),
    ],
)
def test_what_cannot_be_is_refused(words, expected):
    with pytest.raises(UserError, match=expected):
        changed(*words)


def test_noise_and_pissa_are_refused_where_the_loss_compares_with_the_model_without_them():
    for variant in ("dpo_lora", "distill"):
        with pytest.raises(UserError, match="NEFTune is for sft and pretrain; use neftune_alpha=0"):
            changed("neftune_alpha=5", variant=variant)
    with pytest.raises(UserError, match="without its adapters the model is not the reference model of dpo"):
        changed("lora.init=pissa", variant="dpo_lora")


def test_every_impossible_optimizer_has_its_reason():
    for name in IMPOSSIBLE:
        with pytest.raises(UserError, match=f"optimizer={name}: "):
            changed(f"optimizer={name}")


def test_muon_is_not_clipped_unless_that_is_asked_for():
    assert changed("optimizer=muon").max_grad_norm == 0
    assert changed("optimizer=adamw_8bit").max_grad_norm == changed().max_grad_norm > 0


FILES = [
    ("zero2_offload.json", "optimizer=adamw_8bit", "offloaded states with its own AdamW; use optimizer=adamw, or deep"),
    ("zero3_offload.json", "optimizer=muon", "offloaded states with its own AdamW"),
    ("bf16_states.json", "optimizer=adamw_8bit", "bf16_optimizer_states is for Adam"),
    ("zero3_hpz.json", "optimizer=muon", "neither hpZ nor quantised gradients; use deepspeed=zero3.json"),
    ("zero0.json", "optimizer=muon", "trains in fp32 only; use deepspeed=zero1.json"),
]


@pytest.mark.parametrize(("name", "word", "expected"), FILES)
def test_files_that_do_not_go_with_an_optimizer_are_refused(name, word, expected):
    recipe = replace(changed(word), precision="bf16")
    with pytest.raises(UserError, match=f"{word} with deepspeed={name}: .*{expected}"):
        limits.check(recipe, 2, deepspeed_file.read(ROOT / "configs" / name))


def test_an_optimizer_block_is_not_silently_preferred():
    file = deepspeed_file.parse({"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}, "own.json")
    for words in (["optimizer=adamw_8bit"], ["layer_decay=0.9"], ["lora.plus_ratio=16"]):
        with pytest.raises(UserError, match="its optimizer block would replace"):
            limits.check(changed(*words), 2, file)
    limits.check(changed(), 2, file)


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2), Layout(expert=2)])
@pytest.mark.parametrize("word", ["optimizer=muon", "optimizer=adamw_8bit"])
def test_layouts_that_do_not_go_with_an_optimizer_are_refused(layout, word):
    recipe = changed(word)
    dimensions = {"num_local_experts": 4, "num_attention_heads": 4, "num_hidden_layers": 2}
    recipe = replace(recipe, layout=layout, model=replace(recipe.model, config=dimensions))
    assert limits.limit(recipe, 2, deepspeed_file.parse({"zero_optimization": {"stage": 1}}))


@pytest.mark.parametrize(
    ("word", "layout"),
    [
        ("layer_decay=0.9", Layout(pipeline=2)),
        ("lora.plus_ratio=16", Layout(pipeline=2)),
        ("lora.init=pissa", Layout(tensor=2)),
        ("lora.init=pissa", Layout(pipeline=2)),
        ("lora.fused=true", Layout(tensor=2)),
        ("neftune_alpha=5", Layout(sequence=2)),
        ("neftune_alpha=5", Layout(pipeline=2)),
    ],
)
def test_so_are_rates_starts_and_noise(word, layout):
    file = deepspeed_file.parse({"zero_optimization": {"stage": 1}})
    without = replace(changed(variant="lora" if "lora" in word else "full"), layout=layout)
    assert limits.limit(without, 2, file) is None
    assert limits.limit(replace(changed(word), layout=layout), 2, file)


def test_fused_adapters_are_refused_where_deepcompile_fuses_them():
    file = deepspeed_file.read(ROOT / "configs" / "deepcompile.json")
    limits.check(changed("lora.rank=8"), 2, file)
    with pytest.raises(UserError, match="DeepCompile fuses scaling and addition itself"):
        limits.check(changed("lora.fused=true"), 2, file)


def test_muon_gets_whole_gradients_under_zero3():
    recipe = changed("optimizer=muon")
    for name, expected in (("zero3.json", False), ("zero2.json", None)):
        config = deepspeed_config(recipe, deepspeed_file.read(ROOT / "configs" / name))
        assert config["zero_optimization"].get("reduce_scatter") is expected
    file = deepspeed_file.parse({"zero_optimization": {"stage": 3, "reduce_scatter": True}}, "own.json")
    with pytest.raises(UserError, match="so not reduce_scatter: true"):
        limits.check(recipe, 2, file)


@pytest.mark.parametrize("name", ["adamw_8bit", "muon"])
def test_other_states_are_not_converted_for_another_number_of_ranks(tmp_path, name):
    config = {"zero_optimization": {"stage": 2}}
    for recipe, said in ((changed(), None), (changed(f"optimizer={name}"), f"convert states of {name} \\(only Adam's")):
        run = RunFolder(tmp_path / recipe.optimizer)
        write_recipe(run, recipe)
        write_json(run.deepspeed, config)
        write_json(run.checkpoints / "checkpoint-3" / COMPLETE, {"layout": asdict(Layout()), "world_size": 2})
        with pytest.raises(UserError, match=said) if said else nullcontext():
            universal.check(recipe, run, deepspeed_file.parse(config), 4)


NAMES = ["model.embed_tokens.weight", "model.layers.0.a.weight", "model.layers.1.a.weight", "model.norm.weight"]


def test_rates_fall_from_the_head_down():
    recipe = changed("layer_decay=0.5")
    assert list(optimizer.rate_shares(recipe, NAMES).values()) == [0.125, 0.25, 0.5, 1.0]
    gpt2 = ["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.b", "transformer.ln_f.weight"]
    assert list(optimizer.rate_shares(recipe, gpt2).values()) == [0.25, 0.25, 0.5, 1.0]


def test_the_two_sides_of_an_adapter_have_their_rates():
    recipe = replace(changed("learning_rate=1e-4"), lora=Lora(plus_ratio=16))
    names = ["layers.0.q.lora_A.default.weight", "layers.0.q.lora_B.default.weight", "embed.lora_embedding_B.default"]
    assert list(optimizer.rate_shares(recipe, names).values()) == [1.0, 16.0, pytest.approx(1e-2)]


def test_peft_takes_sharded_weights_for_vectors(model_folder):
    """Why LoRA+'s groups are made here: under ZeRO-3 a weight has no elements, and PEFT would give A the rate of B."""
    model = adapters.add(AutoModelForCausalLM.from_pretrained(model_folder), Lora(rank=2))
    for weight in model.parameters():
        weight.data = torch.zeros(0)
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)
    assert [len(group["params"]) for group in theirs.param_groups if group["lr"] == 1e-3] == [0]


def test_the_full_rate_comes_first():
    """The Trainer logs the rate of the first group."""
    layers, norm = torch.nn.ModuleList([torch.nn.Linear(2, 2)]), torch.nn.Linear(2, 2, bias=False)
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": layers, "norm": norm})})
    decayed = dict(model.named_parameters())
    made = optimizer.make(changed("layer_decay=0.5"), model, torch.optim.SGD, decayed, {"lr": 1e-3})
    assert [(one["lr"], len(one["params"])) for one in made.param_groups] == [(1e-3, 1), (5e-4, 2)]


def test_muon_takes_sharded_matrices_for_matrices(monkeypatch):
    linear, sharded = torch.nn.Linear(4, 8, bias=False), torch.nn.Parameter(torch.zeros(0))
    sharded.ds_shape = torch.Size((8, 4))
    model = torch.nn.Sequential(torch.nn.Embedding(3, 4), linear, torch.nn.LayerNorm(4))
    model.register_parameter("sharded", sharded)
    model.get_output_embeddings = lambda: None
    monkeypatch.setattr(torch.compiler, "set_stance", lambda _: None)
    group = {"params": list(model.parameters()), "lr": 1e-3, "weight_decay": 0.0}
    optimizer._muon(model, [group], betas=(0.9, 0.999), eps=1e-8, fused=True)
    assert {weight for weight in model.parameters() if weight.use_muon} == {linear.weight, sharded}


def test_the_lengths_of_documents_are_known_to_each_token():
    collate = Collator(0, document_lengths=True)
    packed = {"input_ids": [5] * 5, "labels": [5] * 5, "seq_lengths": [2, 3]}
    alone = {"input_ids": [5] * 4, "labels": [5] * 4, "seq_lengths": [4]}
    lengths = collate([packed, alone])["document_lengths"]
    assert lengths.tolist() == [[2, 2, 3, 3, 3, 0, 0, 0], [4, 4, 4, 4, 0, 0, 0, 0]]
    assert "document_lengths" not in Collator(0)([packed])


def test_noise_is_as_large_as_the_paper_says():
    """Uniform in alpha / sqrt(length x width), so of that over sqrt(3) in the mean square; none in padding."""
    embedding = torch.nn.Embedding(8, 64)
    model = torch.nn.Module()
    model.get_input_embeddings = lambda: embedding
    noisy = noise.Noise(model, alpha=5.0, seed=1, rank=0)
    tokens, lengths = torch.zeros(4, 200, dtype=torch.long), torch.tensor([[150] * 150 + [50] * 40 + [0] * 10] * 4)
    noisy.begin(0, lengths)
    added = (embedding(tokens) - embedding.weight[0]).detach()
    for length, part in ((150, added[:, :150]), (50, added[:, 150:190])):
        bound = 5.0 / (length * 64) ** 0.5
        assert 0.99 * bound < part.abs().max() <= bound * (1 + 1e-4)
        assert part.square().mean().sqrt() == pytest.approx(bound / 3**0.5, rel=0.02)
        assert abs(part.mean()) < 0.02 * bound
    assert added[:, 190:].abs().max() < 1e-6
    again = embedding(tokens) - embedding.weight[0]
    assert torch.equal(again, added)  # a layer that is computed once more
    noisy.begin(0, lengths)
    assert not torch.equal(embedding(tokens) - embedding.weight[0], added)
    embedding.eval()
    assert torch.equal(embedding(tokens), embedding.weight[0].expand(4, 200, 64))


def test_every_pass_and_rank_draws_other_numbers():
    seeds = {noise.pass_seed(42, step, one, rank) for step in range(50) for one in range(8) for rank in range(16)}
    assert len(seeds) == 50 * 8 * 16
