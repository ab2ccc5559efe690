"""Optimisations for speed and memory: each computes the same as without it, and saves what it is meant to save."""

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, masking_utils
from trl.trainer import utils as trl_utils

from deepspeed_recipes.benchmarks.measure import Reads
from deepspeed_recipes.recipe import deepspeed_file, limits, overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.limits import LARGE, PER_ENTRY, are_large, tiles_loss
from deepspeed_recipes.recipe.recipe import Draft, Layout, Lora, Model
from deepspeed_recipes.recipe.run_folder import RunFolder, read_jsonl, write_recipe
from deepspeed_recipes.training import activation_checkpointing
from deepspeed_recipes.training.data.collate import Collator
from deepspeed_recipes.training.model import attention, draft, probe, transforms
from deepspeed_recipes.training.model import lora as adapters
from deepspeed_recipes.training.trainer import RunTrainer
from tests.ranks import run_on
from tests.small import language_families, small
from tests.tiers import tiered
from tests.versions import needs
from tests.workers import device_reads_per_step

HIDDEN = 4096
LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128,
}
"""Of Llama 3.1 8B."""


# Reads of scalars, each of which empties a GPU's queue


def reads_of(ranks, folder, function: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    ranks.check(function, str(folder), *arguments, log=folder.parent / "log", world_size=1)
    return json.loads((folder / "reads.json").read_text())


def counted(ranks, tmp_path, model_folder, conversations, stage, mistake=None, **changes) -> tuple[int, dict]:
    run = RunFolder(tmp_path / f"run-{mistake}")
    settings = {"precision": "bf16", "packing": True, "logging_steps": 100, "micro_batch_size": 1}
    settings["global_batch_size"] = changes.get("micro_batch_size", 1)
    recipe = small(model_folder, conversations, f"zero{stage}.json", **settings | changes)
    write_recipe(run, recipe)
    found = reads_of(ranks, run.path, device_reads_per_step.of_a_run, mistake)
    return sum(found["counts"].values()), found


@pytest.mark.parametrize("stage", tiered(range(4), (2, 3)))
def test_a_steady_step_reads_no_scalar_that_deepspeed_does_not(ranks, tmp_path, model_folder, conversations, stage):
    ours, found = counted(ranks, tmp_path, model_folder, conversations, stage)
    alone = reads_of(ranks, tmp_path / "run-None", device_reads_per_step.of_deepspeed)
    assert ours == sum(alone["counts"].values()), found["places"]
    assert all("/deepspeed/" in place for place in found["places"]), found["places"]


@pytest.mark.parametrize(
    "mistake",
    tiered(
        ["norms_at_every_step", "filtered_losses", "packing_looked_up", "layers_read_at_every_step"],
        {"norms_at_every_step", "packing_looked_up"},
    ),
)
def test_a_read_by_the_trainer_is_noticed(ranks, tmp_path, model_folder, conversations, mistake):
    _, found = counted(ranks, tmp_path, model_folder, conversations, 2, mistake)
    assert not all("/deepspeed/" in place for place in found["places"])


@pytest.mark.parametrize(
    ("method", "mistake"),
    tiered([("reward", None), ("kto", None), ("orpo", None), ("simpo", None), ("kto", "loss_of_trl")], [("kto", None)]),
)
def test_a_loss_of_whole_answers_reads_none_either(ranks, tmp_path, model_folder, pairs, judged, method, mistake):
    """But transformers looks whether a batch is padded, once for each pass through the model."""
    data = judged if method == "kto" else pairs
    changes = {"method": method, "packing": False, "micro_batch_size": 2}
    _, found = counted(ranks, tmp_path, model_folder, data, 2, mistake, **changes)
    known = ("/deepspeed/", "/transformers/masking_utils.py")
    others = [place for place in found["places"] if not any(name in place for name in known)]
    assert bool(others) == bool(mistake), others


def test_every_way_to_ask_for_a_value_is_a_read():
    numbers = torch.arange(4.0)
    large = numbers > 1
    with Reads() as reads:
        numbers + 1
        numbers[large] = torch.tensor(0.0)  # a fill, which needs no number of places
    assert reads.total == 0
    asking = (
        lambda: numbers.sum().item(),
        lambda: bool(numbers.max() > 1),
        lambda: numbers[large],
        lambda: numbers.index_put_([large], torch.ones(2)),
    )
    for ask in asking:
        with Reads() as reads:
            ask()
        assert reads.total >= 1


# Memory of activations and of the loss, counted on tensors that have shapes only


def saved_per_layer(prepare: Callable[[Any], Any]) -> float:
    """Return the bytes that autograd keeps per token and layer of a Llama-8B-shaped model, as a multiple of h."""
    tokens, kept = 16, []
    for layers in (1, 2):
        config = LlamaConfig(**LAYER, num_hidden_layers=layers)
        with torch.device("meta"):
            model = prepare(
                AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
            ).train()
        model.to_empty(device="cpu")
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved: list[torch.Tensor] = []  # held, or an address would be given to another
        hidden = torch.randn(1, tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one, saved=saved: saved.append(one) or one, lambda one: one
        ):
            model(inputs_embeds=hidden, use_cache=False)
        sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in saved}
        kept.append(sum(size for place, size in sizes.items() if place not in weights))
    return (kept[1] - kept[0]) / tokens / HIDDEN


def ours(model: Any, **changes: Any) -> Any:
    return adapters.add(model, Lora(rank=16, **changes))


def pefts_defaults(model: Any) -> Any:
    """Adapters in fp32, and with the dropout that most examples have."""
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.05))


def feed_forward(model: Any) -> Any:
    transforms.recompute_feed_forward(model)
    return model


def test_adapters_save_46_h_of_activations_where_pefts_defaults_save_111():
    assert 40 < saved_per_layer(ours) <= 46
    assert saved_per_layer(partial(ours, fused=True)) <= saved_per_layer(ours)
    assert 105 < saved_per_layer(pefts_defaults) <= 111


@pytest.mark.every
def test_checkpointing_of_feed_forward_layers_saves_their_part():
    assert saved_per_layer(feed_forward) <= 22 < 49 <= saved_per_layer(lambda model: model) <= 50


class Live(TorchDispatchMode):
    """The bytes of all tensors that are made and not gone yet, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        output = function(*arguments, **(options or {}))
        for made in output if isinstance(output, tuple | list) else (output,):
            if torch.is_tensor(made) and made.untyped_storage()._cdata not in self.known:
                storage = made.untyped_storage()
                self.known[storage._cdata] = weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
        return output

    def gone(self, key: int, size: int) -> None:
        self.bytes -= size
        del self.known[key]


def loss_peak(tiled: bool, tokens: int = 4096, vocabulary: int = 128256) -> float:
    """Return the most bytes per token and vocabulary entry that a pass holds, of a model that is all vocabulary."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    with FakeTensorMode():
        config = LlamaConfig(**sizes, vocab_size=vocabulary, max_position_embeddings=tokens)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if tiled:
            transforms.tile_loss(model)
        row = torch.zeros((1, tokens), dtype=torch.int64)
        seen = torch.zeros((1, 1, tokens, tokens), dtype=torch.bfloat16)  # or transformers would look at values
        with Live() as live:
            model(input_ids=row, labels=row, attention_mask=seen, use_cache=False).loss.backward()
    return live.peak / tokens / vocabulary


def test_the_loss_peaks_at_4_bytes_per_token_and_vocabulary_entry(monkeypatch):
    assert loss_peak(tiled=True) <= 4
    assert 12 <= loss_peak(tiled=False) <= PER_ENTRY
    assert are_large(598, 128256) and not are_large(597, 128256)  # from 1 GiB, at 14 bytes
    monkeypatch.setattr(transforms, "COLUMNS", 32768)
    assert loss_peak(tiled=True) > 4


# What they compute


def family_of(name: str) -> Any:
    page = pages.page(name)
    return AutoConfig.for_model(**next(iter(page.SIZES.values())).config).get_text_config()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(draft.TINY_MODEL)


@pytest.fixture(autouse=True)
def masks_as_they_were(monkeypatch):
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", masking_utils.find_packed_sequence_indices)
    monkeypatch.setattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE)


SEQUENCES = [
    {"input_ids": list(range(5, 5 + sum(lengths))), "labels": list(range(5, 5 + sum(lengths))), "seq_lengths": lengths}
    for lengths in ([40, 24], [11, 30, 9])
]
REFUSED = {
    "bloom": "attend to each other",
    "falcon_h1": "packed sequences",
    "gemma2": "softcap",
    "gpt_oss": "s_aux",
    "lfm2": "packed sequences",
    "nemotron_h": "packed sequences",
    "qwen3_5": "packed sequences",
    "qwen3_5_moe": "packed sequences",
}


def passed(model: torch.nn.Module, boundaries: bool) -> list[torch.Tensor]:
    batch = Collator(0, boundaries=boundaries)(SEQUENCES)
    inputs = {name: value for name, value in batch.items() if name not in ("tokens", "squared_lengths")}
    output = model.train()(**inputs)
    output.loss.backward()
    return [output.loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def agree(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return whether loss and gradients are the same to 1e-5 of the largest."""
    largest = max(gradient.abs().max() for gradient in others[1:])
    assert len(some) == len(others) and largest > 1e-3
    close = all((a - b).abs().max() <= 1e-5 * largest for a, b in zip(some[1:], others[1:], strict=True))
    return close and abs(some[0] - others[0]) <= 1e-5 * abs(others[0])


PACKED = [name for name in language_families() if name not in REFUSED]


@pytest.mark.parametrize("family", tiered(PACKED, {"deepseek", "gemma3", "gpt2", "llama3", "phi4", "qwen3_moe"}))
def test_variable_length_attention_computes_what_a_dense_mask_does(tokenizer, family):
    config = family_of(family)
    for name in ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "residual_dropout", "hidden_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    masked = probe.draft_of(config, tokenizer, "sdpa", torch.float32)
    told = probe.draft_of(config, tokenizer, "varlen", torch.float32)
    assert attention.needs_boundaries(told) and not attention.needs_boundaries(masked)
    expected = passed(masked, boundaries=False)
    assert agree(passed(told, boundaries=True), expected)
    told.zero_grad()
    assert agree(passed(told, boundaries=False), expected), "without boundaries it uses SDPA and its mask"


def test_wrong_document_boundaries_are_noticed(tokenizer, monkeypatch):
    expected = passed(probe.draft_of(family_of("llama3"), tokenizer, "sdpa", torch.float32), boundaries=False)
    begin = attention.document_boundaries

    def of_one_document(lengths, width):
        return begin([[sum(one)] for one in lengths], width)

    monkeypatch.setattr(attention, "document_boundaries", of_one_document)
    assert not agree(passed(probe.draft_of(family_of("llama3"), tokenizer, "varlen", torch.float32), True), expected)


@pytest.mark.parametrize("family", REFUSED)
@needs("transformers>=5.17")
def test_what_the_kernel_does_not_support_is_refused(tokenizer, family):
    try:
        assert not probe.keeps_documents_apart(family_of(family), tokenizer, "varlen")
    except (ValueError, NotImplementedError) as error:
        assert REFUSED[family] in str(error)


def test_generation_with_left_padding_uses_sdpa_and_its_mask(tokenizer):
    told = probe.draft_of(family_of("llama3"), tokenizer, "varlen", torch.float32)
    masked = probe.draft_of(family_of("llama3"), tokenizer, "sdpa", torch.float32)
    tokens = torch.arange(5, 25).view(2, 10)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    passed(told, boundaries=True)
    answers = [
        model.eval().generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False, use_cache=True)
        for model in (told, masked)
    ]
    assert torch.equal(*answers)


LEVERS = {"tiled_loss": True, "gradient_checkpointing": "feed_forward"}


def trained(ranks, tmp_path, model_folder, conversations, name, stage, world_size=2, **changes) -> list[dict]:
    recipe = small(model_folder, conversations, f"zero{stage}.json", packing=True, adam_epsilon=1e-5)
    recipe = replace(recipe, micro_batch_size=1, global_batch_size=2, **changes)
    return read_jsonl(run_on(ranks, recipe, tmp_path, world_size, name=name).metrics)


OFFLOADED = {"gradient_checkpointing": True, "activation_offloading": True}
CASES = [
    (2, {}),
    pytest.param(3, {"lora": Lora(rank=4)}, marks=pytest.mark.every),
    pytest.param(1, {"lora": Lora(rank=4), "gradient_checkpointing": True}, marks=pytest.mark.every),
    pytest.param(3, {"gradient_checkpointing": True}, marks=pytest.mark.every),
    (3, {"gradient_checkpointing": "selective"}),
    pytest.param(2, {"gradient_checkpointing": "selective"}, marks=pytest.mark.every),
    pytest.param(3, {"gradient_checkpointing": "selective", "lora": Lora(rank=4)}, marks=pytest.mark.every),
    pytest.param(3, {"gradient_checkpointing": "selective", "layout": Layout(sequence=2)}, marks=pytest.mark.every),
    (3, OFFLOADED),
    pytest.param(2, OFFLOADED | {"lora": Lora(rank=4)}, marks=pytest.mark.every),
    pytest.param(2, OFFLOADED | {"layout": Layout(sequence=2)}, marks=pytest.mark.every),
    pytest.param(0, {}, marks=pytest.mark.every),
    pytest.param(3, {"layout": Layout(sequence=2)}, marks=pytest.mark.every),
    pytest.param(2, {"lora": Lora(rank=4), "layout": Layout(sequence=2)}, marks=pytest.mark.every),
]


@pytest.mark.parametrize(("stage", "changes"), CASES)
def test_runs_with_all_optimisations_on_and_off_are_the_same(
    ranks, tmp_path, model_folder, conversations, stage, changes
):
    chosen = Model(path=str(model_folder), attention="varlen")
    on = trained(ranks, tmp_path, model_folder, conversations, "on", stage, model=chosen, **LEVERS | changes)
    without = changes | {"tiled_loss": False, "gradient_checkpointing": False, "activation_offloading": False}
    off = trained(ranks, tmp_path, model_folder, conversations, "off", stage, **without)
    assert len(on) == len(off) == 6
    for ours_, theirs in zip(on, off, strict=True):
        assert ours_["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours_["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def offloaded_bytes(prepare: Callable[[Any], Any], layers: int, tokens: int) -> tuple[int, torch.Tensor]:
    """Return the most bytes that a pass keeps in host memory, and the gradient of the first layer's first matrix."""
    torch.manual_seed(0)
    config = LlamaConfig(**LAYER | {"hidden_size": 64, "intermediate_size": 128}, num_hidden_layers=layers)
    model = prepare(AutoModelForCausalLM.from_config(config)).train()
    inputs = activation_checkpointing.offload_inputs(model, on_gpu=False)
    row = torch.arange(tokens)[None] % LAYER["vocab_size"]
    loss = model(input_ids=row, labels=row, use_cache=False).loss
    held = inputs.bytes
    loss.backward()
    assert inputs.bytes == 0, "everything came back"
    return held, next(model.model.layers[0].parameters()).grad


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def test_of_checkpointed_layers_the_inputs_are_in_host_memory():
    held, gradient = offloaded_bytes(checkpointed, layers=6, tokens=32)
    shorter, _ = offloaded_bytes(checkpointed, layers=5, tokens=32)
    assert held - shorter == 32 * 64 * 4, "one input for each layer, in fp32"
    plain, same = offloaded_bytes(lambda model: model, layers=6, tokens=32)
    assert plain > 3 * held, "without checkpointing a layer keeps more of that width"
    assert torch.equal(gradient, same)


def test_a_tensor_that_comes_back_wrong_is_noticed(monkeypatch):
    given = activation_checkpointing.LayerInputs._give_back
    monkeypatch.setattr(
        activation_checkpointing.LayerInputs,
        "_give_back",
        lambda self, kept: kept if torch.is_tensor(kept) else 1.01 * given(self, kept),
    )
    _, wrong = offloaded_bytes(checkpointed, layers=2, tokens=32)
    monkeypatch.undo()
    _, right = offloaded_bytes(checkpointed, layers=2, tokens=32)
    assert not torch.allclose(wrong, right, rtol=1e-5)


@pytest.mark.every
def test_compiled_layers_compute_the_same(model_folder):
    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    compiled = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for model, mode in ((plain, "off"), (compiled, "regional")):
        transforms.apply(model, small(model_folder, "unread", compile=mode))
    assert sum(one._compiled_call_impl is not None for one in compiled.modules()) == 2
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert agree(passed(compiled, boundaries=False), passed(plain, boundaries=False))


# When which is taken


@needs("torch>=2.10")
def test_attention_is_chosen_by_what_is_available(monkeypatch, model_folder, conversations):
    recipe = small(model_folder, conversations, packing=True, precision="bf16")
    config = AutoConfig.from_pretrained(model_folder)
    chosen = partial(attention.candidates, config=config, on_gpu=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert chosen(recipe) == ["varlen", "flex_attention", "sdpa"]
    for version in (2, 3, 4):
        monkeypatch.setattr(attention, f"is_flash_attn_{version}_available", lambda: True)
    first = ["flash_attention_3", "flash_attention_4", "flash_attention_2"]
    assert chosen(recipe) == [*first, "varlen", "flex_attention", "sdpa"]
    for capability, names in {(10, 0): first[1:], (8, 9): first[2:]}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert chosen(recipe) == [*names, "varlen", "flex_attention", "sdpa"]
    assert attention.candidates(recipe, config, on_gpu=False) == ["sdpa"]
    for changes in ({"packing": False}, {"precision": "fp32"}, {"layout": Layout(pipeline=2)}):
        assert chosen(replace(recipe, **changes)) == ["sdpa"], changes
    assert chosen(replace(recipe, model=replace(recipe.model, attention="eager"))) == ["eager"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert chosen(recipe) == ["sdpa"]


def test_the_loss_is_tiled_where_whole_logits_would_be_large():
    recipe = replace(pages.find("llama3-8b", "full"), micro_batch_size=1, sequence_length=4096, tiled_loss=None)
    assert PER_ENTRY * 4096 * 128256 > LARGE and tiles_loss(recipe, 128256)
    assert not tiles_loss(replace(recipe, sequence_length=256), 128256)
    assert not tiles_loss(replace(recipe, tiled_loss=False), 128256)
    assert tiles_loss(replace(recipe, tiled_loss=True, sequence_length=8), 100)
    for changes in ({"method": "dpo"}, {"layout": Layout(pipeline=2)}, {"router_aux_loss_coef": 0.1}):
        assert not tiles_loss(replace(recipe, **changes), 128256)


def test_optimisations_are_override_keys_like_any_other(model_folder, conversations):
    recipe = small(model_folder, conversations)
    typed = ["gradient_checkpointing=feed_forward", "compile=regional", "tiled_loss=none", "model.attention=varlen"]
    changed = overrides.apply(recipe, typed)
    assert changed.gradient_checkpointing == "feed_forward" and changed.compile == "regional"
    assert overrides.apply(recipe, ["gradient_checkpointing=false"]).gradient_checkpointing is False
    with pytest.raises(UserError, match="true, selective, feed_forward or false"):
        overrides.apply(recipe, ["gradient_checkpointing=half"])
    for word, why in (("tiled_mlp=true", "that tiles discard"), ("compile=regional", "choose by themselves")):
        with pytest.raises(UserError, match=f"gradient_checkpointing=selective with .*: .*{why}"):
            overrides.apply(recipe, ["gradient_checkpointing=selective", word])
    for word in ("gradient_checkpointing=false", "compile=regional", "layout.pipeline=2"):
        with pytest.raises(UserError, match=f"activation_offloading=true with {word}: .*; use"):
            overrides.apply(recipe, ["gradient_checkpointing=true", "activation_offloading=true", word])
    split = overrides.apply(recipe, ["gradient_checkpointing=selective", "layout.tensor=2"])
    with pytest.raises(UserError, match=r"layout.tensor=2.*: gradient_checkpointing=selective keeps the products"):
        limits.check(split, 2, deepspeed_file.DeepSpeedFile(stage=1))
    for known, answer in (("torch_compile", "compile"), ("use_liger_kernel", "liger_kernel")):
        with pytest.raises(UserError, match=f"use '{answer}'"):
            overrides.apply(recipe, [f"{known}=true"])


def test_unavailable_optimisations_are_refused(model_folder, conversations):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.raises(UserError, match="pip install liger-kernel"):
        transforms.apply(model, small(model_folder, conversations, liger_kernel=True))
    with pytest.raises(UserError, match=r"compile=regional with deepspeed=zero3.json: ZeRO-3 .*; use .*zero2.json"):
        recipe = small(model_folder, conversations, "zero3.json", compile="regional")
        limits.check(recipe, 1, deepspeed_file.read(recipe.deepspeed))
    recipe = small(model_folder, conversations, "deepcompile.json")
    file = deepspeed_file.read(recipe.deepspeed)
    transforms.check(recipe, file, on_gpu=True)
    with pytest.raises(UserError, match=r"deepspeed=deepcompile.json: .* use zero3.json"):
        transforms.check(recipe, file, on_gpu=False)
    with pytest.raises(UserError, match=r"compile.passes has autosp, .* write layout.sequence=2"):
        transforms.check(recipe, replace(file, compiled_passes=("autosp",)), on_gpu=True)
    mixture = AutoModelForCausalLM.from_config(draft.shrink(family_of("mixtral"), Draft(), load()))
    with pytest.raises(UserError, match="gradient_checkpointing=feed_forward: not for mixtral"):
        transforms.recompute_feed_forward(mixture)


def test_an_engine_that_left_deepcompile_out_does_not_train_on():
    """DeepSpeed's own engine, told by its configuration alone, leaves AutoSP out at stage 2 and only logs it."""
    compiled = deepspeed_file.parse({"compile": {"deepcompile": True}, "zero_optimization": {"stage": 2}}, "my.json")
    engine = object.__new__(DeepSpeedEngine)
    torch.nn.Module.__init__(engine)
    compile_config = SimpleNamespace(passes=["autosp"], deepcompile=True)
    zero = SimpleNamespace(stage=2)
    engine._config = SimpleNamespace(compile_config=compile_config, zero_config=zero, zero_optimization_stage=2)
    engine._deepcompile_active = False
    assert engine.get_autosp_backend({}) is None and not engine.is_deepcompile_active()
    with pytest.raises(UserError, match=r"deepspeed=my.json: .* would train as plain ZeRO-2"):
        RunTrainer.on_engine_ready(SimpleNamespace(deepspeed=engine, context=SimpleNamespace(file=compiled)))


def load() -> Any:
    return AutoTokenizer.from_pretrained(draft.TINY_MODEL)
