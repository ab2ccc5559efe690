"""The Hugging Face trainer of a recipe, under DeepSpeed."""

from collections.abc import Callable, Sequence
from typing import Any

from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from deepspeed.runtime.utils import clip_grad_norm_
from torch import distributed as dist
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from recipes.spec.layout import data_parallel_size
from recipes.spec.recipe import Layout, Method
from recipes.training import world
from recipes.training.attention import is_told
from recipes.training.data import Collator

INFINITY = 2147483647
"""Written for infinity, which strict JSON has no word for: what nobody reaches."""


class EngineReady(TrainerCallback):
    """Calls `action` once the DeepSpeed engine exists, before the first step."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Call it."""
        self.action()


def build(
    method: Method,
    model: Any,
    arguments: TrainingArguments,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    callbacks: Sequence[TrainerCallback],
) -> Trainer:
    """Return the trainer for the method: TRL's for preferences, transformers' own for the rest.

    SFT takes transformers' Trainer on rows that `data.prepare` has packed and masked: TRL's SFTTrainer computes
    entropy and accuracy and gathers them over all ranks at every step, which costs more than it tells.
    """
    shared: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "train_dataset": rows,
        "processing_class": tokenizer,
        "callbacks": list(callbacks),
    }
    if method == "dpo":
        from trl import DPOTrainer

        trainer = DPOTrainer(**shared)
    else:
        trainer = Trainer(**shared, data_collator=Collator(tokenizer.pad_token_id, tells=is_told(model)))
    trainer.remove_callback(PrinterCallback)
    return trainer


def share_rows(trainer: Trainer, layout: Layout) -> None:
    """Make all ranks that hold parts of one copy of the model read the same rows; accelerate knows data ranks only."""
    accelerator = trainer.accelerator
    size = dist.get_world_size()

    def prepare(loader: DataLoader, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None) -> Any:
        prepared = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=data_parallel_size(layout, size),
            process_index=world.place(layout).row,
            put_on_device=True,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            non_blocking=accelerator.non_blocking,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    accelerator.prepare_data_loader = prepare


def report_grad_norm(engine: Any) -> None:
    """Make the engine report its gradient norm in fp32 without ZeRO too, where DeepSpeed computes and forgets it.

    DeepSpeed 0.19.8, engine.py, `clip_fp32_gradients`: the return value of `clip_grad_norm_` is dropped.
    `test_deepspeed_forgets_the_fp32_gradient_norm` tells when this can go.
    """

    def clip_and_remember() -> None:
        engine._global_grad_norm = clip_grad_norm_(
            parameters=engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu
        )

    engine.clip_fp32_gradients = clip_and_remember


def read_norms_when_logging(trainer: Trainer) -> None:
    """Leave the gradient norm on the device until it is logged; the Trainer and accelerate read it at every step.

    A read waits until the device has done everything before it, and the device then waits for the next launch.
    """

    def norm(*_: Any, **__: Any) -> Any:
        return trainer.deepspeed.get_global_grad_norm()

    trainer._clip_grad_norm = trainer._get_grad_norm = norm


def as_never_loaded(engine: Any) -> None:
    """Under ZeRO-3, put small weights back into shards after a checkpoint was loaded, as a fresh engine has them.

    DeepSpeed 0.19.8 gathers them at the end of a load and releases each after its module's first forward pass; DoRA,
    which reads an adapter's weight from outside its module, then finds it empty. A fresh engine gathers at the first
    forward pass, and keeps them. `test_catalogue.py` resumes DoRA under ZeRO-3.
    """
    small = getattr(engine.optimizer, "persistent_parameters", [])
    if small:
        small[0].partition(small)


def resolved_config(engine: Any) -> dict[str, Any]:
    """Return the configuration that the engine got, in strict JSON's values."""
    return _strict(engine._config._param_dict)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return INFINITY if value == float("inf") else value
