"""Profiles a Hugging Face decoder on the meta device: no weights, no GPU, about a second per training mode.

A model with two layers of each kind runs a forward and a backward pass. In the second layer of each kind, the bytes
that autograd saves are measured (every storage once, without weights), and the peak of the backward pass. Shapes cost
nothing on the meta device, so sequences can have realistic lengths.
"""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.pytorch_utils import Conv1D

from ...recipe.conversions import lora_options
from ...recipe.errors import UserError, errors_only, first_line
from ...recipe.files import JsonView
from ...recipe.layout import per_layer
from ...recipe.recipe import Lora
from . import decoders
from .allocations import Fit, combined, decoder_layers, difference, fit
from .profile import LayerProfile, ModelProfile, training_mode

RANKS = (8, 64)
"""Ranks of the measured adapters; memory is linear in the rank."""
SPLIT = ("colwise", "rowwise")
"""Styles in a Hugging Face tensor-parallel plan that split a matrix together with its output or its input."""
SPLIT_WEIGHT = ("colwise_gather_output", "rowwise_split_input")
"""Styles that split a matrix, but leave its output or input whole on every rank."""


def profile_model(config: JsonView, loras: Sequence[Lora | None] = (None,)) -> ModelProfile:
    """Return a decoder's profile for each kind of adapters, of any rank, and for training all weights if it is None.

    Of a `config.json`, `model_type` and the dimensions are enough.
    """
    whole = build(config)
    inner = whole.config.get_text_config()
    if not getattr(inner, "num_attention_heads", None):
        raise UserError(f"{inner.model_type}: has no attention; only transformer models can be planned.")
    layers = decoder_layers(whole)
    signatures = [_signature(layer, inner, index) for index, layer in enumerate(layers)]
    kinds = list(dict.fromkeys(signatures))
    first = [signatures.index(kind) for kind in kinds]
    try:
        fits = {mode: one for lora in loras for mode, one in _modes(config, lora, first).items()}
    except (RuntimeError, ZeroDivisionError) as error:  # the model's own code cannot compute with these sizes
        raise UserError(f"{inner.model_type}: its sizes contradict each other: {first_line(error)[:200]}") from error
    adapted = {f"{training_mode(lora)}{end}" for lora in loras if lora for end in ("", " rank")}
    embedding, output = whole.get_input_embeddings().weight, whole.get_output_embeddings().weight
    tied = bool(inner.tie_word_embeddings)
    children = list(whole.base_model.children())
    at = children.index(layers)
    before, after = (
        sum(one.numel() for module in modules for one in module.parameters())
        for modules in (children[:at], children[at + 1 :])
    )
    return ModelProfile(
        model_type=inner.model_type,
        hidden_size=inner.hidden_size,
        vocab_size=embedding.shape[0],
        attention_heads=inner.num_attention_heads,
        key_value_heads=int(getattr(inner, "num_key_value_heads", None) or inner.num_attention_heads),
        layer_kinds=tuple(
            replace(
                _layer_profile(layers[index], inner, index),
                saved={mode: one["saved", number] for mode, one in fits.items()},
                backward_peak={mode: one["backward_peak", number] for mode, one in fits.items()},
                adapter_parameters={
                    mode: one["adapter_parameters", number].fixed for mode, one in fits.items() if mode in adapted
                },
            )
            for number, index in enumerate(first)
        ),
        layer_order=tuple(kinds.index(kind) for kind in signatures),
        embedding_parameters=before,
        head_parameters=after + (0 if tied else output.numel()),
        tied_embeddings=tied,
        saved_outside_layers={mode: one["saved_outside_layers"] for mode, one in fits.items()},
        loss_peak={mode: one["loss_peak"] for mode, one in fits.items()},
        tower_parameters=tower_parameters(config) if config.get("vision_config") else 0,
    )


@errors_only("transformers")
def build(config: JsonView, attention: str | None = None) -> PreTrainedModel:
    """Return the model on the meta device, in bf16 and in training mode."""
    stated = decoders.decoder_of(config) if decoders.is_stand_in(config) else config
    values = {name: value for name, value in stated.items() if name != "quantization_config"}
    for name in ("rope_scaling", "rope_parameters"):
        rope = values.get(name)
        # This type reads the sequence length from the values of positions, which do not exist here.
        if isinstance(rope, Mapping) and "dynamic" in (rope.get("type"), rope.get("rope_type")):
            theta = rope.get("rope_theta") or values.get("rope_theta")
            values[name] = {"rope_type": "default"} | ({"rope_theta": theta} if theta else {})
    try:
        known = AutoConfig.for_model(**copy.deepcopy(values)).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(known, dtype=torch.bfloat16, attn_implementation=attention)
    except Exception as error:  # models' classes raise exceptions of any type for wrong dimensions
        why = " ".join(str(error).split())[:200]
        if "Unrecognized model" in why:
            raise UserError(
                f"model_type={values.get('model_type')}: not a decoder of transformers {version('transformers')}; "
                "install a version that has it, or plan a model with the same architecture."
            ) from error
        raise UserError(f"{values.get('model_type')}: transformers cannot build this decoder: {why}") from error
    model.config.use_cache = False
    model.config.pad_token_id = None  # models search the tokens for it, which have no values here
    return model.train()


@errors_only("transformers")
def tower_parameters(config: JsonView) -> int:
    """Return the number of parameters of a vision-language model outside its decoder and head."""
    try:
        known = AutoConfig.for_model(**copy.deepcopy(dict(config)))
        if type(known) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return 0
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(known, dtype=torch.bfloat16, attn_implementation=None)
    except Exception:  # models' classes raise exceptions of any type, and the decoder alone may be in order
        return 0
    language = {id(one) for part in (model.get_decoder(), model.get_output_embeddings()) for one in part.parameters()}
    return sum(one.numel() for one in model.parameters() if id(one) not in language)


def _signature(layer: nn.Module, config: PreTrainedConfig, index: int) -> tuple[object, ...]:
    """Return a value that is equal for layers with the same computation and the same allocations."""
    listed = tuple(str(getattr(config, name)[index]) for name in per_layer(vars(config), config.num_hidden_layers))
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    classes = tuple(type(module).__name__ for module in layer.modules())
    settings = tuple(
        (name, value)
        for module in layer.modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None) and name not in ("layer_idx", "layer_id", "layer_number")
    )
    return listed, shapes, classes, settings


def _layer_profile(layer: nn.Module, config: PreTrainedConfig, index: int) -> LayerProfile:
    """Return the sizes of a layer; the saved bytes are added later."""
    linears = {
        name: tuple(one.weight.shape) if isinstance(one, Conv1D) else (one.in_features, one.out_features)
        for name, one in layer.named_modules()
        if isinstance(one, nn.Linear | Conv1D)
    }
    experts = {name: one for name, one in layer.named_parameters() if ".experts." in name}
    in_all_experts = sum(one.numel() for one in experts.values())
    count = next((one.shape[0] for one in experts.values()), 1)
    matrices = sum(one.numel() for one in layer.parameters() if one.dim() > 1)
    expert_matrices = sum(one.numel() for one in experts.values() if one.dim() > 1)
    used = getattr(config, "num_experts_per_tok", 1) / count if experts else 0
    styles = tensor_plan(config)
    own = [sum(one.numel() for one in module.parameters(recurse=False)) for module in layer.modules()]
    windows = [vars(module)["sliding_window"] for module in layer.modules() if "sliding_window" in vars(module)]
    attention = next(
        (one for name, one in layer.named_modules() if name in ("self_attn", "self_attention", "attn")), None
    )
    attention, width = attention or getattr(layer, "attention", None), 0
    if attention is not None:  # linear attention has other names
        head = getattr(attention, "head_dim", None) or config.hidden_size // config.num_attention_heads
        keys, values = getattr(attention, "qk_head_dim", head), getattr(attention, "v_head_dim", head)
        width = int(config.num_attention_heads * (keys + values) // 2)
    types = getattr(config, "layer_types", None)
    if not windows and (types is None or "sliding" in types[index]):
        windows = [getattr(config, "sliding_window", None)]
    return LayerProfile(
        parameters=sum(one.numel() for one in layer.parameters()),
        tensor_split=sum(
            layer.get_submodule(name).weight.numel()
            for name, _ in planned_submodules(layer, styles, (*SPLIT, *SPLIT_WEIGHT))
            if name in linears
        ),
        expert_parameters=in_all_experts,
        linears=tuple(linears.values()),
        active_weights=matrices - expert_matrices * (1 - used),
        attention_width=width,
        window=windows[0] if windows else None,
        experts_per_token=getattr(config, "num_experts_per_tok", 1) if experts else 0,
        largest_module=max(own),
        modules=sum(size > 0 for size in own),
        checkpoint_bytes=2 * config.hidden_size,
    )


def tensor_plan(config: PreTrainedConfig) -> dict[str, str]:
    """Return how tensor parallelism splits each linear layer, by its name inside the decoder layer."""
    whole = config.base_model_tp_plan or {}
    return {pattern.removeprefix("layers.*."): style for pattern, style in whole.items()}


def planned_submodules(layer: nn.Module, styles: Mapping[str, str], wanted: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the names and styles of a layer's submodules whose style is one of `wanted`."""
    for name, _ in layer.named_modules():
        for end, style in styles.items():
            if f".{name}".endswith(f".{end}") and style in wanted:
                yield name, style


def _modes(config: JsonView, lora: Lora | None, first: Sequence[int]) -> dict[str, Fit]:
    """Return the memory of training with `lora`, by the names that `training_mode` explains."""
    mode = training_mode(lora)
    if lora is not None:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # imported by PEFT; its warnings do not apply here
        from peft import LoraConfig, get_peft_model

        adapted = []
        for rank in RANKS:
            model = _two_of_each_kind(build(config), first)
            model.enable_input_require_grads()  # checkpointing needs it; without it, the first layer saves less
            plain = replace(lora, rank=rank, init="zero")  # there are no values to decompose
            options = lora_options(plain, kind=model.config.model_type)
            try:  # in the model's dtype, as in `training.model.lora`
                peft_model = get_peft_model(model, LoraConfig(**options), autocast_adapter_dtype=False)
            except ValueError as error:
                raise UserError(f"lora.target_modules={lora.target_modules}: {first_line(error)}") from error
            adapted.append(peft_model.to(torch.bfloat16))
        smaller = fit(adapted[0])
        more = difference(adapted[1], smaller)
        per_rank = {key: 1 / (RANKS[1] - RANKS[0]) * size for key, size in more.items()}
        return {mode: combined(smaller, -RANKS[0], per_rank), f"{mode} rank": per_rank}
    model = _two_of_each_kind(build(config), first)
    full = fit(model)
    modes = {mode: full}
    if model.config._attn_implementation == "sdpa":
        modes["masked"] = combined(fit(model, mask=True), -1, full)
        modes["eager"] = combined(fit(_two_of_each_kind(build(config, "eager"), first)), -1, full)
    shared = getattr(model.config, "num_key_value_heads", None) or 2
    if tensor_plan(model.config) and not (model.config.num_attention_heads % 2 or shared % 2):
        half = difference(_half(model), full)
        modes["split"] = {key: -2 * size for key, size in half.items()}
    return modes


def _two_of_each_kind(model: PreTrainedModel, first: Sequence[int]) -> PreTrainedModel:
    chosen = [index for index in first for _ in range(2)]
    layers, config = decoder_layers(model), model.config
    kept = [copy.deepcopy(layers[index]) for index in chosen]
    for name in per_layer(vars(config), config.num_hidden_layers):
        setattr(config, name, [getattr(config, name)[index] for index in chosen])
    if isinstance(getattr(type(config), "layer_types", None), property):  # Jamba computes it from the layers' numbers
        types = {"layer_types": [config.layer_types[index] for index in chosen]}
        config.__class__ = type(type(config).__name__, (type(config),), types)
    config.num_hidden_layers = len(chosen)
    del layers[:]
    layers.extend(kept)
    if getattr(config, "sliding_window", None):
        config.sliding_window = 2**30  # a window narrower than the sequence needs a mask, which is a separate mode
    return model


def _half(model: PreTrainedModel) -> PreTrainedModel:
    """Return one of two tensor-parallel ranks' part of the model: split matrices have half their size."""
    halved = copy.deepcopy(model)
    for layer in set(decoder_layers(halved)):
        for name, style in list(planned_submodules(layer, tensor_plan(halved.config), SPLIT)):
            linear = layer.get_submodule(name)
            if isinstance(linear, nn.Linear):
                outputs, inputs = linear.weight.shape
                shape = (outputs // 2, inputs) if style == "colwise" else (outputs, inputs // 2)
                linear.weight = nn.Parameter(linear.weight.new_empty(shape))
                if linear.bias is not None and style == "colwise":
                    linear.bias = nn.Parameter(linear.bias.new_empty(outputs // 2))
    return halved
