"""Files for TRL's command line, and TrainingArguments that a script has saved (`json.dump(args.to_dict(), file)`)."""

import dataclasses
from pathlib import Path

from ....recipe.errors import UserError
from ....recipe.files import Json, JsonView
from . import trainer
from .translation import Translation

DEFAULTS = trainer.DEFAULTS | {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "max_length": 1024}
LORA = {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "dora": "use_dora", "rslora": "use_rslora"}
METHODS = ("dpo", "kto", "orpo", "simpo", "grpo", "reward")


def is_one(values: JsonView) -> bool:
    """Return True if a file has the names of TrainingArguments."""
    return bool({"model_name_or_path", "per_device_train_batch_size", "num_train_epochs", "output_dir"} & set(values))


def translate(values: JsonView, gpus: int, place: Path) -> Translation:
    """Translate the settings of a file; the arguments are those of `llama_factory.translate`.

    Raises:
        UserError: a value of the wrong kind.
    """
    saved = "_n_gpu" in values or "hub_token" in values or len(values) > 60  # `to_dict` writes every argument
    given = _set_by_the_user(values) if saved else values
    found = Translation("TrainingArguments" if saved else "TRL", given, DEFAULTS)
    found.model = str(found.take("model_name_or_path") or "MODEL")
    if "model_name_or_path" in values:
        found.note("model_name_or_path", "the model")
    else:
        found.lack("model", "TrainingArguments have no model: put its folder or Hub id in place of MODEL")
    trainer.settings(found, gpus)
    found.method = next(
        (one for one in METHODS if values.get("method") == one or one in str(values.get("loss_type"))), "sft"
    )
    if "beta" in found.values and found.method in ("dpo", "kto", "orpo", "simpo"):
        found.rename("beta", f"{found.method}.beta")
    if found.given("use_peft") or found.given("lora_r"):
        found.take("use_peft")
        found.adapter = "qlora" if found.given("load_in_4bit") else "lora"
        trainer.adapters(found, LORA)
        if found.given("load_in_4bit"):
            found.take("load_in_4bit")
            found.set("model.quantization", "nf4", "load_in_4bit")
        targets = found.take("lora_target_modules")
        found.set("lora.target_modules", targets or "all-linear", "lora_target_modules")
        if "use_peft" in found.values:
            found.note("use_peft", found.adapter)
    found.rename("max_length", "sequence_length")
    if found.method == "sft":
        if found.values.get("truncation_mode", "keep_start") == "keep_start":
            found.set("truncate", True, "truncation_mode")  # SFTTrainer keeps the beginning
        if found.values.get("assistant_only_loss") is False and found.values.get("completion_only_loss") is False:
            found.take("assistant_only_loss", "completion_only_loss")
            found.set("loss_on", "all", "assistant_only_loss", "completion_only_loss")
    if found.given("lora_modules_to_save"):
        found.rename("lora_modules_to_save", "lora.modules_to_save")
    for name, key in (("dataset_name", "data.path"), ("dataset_train_split", "data.split")):
        if found.given(name):
            found.rename(name, key)
    if not found.given("dataset_name"):
        found.lack("dataset", "the file names no data: give data.path=FILE")
    if "data.validation_share" not in found.overrides:
        found.set("data.validation_share", 0.0)
    found.set("packing", bool(found.take("packing")), "packing")
    found.set("gradient_checkpointing", bool(found.take("gradient_checkpointing")), "gradient_checkpointing")
    found.finish("trl")
    return found


def _set_by_the_user(values: JsonView) -> Json:
    """Return the arguments that differ from transformers' defaults.

    Raises:
        UserError: transformers is not installed.
    """
    try:
        from transformers import TrainingArguments  # takes seconds, and only saved arguments need it
    except ImportError:
        raise UserError("a file of all TrainingArguments needs transformers to tell which ones you set.") from None
    fields = dataclasses.fields(TrainingArguments)
    usual = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    return {name: value for name, value in values.items() if name not in usual or value != usual[name]}
