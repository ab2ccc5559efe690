"""The table of possible combinations of layouts, methods and ZeRO stages in configs/README.md."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deepspeed_recipes.recipe import compatibility, limits, pages
from deepspeed_recipes.recipe.deepspeed_file import DeepSpeedFile
from deepspeed_recipes.recipe.methods import Classify, Distill, Dpo, Embed, Grpo, Kto, Orpo, Reward, Simpo
from deepspeed_recipes.recipe.recipe import Layout, Lora

ROWS = {
    "data": Layout(),
    "tensor": Layout(tensor=2),
    "sequence": Layout(sequence=2),
    "pipeline": Layout(pipeline=2),
    "tensor x sequence": Layout(tensor=2, sequence=2),
    "tensor x pipeline": Layout(tensor=2, pipeline=2),
    "sequence x pipeline": Layout(sequence=2, pipeline=2),
    "tensor x sequence x pipeline": Layout(tensor=2, sequence=2, pipeline=2),
    "expert": Layout(expert=2),
    "expert x tensor": Layout(tensor=2, expert=2),
    "expert x sequence": Layout(sequence=2, expert=2),
    "expert x pipeline": Layout(pipeline=2, expert=2),
}
"""Each is combined with data parallelism."""
STAGES = range(4)
METHODS: Mapping[str, Mapping[str, Any]] = {
    "LoRA": {"lora": Lora()},
    "DoRA": {"lora": Lora(dora=True)},
    "QLoRA": {"lora": Lora(), "quantization": "nf4"},
    "DPO": {"method": Dpo()},
    "reward": {"method": Reward()},
    "KTO": {"method": Kto()},
    "ORPO": {"method": Orpo()},
    "SimPO": {"method": Simpo()},
    "8-bit Adam": {"optimizer": "adamw_8bit"},
    "Muon": {"optimizer": "muon", "max_grad_norm": 0.0},
    "classify": {"method": Classify()},
    "embed": {"method": Embed()},
    "distillation": {"method": Distill()},
    "GRPO": {"method": Grpo(max_new_tokens=64), "reward": "rewards.py:right"},
}
"""Changes of the recipe for each column after the columns with full supervised fine-tuning."""


def render() -> str:
    """Return the table as Markdown, with each reason listed once below it."""
    reasons: list[str] = []
    columns = [*(f"ZeRO {stage}" for stage in STAGES), *METHODS]
    lines = [f"| layout | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, layout in ROWS.items():
        cells = [_cell([why(layout, {}, stage)], reasons) for stage in STAGES]
        cells += [_cell([why(layout, method, stage) for stage in STAGES], reasons) for method in METHODS.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, start=1)]
    families = [
        f"- {technique}, not {', '.join(f'`{kind}`' for kind, other in kinds.items() if other == reason)}: {reason}."
        for technique, kinds in compatibility.FAMILIES.items()
        for reason in dict.fromkeys(kinds.values())
    ]
    return "\n".join([*lines, "", *notes, "", *families]) + "\n"


def why(layout: Layout, method: Mapping[str, Any], stage: int) -> str | None:
    """Return why a layout cannot be combined with a method and a ZeRO stage, for a model whose sizes all divide."""
    recipe, changes = pages.find("tiny", "full"), dict(method)
    model = replace(recipe.model, config={}, quantization=changes.pop("quantization", "none"))
    return limits.limit(replace(recipe, layout=layout, model=model, **changes), 16, DeepSpeedFile(stage=stage))


def _cell(whys: list[str | None], reasons: list[str]) -> str:
    """Return "yes" if any of several combinations is possible, otherwise the number of the last reason."""
    against = [why for why in whys if why is not None]
    if len(against) < len(whys):
        return "yes"
    if against[-1] not in reasons:
        reasons.append(against[-1])
    return f"[{reasons.index(against[-1]) + 1}]"
