"""Adapters, optimizers and trackers: their settings in a recipe, and which of them there are."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from .bounds import Bounds, Several
from .errors import UserError, redact


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
    """PEFT's `modules_to_save`, separated by commas: modules that are trained whole together with the adapters, and
    exported with them, such as `embed_tokens,lm_head` for new words. Where both share one weight, they still do."""
    dora: bool = False
    """Also train each weight's magnitude (DoRA, Liu et al. 2024, arXiv:2402.09353): slower, better at low ranks."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA, Kalajdzievski 2023, arXiv:2312.03732), so that high ranks learn as
    fast as low ones."""
    init: Literal["zero", "pissa"] = "zero"
    """Initial adapters: `zero` adds nothing to the model; `pissa` moves the largest singular values of each weight
    into the adapter and trains those (PiSSA, Meng et al. 2024, arXiv:2404.02948). The model starts as the same
    function, and the export is an ordinary adapter of twice the rank."""
    plus_ratio: Annotated[float, Bounds(above=0, usual=16)] = 1.0
    """Ratio of the learning rate of an adapter's output side (B) to that of its input side (LoRA+, Hayou et al. 2024,
    arXiv:2402.12354, which recommends 16). 1 gives both sides the same rate."""
    fused: bool = False
    """Add the adapter's product to the layer's output, and to its input's gradient, while it is computed. PEFT writes,
    scales and adds it in three passes over memory. The trained and exported adapters are the same."""


Optimizer = Literal["adamw", "adamw_8bit", "muon"]

_FLAT = "ZeRO updates flat pieces of all weights together, which contain no {what}"
_BY_LAYER = "it updates {what}, and ZeRO updates all weights at once"
IMPOSSIBLE: Mapping[str, str] = {
    **dict.fromkeys(("galore", "apollo", "q_galore"), _FLAT.format(what="matrices whose gradients it could project")),
    **dict.fromkeys(("adafactor", "came"), _FLAT.format(what="rows and columns whose means it could keep")),
    **dict.fromkeys(("shampoo", "soap"), _FLAT.format(what="matrices for which it could keep its factors")),
    "adam_mini": _FLAT.format(what="heads or rows that could share a learning rate"),
    "badam": _BY_LAYER.format(what="one block of layers at a time, whose states it makes anew"),
    **dict.fromkeys(("lomo", "adalomo"), _BY_LAYER.format(what="each weight within the backward pass")),
    "lisa": _BY_LAYER.format(what="a few layers that it draws anew"),
}
"""Names of other well-known optimizers -> why they cannot train weights that DeepSpeed shards."""

_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "fused_adamw", "paged_adamw_32bit")
OUR_OPTIMIZERS: Mapping[str, Optimizer] = {
    **dict.fromkeys(("adamw", *_ADAMW), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw_8bit"),
}
"""TrainingArguments' `optim` -> the optimizer that takes the same steps."""
PAGED = "the moments stay on the GPU; a config that offloads the optimizer keeps them in host memory"
"""The effect of `paged_adamw_32bit` and `paged_adamw_8bit` here."""


def why_impossible(name: str) -> str | None:
    """Return why an optimizer is not available, or None; also for TrainingArguments' names (`galore_adamw_8bit`)."""
    words = name.lower().replace("-", "_")
    return next((why for known, why in IMPOSSIBLE.items() if known in words), None)


TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")
"""Names of the trackers; each is also the name of its Python module and package."""


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases, on rank 0."""

    mode: Literal["online", "offline", "disabled"] = "online"
    """`online` falls back to `offline` when the machine has no API key."""
    project: str = "deepspeed-recipes"
    """Project of the run in W&B and Trackio; in MLflow, the experiment."""
    entity: str | None = None
    """User or team that owns the project. None uses W&B's default for the API key."""
    name: str | None = None
    """Name of the run in W&B and MLflow. None uses the recipe's, such as `llama3-8b-lora`."""
    group: str | None = None
    """Group of the run; W&B shows the runs of a group together. A sweep sets this key."""
    job_type: str | None = None
    """Role of the run within its group, such as `train`."""
    tags: Annotated[str | None, Several()] = None
    """More tags, separated by commas, in addition to the family, the method and the DeepSpeed file."""
    artifacts: bool = False
    """After the run, add its export to the W&B run as an artifact, and report.html, which online runs always add."""
    examples: bool = False
    """Show held-out examples with their answers in every tracker, and examples of the data in the report that W&B gets.
    `false` keeps all text of the data in the run folder."""


def check_trackers(chosen: Sequence[str], wandb: Wandb) -> None:
    """Refuse a tracker that does not exist or that is named twice, and what W&B would refuse when the run starts."""
    for name in chosen:
        if name not in TRACKERS:
            near = difflib.get_close_matches(name.lower(), TRACKERS, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UserError(
                f"tracking={redact(name)}: no such tracker.{hint} Choose from {', '.join(TRACKERS)}, or none."
            )
        if chosen.count(name) > 1:
            raise UserError(f"tracking={','.join(chosen)}: {name} is named twice.")
    if "wandb" not in chosen or wandb.mode == "disabled":
        return
    if len(wandb.project) > 128 or set(wandb.project) & set("/\\#?%:"):
        raise UserError(f"wandb.project={redact(wandb.project[:140])}: W&B allows 128 characters, and none of /\\#?%:.")
    for tag in (wandb.tags or "").split(","):
        if len(tag.strip()) > 64:
            raise UserError(f"wandb.tags: {redact(tag.strip()[:80])}: W&B allows 64 characters for each tag.")
