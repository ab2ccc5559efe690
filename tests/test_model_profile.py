"""A model's profile agrees with what autograd saves, measured on drafts of every family; so do the shipped profiles."""

import json
import subprocess
import sys
from itertools import product

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.planning.cost import activations
from deepspeed_recipes.planning.cost.states import NF4
from deepspeed_recipes.planning.cost.training_setup import TrainingSetup
from deepspeed_recipes.planning.model_profile import allocations, lookup, meta_device
from deepspeed_recipes.planning.model_profile.allocations import LiveBytes
from deepspeed_recipes.planning.model_profile.meta_device import profile_model
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Draft, Lora
from deepspeed_recipes.training import activation_checkpointing, upstream
from deepspeed_recipes.training.model import lora as adapters
from deepspeed_recipes.training.model.draft import TINY_MODEL, shrink
from scripts.maintain.calibration import shipped_profiles
from tests import ROOT
from tests.small import language_families
from tests.tiers import tiered

CORE = ("llama3", "bloom")
"""Gated layers and plain ones, rotary positions and biases; `make test-all` measures all families."""
FAMILIES = tiered(language_families(), CORE)
LORA = Lora(rank=16)
SEQUENCES, LENGTH = 3, 256
"""As long as real ones: a multiple of 128, the chunk to whose multiples state-space layers pad a sequence."""
MODES = {
    "full": {},
    "packed": {"packing": True},
    "checkpointed": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": "selective"},
    "eager, checkpointed": {"attention": "eager", "gradient_checkpointing": True},
    "adapters": {"lora": LORA},
    "adapters, packed, checkpointed": {"lora": LORA, "packing": True, "gradient_checkpointing": True},
}


class CpuKernels(allocations.Kernels):
    """Allocates as the CPU's kernels do, on which the drafts below are measured.

    Attention with every mask is flash attention; if heads have two widths, all scores are saved. Dropout saves a factor
    in the element's type. (PyTorch 2.13, aten/src/ATen/native/transformers: attention.cpp, sdp_utils_cpp.cpp.)
    """

    def attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        if query.shape[-1] == value.shape[-1] and not dropout_p:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def dropout(self, input, *args, **kwargs):
        return functional.dropout(input, *args, **kwargs)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Let profiles imitate the kernels of this machine."""
    monkeypatch.setattr(allocations, "Kernels", CpuKernels)


def is_fused_on_cpu(config) -> bool:
    """Return whether a fused kernel computes attention on a CPU: not with dropout, nor with keys wider than values.

    `selective` keeps what such a kernel returns, and computes it again where there is none.
    """
    dropout = getattr(config, "attention_dropout", 0) or getattr(config, "attn_pdrop", 0)
    return not dropout and getattr(config, "qk_head_dim", None) == getattr(config, "v_head_dim", None)


def draft_of(family, hidden=64):
    config = AutoConfig.for_model(**next(iter(pages.page(family).SIZES.values())).config)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    return shrink(config, Draft(enabled=True, layers=6, hidden_size=hidden), tokenizer)


def setup_for(family, **changes):
    attention = next(iter(pages.page(family).SIZES.values())).attention.replace("auto", "sdpa")  # on a CPU
    batch = {"micro_batch_size": SEQUENCES, "sequence_length": LENGTH}
    plain = {"gradient_checkpointing": False, "packing": False, "attention": attention}
    return TrainingSetup(1, **batch | plain | changes)


def predicted(profile, setup):
    """Return the bytes that live between the forward and the backward pass."""
    ends = activations.of_mode(profile.saved_outside_layers, setup.lora).of(SEQUENCES, LENGTH)
    masks = activations.mask_bytes(profile.layers, setup) if setup.gradient_checkpointing else 0
    return sum(activations.kept_bytes(layer, setup) for layer in profile.layers) + ends + masks


def measured(model, setup, backward=False):
    """Return the bytes that autograd saves for a loss, in real tensors on the CPU; or the peak of both passes.

    With checkpointing all live bytes count: the layers' inputs are not saved tensors, since functions hold them.
    """
    torch.manual_seed(0)
    model.config.use_cache = False
    if setup.gradient_checkpointing:
        kept = {"context_fn": activation_checkpointing.keep_products} if setup.selective else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **kept})
    if setup.lora:
        model.enable_input_require_grads()
        model = adapters.add(model, setup.lora)
    live = LiveBytes()
    live.watch((*model.parameters(), *model.buffers()), counted=False)

    def save(tensor):
        live.save(tensor, 0)
        return tensor.detach()

    with live, saved_tensors_hooks(save, lambda tensor: tensor):
        tokens = torch.randint(5, model.config.vocab_size, (SEQUENCES, LENGTH))
        positions = torch.arange(LENGTH) % (LENGTH // 2 if setup.packing else LENGTH)
        loss = model(input_ids=tokens, labels=tokens, position_ids=positions.expand(SEQUENCES, -1)).loss
    if backward:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
        with live:
            loss.backward()
        return live.peak
    return live.bytes if setup.gradient_checkpointing else sum(size for _, size in live.saved.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("on_a_cpu")
def test_what_autograd_saves_of_a_draft_is_what_is_predicted(family):
    config = draft_of(family)
    profile = profile_model(config.to_dict(), [None, LORA])
    found = {}
    for name, changes in MODES.items():
        setup = setup_for(family, **changes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=setup.attention)
        found[name] = measured(model.train(), setup)
        unfused = setup.selective and not is_fused_on_cpu(config)
        again = sum(2 * layer.attention_width * SEQUENCES * LENGTH for layer in profile.layers) if unfused else 0
        assert predicted(profile, setup) - again == pytest.approx(found[name], rel=0.05), name
    # The mistakes that would be noticed: forgotten checkpointing, adapters taken for all weights.
    assert found["checkpointed"] < 0.8 * found["full"]
    modes = {name: predicted(profile, setup_for(family, **changes)) for name, changes in MODES.items()}
    assert modes["full"] != pytest.approx(found["checkpointed"], rel=0.05)
    assert modes["checkpointed"] != pytest.approx(found["full"], rel=0.05)


@pytest.mark.parametrize(
    ("family", "name"),
    tiered(
        product(
            ("llama3", "gpt2", "mixtral"),
            ("full", "checkpointed", "selective", "eager, checkpointed", "adapters, packed, checkpointed"),
        ),
        {
            ("llama3", "eager, checkpointed"),
            ("llama3", "full"),
            ("llama3", "selective"),
            ("gpt2", "adapters, packed, checkpointed"),
            ("mixtral", "checkpointed"),
        },
    ),
)
@pytest.mark.usefixtures("on_a_cpu")
def test_the_worst_moment_is_what_is_predicted(family, name):
    """All live bytes of a forward and a backward pass are tracked, except the gradients of weights."""
    config, setup = draft_of(family), setup_for(family, **MODES[name])
    config.vocab_size, config.pad_token_id = 64, None  # so that the logits are not all that counts
    without = [None, setup.lora]  # masks, and what eager attention takes, are measured without adapters
    profile = profile_model(config.to_dict(), without)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=setup.attention).train()
    kept = sum(activations.kept_bytes(layer, setup) for layer in profile.layers)
    kept += activations.mask_bytes(profile.layer_kinds, setup)
    worst = max(activations.backward_bytes(kind, setup) for kind in profile.layer_kinds)
    found = measured(model, setup, backward=True)
    assert kept + max(worst, activations.loss_bytes(profile, setup)[0]) == pytest.approx(found, rel=0.08)


@pytest.mark.usefixtures("on_a_cpu")
def test_a_forgotten_mask_is_noticed():
    profile = profile_model(draft_of("llama3").to_dict())
    model = AutoModelForCausalLM.from_config(draft_of("llama3"), dtype=torch.bfloat16).train()
    found = measured(model, setup_for("llama3", packing=True))
    assert predicted(profile, setup_for("llama3")) != pytest.approx(found, rel=0.05)


@pytest.mark.usefixtures("on_a_cpu")
def test_4_bit_weights_save_the_same_activations_and_need_the_predicted_memory(tmp_path):
    config = draft_of("llama3", hidden=256)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=adapters.nf4(torch.bfloat16)
    ).train()
    upstream.keep_4bit_layout(model)
    packed = [one for one in model.parameters() if hasattr(one, "quant_state")]
    states = [one.quant_state for one in packed]
    scales = sum(state.absmax.nbytes + state.state2.absmax.nbytes for state in states)
    profile = profile_model(config.to_dict(), [LORA])
    linears = sum(inputs * outputs for layer in profile.layers for inputs, outputs in layer.linears)
    assert sum(one.nbytes for one in packed) + scales == pytest.approx(NF4 * linears, rel=0.01)
    setup = setup_for("llama3", lora=LORA)
    assert predicted(profile, setup) == pytest.approx(measured(model, setup), rel=0.05)


def test_layers_that_scan_token_by_token_are_profiled_from_short_sequences(monkeypatch):
    """Jamba's reference scan took minutes with the usual lengths; its memory for longer sequences follows as well."""
    measure, lengths = allocations.measure, []
    monkeypatch.setattr(allocations, "measure", lambda *words: lengths.append(words[-1]) or measure(*words))
    config = {"model_type": "jamba", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "num_experts": 2}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_dt_rank": 4}
    config |= {"attn_layer_period": 2, "attn_layer_offset": 1}
    kinds = profile_model(config, [None, LORA]).layer_kinds
    assert max(lengths) < 64
    model = meta_device._two_of_each_kind(meta_device.build(config), range(2))
    measured = allocations.measure_batch(model, (256, 64))
    for number, kind in enumerate(kinds):
        assert kind.saved["full"].of(256, 64) == pytest.approx(measured["saved", number], rel=0.002)
        assert kind.backward_peak["full"].of(256, 64) == pytest.approx(measured["backward_peak", number], rel=0.02)


def test_a_layer_of_llama_saves_what_counting_by_hand_gives():
    config = pages.page("llama3").SIZES["8b"].config
    (kind,) = lookup.profile_of(config).layer_kinds
    h, k, f, n = 4096, 1024, 14336, 32
    assert kind.saved["full"].per_token == pytest.approx(20 * h + 4 * k + 8 * f + 4 * n, rel=1e-3)
    assert kind.saved["lora"].per_token + 16 * kind.saved["lora rank"].per_token == pytest.approx(45.1 * h, rel=0.01)
    assert kind.saved["masked"].per_pair == 2  # the mask in bf16, once for all heads
    assert kind.saved["masked"].per_token == pytest.approx(2 * 2 * (h - k), rel=1e-3)  # keys and values repeated
    assert kind.saved["eager"].per_pair == pytest.approx(6 * n)  # scores in fp32 before softmax, after it in bf16
    assert kind.adapter_parameters["lora rank"] == 7 * 0 + sum(inputs + outputs for inputs, outputs in kind.linears)


def test_every_size_of_the_catalogue_is_committed_for_this_version_of_transformers():
    stored = {name: one for file in lookup.PROFILES.glob("*.json") for name, one in lookup.read(file).items()}
    names = {lookup.key(config): (name, config) for name, config, _ in shipped_profiles.catalogue()}
    assert set(stored) == set(names) and len(names) > 40, (
        "python -m scripts.maintain.calibration.shipped_profiles writes them again"
    )
    for family in pages.families():
        for model in pages.page(family).SIZES.values():
            profile = stored[lookup.key(model.config)]
            assert profile.parameters == pytest.approx(model.parameters, rel=0.01)
            assert len(profile.layer_order) == AutoConfig.for_model(**model.config).get_text_config().num_hidden_layers


@pytest.mark.parametrize("name", tiered([name for name, _, _ in shipped_profiles.catalogue()], ("llama3-1b",)))
def test_shipped_profiles_are_what_profiling_gives(name):
    config, loras = next((config, loras) for found, config, loras in shipped_profiles.catalogue() if found == name)
    again = lookup.to_dict(shipped_profiles.compute_profile(config, loras[:1]))
    committed = lookup.to_dict(lookup.profile_of(config))
    for kind, known in zip(again["layer_kinds"], committed["layer_kinds"], strict=True):
        for part in ("adapter_parameters", "saved", "backward_peak"):
            known[part] = {mode: known[part][mode] for mode in kind[part]}
        assert kind == known
    outside = again["saved_outside_layers"]
    assert {mode: committed["saved_outside_layers"][mode] for mode in outside} == outside


def test_another_model_is_profiled_once_and_cached(tmp_path, monkeypatch, capsys):
    config = dict(pages.page("qwen3").SIZES["0.6b"].config) | {"num_hidden_layers": 5}
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no cache can be kept there
    found = [lookup.profile_of(config) for _ in range(2)]
    assert capsys.readouterr().err.count(f"not kept for the next time: {tmp_path / 'file'}") == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert found == [lookup.profile_of(config)] * 2
    code = (
        "import json, sys\nfrom deepspeed_recipes.planning.model_profile import lookup\n"
        "lookup.profile_of(json.loads(sys.argv[1]))\nprint('torch' in sys.modules)"
    )
    again = subprocess.run([sys.executable, "-c", code, json.dumps(config)], cwd=ROOT, capture_output=True, text=True)
    assert again.stdout == "False\n", again.stderr
    assert len(list((tmp_path / "deepspeed-recipes" / "profiles").iterdir())) == 1


@pytest.mark.parametrize("config", [{}, {"model_type": "nonsense"}, {"model_type": "bert"}, {"model_type": "t5"}])
def test_models_that_are_not_decoders_are_refused(config):
    with pytest.raises(UserError, match=r"decoder") as caught:
        profile_model(config)
    assert str(caught.value).count("\n") <= 2
