"""Files for TRL's command line, and TrainingArguments that a script has saved (`json.dump(args.to_dict(), file)`)."""

import dataclasses
import json
import os
from pathlib import Path
from typing import get_args, get_type_hints

from ....recipe.errors import UserError, errors_only
from ....recipe.files import Json, JsonView
from ....recipe.methods.grpo import Grpo
from ....recipe.methods.preferences import DpoLoss
from ....recipe.overrides import OTHER_TOOLS, key_of
from . import trainer
from .translation import ADAPTERS, Translation, check_types

TRL = OTHER_TOOLS["trl"]
DEFAULTS = trainer.DEFAULTS | TRL["defaults"]
METHODS: dict[str, Json] = TRL["methods"]
"""The methods, and the defaults of their configurations."""
SCALES = {"True": "group", "False": "none"}
"""`scale_rewards` -> `grpo.scale`, where they differ."""
PEFT_TARGETS = "q_proj,v_proj"


def translate(values: JsonView, gpus: int) -> Translation:
    """Translate the settings of a file for a run on `gpus` GPUs."""
    saved = "_n_gpu" in values or "hub_token" in values or len(values) > 60  # `to_dict` writes every argument
    given, kind = _set_by_the_user(values) if saved else (values, "")
    # TRL's command line has `--no_X` for every switch X that is on by default.
    off = {name for name, value in given.items() if name.startswith("no_") and value is True}
    given = {name: value for name, value in given.items() if name not in off} | {name[3:]: False for name in off}
    own = bool(kind) or (not saved and "model_name_or_path" in values)
    method, told = (kind, True) if kind else _method(given)
    found = Translation(
        "TRL" if own else "TrainingArguments", given, DEFAULTS | METHODS[method] if own else trainer.DEFAULTS
    )
    found.method, found.complete = method, saved
    if own and not told:
        found.remarks.append(f"the file does not name its method: it is read as one for `trl {method}`")
    if "method" in given:
        found.note("method", method)
    found.name_model("model_name_or_path")
    if own and found.given("fp16"):
        found.defaults["bf16"] = False
    trainer.settings(found, gpus)
    if own:
        for name in METHODS[method]:
            if (key := key_of(name, method)).startswith(f"{method}.") and name != "loss_type":
                found.rename(key, name)
        _losses(found)
        _adapter(found)
    if own and method != "grpo" and "max_length" in given and given["max_length"] is None:
        found.lack("max_length", "null: no limit; give sequence_length=N")
    elif method != "grpo":
        found.rename("sequence_length", "max_length")
    if own and method not in ("sft", "grpo"):
        found.remarks.append("max_length: longer examples are left out and counted, not cut")
    if own and method == "sft":
        if given.get("truncation_mode", "keep_start") == "keep_start":
            found.set("truncate", True, "truncation_mode")  # SFTTrainer keeps the beginning
        if given.get("packing_strategy") in ("bfd", "bfd_split", "bfd-requeue"):
            found.note("packing_strategy", "the longest documents first, as in `bfd`")
    if method == "sft":
        found.set("packing", bool(found.take("packing")), "packing")
    if given.get("disable_dropout") is False and method != "grpo":
        found.lack("disable_dropout", f"dropout is off in {method}, as in TRL unless this is false")
    if given.get("dataset_text_field", "text") != "text":
        found.set("data.columns", f"{given['dataset_text_field']}:text", "dataset_text_field")
    _data(found)
    kind = str(found.values.get("accelerate_config", ""))  # a file that TRL ships
    if kind in ("zero1", "zero2", "zero3"):
        found.set("deepspeed", f"{kind}.json", "accelerate_config")
    elif kind.startswith("fsdp"):
        found.set("deepspeed", "zero3.json", "accelerate_config")
    elif kind in ("multi_gpu", "single_gpu"):
        found.unneeded["accelerate_config"] = "--gpus N is the number of GPUs"
    found.set("gradient_checkpointing", bool(found.take("gradient_checkpointing")), "gradient_checkpointing")
    found.finish("trl")
    return found


def _method(values: JsonView) -> tuple[str, bool]:
    """Return the method of a file, and whether a key names it."""
    if values.get("method") in METHODS:
        return str(values["method"]), True
    kinds = values.get("loss_type") or ""
    kind = str(next(iter(kinds), "")) if isinstance(kinds, list) else str(kinds)
    if kind in ("simpo", "orpo", "kto"):
        return kind, True
    if kind in get_args(get_type_hints(Grpo)["loss"]):
        return "grpo", True
    for method, names in TRL["signs"].items():
        if any(values.get(name) is not None for name in names.split()):
            return method, True
    preferences = kind in get_args(DpoLoss) or "beta" in values
    return ("dpo" if preferences else "sft"), preferences


def _losses(found: Translation) -> None:
    """Translate the loss: its name, and for conversations the tokens that it counts."""
    kinds = found.take("loss_type")
    names = [str(kind) for kind in kinds] if isinstance(kinds, list) else [str(kinds)] if kinds else []
    known = {"dpo": get_args(DpoLoss), "grpo": get_args(get_type_hints(Grpo)["loss"])}.get(found.method, ())
    if len(names) == 1 and names[0] in known:
        found.set(f"{found.method}.loss", names[0], "loss_type")
    elif len(names) == 1 and names[0] in ("nll", "chunked_nll", "kto", "simpo"):
        if "loss_type" in found.values:
            found.note("loss_type", "the same loss")
    elif names:
        found.lack("loss_type", f"there are {', '.join(known) or 'no other losses'}")
    if found.method == "sft":
        answers = [name for name in ("assistant_only_loss", "completion_only_loss") if found.given(name)]
        off = [name for name in ("assistant_only_loss", "completion_only_loss") if found.values.get(name) is False]
        found.set("loss_on", "assistant" if answers else "all", *(answers or off))
        for name in off if answers else ():
            found.note(name, f"{answers[0]} decides")
        if not answers and "completion_only_loss" not in off:
            found.remarks.append(
                "loss_on: without assistant_only_loss, TRL learns all tokens of conversations, but of prompts and "
                "completions only the completions; for such data, give loss_on=assistant"
            )
    elif found.method == "simpo":
        found.settle_imitation(found.take("cpo_alpha"))
    elif found.method == "grpo":
        scale = found.take("scale_rewards")
        found.set("grpo.scale", SCALES.get(str(scale), scale), "scale_rewards")
        length = int(trainer.number(found.take("max_completion_length"), "max_completion_length"))
        found.set("sequence_length", 1024 + length)
        found.remarks.append(f"sequence_length: room for prompts of 1024 tokens before answers of {length}")
        found.set_rewards("reward_funcs", found.take("reward_funcs"))


def _adapter(found: Translation) -> None:
    if not found.given("use_peft"):
        found.need_none(ADAPTERS, "use_peft is not set: all weights are trained, as in TRL")
        if found.given("load_in_4bit"):
            found.lack("load_in_4bit", "4-bit weights are frozen: train adapters (use_peft: true)")
        return
    bits = found.given("load_in_4bit")
    found.adapter = "dora" if found.given("use_dora") else "qlora" if bits else "lora"
    found.note("use_peft", found.adapter)
    trainer.adapters(found)
    if bits:
        found.set("model.quantization", "nf4", "load_in_4bit")
        if "use_bnb_nested_quant" not in found.values:
            found.remarks.append("load_in_4bit: with double quantization, as with use_bnb_nested_quant: true")
    targets = found.take("lora_target_modules")
    if isinstance(targets, list) and len(targets) == 1:
        targets = targets[0]
    found.set("lora.target_modules", targets or PEFT_TARGETS, "lora_target_modules")
    if not targets:
        found.remarks.append(
            f"lora.target_modules: PEFT's own choice for Llama, Mistral, Qwen and Gemma is {PEFT_TARGETS}; for other "
            "architectures name PEFT's, or all-linear"
        )


def _data(found: Translation) -> None:
    template = str(found.values.get("chat_template") or "")
    if "{%" in template or "{{" in template:
        found.lack("chat_template", "save it as a file, and give model.chat_template=FILE")
    if not found.given("dataset_name"):
        _mixture(found)
    elif found.take("eval_strategy", "evaluation_strategy") not in (None, "no", False):
        # The split that TRL's scripts evaluate, if it can be named here.
        dataset, split = Path(found.take("dataset_name")), found.take("dataset_test_split") or "test"
        on_hub = len(dataset.parts) == 2 and not dataset.exists() and not dataset.suffix[1:].isalpha()
        named = dataset / split
        place = named if on_hub or named.is_dir() else min(dataset.glob(f"{split}.*"), default=None)
        if place:
            found.set("data.validation", place, "eval_strategy", "evaluation_strategy", "dataset_test_split")
        else:
            found.lack(
                "eval_strategy" if "eval_strategy" in found.values else "evaluation_strategy",
                f"TRL evaluates the split {split} of {dataset}: give data.validation=FILE or "
                "data.validation_share=0.05",
            )
    if "data.validation_share" not in found.overrides:
        found.set("data.validation_share", 0.0)


def _mixture(found: Translation) -> None:
    """Translate the data sets of alignment-handbook's `dataset_mixer`, TRL's `datasets` and `dataset_mixture`."""
    source = next(filter(found.given, ("dataset_mixer", "dataset_mixture", "datasets")), "")
    listed = found.values.get(source)
    if isinstance(listed, dict) and source == "dataset_mixer":
        listed = {"datasets": [{"path": name, "weight": share} for name, share in listed.items()]}
    entries = listed.get("datasets") if isinstance(listed, dict) else listed
    if not isinstance(entries, list) or not all(
        isinstance(one, dict) and ("path" in one or "id" in one) for one in entries
    ):
        found.lack("dataset", "the file names no data: give data.path=FILE")
        return
    paths: list[str] = []
    for one in entries:
        check_types(one, {"data_files": (str, list, dict), "path": (str,), "data_dir": (str,)}, f"{source}: ")
        place = Path(str(one.get("path") or one["id"]), str(one.get("data_dir") or ""))
        files = one.get("data_files") or []
        loader = str(place) in ("json", "csv", "parquet", "text")  # of the library `datasets`, not a folder
        named = [str(file if loader else place / file) for file in ([files] if isinstance(files, str) else files)]
        if isinstance(files, dict) or any("*" in name or "://" in name for name in named):
            found.lack(f"{source}.data_files", "name the files: give data.path=A,B")
        paths += named or [str(place)]
    found.set("data.path", paths, source)
    splits = found.values.get("dataset_splits") or [one.get("split") or "train" for one in entries]
    trained = sorted({str(one) for one in splits if "test" not in str(one)})
    if len(trained) == 1 and trained != ["train"]:
        found.set("data.split", trained[0], "dataset_splits")
    elif len(trained) > 1:
        found.lack(f"{source}.split", f"one split is read of all: {', '.join(trained)}; save them as files")
    elif "dataset_splits" in found.values:
        found.note("dataset_splits", "the split train")
    held_out = [str(one) for one in splits if "test" in str(one)]
    if held_out and found.take("eval_strategy", "evaluation_strategy") not in (None, "no", False):
        found.set(
            "data.validation", [f"{one}/{held_out[0]}" for one in found.overrides["data.path"].split(",")], source
        )
    share = listed.get("test_split_size") if isinstance(listed, dict) else found.values.get("test_split_size")
    if share:
        found.set("data.validation_share", share, source, "test_split_size")
    if any(one.get("weight") not in (None, 1) for one in entries):
        found.lack(
            f"{source}.weight", "a share of each: data.weights mixes without leaving out, data.max_examples draws"
        )
    if configs := [name for one in entries if (name := one.get("config") or one.get("name")) not in (None, "default")]:
        found.lack(f"{source}.config", f"a subset ({configs[0]}) cannot be asked for; save it as files")


def _set_by_the_user(values: JsonView) -> tuple[Json, str]:
    """Return the arguments that differ from the defaults of their class, and its method: none for TrainingArguments."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:  # takes seconds, and only saved arguments need it
        with errors_only("bitsandbytes"):
            import trl
            from transformers import TrainingArguments
            from trl.experimental.cpo import CPOConfig
            from trl.experimental.orpo import ORPOConfig
    except ImportError:
        raise UserError("a file of all TrainingArguments needs transformers and TRL to tell which you set.") from None
    classes = {
        "": TrainingArguments,
        "sft": trl.SFTConfig,
        "dpo": trl.DPOConfig,
        "kto": trl.KTOConfig,
        "orpo": ORPOConfig,
        "simpo": CPOConfig,
        "grpo": trl.GRPOConfig,
        "reward": trl.RewardConfig,
    }

    def differs(method: str) -> int:
        return len(values.keys() ^ {field.name for field in dataclasses.fields(classes[method]) if field.init})

    method = min(classes, key=differs)
    # As `to_dict` writes them: __post_init__ fills in what is None.
    usual = json.loads(json.dumps(classes[method](output_dir="", use_cpu=True).to_dict(), default=str))
    same = {name for name, value in usual.items() if name in values and values[name] == value}
    if values.get("steps_per_generation") == values.get("gradient_accumulation_steps"):
        same |= {"steps_per_generation", "generation_batch_size"}  # TRL has derived them
    same -= {"use_cpu", "report_to"}  # set here to compare on any machine; and a recipe's default is another
    return {name: value for name, value in values.items() if name not in same}, method
