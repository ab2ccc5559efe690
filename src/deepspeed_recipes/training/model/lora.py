"""LoRA, QLoRA and DoRA: freezes or quantises the base model and adds the weights that are trained.

Fused LoRA: PEFT computes `result + lora_B(lora_A(x)) * scaling`: product, scaled product and sum are three tensors of
the output's size, the scaled gradient is a fourth, and autograd adds the input's two gradients to a fifth. Here
`addmm_` multiplies, scales and adds at once. On GPUs cuBLAS does so in the product's epilogue: a kernel written in
Triton could save more only by computing the base layer's product as well, which cuBLAS is hard to beat at.
"""

import math
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from deepspeed.runtime.zero import GatheredParameters
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import lora
from peft.tuners.lora import Linear, LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import linear
from transformers import BitsAndBytesConfig, PreTrainedModel

from ...recipe.conversions import lora_options
from ...recipe.errors import UserError, first_sentence
from ...recipe.recipe import Lora, names
from ...recipe.run_folder import read_json, write_json
from .. import upstream
from .processor import NAMES as VISION


class DownProjection(torch.autograd.Function):
    """The input and its product with A; in the backward pass the adapter's share joins the base layer's gradient.

    Only the base layer may read the returned input: only then is the gradient that arrives for it the base layer's
    alone, freshly computed and read by nothing else, so that it can be added to in place.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, inputs: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same input, x, [..., in], and x A^T, [..., rank]; `down` is the adapter's A, [rank, in]."""
        ctx.save_for_backward(inputs, down)
        return inputs.detach(), linear(inputs, down)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, of_inputs: Tensor, of_reduced: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the input, the base layer's and the adapter's, and of A."""
        inputs, down = ctx.saved_tensors
        reduced = _rows(of_reduced)
        summed = _rows(of_inputs).addmm_(reduced, down)
        return summed.view(of_inputs.shape), reduced.t() @ _rows(inputs)


class UpProjection(torch.autograd.Function):
    """The base layer's output plus the adapter's: y + scaling * (x A^T) B^T.

    x A^T is kept for the gradient of B: it is rank / in as large as x, all of which would be read to compute it again.
    Parameters are kept as they are, not transposed: ZeRO-3 empties and refills them, but not views of them.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, output: Tensor, reduced: Tensor, up: Tensor, scaling: float) -> Tensor:
        """Return the sum, [..., out], in the place of the base layer's output, which nothing else reads.

        Not marked as changed: if the output is a view, as in a layer with a bias, autograd would copy the gradient
        twice. If anything else has kept the output for a backward pass, autograd still detects that and raises.
        `reduced` is x A^T, [..., rank], and `up` the adapter's B, [out, rank].
        """
        ctx.save_for_backward(reduced, up)
        ctx.scaling = scaling
        summed = output.detach()
        summed.view(-1, summed.shape[-1]).addmm_(_rows(reduced), up.t(), alpha=scaling)
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of the base layer's output, of x A^T and of B."""
        reduced, up = ctx.saved_tensors
        rows = _rows(gradient)
        of_reduced = _scaled_product(rows, up, ctx.scaling).view(reduced.shape)
        return gradient, of_reduced, _scaled_product(rows.t(), _rows(reduced), ctx.scaling), None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    return torch.addmm(left.new_empty(1, 1), left, right, beta=0, alpha=scale)  # with beta=0 the empty tensor is unread


class Fused(LoraLayer):
    """A LoRA layer that fuses the adapter's additions to output and input gradient into its matrix products."""

    def forward(self, x: Tensor, *arguments: object, **options: object) -> Tensor:
        """Return the layer's output for x, [..., in]; PEFT computes all but a single plain adapter in x's dtype."""
        active = [name for name in self.active_adapters if name in self.lora_A]
        if len(active) != 1 or arguments or options or self.disable_adapters or self.merged:
            return super().forward(x, *arguments, **options)
        (name,) = active
        plain = name not in self.lora_variant and self.lora_B[name].bias is None
        exact = x.dtype == self.lora_A[name].weight.dtype and not torch.is_autocast_enabled(x.device.type)
        if not (plain and exact) or torch.compiler.is_compiling():
            return super().forward(x, *arguments, **options)
        # The adapter's modules are not called; ZeRO-3 gathers their weights for this layer after the first read.
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        dropout = self.lora_dropout[name]
        drops = isinstance(dropout, torch.nn.Dropout) and dropout.training
        if drops or not x.requires_grad:  # the base layer's gradient is for another tensor, or is not needed
            reduced = self.lora_A[name](dropout(x))
        else:
            x, reduced = DownProjection.apply(x, down)
        return UpProjection.apply(self.base_layer(x), reduced, up, self.scaling[name])


class FusedLinear(Fused, Linear):
    """PEFT's layer on `torch.nn.Linear`."""


@cache
def layers(quantised: bool = False) -> dict[type[torch.nn.Module], type[torch.nn.Module]]:
    """Return the replacements of PEFT's layers, by the layers that they adapt; PEFT takes the first match.

    bitsandbytes is imported only for `quantised` (4-bit) weights, since other runs do not need it.
    """
    if not quantised:
        return {torch.nn.Linear: FusedLinear}
    from bitsandbytes.nn import Linear4bit

    class FusedLinear4bit(Fused, lora.Linear4bit):
        """PEFT's layer on bitsandbytes' `Linear4bit`, whose output PEFT copies before it adds to it."""

    return {Linear4bit: FusedLinear4bit, **layers()}  # `Linear4bit` is a linear layer too


HEAD_AND_TOWER = ("lm_head", *(rf"(.*\.)?{name}" for name in VISION))
"""Modules of a vision-language model that keep the training dtype; transformers matches the whole name."""


def nf4(dtype: torch.dtype, kept: Sequence[str] | None = None) -> BitsAndBytesConfig:
    """Return QLoRA's 4-bit quantisation (arXiv:2305.14314): NF4 with double quantisation.

    `kept` names the modules that are not quantised; None keeps only the head.

    The packed bytes are stored as the training dtype: DeepSpeed casts every floating-point parameter to that dtype, and
    would convert bytes of another dtype as if they were numbers.
    """
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
        llm_int8_skip_modules=list(kept) if kept else None,
    )


def add(
    model: PreTrainedModel,
    lora: Lora,
    seed: int = 0,
    scores: bool = False,
    embeds: bool = False,
    excluded: str | None = None,
    rows: dict[str, list[int]] | list[int] | None = None,
) -> PeftModel:
    """Return the model with adapters in the model's dtype; everything else is frozen, except for a head that scores.

    `embeds` means that it has no head, `excluded` is a regular expression for modules without adapters, and `rows` are
    PEFT's `trainable_token_indices`.
    """
    try:
        given = lora_options(lora, scores, embeds, model.config.model_type)
        if saved := names(lora.modules_to_save):
            if absent := [
                name for name in saved if not any(f".{one}".endswith(f".{name}") for one, _ in model.named_modules())
            ]:
                raise UserError(f"lora.modules_to_save={lora.modules_to_save}: the model has no module {absent[0]}.")
            given["ensure_weight_tying"] = bool(model.config.get_text_config().tie_word_embeddings)
        given["trainable_token_indices"] = rows or None
        # PEFT takes the routers of PhiMoE and Llama 4 for Linear, their base class; they return more than its product.
        routers = {
            name.rpartition(".")[2]
            for name, part in model.named_modules()
            if isinstance(part, torch.nn.Linear) and type(part).__name__.endswith("Router")
        }
        if wrong := routers.intersection(names(lora.target_modules)):
            raise UserError(
                f"lora.target_modules={lora.target_modules}: {wrong.pop()} of {model.config.model_type} returns more "
                "than a product, and PEFT cannot adapt it; leave it out."
            )
        if routers:
            excluded = "|".join([*([excluded] if excluded else []), rf".*\.({'|'.join(sorted(routers))})"])
        options = LoraConfig(**given | ({"exclude_modules": excluded} if excluded else {}))
        if lora.fused:
            options._register_custom_module(layers(getattr(model, "is_loaded_in_4bit", False)))
        # PEFT's fast decomposition then draws the same numbers on every rank, and again when a run is resumed.
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())), upstream.reading_rows(model):
            torch.manual_seed(seed)
            adapted = get_peft_model(model, options, autocast_adapter_dtype=False)
    except (TypeError, ValueError) as error:  # the first where a tied weight is named under both of its names
        targets = f"lora.target_modules={lora.target_modules}"
        for name in ("target_parameters", "modules_to_save"):
            targets += f" lora.{name}={value}" if (value := getattr(lora, name)) else ""
        raise UserError(f"{targets}: {first_sentence(str(error))}.") from error
    upstream.replace_rows_in_outputs(adapted)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)
    if lora.init == "pissa":
        for name, layer in _lora_layers(adapted).items():
            for side, dimension in SIDES.items():
                weight = getattr(layer, side)[adapted.active_adapter].weight
                if (found := weight.shape[dimension]) < lora.rank:
                    raise UserError(
                        f"lora.rank={lora.rank}: PiSSA takes as many singular values of each matrix, and "
                        f"{name.rpartition('.')[2]} has {found}; set lora.rank={found}, or leave it out of "
                        "lora.target_modules."
                    )
                layer.register_buffer(f"start_{side}", weight.detach().clone(), persistent=False)  # in no checkpoint
    else:
        _start_by_name(adapted, seed)
    return adapted


def _start_by_name(adapted: PeftModel, seed: int) -> None:
    """Initialise each adapter with random values that depend only on its name and the seed.

    PEFT draws them in sequence, so a stage of a pipeline, which has other layers, would get different values.
    """
    for name, parameter in adapted.named_parameters():
        if "lora_A" in name and not parameter.is_meta:
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            with GatheredParameters([parameter], modifier_rank=0):
                drawn = torch.empty(parameter.shape)
                if drawn.numel():  # under ZeRO-3 the other ranks only take part
                    torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)  # as PEFT does
                parameter.data.copy_(drawn)


SIDES = {"lora_A": 0, "lora_B": 1}
"""The parts of an adapter, and the dimension of each that is its rank."""


def export_pissa(model: PeftModel, folder: Path) -> None:
    """Convert the adapter in `folder` into an adapter of twice the rank on the unchanged base model.

    PiSSA (Meng et al. 2024, arXiv:2404.02948) starts adapters as a weight's largest singular values, and subtracts them
    from the weights, so the frozen model differs from the model in the files. The export is therefore the trained
    adapter minus the initial one.

    W + s (B A - B0 A0) = W + s [B, -B0] [A; A0], and the scale s, alpha / rank or alpha / sqrt(rank), stays the same.
    """
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    for name, layer in _lora_layers(model).items():
        for side, dimension in SIDES.items():
            start = getattr(layer, f"start_{side}").to("cpu", weights[f"{name}.{side}.weight"].dtype)
            sign = -1 if side == "lora_B" else 1
            joined = torch.cat([weights[f"{name}.{side}.weight"], sign * start], dim=dimension)
            weights[f"{name}.{side}.weight"] = joined.contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    config = read_json(folder / "adapter_config.json")
    factor = math.sqrt(2) if config["use_rslora"] else 2
    doubled = {"r": 2 * config["r"], "lora_alpha": factor * config["lora_alpha"], "init_lora_weights": True}
    write_json(folder / "adapter_config.json", config | doubled)


def _lora_layers(model: PeftModel) -> dict[str, LoraLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
