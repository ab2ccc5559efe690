"""What only runs on a GPU, called with CUDA tensors that have no values: signatures, dtypes, shapes, devices.

A read of a value (`.item()`, a mask as an index) raises here, since there is none; on a GPU it makes the host wait for
all kernels before it. A build of torch for CPUs alone has no such tensors, and the file is skipped there; no GPU is
needed (`make stack STACK=middle WITH=python3.12` makes such an environment). Backward passes need a driver.
"""

import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, masking_utils
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils
from trl.trainer.utils import add_fused_lm_head

from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.recipe import Draft
from deepspeed_recipes.training import upstream
from deepspeed_recipes.training.model import attention, draft, lora, transforms
from tests.versions import has

if not torch.backends.cuda.is_built() or not has("torch>=2.11"):
    pytest.skip("this build of torch is for CPUs only, or asks a driver for fake tensors", allow_module_level=True)

LENGTHS = (100, 60, 96)
"""Of the documents of a packed sequence."""


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """Make every tensor one without values, and transformers not look whether sequences are packed."""
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", masking_utils.find_packed_sequence_indices)
    tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
    with FakeTensorMode():
        yield tokenizer


def on_cuda(tokenizer, family: str, kernel: str) -> PreTrainedModel:
    """Return a draft in bf16 whose weights are on the fake GPU."""
    config = AutoConfig.for_model(**next(iter(pages.page(family).SIZES.values())).config)
    small = draft.shrink(config, Draft(layers=2), tokenizer)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16, attn_implementation=kernel)
    transforms.switch_by_batch(model)
    model.config.use_cache = False
    upstream.tell_whether_packed(model, True)
    return model.train()


def packed(model: torch.nn.Module, **more: torch.Tensor) -> dict[str, object]:
    """Return one packed sequence as the collator makes it, and what else it is to have, on the model's device."""
    tokens = torch.zeros((1, sum(LENGTHS)), dtype=torch.int64)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": positions, **more}
    if attention.needs_boundaries(model):
        batch |= attention.document_boundaries([LENGTHS], sum(LENGTHS))
    return {name: one.to("cuda") if torch.is_tensor(one) else one for name, one in batch.items()}


def train(model: torch.nn.Module, **more: torch.Tensor) -> None:
    """Compute a loss, and update the weights as if there were gradients, with the optimizer that a run has on a GPU."""
    loss = model(**packed(model, **more)).loss
    assert loss.is_cuda and loss.shape == () and loss.requires_grad
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        assert weight.is_cuda
        weight.grad = torch.empty_like(weight)
    torch.optim.AdamW(trained, fused=True).step()


@pytest.mark.parametrize("kernel", [attention.VARLEN, "sdpa"])
@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma3", "mistral", "gpt_neox", "phi4", "granite"])
def test_a_step_of_a_packed_sequence(fake, family, kernel):
    train(on_cuda(fake, family, kernel))


@pytest.mark.parametrize("tiles", [1, 4])
def test_a_step_in_tiles(fake, tiles):
    model = on_cuda(fake, "llama3", "sdpa")
    transforms.recompute_feed_forward(model, tiles)
    train(model)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_pass_through_fused_adapters_and_back(fake, monkeypatch, dropout):
    monkeypatch.setattr(LoraLayer, "_move_adapter_to_device_of_base_layer", lambda *_: None)  # not without values
    config = LoraConfig(r=4, lora_dropout=dropout)
    with torch.device("cuda"):
        base = torch.nn.Linear(64, 96, bias=True, dtype=torch.bfloat16)
        layer = lora.FusedLinear(base, "default", config, r=4, lora_alpha=8)
        hidden = torch.zeros((1, 7, 64), dtype=torch.bfloat16, requires_grad=True)
        for weight in layer.parameters():
            weight.data = weight.data.to(torch.bfloat16)
    output = layer(hidden)
    assert type(output.grad_fn).__name__ == "UpProjectionBackward"
    assert (output.shape, output.dtype, output.is_cuda) == ((1, 7, 96), torch.bfloat16, True)
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    reduced = hidden.detach() @ down.t()
    kept = SimpleNamespace(saved_tensors=(reduced, up), scaling=2.0)
    of_output, of_reduced, of_up, _ = lora.UpProjection.backward(kept, torch.zeros_like(output))
    kept = SimpleNamespace(saved_tensors=(hidden, down))
    of_hidden, of_down = lora.DownProjection.backward(kept, torch.zeros_like(hidden), of_reduced)
    computed = ((of_output, output), (of_reduced, reduced), (of_up, up), (of_hidden, hidden), (of_down, down))
    for gradient, one in computed:
        assert (gradient.shape, gradient.dtype, gradient.device) == (one.shape, one.dtype, one.device)


def test_trls_tiled_loss_reads_which_tokens_are_labelled(fake):
    """Once per micro-batch and tensor; when TRL takes indices it no longer has to be kept from it."""
    model = on_cuda(fake, "llama3", "sdpa")
    add_fused_lm_head(model)
    model.forward = partial(model.forward, fused_lm_head=True)
    with pytest.raises(DynamicOutputShapeException, match="nonzero"):
        train(model)


def test_the_tiled_loss_of_labelled_tokens_reads_nothing(fake, monkeypatch):
    monkeypatch.setattr(trl_utils, "_use_triton", trl_utils._use_triton)  # put back afterwards
    monkeypatch.setattr(chunked_logprob, "_use_triton", lambda device: False)  # its kernels need a driver
    model = on_cuda(fake, "llama3", "sdpa")
    transforms.tile_loss(model)
    places = torch.zeros(256, dtype=torch.int64)
    train(model, labelled=places, shift_labels=places[None])
    train(model)


@pytest.mark.parametrize("key_heads", [8, 2], ids=["own keys", "shared keys"])
@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("width", [64, 40], ids=["values as wide", "narrower values"])
def test_the_variable_length_kernel_takes_what_layers_pass(key_heads, window, width):
    total = sum(LENGTHS)
    query = torch.zeros((1, 8, total, 64), dtype=torch.bfloat16, device="cuda")
    key = torch.zeros((1, key_heads, total, 64), dtype=torch.bfloat16, device="cuda")
    value = torch.zeros((1, key_heads, total, width), dtype=torch.bfloat16, device="cuda")
    starts = torch.zeros(len(LENGTHS) + 1, dtype=torch.int32, device="cuda")
    output, weights = attention.varlen(
        None, query, key, value, None, scaling=0.1, sliding_window=window, cu_seq_lens_q=starts,
        max_length_q=max(LENGTHS),
    )  # fmt: skip
    assert weights is None and output.is_cuda
    assert (output.shape, output.dtype) == ((1, total, 8, width), torch.bfloat16)


def test_an_argument_that_the_kernel_does_not_have_is_noticed(monkeypatch):
    """As `enable_gqa` was passed to kernels of torch 2.11, which lack it."""
    monkeypatch.setattr(attention, "varlen_attn", lambda query, key, value, *starts: query)
    monkeypatch.setattr(attention, "_parameters", lambda function: {"scale", "window_size", "enable_gqa"})
    with pytest.raises(TypeError, match="unexpected keyword"):
        test_the_variable_length_kernel_takes_what_layers_pass(2, None, 64)


def test_a_read_of_a_value_is_noticed(fake, monkeypatch):
    model = on_cuda(fake, "llama3", "sdpa")
    model.register_forward_pre_hook(lambda module, _: module.lm_head.weight.sum().item())
    with pytest.raises(DataDependentOutputException):
        train(model)


ASKS = """
import torch
asked = []
torch.cuda._device_count_nvml = lambda: 1  # a driver with one GPU
torch._C._cuda_getDeviceCount = lambda: asked.append("devices") or 1
torch.cuda._lazy_init = lambda: asked.append("CUDA")
import deepspeed_recipes.benchmarks.measure
torch.cuda.is_available()
print(asked)
torch.cuda._raw_device_count_nvml = torch.cuda._device_count_nvml = lambda: -1
torch.cuda.is_available()
print(asked)
"""


def test_contenders_can_be_forked_from_what_is_imported():
    """CUDA is neither started nor asked for devices, after which a fork could not use it; on purpose, it is noticed."""
    environment = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "DS_ACCELERATOR": "cuda"}
    command = [sys.executable, "-c", ASKS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["[]", "['devices']"]
