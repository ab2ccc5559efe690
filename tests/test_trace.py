"""What is traced on the meta device is what autograd keeps: weighed on drafts of every family, and as committed."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from recipes.planning import activations, trace
from recipes.planning.dissect import dissect
from recipes.planning.memory import NF4
from recipes.planning.setup import Setup
from recipes.planning.weigh import Live
from recipes.spec import pages
from recipes.spec.errors import UserError
from recipes.spec.recipe import Draft, Lora
from recipes.training import adapters
from recipes.training.draft import TINY_MODEL, shrink

CORE = ("llama3", "gemma3", "bloom", "gpt2", "mixtral", "qwen3_5", "deepseek")
"""One of each kind of attention and feed-forward layer; `make test-all` weighs all families."""
FAMILIES = [pytest.param(family, marks=() if family in CORE else pytest.mark.every) for family in pages.families()]
LORA = Lora(rank=16)
ROWS, LENGTH = 3, 192
WAYS = {
    "full": {},
    "packed": {"packing": True},
    "checkpointed": {"gradient_checkpointing": True},
    "adapters": {"lora": LORA},
    "adapters, packed, checkpointed": {"lora": LORA, "packing": True, "gradient_checkpointing": True},
}


def draft_of(family, hidden=64):
    config = AutoConfig.for_model(**next(iter(pages.page(family).SIZES.values())).config)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    return shrink(config, Draft(enabled=True, layers=6, hidden_size=hidden), tokenizer)


def setup_of(family, **changes):
    attention = next(iter(pages.page(family).SIZES.values())).attention.replace("auto", "sdpa")  # on a CPU
    plain = Setup(1, micro_batch_size=ROWS, sequence_length=LENGTH, gradient_checkpointing=False, packing=False)
    return replace(plain, attention=attention, **changes)


def predicted(anatomy, setup):
    """Return the bytes that live between the forward and the backward pass."""
    ends = activations.traced(anatomy.ends, setup).of(ROWS, LENGTH)
    masks = activations.mask_bytes(anatomy.layers, setup) if setup.gradient_checkpointing else 0
    return sum(activations.kept_bytes(layer, setup) for layer in anatomy.layers) + ends + masks


def weighed(model, setup, backward=False):
    """Return the bytes that autograd keeps of a loss, in real tensors on the CPU; or the most that live until the end.

    With checkpointing what lives on is weighed: the layers' inputs are no saved tensors, since functions hold them.
    """
    torch.manual_seed(0)
    model.config.use_cache = False
    if setup.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if setup.lora:
        model.enable_input_require_grads()
        model = adapters.add(model, setup.lora)
    live = Live()
    live.ignore((*model.parameters(), *model.buffers()))

    def keep(tensor):
        live.save(tensor, 0)
        return tensor.detach()

    with live, saved_tensors_hooks(keep, lambda tensor: tensor):
        tokens = torch.randint(5, model.config.vocab_size, (ROWS, LENGTH))
        positions = torch.arange(LENGTH) % (LENGTH // 2 if setup.packing else LENGTH)
        loss = model(input_ids=tokens, labels=tokens, position_ids=positions.expand(ROWS, -1)).loss
    if backward:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
        with live:
            loss.backward()
        return live.peak
    return live.bytes if setup.gradient_checkpointing else sum(size for _, size in live.saved.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_autograd_keeps_of_a_draft_is_what_is_predicted(family):
    config = draft_of(family)
    anatomy = dissect(config.to_dict(), [None, LORA], device="cpu")
    found = {}
    for name, changes in WAYS.items():
        setup = setup_of(family, **changes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        found[name] = weighed(model, setup)
        assert predicted(anatomy, setup) == pytest.approx(found[name], rel=0.05), name
    # The mistakes that would be noticed: forgotten checkpointing, adapters taken for all weights.
    assert found["checkpointed"] < 0.8 * found["full"]
    ways = {name: predicted(anatomy, setup_of(family, **changes)) for name, changes in WAYS.items()}
    assert ways["full"] != pytest.approx(found["checkpointed"], rel=0.05)
    assert ways["checkpointed"] != pytest.approx(found["full"], rel=0.05)


@pytest.mark.parametrize("name", ["full", "checkpointed", "adapters, packed, checkpointed"])
@pytest.mark.parametrize("family", ["llama3", "gpt2", "mixtral"])
def test_the_worst_moment_is_what_is_predicted(family, name):
    """Everything that lives in a forward and a backward pass is followed, but for the gradients of weights."""
    config, setup = draft_of(family), setup_of(family, **WAYS[name])
    config.vocab_size, config.pad_token_id = 64, None  # so that the logits are not all that counts
    anatomy = dissect(config.to_dict(), [setup.lora], device="cpu")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    kept = sum(activations.kept_bytes(layer, setup) for layer in anatomy.layers)
    kept += activations.mask_bytes(anatomy.kinds, setup)
    worst = max(activations.backward_bytes(kind, setup) for kind in anatomy.kinds)
    found = weighed(model, setup, backward=True)
    assert kept + max(worst, activations.loss_bytes(anatomy, setup)) == pytest.approx(found, rel=0.1)


def test_a_mask_that_is_forgotten_is_noticed():
    anatomy = dissect(draft_of("llama3").to_dict(), device="cpu")
    model = AutoModelForCausalLM.from_config(draft_of("llama3"), dtype=torch.bfloat16).train()
    found = weighed(model, setup_of("llama3", packing=True))
    assert predicted(anatomy, setup_of("llama3")) != pytest.approx(found, rel=0.05)


def test_weights_in_4_bits_keep_what_others_do_and_take_what_is_said(tmp_path):
    config = draft_of("llama3", hidden=256)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=adapters.nf4(torch.bfloat16)
    ).train()
    adapters.keep_layout(model)
    packed = [one for one in model.parameters() if hasattr(one, "quant_state")]
    states = [one.quant_state for one in packed]
    scales = sum(state.absmax.nbytes + state.state2.absmax.nbytes for state in states)
    anatomy = dissect(config.to_dict(), [LORA], device="cpu")
    linears = sum(inputs * outputs for layer in anatomy.layers for inputs, outputs in layer.linears)
    assert sum(one.nbytes for one in packed) + scales == pytest.approx(NF4 * linears, rel=0.01)
    setup = setup_of("llama3", lora=LORA)
    assert predicted(anatomy, setup) == pytest.approx(weighed(model, setup), rel=0.05)


def test_a_layer_of_llama_keeps_what_counting_by_hand_gives():
    config = pages.page("llama3").SIZES["8b"].config
    (kind,) = trace.anatomy(config).kinds
    h, k, f, n = 4096, 1024, 14336, 32
    assert kind.saved["full"].per_token == pytest.approx(20 * h + 4 * k + 8 * f + 4 * n, rel=1e-3)
    assert kind.saved["lora"].per_token + 16 * kind.saved["lora rank"].per_token == pytest.approx(45.1 * h, rel=0.01)
    assert kind.saved["masked"].per_pair == 2  # the mask in bf16, once for all heads
    assert kind.saved["masked"].per_token == pytest.approx(2 * 2 * (h - k), rel=1e-3)  # keys and values repeated
    assert kind.saved["eager"].per_pair == pytest.approx(6 * n)  # scores in fp32 before softmax, after it in bf16
    assert kind.adapters["lora rank"] == 7 * 0 + sum(inputs + outputs for inputs, outputs in kind.linears)


def test_every_size_of_the_catalogue_is_committed_for_this_version_of_transformers():
    stored = {name: one for file in trace.TRACES.glob("*.json") for name, one in trace._read(file).items()}
    names = {trace.key(config): (name, config) for name, config, _ in trace.catalogue()}
    assert set(stored) == set(names) and len(names) > 40, "python -m recipes.planning.trace writes them again"
    for family in pages.families():
        for model in pages.page(family).SIZES.values():
            anatomy = stored[trace.key(model.config)]
            assert anatomy.parameters == pytest.approx(model.parameters, rel=0.01)
            assert len(anatomy.order) == AutoConfig.for_model(**model.config).num_hidden_layers


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("llama3-1b", "gpt_oss-20b", "gemma3-1b") else pytest.mark.every)
        for name, _, _ in trace.catalogue()
    ],
)
def test_committed_traces_are_what_tracing_gives(name):
    config, loras = next((config, loras) for found, config, loras in trace.catalogue() if found == name)
    again = trace.to_dict(trace.traced(config, loras[:1]))
    committed = trace.to_dict(trace.anatomy(config))
    for kind, known in zip(again["kinds"], committed["kinds"], strict=True):
        for part in ("adapters", "saved", "working"):
            known[part] = {way: known[part][way] for way in kind[part]}
        assert kind == known
    assert {way: committed["ends"][way] for way in again["ends"]} == again["ends"]


def test_another_model_is_traced_once_and_kept(tmp_path):
    config = dict(pages.page("qwen3").SIZES["0.6b"].config) | {"num_hidden_layers": 5}
    code = (
        "import json, sys, time\nfrom recipes.planning import trace\n"
        "trace.anatomy(json.loads(sys.argv[1]))\nprint(time.process_time(), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, json.dumps(config)]
    environment = {"XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin", "HOME": str(tmp_path)}
    first, second = (
        subprocess.run(command, cwd=pages.ROOT, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert float(first.split()[0]) < 15 and "True" in first
    assert float(second.split()[0]) < 2 and "False" in second
    assert len(list((tmp_path / "deepspeed-recipes" / "traces").iterdir())) == 1


@pytest.mark.parametrize("config", [{}, {"model_type": "nonsense"}, {"model_type": "bert"}, {"model_type": "t5"}])
def test_what_is_no_decoder_is_refused(config):
    with pytest.raises(UserError, match=r"decoder") as caught:
        dissect(config)
    assert str(caught.value).count("\n") <= 2
