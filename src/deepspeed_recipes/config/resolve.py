"""Resolves a template: replaces every "auto" with the value that the Hugging Face Trainer would use.

The formulas are those of `HfTrainerDeepSpeedConfig` (transformers) and `Accelerator._prepare_deepspeed`; a test
compares the result, key by key, with what a real Trainer passes to `deepspeed.initialize`.
"""

import copy
import json
from dataclasses import dataclass
from typing import Any, Literal

from ..recipe.errors import UserError
from ..recipe.files import NEVER, Json, finite
from .read import Key
from .rule import dotted, shown


class Unresolvable(UserError):
    """The template contradicts the numbers; each line of the message names a key, its value and the fix."""


@dataclass(frozen=True)
class Numbers:
    """The values that the Trainer fills into a template. The defaults are those of TrainingArguments."""

    micro_batch_size: int = 1
    """Sequences per forward pass and rank."""
    gradient_accumulation_steps: int = 1
    world_size: int = 1
    """Number of ranks."""
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    hidden_size: int | None = None
    """Width of the model, from which bucket sizes are computed."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    max_grad_norm: float = 1.0
    learning_rate: float = 5e-5
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_steps: int | None = None
    """Optimizer steps of the whole run, needed only by a `scheduler` block."""

    @property
    def train_batch_size(self) -> int:
        """The global batch size that satisfies DeepSpeed's check.

        Pipeline and sequence ranks share a micro-batch. DeepSpeed counts tensor ranks as if each had its own, so the
        world size is not divided by them.
        """
        sharing = self.world_size // (self.pipeline * self.sequence)
        return self.micro_batch_size * self.gradient_accumulation_steps * sharing


def resolve(template: Json, numbers: Numbers) -> Json:
    """Return a copy of `template` with a value for every "auto", as the engine gets it.

    Raises `Unresolvable` if a value contradicts the numbers (the Trainer would report a mismatch), the Trainer has no
    value for an "auto", or the ranks are not divisible by the layout.
    """
    for name in ("tensor", "pipeline", "sequence"):
        size = getattr(numbers, name)
        if size < 1 or numbers.world_size % size:
            raise Unresolvable(
                f"layout.{name}={size} does not divide {numbers.world_size} ranks; choose a size that does"
            )
    share = numbers.tensor * numbers.pipeline * numbers.sequence
    if numbers.world_size % share:
        raise Unresolvable(
            f"{numbers.world_size} ranks are not divisible by {share} (tensor x pipeline x sequence); use a multiple"
        )
    config = copy.deepcopy(template)
    lines = []
    for path, value in _matched(numbers).items():
        node: object = config
        for part in path.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node not in (None, "auto", value):
            ours = f"{path} is {shown(node)} in the template but {shown(value)} in the run"
            lines.append(f'{ours}; write "auto" or change the run')
    if lines:
        raise Unresolvable("\n".join(lines))
    _fill(config, fillings(numbers))
    # accelerate adds these keys before the engine gets the config.
    config.setdefault("gradient_accumulation_steps", 1)
    if numbers.sequence > 1:
        config["train_batch_size"] = numbers.train_batch_size
    if numbers.precision == "fp16":
        config.setdefault("fp16", {"enabled": True, "auto_cast": True})
    elif numbers.precision == "bf16":
        config.setdefault("bf16", {"enabled": True})
    for name in ("fp16", "bf16"):
        config.setdefault(name, {"enabled": False})
    config["steps_per_print"] = NEVER
    if "optimizer" not in config:
        config["zero_allow_untested_optimizer"] = True
    return config


def dumps(config: Json) -> str:
    """Return a resolved config as strict JSON, with infinity written as NEVER."""
    return json.dumps(finite(config), indent=2, allow_nan=False) + "\n"


def _matched(numbers: Numbers) -> dict[str, object]:
    """Return the keys that the Trainer compares with its arguments, unless they are "auto", and their values."""
    matched: dict[str, object] = {
        "train_micro_batch_size_per_gpu": numbers.micro_batch_size,
        "gradient_accumulation_steps": numbers.gradient_accumulation_steps,
        "train_batch_size": numbers.train_batch_size,
        "gradient_clipping": numbers.max_grad_norm,
        "fp16.enabled": numbers.precision == "fp16",
        "bf16.enabled": numbers.precision == "bf16",
        "optimizer.params.lr": numbers.learning_rate,
        "optimizer.params.betas": [numbers.adam_beta1, numbers.adam_beta2],
        "optimizer.params.eps": numbers.adam_epsilon,
        "optimizer.params.weight_decay": numbers.weight_decay,
        "scheduler.params.warmup_max_lr": numbers.learning_rate,
        "scheduler.params.warmup_num_steps": max(1, numbers.warmup_steps),
    }
    if numbers.max_steps is not None:
        matched["scheduler.params.total_num_steps"] = numbers.max_steps
    return matched


def fillings(numbers: Numbers) -> dict[str, object]:
    """Return the value for every key that may be "auto"."""
    found = {
        **_matched(numbers),
        "scheduler.params.warmup_min_lr": 0,
        "zero_optimization.stage": 2,
        "zero_optimization.offload_optimizer.device": "none",
        "zero_optimization.offload_optimizer.nvme_path": "none",
        "zero_optimization.offload_param.device": "none",
        "zero_optimization.offload_param.nvme_path": "none",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    }
    if numbers.hidden_size is not None:
        square = numbers.hidden_size * numbers.hidden_size
        found["zero_optimization.reduce_bucket_size"] = square
        found["zero_optimization.stage3_prefetch_bucket_size"] = int(0.9 * square)
        found["zero_optimization.stage3_param_persistence_threshold"] = 10 * numbers.hidden_size
    return found


def _fill(node: Any, fillings: dict[str, object], path: Key = ()) -> None:
    items = enumerate(node) if isinstance(node, list) else list(node.items())
    for name, value in items:
        where = (*path, name)
        if isinstance(value, dict):
            _fill(value, fillings, where)
        elif value == "auto" and dotted(where) in fillings:
            node[name] = copy.deepcopy(fillings[dotted(where)])
        elif value == "auto":
            key, why = dotted(where), "but the Trainer has no value for it; write a value"
            if key.endswith(("bucket_size", "persistence_threshold")):
                why = "which needs the model's hidden size; add --model or hidden_size=N"
            elif key == "scheduler.params.total_num_steps":
                why = "which needs the number of steps; add max_steps=N"
            raise Unresolvable(f'{key} is "auto", {why}')
