"""The variable-length kernel as each torch version declares it: the same attention, or a reason.

The kernel itself needs a GPU. Here functions with exactly its signatures compute what it computes, on a CPU.
"""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoTokenizer

from deepspeed_recipes.training.model import attention, probe
from tests.small import small
from tests.versions import needs

STARTS = torch.tensor([0, 5, 12], dtype=torch.int32)


def computed(query, key, value, starts, scale, window, causal=True):
    """Return attention within documents, masked densely, for as many key heads as query heads."""
    mask = torch.full((len(query), len(query)), False)
    for start, end in pairwise(starts.tolist()):
        mask[start:end, start:end] = True
    back = torch.arange(len(query))[:, None] - torch.arange(len(query))
    mask &= (back >= 0) | torch.tensor(not causal)
    if window[0] >= 0:
        mask &= back <= window[0]
    query, key, value = (one.transpose(0, 1)[None] for one in (query, key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)[0].transpose(0, 1)


def torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    assert key.shape == query.shape
    return computed(query, key, value, cu_seq_q, None, (-1, -1), is_causal)


def torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert key.shape == query.shape
    return computed(query, key, value, cu_seq_q, scale, window_size, causal=window_size[1] == 0)


def torch_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
    *, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False,
):  # fmt: skip
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa == (groups > 1)
    key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    return torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def inputs(key_heads):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(12, heads, 8, generator=generator) for heads in (4, key_heads, key_heads))


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("kernel", [torch_2_10, torch_2_11, torch_2_13])
def test_every_version_computes_the_same(monkeypatch, kernel, key_heads, scale):
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    options = {"scale": scale, "window_size": (-1, 0), "enable_gqa": key_heads != 4}
    ours = attention._fused(*inputs(key_heads), STARTS, 7, **options)
    torch.testing.assert_close(ours, attention._one_by_one(*inputs(key_heads), STARTS, 7, **options))


def test_windows_are_kept_or_refused(monkeypatch):
    options = {"scale": None, "window_size": (2, 0), "enable_gqa": False}
    monkeypatch.setattr(attention, "varlen_attn", torch_2_11)
    ours = attention._fused(*inputs(4), STARTS, 7, **options)
    torch.testing.assert_close(ours, attention._one_by_one(*inputs(4), STARTS, 7, **options))
    monkeypatch.setattr(attention, "varlen_attn", torch_2_10)
    with pytest.raises(ValueError, match="no sliding windows"):
        attention._fused(*inputs(4), STARTS, 7, **options)


@pytest.fixture
def recipe(monkeypatch, model_folder, conversations):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return small(model_folder, conversations, packing=True, precision="bf16")


@needs("torch>=2.10")
def test_without_the_kernel_the_next_one_is_taken(monkeypatch, recipe):
    config = AutoConfig.from_pretrained(recipe.model.path)
    assert attention.candidates(recipe, config, on_gpu=True)[0] == "varlen"
    monkeypatch.setattr(attention, "varlen_attn", None)
    assert attention.candidates(recipe, config, on_gpu=True)[0] == "flex_attention"


def test_a_refused_kernel_is_named_with_the_reason(monkeypatch, recipe):
    def too_old(*_, **__):
        raise TypeError("varlen_attn() got an unexpected keyword argument 'enable_gqa'\nmore")

    monkeypatch.setattr(attention, "_one_by_one", too_old)
    monkeypatch.setattr(attention, "candidates", lambda *_: ["varlen", "sdpa"])  # flex attention is slow on a CPU
    said = []
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path)
    assert probe.check_packing(recipe, tokenizer, on_gpu=True, say=said.append) == "sdpa"
    reason = "TypeError: varlen_attn() got an unexpected keyword argument 'enable_gqa'"
    assert said[0] == f"model.attention: not varlen in qwen3 ({reason})"
