"""Fused LoRA: an adapter's product is added to the layer's output, and to its input's gradient, while it is computed.

PEFT computes `result + lora_B(lora_A(x)) * scaling`: product, scaled product and sum are three tensors of the output's
size, the scaled gradient is a fourth, and autograd adds the input's two gradients to a fifth. Here `addmm_` multiplies,
scales and adds at once. On GPUs cuBLAS does so in the product's epilogue: a kernel written in Triton could save more
only by computing the base layer's product as well, which cuBLAS is hard to beat at.
"""

from functools import cache

import torch
from peft.tuners import lora
from peft.tuners.lora import Linear, LoraLayer
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import linear


class DownProjection(torch.autograd.Function):
    """The input and its product with A; in the backward pass the adapter's share joins the base layer's gradient.

    Only the base layer may read the returned input: only then is the gradient that arrives for it the base layer's
    alone, freshly computed and read by nothing else, so that it can be added to in place.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, inputs: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same input, [..., in], and x A^T, [..., rank].

        Args:
            ctx: autograd's.
            inputs: x, [..., in].
            down: the adapter's A, [rank, in].
        """
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
        """Return the sum, [..., out], in the place of the base layer's output.

        Not marked as changed: if the output is a view, as in a layer with a bias, autograd would copy the gradient
        twice. If anything else has kept the output for a backward pass, autograd still detects that and raises.

        Args:
            ctx: autograd's.
            output: y, [..., out], which nothing else reads.
            reduced: x A^T, [..., rank].
            up: the adapter's B, [out, rank].
            scaling: of the adapter.
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
        name = None if arguments or options else self._plain_adapter(x)
        if name is None:
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

    def _plain_adapter(self, x: Tensor) -> str | None:
        """Return the only active adapter if `forward` covers it."""
        active = [name for name in self.active_adapters if name in self.lora_A]
        if len(active) != 1 or self.disable_adapters or self.merged:
            return None
        (name,) = active
        plain = name not in self.lora_variant and self.lora_B[name].bias is None
        exact = x.dtype == self.lora_A[name].weight.dtype and not torch.is_autocast_enabled(x.device.type)
        return name if plain and exact and not torch.compiler.is_compiling() else None


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
