"""The changes to a loaded model, in the order in which a run makes them, each with its condition.

`apply` makes them; adapters are added afterwards (`lora.py`), and then the model is divided over ranks (`parallel/`).
Only this module and `upstream.py` replace functions, classes or attributes of a library's objects.

Tiling: the loss and the feed-forward layers process each token by itself, so computing some of the tokens at a time
changes only the memory in use and not the result. Whole logits (12 to 14 bytes per token and vocabulary entry) and
whole feed-forward activations never exist; each tile is computed again in the backward pass. The idea is that of Arctic
long sequence training (Bekman et al. 2025, arXiv:2506.13996).

Stages of a pipeline: a stage is the Hugging Face model itself without the layers of the other stages. Its own `forward`
still runs, so masks, rotary embeddings, sliding windows, multipliers and soft caps are the model's, and no architecture
needs its own code here. Two places are changed: the first layer of a later stage receives what the previous stage sent,
and the modules after the last layer of an earlier stage (norm, head) are removed.
"""

import contextlib
import copy
import importlib.util
import math
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial, wraps
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel
from trl.trainer.utils import add_fused_lm_head

from ...recipe import limits
from ...recipe.compatibility import refusal
from ...recipe.deepspeed_file import DeepSpeedFile
from ...recipe.errors import UserError
from ...recipe.layout import per_layer
from ...recipe.limits import tiles_loss
from ...recipe.recipe import Recipe
from .. import activation_checkpointing, distributed, upstream
from ..console import say
from . import processor
from .attention import VARLEN

COLUMNS = 8192
"""Vocabulary entries in a tile of logits: 2 bytes per token and entry at 4,096 tokens, where TRL's own 32,768 hold 8
without Triton; a matrix product of 4,096 x 8,192 still fills a GPU."""
FP8 = (8, 9)
"""Compute capability (Ada) from which a GPU multiplies in 8-bit floats."""
FP8_STEP = 16
"""The widths of the multiplied matrices must be multiples of this."""


def apply(model: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    """Return a newly read or created model with the changes that the recipe needs, made in place.

    Their order counts: none may read what a later one makes.
    """
    config = model.config.get_text_config()
    upstream.restore_rotary_frequencies(model)
    model.config.use_cache = False  # with a cache transformers does not detect packed documents, which would then mix
    _leave_out_own_losses(model, recipe)
    switch_by_batch(model)
    if recipe.model.vision:
        # Qwen2.5-VL declares that it does not, but its loss does divide by the tokens of the whole batch. Otherwise the
        # Trainer would average the means of micro-batches, in which a token counts more the fewer there are.
        model.accepts_loss_kwargs = True
        processor.always_see(model, processor.of_recipe(recipe))
        if not recipe.model.train_vision:
            processor.freeze(model)
    if recipe.trains_some:
        named = dict(model.named_parameters())
        counts = {name: getattr(weight, "ds_numel", weight.numel()) for name, weight in named.items()}
        share = limits.trained_share(recipe, counts)
        for name, weight in named.items():
            weight.requires_grad_(recipe.trains(name))
        trained = [name for name in named if recipe.trains(name)]
        some = ", ".join(trained[:3]) + (", ..." if len(trained) > 3 else "")
        say(f"trained: {len(trained)} of {len(named)} weights, {share:.1%} of the parameters: {some}")
    if recipe.method.tiles:  # its trainer gives the model TRL's fused head
        upstream.narrow_loss_tiles(COLUMNS)
    elif tiles_loss(recipe, config.vocab_size):
        tile_loss(model)
    if recipe.tiled_mlp:  # each tile is about as long as the model is wide, as in the paper
        length = recipe.sequence_length / recipe.layout.sequence
        recompute_feed_forward(model, max(2, math.ceil(length / config.hidden_size)))
    elif recipe.gradient_checkpointing == "feed_forward":
        recompute_feed_forward(model)
    if recipe.activation_offloading:
        activation_checkpointing.offload_inputs(model, distributed.on_gpu())
    if recipe.liger_kernel:  # for norms, rotary embeddings and gated feed-forward layers
        if importlib.util.find_spec("liger_kernel") is None:
            raise UserError(
                "liger_kernel=true: liger-kernel is not installed; pip install liger-kernel, or leave it out."
            )
        # The loss is `tile_loss`'s, which supports every family's scales and soft caps, and ZeRO-3.
        apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    if recipe.fp8:
        multiply_in_fp8(model, distributed.on_gpu())
    if recipe.compile == "regional":
        for module in model.modules():
            if type(module).__name__ in (model._no_split_modules or ()):
                module.compile()  # in place; compilation begins with the first step
    upstream.keep_4bit_layout(model)
    return model


def _leave_out_own_losses(model: PreTrainedModel, recipe: Recipe) -> None:
    """Reduce the model's loss to the cross-entropy, and print the removed terms.

    transformers adds such a term in full to every micro-batch of every rank; tiled losses and pipelines omit it.
    `router_aux_loss_coef` adds the routers' load-balancing loss in the right proportion.
    """
    if (left_out := cross_entropy_alone(model)) and not recipe.router_aux_loss_coef:
        say(
            f"the loss is the cross-entropy alone, without the terms of {' and '.join(left_out)} in config.json; "
            "router_aux_loss_coef=0.001 adds a load-balancing loss"
        )


def cross_entropy_alone(model: PreTrainedModel) -> list[str]:
    """Reduce a model's loss to the cross-entropy, whatever its config.json adds, and return the keys of the rest."""
    config, left_out = model.config.get_text_config(), []
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # `whole.save` writes the files' own value
        left_out.append("output_router_logits")
    if getattr(model, "z_loss_coefficient", 0):  # Bamba's
        model.z_loss_coefficient = 0.0
        left_out.append("z_loss_coefficient")
    return left_out


def switch_by_batch(model: PreTrainedModel) -> None:
    """Make a `model` loaded with `varlen` use it for batches with documents' boundaries, and SDPA for all others.

    The others are evaluation and generation, which have masks and caches.
    """
    owned = (getattr(one, "config", None) for one in model.modules())
    known = {id(one): one for one in owned if isinstance(one, PreTrainedConfig)}
    configs = [one for one in known.values() if one._attn_implementation == VARLEN]

    def switch(_: object, __: object, inputs: dict[str, torch.Tensor]) -> None:
        for config in configs:
            config._attn_implementation = VARLEN if inputs.get("cu_seq_lens_q") is not None else "sdpa"

    # PEFT calls the outermost model's `forward` without its hooks, but the inner models' with theirs.
    for module in model.modules() if configs else ():
        if isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(switch, with_kwargs=True)


def tile_loss(model: PreTrainedModel) -> None:
    """Make `model` compute its loss without whole logits, wherever it is given labels; before adapters are added.

    Uses TRL's fused head, which supports every architecture's logit scales and soft caps. If the batch has the labelled
    tokens and their labels (`data.collate.labelled_only`), logits of the other tokens are never computed.
    """
    upstream.narrow_loss_tiles(COLUMNS)
    upstream.score_every_token()
    add_fused_lm_head(model)
    fused = model.forward

    @wraps(fused)
    def forward(*arguments: object, labelled: torch.Tensor | None = None, **inputs: object) -> Any:
        if labelled is None:
            return fused(*arguments, **inputs, fused_lm_head=inputs.get("labels") is not None)

        def select(_: torch.nn.Module, __: object, output: Any) -> Any:
            output.last_hidden_state = output.last_hidden_state.flatten(0, 1).index_select(0, labelled)[None]
            return output

        handle = model.base_model.register_forward_hook(select)  # the head gets [1, labelled tokens, width]
        try:
            return fused(*arguments, **inputs, fused_lm_head=True)
        finally:
            handle.remove()

    model.forward = forward


def recompute_feed_forward(model: PreTrainedModel, tiles: int = 1) -> None:
    """Make every layer keep the input of its feed-forward part, and compute the rest again in the backward pass.

    With several `tiles`, each part computes a sequence in so many pieces, and keeps only their inputs and outputs.
    Parts that route tokens to experts are refused.
    """
    parts = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    if not parts or any(name.endswith(".experts") for part in parts for name, _ in part.named_modules(prefix=".")):
        raise UserError(
            f"{'tiled_mlp=true' if tiles > 1 else 'gradient_checkpointing=feed_forward'}: not for "
            f"{model.config.model_type}, whose layers have "
            f"{'experts, which already get parts of the tokens' if parts else 'no module named mlp'}; leave it out."
        )
    for part in parts:
        whole = partial(checkpoint, part.forward, use_reentrant=False)
        part.forward = partial(_in_tiles, part.forward, tiles) if tiles > 1 else whole


def _in_tiles(forward: Callable[..., torch.Tensor], tiles: int, *inputs: torch.Tensor) -> torch.Tensor:
    """Return forward(*inputs), all of them [sequences, length, width].

    The number of tiles is fixed, with empty tiles for short sequences: under ZeRO-3 all ranks must compute the same
    number, whatever the length of their sequences.
    """
    parts = zip(*(one.tensor_split(tiles, dim=1) for one in inputs), strict=True)
    outputs = [checkpoint(forward, *(one.contiguous() for one in part), use_reentrant=False) for part in parts]
    return torch.cat(outputs, dim=1)


def multiply_in_fp8(model: PreTrainedModel, on_gpu: bool) -> None:
    """Make the decoder's linear layers multiply in 8-bit floats during training, with a scale per tensor.

    Forward products are in e4m3 and gradients in e5m2 (torchao's default recipe, after "FP8 Formats for Deep Learning",
    arXiv:2209.05433). The head and routers keep their precision. In evaluation, layers compute in the precision in
    which the export will be used.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    def fits(module: torch.nn.Linear, name: str) -> bool:
        fitting = module.in_features % FP8_STEP == 0 and module.out_features % FP8_STEP == 0
        return fitting and not name.endswith((".gate", ".router"))

    convert_to_float8_training(model.base_model, config=Float8LinearConfig(emulate=not on_gpu), module_filter_fn=fits)

    def exact_in_evaluation(layer: torch.nn.Linear, train: Callable[..., torch.Tensor], inputs: torch.Tensor) -> Any:
        return train(inputs) if layer.training else linear(inputs, layer.weight, layer.bias)

    for layer in model.modules():
        if isinstance(layer, Float8Linear):
            layer.forward = partial(exact_in_evaluation, layer, layer.forward)


def check(recipe: Recipe, file: DeepSpeedFile, on_gpu: bool) -> None:
    """Refuse what needs CUDA on CPUs, and passes of DeepCompile for other programs."""
    if recipe.fp8:
        if importlib.util.find_spec("torchao") is None:
            raise UserError("fp8=true: torchao is not installed; pip install torchao, or leave fp8 out.")
        if on_gpu and torch.cuda.get_device_capability() < FP8:
            raise UserError(
                f"fp8=true: {torch.cuda.get_device_name()} does not multiply in 8-bit floats; Ada (RTX 4090, L4), "
                "Hopper and later GPUs do. Leave fp8 out."
            )
    if file.deepcompile and not on_gpu:
        raise UserError(
            f"deepspeed={file.name}: DeepCompile's kernels are CUDA's, and these ranks are on CPUs; use "
            f"zero{file.stage}.json."
        )
    if file.super_offload and not on_gpu:
        raise UserError(
            f"deepspeed={file.name}: DeepSpeed's SuperOffload is for CUDA, and these ranks are on CPUs; use "
            "zero3_offload.json."
        )
    split = sorted({"autosp", "autotp"} & set(file.compiled_passes))
    if split:
        key = {"autosp": "sequence", "autotp": "tensor"}[split[0]]
        raise UserError(
            f"deepspeed={file.name}: compile.passes has {split[0]}, for which a program has to mark its inputs; in a "
            f"recipe write layout.{key}=2, and remove the pass."
        )


def balance_experts(model: PreTrainedModel | PeftModel, coefficient: float, micro_batches: int) -> None:
    """Make the model add its routers' load-balancing loss (Fedus et al. 2021, arXiv:2101.03961) to its own.

    Adds `coefficient` times the mean over the step's micro-batches of the loss that transformers computes from
    each one's tokens. transformers itself adds all of it to every micro-batch of every rank, which the Trainer's
    weighting by tokens multiplies by the number of micro-batches. It recognises padding by an attention mask, which our
    batches lack: `document_lengths` take its place.
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    name = "load_balancing_loss_func"
    theirs = getattr(sys.modules[type(inner).__module__], name, None)
    if theirs is None or not hasattr(inner, "router_aux_loss_coef"):
        raise UserError(
            f"router_aux_loss_coef={coefficient}: transformers has no load-balancing loss for "
            f"{inner.config.model_type}; set it to 0."
        )
    inner.router_aux_loss_coef = coefficient / micro_batches
    masks: list[torch.Tensor] = []

    def note(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        if (lengths := options.pop("document_lengths", None)) is not None:
            masks.append(lengths > 0)
        return arguments, options

    def of_tokens(*arguments: Any) -> torch.Tensor:
        *others, mask = arguments
        return theirs(*others, masks[0] if masks and mask is None else mask)

    model.register_forward_pre_hook(note, with_kwargs=True)  # PEFT calls only the `forward` of its base model
    model.register_forward_hook(lambda *_: masks.clear())
    replace_functions(inner, [name], lambda _: of_tokens)


@contextlib.contextmanager
def balancing_declared(model: PreTrainedModel | PeftModel, given: PreTrainedConfig) -> Iterator[None]:
    """Within a `with` block, let the configuration have the value of `output_router_logits` in the model's files."""
    config = model.config.get_text_config()
    if not getattr(given.get_text_config(), "output_router_logits", False):
        yield
        return
    config.output_router_logits = True
    try:
        yield
    finally:
        config.output_router_logits = False  # as `_leave_out_own_losses` has set it


def divide_number(module: nn.Module, name: str, size: int) -> None:
    """Divide a number that a module's code reads off the module, such as its heads, by the ranks that share them."""
    setattr(module, name, getattr(module, name) // size)


def replace_functions(model: nn.Module, names: Collection[str], replace: Callable[[str], object]) -> None:
    """Replace functions of these names by `replace(name)` in the modeling files of `model`'s modules."""
    for namespace in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name in set(names) & set(vars(namespace)):
            setattr(namespace, name, replace(name))


def cut_to_stage(whole: PreTrainedModel, layers: range) -> None:
    """Remove everything from `whole` that is not part of the stage that holds `layers`."""
    held = decoder_layers(whole)
    before, after = before_and_after(whole)
    first, last = layers.start == 0, layers.stop == len(held)
    whole.whole_config = copy.deepcopy(whole.config)
    tied = whole.config.get_text_config().tie_word_embeddings
    decoder = whole.base_model
    # Not with `del`: deleting from a ModuleList renumbers, and so renames, the layers that remain.
    for name in [name for name in held._modules if int(name) not in layers]:
        del held._modules[name]
    config = decoder.config
    for name in per_layer(vars(config), config.num_hidden_layers):
        setattr(config, name, [getattr(config, name)[index] for index in layers])
    config.num_hidden_layers = len(layers)
    embedding = whole.get_input_embeddings()
    whole.received = whole.left = None
    if not first:
        _start_at(whole, next(iter(held)))
        for name, module in decoder.named_children():
            if module in before and not (last and tied and module is embedding):
                unused = _UnusedEmbedding(config.hidden_size) if isinstance(module, nn.Embedding) else nn.Identity()
                decoder.add_module(name, unused)
    if not last:
        for name, module in decoder.named_children():
            if module in after:
                decoder.add_module(name, _Outlet(whole))
        whole.set_output_embeddings(nn.Identity())
    if not (last and (first or tied)):
        whole.all_tied_weights_keys = {}


def run_stage(
    part: PreTrainedModel, received: torch.Tensor, position_ids: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute one stage that `cut_to_stage` has produced."""
    base = part.get_base_model() if hasattr(part, "get_base_model") else part
    tokens = received
    if received.is_floating_point():
        base.received, tokens = received, position_ids.new_zeros(received.shape[:2])
    output = part(input_ids=tokens, position_ids=position_ids, use_cache=False)
    left, base.left, base.received = base.left, None, None
    return output.logits if left is None else (left, position_ids)


class _UnusedEmbedding(nn.Module):
    """Replaces an embedding whose result is not used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.dtype = torch.get_default_dtype()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*ids.shape, self.width, dtype=self.dtype, device=ids.device)


class _Outlet(nn.Module):
    """Replaces the norm after the last layer; keeps the hidden states that are sent on."""

    def __init__(self, whole: PreTrainedModel) -> None:
        super().__init__()
        self.whole = [whole]  # in a list, or the model would be its own submodule

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.whole[0].left = hidden
        return hidden


def _start_at(whole: PreTrainedModel, layer: nn.Module) -> None:
    """Make `layer` compute on `whole.received` instead of its argument.

    A hook would not do: hooks run inside activation checkpointing, which would call them again after another
    micro-batch has been received.
    """
    kind = type(layer)

    def call(self: nn.Module, *arguments: object, **options: object) -> Any:
        options.pop("hidden_states", None)
        return kind.__call__(self, whole.received, *arguments[1:], **options)

    layer.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def decoder_layers(whole: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a decoder of the usual shape."""
    decoder = whole.base_model
    count = whole.config.get_text_config().num_hidden_layers
    found = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if decoder is whole or len(found) != 1 or whole.get_output_embeddings() is None:
        raise refusal("pipeline of another shape", kind=type(whole).__name__)
    return found[0]


def before_and_after(whole: PreTrainedModel) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules before the layers, and those after them that have parameters."""
    children = list(whole.base_model.children())
    at = children.index(decoder_layers(whole))
    return children[:at], [child for child in children[at + 1 :] if any(True for _ in child.parameters())]
