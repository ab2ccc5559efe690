"""Take a Hugging Face decoder apart on the meta device: no weights, no GPU, a second per way of training it.

A model with two layers of each kind is run forward and backward. Counted are what autograd keeps of each kind's second
layer, every storage once and weights not at all, and what its backward pass takes besides. Shapes cost nothing on the
meta device, so that rows are as long as real ones.
"""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from recipes.planning.anatomy import Anatomy, Kind, way
from recipes.planning.fit import Fit, decoder_layers, fit, weighed
from recipes.spec.errors import UserError, first_line
from recipes.spec.peft import lora_options
from recipes.spec.recipe import Lora

RANKS = (8, 64)
"""Of the adapters that are traced: what they take is linear in it."""
NEVER = 2**30
"""A window that is wider than any row."""
SPLIT = ("colwise", "rowwise")
"""Styles of a Hugging Face plan that split a matrix, and what comes out of it or goes in."""
SPLIT_WEIGHT = ("colwise_gather_output", "rowwise_split_input")
"""Those that split the matrix, where every rank has the whole of what comes out, or goes in."""


def dissect(config: Mapping[str, Any], loras: Sequence[Lora | None] = (None,), device: str = "cuda") -> Anatomy:
    """Return a decoder's parts, and what its layers keep when it is trained in each of the ways `loras`.

    Args:
        config: as in a `config.json`; `model_type` and the dimensions are enough.
        loras: None stands for all weights; the rank does not matter.
        device: whose kernels compute, "cuda" or "cpu"; what they keep differs in `weigh.Kernels`.

    Raises:
        UserError: not a decoder that transformers knows, or one whose sizes contradict each other.
    """
    whole = build(config)
    inner = whole.config.get_text_config()
    if not getattr(inner, "num_attention_heads", None):
        raise UserError(f"{inner.model_type}: has no attention; plans are for transformers.")
    layers = decoder_layers(whole)
    signatures = [_signature(layer, inner, index) for index, layer in enumerate(layers)]
    kinds = list(dict.fromkeys(signatures))
    first = [signatures.index(kind) for kind in kinds]
    try:
        fits = {name: one for lora in loras for name, one in _ways(config, lora, first, device).items()}
    except (RuntimeError, ZeroDivisionError) as error:  # from the model's own code: it cannot compute with such sizes
        raise UserError(f"{inner.model_type}: its sizes contradict each other: {first_line(error)[:200]}") from error
    adapted = {f"{way(lora)}{end}" for lora in loras if lora for end in ("", " rank")}
    heads = [_attention_width(layers[index], inner) for index in first]
    embedding, output = whole.get_input_embeddings().weight, whole.get_output_embeddings().weight
    tied = bool(inner.tie_word_embeddings)
    after = sum(map(size, _around(whole)[1]))
    return Anatomy(
        model_type=inner.model_type,
        hidden=inner.hidden_size,
        vocabulary=embedding.shape[0],
        heads=inner.num_attention_heads,
        key_value_heads=_key_value_heads(inner),
        kinds=tuple(
            replace(
                _kind(layers[index], inner, index, heads[number]),
                saved={name: one.kinds[number][0] for name, one in fits.items()},
                working={name: one.kinds[number][1] for name, one in fits.items()},
                adapters={name: one.kinds[number][2] for name, one in fits.items() if name in adapted},
            )
            for number, index in enumerate(first)
        ),
        order=tuple(kinds.index(kind) for kind in signatures),
        embedding=sum(map(size, _around(whole)[0])),
        head=after + (0 if tied else output.numel()),
        tied=tied,
        ends={name: one.ends for name, one in fits.items()},
        loss={name: one.loss for name, one in fits.items()},
    )


def build(config: Mapping[str, Any], attention: str | None = None) -> PreTrainedModel:
    """Return the model on the meta device, in bf16 and ready to train.

    Raises:
        UserError: not a decoder that transformers knows.
    """
    values = {name: value for name, value in config.items() if name != "quantization_config"}
    try:
        known = AutoConfig.for_model(**copy.deepcopy(values)).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(known, dtype=torch.bfloat16, attn_implementation=attention)
    except Exception as error:  # of any kind: whatever a model's class finds wrong with what it is to be made of
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{values.get('model_type')}: transformers knows no decoder like this: {why}") from error
    model.config.use_cache = False
    model.config.pad_token_id = None  # models look for it among the tokens, which have no values here
    return model.train()


def _around(model: PreTrainedModel) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return what stands before the layers and after them, the head left out."""
    children = list(model.base_model.children())
    at = children.index(decoder_layers(model))
    return children[:at], children[at + 1 :]


def size(module: nn.Module) -> int:
    """Return the parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def _signature(layer: nn.Module, config: PreTrainedConfig, index: int) -> tuple[Any, ...]:
    """Return what two layers have in common that compute and weigh the same."""
    listed = tuple(
        str(value[index])
        for value in vars(config).values()
        if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers
    )
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    classes = tuple(type(module).__name__ for module in layer.modules())
    settings = tuple(
        (name, value)
        for module in layer.modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None) and name not in ("layer_idx", "layer_id", "layer_number")
    )
    return listed, shapes, classes, settings


def _attention_width(layer: nn.Module, config: PreTrainedConfig) -> int:
    """Return heads x (width of keys + width of values) / 2; 0 for a layer whose attention is linear."""
    attention = next(
        (one for name, one in layer.named_modules() if name in ("self_attn", "self_attention", "attn")), None
    )
    attention = attention or getattr(layer, "attention", None)
    if attention is None:
        return 0
    width = getattr(attention, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys, values = getattr(attention, "qk_head_dim", width), getattr(attention, "v_head_dim", width)
    return config.num_attention_heads * (keys + values) // 2


def _kind(layer: nn.Module, config: PreTrainedConfig, index: int, attention_width: int) -> Kind:
    linears = {
        name: tuple(one.weight.shape) if isinstance(one, Conv1D) else (one.in_features, one.out_features)
        for name, one in layer.named_modules()
        if isinstance(one, nn.Linear | Conv1D)
    }
    experts = {name: one for name, one in layer.named_parameters() if ".experts." in name}
    routed = sum(one.numel() for one in experts.values())
    count = next((one.shape[0] for one in experts.values()), 1)
    matrices = sum(one.numel() for one in layer.parameters() if one.dim() > 1)
    in_experts = sum(one.numel() for one in experts.values() if one.dim() > 1)
    used = getattr(config, "num_experts_per_tok", 1) / count if experts else 0
    styles = plan(config)
    return Kind(
        parameters=size(layer),
        split=sum(
            layer.get_submodule(name).weight.numel()
            for name, _ in planned(layer, styles, (*SPLIT, *SPLIT_WEIGHT))
            if name in linears
        ),
        routed=routed,
        linears=tuple(linears.values()),
        multiplied=matrices - in_experts * (1 - used),
        attention_width=attention_width,
        window=_window(layer, config, index),
        chosen=getattr(config, "num_experts_per_tok", 1) if experts else 0,
        largest=max(sum(one.numel() for one in module.parameters(recurse=False)) for module in layer.modules()),
        checkpoint=2 * config.hidden_size,
    )


def _key_value_heads(config: PreTrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _window(layer: nn.Module, config: PreTrainedConfig, index: int) -> int | None:
    own = [vars(module)["sliding_window"] for module in layer.modules() if "sliding_window" in vars(module)]
    if own:
        return own[0]
    types = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if types is None or "sliding" in types[index] else None


def plan(config: PreTrainedConfig) -> dict[str, str]:
    """Return how tensor parallelism splits each linear layer of a decoder layer, by its name inside it."""
    whole = config.base_model_tp_plan or {}
    return {pattern.removeprefix("layers.*."): style for pattern, style in whole.items()}


def planned(layer: nn.Module, styles: Mapping[str, str], wanted: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the submodules of a layer whose style is one of `wanted`."""
    for name, _ in layer.named_modules():
        for end, style in styles.items():
            if f".{name}".endswith(f".{end}") and style in wanted:
                yield name, style


def _ways(config: Mapping[str, Any], lora: Lora | None, first: Sequence[int], device: str) -> dict[str, Fit]:
    """Return what each of the ways takes that `lora` stands for, by its name in `Kind.saved`."""
    name = way(lora)
    if lora is not None:
        small, large = (_adapted(_cut(build(config), first), replace(lora, rank=rank)) for rank in RANKS)
        base = fit(small, device)
        per_rank = base.to(weighed(large, device)).times(1 / (RANKS[1] - RANKS[0]))
        return {name: base.plus(per_rank.times(-RANKS[0])), f"{name} rank": per_rank}
    model = _cut(build(config), first)
    ways = {name: fit(model, device)}
    if model.config._attn_implementation == "sdpa":
        less = ways[name].times(-1)
        ways["masked"] = fit(model, device, mask=True).plus(less)
        ways["eager"] = fit(_cut(build(config, "eager"), first), device).plus(less)
    if plan(model.config) and not (model.config.num_attention_heads % 2 or _key_value_heads(model.config) % 2):
        ways["split"] = ways[name].to(weighed(_half(model), device)).times(-2)
    return ways


def _cut(model: PreTrainedModel, first: Sequence[int]) -> PreTrainedModel:
    """Leave one layer of each kind, each of them twice."""
    chosen = [index for index in first for _ in range(2)]
    layers, config = decoder_layers(model), model.config
    kept = [copy.deepcopy(layers[index]) for index in chosen]
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers and name != "architectures":
            setattr(config, name, [value[index] for index in chosen])
    config.num_hidden_layers = len(chosen)
    del layers[:]
    layers.extend(kept)
    if getattr(config, "sliding_window", None):
        config.sliding_window = NEVER  # a narrower one needs a mask, which is a way of its own
    return model


def _adapted(model: PreTrainedModel, lora: Lora) -> nn.Module:
    """Return the model with adapters in its own dtype, as `recipes.training.adapters` adds them."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, and it warns of what is not used here
    from peft import LoraConfig, get_peft_model

    model.enable_input_require_grads()  # as checkpointing needs it; without, the first layer keeps a little less
    try:
        adapted = get_peft_model(model, LoraConfig(**lora_options(lora)), autocast_adapter_dtype=False)
    except ValueError as error:
        raise UserError(f"lora.target_modules={lora.target_modules}: {first_line(error)}") from error
    return adapted.to(torch.bfloat16)


def _half(model: PreTrainedModel) -> PreTrainedModel:
    """Return what one of two tensor parallel ranks computes: of the matrices that are split, half of their shapes."""
    halved = copy.deepcopy(model)
    for layer in set(decoder_layers(halved)):
        for name, style in list(planned(layer, plan(halved.config), SPLIT)):
            linear = layer.get_submodule(name)
            if isinstance(linear, nn.Linear):
                rows, columns = linear.weight.shape
                shape = (rows // 2, columns) if style == "colwise" else (rows, columns // 2)
                linear.weight = nn.Parameter(linear.weight.new_empty(shape))
                if linear.bias is not None and style == "colwise":
                    linear.bias = nn.Parameter(linear.bias.new_empty(rows // 2))
    return halved
