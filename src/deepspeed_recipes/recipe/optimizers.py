"""The available optimizers, and the reasons why others are not available."""

from collections.abc import Mapping
from typing import Literal

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
OURS: Mapping[str, Optimizer] = {
    **dict.fromkeys(("adamw", *_ADAMW), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw_8bit"),
}
"""TrainingArguments' `optim` -> the optimizer that takes the same steps."""
PAGED = "the moments stay on the GPU; a config that offloads the optimizer keeps them in host memory"
"""What becomes of the pages of `paged_adamw_32bit` and `paged_adamw_8bit`."""


def impossible(name: str) -> str | None:
    """Return why an optimizer is not available, or None; also for TrainingArguments' names (`galore_adamw_8bit`)."""
    words = name.lower().replace("-", "_")
    return next((why for known, why in IMPOSSIBLE.items() if known in words), None)
