"""Low-rank adapters: a section of the recipe (`lora.rank=32`)."""

from dataclasses import dataclass
from typing import Annotated, Literal

from .bounds import Bounds, Several


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), applied by PEFT, in the recipe's precision.

    PEFT's default, fp32, saves 73h instead of 45.5h bytes of activations per token and layer (h: hidden size) and has
    no advantage here: DeepSpeed keeps fp32 master weights of all trained weights.
    """

    rank: Annotated[int, Bounds(least=1, most=65536)] = 16
    """Rank of the adapters. A higher rank learns more and needs more memory."""
    alpha: Annotated[int, Bounds(least=1)] = 32
    """The adapter's output is scaled by alpha / rank."""
    dropout: Annotated[float, Bounds(least=0, below=1)] = 0.0
    """Share of the adapters' inputs that is dropped in training."""
    target_modules: Annotated[str, Several()] = "all-linear"
    """PEFT's `target_modules`: `all-linear`, or module names separated by commas (`q_proj,v_proj`)."""
    target_parameters: Annotated[str | None, Several()] = None
    """PEFT's `target_parameters`, separated by commas: 3-D weights outside linear layers, such as the fused experts of
    an MoE model (`mlp.experts.gate_up_proj,mlp.experts.down_proj`)."""
    modules_to_save: Annotated[str | None, Several()] = None
    """PEFT's `modules_to_save`, separated by commas: modules that are trained whole beside the adapters, and are in
    their export, such as `embed_tokens,lm_head` for new words. Where both share one weight, they still do."""
    dora: bool = False
    """Also train each weight's magnitude (DoRA, Liu et al. 2024, arXiv:2402.09353): slower, better at low ranks."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA, Kalajdzievski 2023, arXiv:2312.03732), so that high ranks learn as
    fast as low ones."""
    init: Literal["zero", "pissa"] = "zero"
    """Initial adapters. `zero` adds nothing to the model; `pissa` moves the largest singular values of each weight into
    the adapter and trains those (PiSSA, Meng et al. 2024, arXiv:2404.02948). The model starts as the same function, and
    the export is an ordinary adapter of twice the rank."""
    plus_ratio: Annotated[float, Bounds(above=0, usual=16)] = 1.0
    """Ratio of the learning rate of an adapter's output side (B) to that of its input side (LoRA+, Hayou et al. 2024,
    arXiv:2402.12354, which recommends 16). 1 gives both sides the same rate."""
    fused: bool = False
    """Add the adapter's product to the layer's output, and to its input's gradient, while it is computed. PEFT writes,
    scales and adds it in three passes over memory. The trained and exported adapters are the same."""
