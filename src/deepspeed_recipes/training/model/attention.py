"""Chooses a run's attention implementation: for packed sequences one without a length x length mask.

With a mask, PyTorch's SDPA cannot use its flash kernel, and computes all pairs of tokens of a sequence, including
masked pairs. A variable-length kernel gets the documents' boundaries and computes only the pairs within documents.
torch has such a kernel (`torch.nn.attention.varlen`, on CUDA from 2.10 on), so that no flash-attn wheel has to be
built.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_flash_attn_4_available

from ...recipe.errors import first_line
from ...recipe.recipe import Recipe

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch 2.9
    varlen_attn = None

VARLEN = "varlen"
"""Name of the implementation below, for `model.attention`."""
OLDEST = (8, 0)
"""Compute capability (Ampere) from which flash kernels exist."""
HOPPER = 9
"""Major compute capability that FlashAttention-3 is written for (arXiv:2407.08608), and the lowest of -4."""
WIDEST = 256
"""Largest head width that they support; they have no attention dropout."""


def candidates(recipe: Recipe, config: PreTrainedConfig, on_gpu: bool) -> list[str]:
    """Return the possible values of `model.attention`, best first; `probe.check_packing` takes the first that works.

    `config` is that of the model's text part.
    """
    if recipe.model.attention != "auto":
        return [recipe.model.attention]
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    fallback = "sdpa" if kind is None or kind._supports_sdpa else "eager"  # a Hub model's own code is tried with SDPA
    if not on_gpu or not recipe.packs or recipe.layout.pipeline > 1:
        return [fallback]  # single documents need no mask, and on CPUs SDPA has the only fused kernel
    capability = torch.cuda.get_device_capability()
    heads = getattr(config, "num_attention_heads", None)  # a state-space model has none
    if recipe.precision == "fp32" or capability < OLDEST or not heads:
        return [fallback]
    width = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    if width > WIDEST or getattr(config, "attention_dropout", 0) or getattr(config, "attn_pdrop", 0):
        return [fallback]
    major = capability[0]  # the package that was written for this kind of GPU comes first
    found = {
        "flash_attention_3": major == HOPPER and is_flash_attn_3_available(),
        "flash_attention_4": major >= HOPPER and is_flash_attn_4_available(),
        "flash_attention_2": is_flash_attn_2_available(),
    }
    installed = [name for name, usable in found.items() if usable]  # what transformers would download has to be named
    return [*installed, *([VARLEN] if varlen_attn else []), "flex_attention", fallback]


def not_installed(name: str, error: ImportError) -> str:
    """Return that a named implementation's package is missing, with the fix."""
    return f"model.attention={name}: {first_line(error)}\nInstall it, or use model.attention=auto."


def is_flash(name: str) -> bool:
    """Return whether an implementation is a FlashAttention, from a package or a kernel from the Hub."""
    return name.startswith("flash_attention") or ("/" in name and "flash" in name)


def document_boundaries(lengths: Sequence[Sequence[int]], width: int) -> dict[str, torch.Tensor]:
    """Return the documents' boundaries as arguments of transformers' flash attention (`FlashAttentionKwargs`).

    Computed on the host, so that no layer has to read them off the position ids on the device. The documents' `lengths`
    are in tokens, and padding to `width` counts as part of a sequence's last document.
    """
    filled = [length for one in lengths for length in (*one[:-1], width - sum(one[:-1]))]
    starts = torch.tensor([0, *filled], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = max(filled)
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}


def loadable(attention: str) -> str:
    """Return the implementation to load a model with; SDPA while `auto` is undecided."""
    return "sdpa" if attention == "auto" else attention


def needs_boundaries(model: torch.nn.Module) -> bool:
    """Return whether `model` needs the documents' boundaries in its batches; otherwise it reads the position ids."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    names = [one._attn_implementation or "" for one in configs if isinstance(one, PreTrainedConfig)]
    return any(name == VARLEN or is_flash(name) for name in names)


def varlen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within documents, with the interface of transformers' implementations.

    Queries are [sequences, heads, length, width]; keys and values may have fewer heads, and values another width.
    `scaling` is the factor of the scores, None for 1 / sqrt(width); a token attends to the `sliding_window` tokens up
    to itself. `cu_seq_lens_q` are the starts of documents when all sequences are concatenated, and the end,
    [documents + 1], int32; `max_length_q` is the longest one's length.

    Returns [sequences, length, heads, width], and None instead of weights. Raises ValueError if the kernel lacks what
    the layer needs: soft caps, sinks, biases, dropout, masks.
    """
    wanted = {name: options.get(name) for name in ("softcap", "s_aux", "position_bias")} | {"dropout": dropout or None}
    asked = [name for name, given in {**wanted, "attention_mask": attention_mask}.items() if given is not None]
    if asked or cu_seq_lens_q is None or options.get("is_causal") is False:
        lacking = ", ".join(asked) or "anything else"
        raise ValueError(f"{VARLEN} attention is causal, within documents, and does not support {lacking}")
    sequences, heads, length, width = query.shape
    query, key, value = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
    narrow = value.shape[-1]
    value = pad(value, (0, width - narrow))
    window = (sliding_window - 1 if sliding_window else -1, 0)
    compute = _fused if query.is_cuda else _one_by_one
    output = compute(
        query, key, value, cu_seq_lens_q, max_length_q,
        scale=scaling, window_size=window, enable_gqa=key.shape[1] != heads,
    )  # fmt: skip
    return output[..., :narrow].unflatten(0, (sequences, length)), None


@cache
def _parameters(function: Callable[..., object]) -> frozenset[str]:
    """Return the names of a function's parameters; cached, since every layer needs them at every pass."""
    return frozenset(inspect.signature(function).parameters)


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: Any, **options: Any
) -> torch.Tensor:
    """Call torch's kernel with the arguments that the installed version supports.

    torch 2.10 has neither a scale nor windows, but `is_causal`; 2.11 and 2.12 share no keys and values between heads.
    Raises ValueError if the kernel has no sliding windows, and the layer needs them.
    """
    known = _parameters(varlen_attn)
    if options["enable_gqa"] and "enable_gqa" not in known:
        key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for one in (key, value))
    if options["scale"] is not None and "scale" not in known:
        query = query * (options["scale"] * query.shape[-1] ** 0.5)
    if "window_size" not in known:
        if options["window_size"][0] >= 0:
            raise ValueError(f"torch {torch.__version__} has no sliding windows in its variable-length kernel")
        options["is_causal"] = True
    taken = {name: value for name, value in options.items() if name in known}
    return varlen_attn(query, key, value, starts, starts, longest, longest, **taken)


def _one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, _: object, **options: Any
) -> torch.Tensor:
    """Compute the same as the kernel, on a CPU; [tokens, heads, width] each."""
    outputs = []
    for start, end in pairwise(starts.tolist()):
        queries, keys, values = (one[start:end].transpose(0, 1)[None] for one in (query, key, value))
        back = options["window_size"][0]
        mask = None
        if 0 <= back < end - start - 1:
            distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
            mask = (distance >= 0) & (distance <= back)
        shared = {"scale": options["scale"], "enable_gqa": options["enable_gqa"]}
        outputs.append(scaled_dot_product_attention(queries, keys, values, mask, is_causal=mask is None, **shared))
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


AttentionInterface.register(VARLEN, varlen)
