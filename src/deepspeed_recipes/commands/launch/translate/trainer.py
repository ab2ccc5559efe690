"""Settings under the names of transformers' TrainingArguments, which LLaMA-Factory, TRL and many scripts share.

Sources: transformers.TrainingArguments, trl.SFTConfig, trl.DPOConfig and peft.LoraConfig of the pinned versions.
"""

import math
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ....recipe.errors import UserError, counted
from ....recipe.files import Json
from ....recipe.overrides import FOREIGN_NAMES, OTHER_TOOLS
from ....recipe.project import CONFIGS
from ....recipe.recipe import PerEpoch, Schedule
from ....recipe.run_folder import read_json
from ....recipe.sections import OUR_OPTIMIZERS, PAGED, why_impossible
from .translation import Translation, as_text, check_types

DEFAULTS: Json = OTHER_TOOLS["trainer"]["defaults"]
SHARED = ("layout.tensor", "layout.pipeline", "layout.sequence")
"""The number of GPUs that work on the same sequences."""
SCHEDULES = get_args(get_type_hints(Schedule)["kind"])
SCHEDULE_OPTIONS = {
    "min_lr_rate": "schedule.min_rate",
    "min_lr_ratio": "schedule.min_rate",
    "num_cycles": "schedule.cycles",
    "power": "schedule.power",
    "num_decay_steps": "schedule.decay",
    "decay_type": "schedule.decay_type",
    "timescale": "schedule.timescale",
}
"""`lr_scheduler_kwargs` -> our keys; the absolute rates `min_lr` and `lr_end` are divided by the learning rate."""


def settings(found: Translation, gpus: int) -> None:
    """Translate batch, optimizer, schedule, precision, logging, checkpoints, trackers and sharding."""
    micro = found.take("per_device_train_batch_size", "micro_batch_size")
    accumulated = found.take("gradient_accumulation_steps")
    sources = ("per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps")
    found.set("micro_batch_size", micro, *sources[:2])
    copies = [name for name in found.values if FOREIGN_NAMES.get(name) in SHARED and found.given(name)]
    shared = math.prod(_whole(found.values[name], name) for name in copies)  # GPUs that read the same sequences
    gpus = max(1, gpus // shared)
    batch = _whole(micro, _typed(found, *sources[:2])) * _whole(accumulated, sources[2]) * gpus
    found.set("global_batch_size", batch, *sources)
    found.remarks.append(
        f"global_batch_size counts all GPUs: {micro} x {accumulated} x {counted(gpus, 'GPU')}"
        f"{' with sequences of their own (' + ', '.join(copies) + ')' if shared > 1 else ''}; "
        "with another number give --gpus N together with --from"
    )
    if found.given("max_steps") and number(found.take("max_steps"), "max_steps") > 0:
        found.set("max_steps", found.values["max_steps"], "max_steps")
        found.unneeded |= {
            name: "max_steps is set" for name in ("num_train_epochs", "num_epochs") if name in found.values
        }
    else:
        if "max_steps" in found.values:
            found.note("max_steps", "epochs decides")
        found.rename("epochs", "num_train_epochs", "num_epochs")
    for key in ("learning_rate", "weight_decay", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed"):
        found.rename(key, key)
    if found.given("adam_beta1") and found.values["adam_beta1"] == 0.9:
        found.note("adam_beta1", "0.9, as always")
    if found.given("data_seed"):
        found.lack("data_seed", "one seed is for the order of the data, too")
    _optimization(found)
    _saving(found)
    _sharding(found)


def _optimization(found: Translation) -> None:
    """Translate schedule, optimizer and precision."""
    name = _typed(found, "lr_scheduler_type", "lr_scheduler")
    kind = str(found.take("lr_scheduler_type", "lr_scheduler"))
    kind = {"wsd": "warmup_stable_decay"}.get(kind, kind)
    if kind == "cosine" and (found.given("cosine_min_lr_ratio")):  # Axolotl's
        if number(found.values["cosine_min_lr_ratio"], "cosine_min_lr_ratio") < 1:
            kind = "cosine_with_min_lr"
            found.rename("schedule.min_rate", "cosine_min_lr_ratio")
        else:
            kind = "constant_with_warmup"
            found.note("cosine_min_lr_ratio", f"schedule.kind={kind}")
    if kind in SCHEDULES:
        found.set("schedule.kind", kind, name)
    else:
        found.lack(name, f"there are {', '.join(SCHEDULES)}; schedule.kind is the recipe's")
    given = found.take("lr_scheduler_kwargs") if kind in SCHEDULES else None
    for option, value in (given if isinstance(given, dict) else {}).items():
        if option in ("min_lr", "lr_end"):
            rate = number(found.values.get("learning_rate", DEFAULTS["learning_rate"]), "learning_rate")
            found.set("schedule.min_rate", number(value, option) / rate if rate else 0.0, "lr_scheduler_kwargs")
        elif option in SCHEDULE_OPTIONS and (kind, option) != ("cosine", "num_cycles"):
            found.set(SCHEDULE_OPTIONS[option], value, "lr_scheduler_kwargs")
        else:
            found.lack(f"lr_scheduler_kwargs.{option}", f"{as_text(value)}: there are {', '.join(SCHEDULE_OPTIONS)}")
    steps, ratio = found.take("warmup_steps"), found.take("warmup_ratio")
    if kind == "constant":
        found.need_none(("warmup_steps", "warmup_ratio"), "a constant rate has no warm-up")
    else:
        given = [name for name in ("warmup_steps", "warmup_ratio") if name in found.values]
        if len(given) == 2:  # as in transformers
            given = given[:1] if steps or not ratio else given[1:]
            found.unneeded["warmup_ratio" if given == ["warmup_steps"] else "warmup_steps"] = f"{given[0]} counts"
        if not steps and number(ratio or 0, "warmup_ratio") >= 1:
            found.lack("warmup_ratio", f"{ratio}: schedule.warmup is a number of steps from 1 on; give theirs")
        else:
            found.set("schedule.warmup", steps or ratio or 0.0, *given)
    name = _typed(found, "optim", "optimizer")
    kind = str(found.take("optim", "optimizer"))
    if kind in OUR_OPTIMIZERS:
        found.set("optimizer", OUR_OPTIMIZERS[kind], name)
        if kind == "adamw_torch_8bit":
            found.remarks.append(f"{name}: {kind}: the moments are in bitsandbytes' 8 bits, not torchao's")
    elif kind == "muon":  # its updates have fixed norms, so clipping is off
        found.set("optimizer", "muon", name)
        found.overrides["max_grad_norm"] = "0"
        found.by_default.discard("max_grad_norm")
    else:
        found.lack(name, why_impossible(kind) or "there are adamw, adamw_8bit and muon")
    if kind.startswith("paged"):
        found.remarks.append(f"{name}: {kind}: {PAGED}")
    half = [name for name in ("fp16", "float16") if found.given(name) and found.values[name] != "auto"]
    brain = [name for name in ("bf16", "pure_bf16", "bfloat16") if found.given(name)]
    if half and all(found.values[name] == "auto" for name in brain):
        found.set("precision", "fp16", *half, *brain)
        if not any(found.given(name) for name in ("deepspeed", "fsdp", "fsdp_config")):
            found.set("deepspeed", "fp16.json", *half)
    elif brain or found.take("bf16"):
        found.set("precision", "bf16", "bf16", *brain)
    else:
        _without_bf16(found)


def _without_bf16(found: Translation) -> None:
    """Translate the dtype in which the weights are loaded, and in which a run without fp16 and bf16 computes there."""
    name = _typed(found, "torch_dtype", "dtype")
    kind = as_text(found.take("torch_dtype", "dtype")).removeprefix("torch.")
    if kind in ("bfloat16", "bf16"):
        found.set("precision", "bf16", name)
        if "bf16" in found.values:
            found.note("bf16", f"{name} decides")
        return
    found.set("precision", "fp32", "bf16")
    if kind in ("float16", "fp16"):
        found.lack(name, f"{kind} without a loss scale there; give precision=fp16")
    elif kind == "auto":
        found.lack(name, "the dtype of the model's files there; if that is bf16, give precision=bf16")


OF_TRACKERS = {
    "use_wandb": "wandb",
    "wandb_project": "wandb",
    "use_tensorboard": "tensorboard",
    "use_mlflow": "mlflow",
    "use_trackio": "trackio",
}
"""Axolotl's keys that turn a tracker on."""


def _saving(found: Translation) -> None:
    """Translate what a run measures, logs and keeps, and its trackers."""
    streamed = any(found.given(name) for name in found.values if name.startswith(("pretraining_dataset", "streaming")))
    for name, steps, key in (
        ("save_strategy", "save_steps", "save_steps"),
        ("eval_strategy", "eval_steps", "eval_steps"),
        ("evaluation_strategy", "eval_steps", "eval_steps"),
    ):
        kind, value = found.take(name), found.take(steps)
        if kind == "epoch":
            if streamed:
                found.leave(name, f"a stream has no epochs: give {key}=N")
            else:
                found.set(key, "epoch", name)
            continue
        if kind == "best":
            found.leave(name, "keep_best=true exports the best of the checkpoints that save_steps=N saves")
            continue
        if kind in ("no", False):
            off = {"save_steps": 0, "eval_steps": None}[key]
            found.set(key, off, name, *((steps,) if value is not None else ()))
            continue
        if kind and value is None:  # as TrainingArguments fills it in
            value = found.take("logging_steps") if key == "eval_steps" else 500
        if value is None:
            continue
        if number(value, steps) >= 1:
            if kind or name != "evaluation_strategy":
                found.set(key, value, *((name,) if kind else ()), steps)
        else:
            found.leave(steps, f"a share of the run; give {key}=N")
    for name, key in (("evals_per_epoch", "eval_steps"), ("saves_per_epoch", "save_steps")):
        times = found.values.get(name) or 0
        often = "epoch" if times == 1 else f"epoch/{times}"
        if often in get_args(PerEpoch) and not streamed:
            found.set(key, often, name)
        elif found.given(name):
            found.leave(name, f"give {key}=N")
    metric = str(found.take("metric_for_best_model") or "")
    if metric in ("loss", "eval_loss"):
        found.note("metric_for_best_model", "data.metric=loss")
    elif metric:
        found.lack("metric_for_best_model", "the best step is judged by data.metric")
    if found.take("greater_is_better") is not None:
        found.note("greater_is_better", "known of each metric")
    found.rename("logging_steps")
    if found.given("save_total_limit"):
        limit = _whole(found.take("save_total_limit"), "save_total_limit")
        found.set("keep_checkpoints", max(2, limit), "save_total_limit")
        if limit < 2:
            found.remarks.append("keep_checkpoints: at least 2, so that one survives while the next is written")
    if folder := found.take("output_dir"):
        found.options += ["--output-dir", str(folder)]
        found.note("output_dir", f"--output-dir {folder}")
    named = found.take("report_to")
    names = [named] if isinstance(named, str) else list(named or ())
    known = [name for name in names if name in ("wandb", "tensorboard", "mlflow", "trackio")]
    for name in set(names) - set(known) - {"none", "all"}:
        found.leave("report_to", f"{name}: there are wandb, tensorboard, mlflow and trackio")
    refused = "wandb" if found.values.get("use_wandb") is False else None
    switches = [key for key, tracker in OF_TRACKERS.items() if found.given(key) and tracker != refused]
    known = list(dict.fromkeys([*known, *(OF_TRACKERS[key] for key in switches)]))
    if "all" not in names:  # the other tools track nothing by default
        found.set("tracking", ",".join(known) or "none", "report_to", *(key for key in switches if "use_" in key))


def _sharding(found: Translation) -> None:
    """Keep the file of DeepSpeed that is given, find ours for a well-known name, or take FSDP for ZeRO-3."""
    file = found.take("deepspeed")
    if isinstance(file, dict):
        found.lack("deepspeed", "settings inside the file: write them to a JSON file and give deepspeed=FILE")
    elif file:
        path, ours = Path(str(file)), file
        if not path.is_file():  # ours for one that another tool ships under a well-known name
            name = path.stem.lower()
            shipped = OTHER_TOOLS["trainer"]["deepspeed"]
            known = f"{name}.json" if (CONFIGS / f"{name}.json").is_file() else None
            known = shipped.get(path.with_suffix("").as_posix(), known)
            ours = known or next((mine for part, mine in shipped.items() if part in name), file)
            if ours == file:
                found.lack("deepspeed", f"{file} is not here; give deepspeed=FILE")
                return
            if not known:
                found.remarks.append(f"deepspeed: {file} is not here; {ours} is taken by its name")
            kind = found.overrides.get("optimizer", "adamw")
            if "_offload" in ours and kind != "adamw":
                found.remarks.append(f"deepspeed: {file} offloads the optimizer there, which {kind} cannot do here")
                ours = f"{ours.partition('_offload')[0]}.json"
            elif "_offload" in ours and "offload" not in name:
                found.remarks.append(
                    f"deepspeed: {file} offloads the optimizer to the CPU; deepspeed={name}.json does not"
                )
        found.set("deepspeed", ours, "deepspeed")
    shards, settings = found.take("fsdp"), found.take("fsdp_config")
    if (shards or settings) and not file:
        here = isinstance(settings, str) and Path(settings).is_file()
        options = read_json(Path(settings)) if here else settings if isinstance(settings, dict) else {}
        check_types({"fsdp_config": options}, {"fsdp_config": (dict,)})
        offloads = "offload" in str(shards) or bool(options.get("fsdp_offload_params") or options.get("offload_params"))
        ours = "zero3_offload_params.json" if offloads else "zero3.json"
        for name in ("fsdp", "fsdp_config", "fsdp_version"):
            if name in found.values:
                found.note(name, f"deepspeed={ours}, which shards the same")
        if isinstance(settings, str) and not here:
            offloading = "if it offloads, give deepspeed=zero3_offload_params.json"
            found.lack("fsdp_config", f"{settings} is not here; {offloading}")
        found.overrides["deepspeed"] = ours
        if options.get("fsdp_activation_checkpointing") or options.get("activation_checkpointing"):
            found.set("gradient_checkpointing", True, "fsdp_config")


def adapters(found: Translation) -> None:
    """Translate those of LoRA's settings that have a default in every tool."""
    found.rename("lora.rank")
    found.rename("lora.alpha")
    found.set("lora.dropout", found.take("lora_dropout") or 0.0, "lora_dropout")
    if not found.given("lora_target_parameters") and not found.given("target_parameters"):
        found.set("lora.target_parameters", None)  # the experts of a page, say


def number(value: Any, name: str) -> float:
    """Return a number that YAML may have read as text (`1e-4`), or refuse the value."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"{name}: {value}: must be a number.") from None


def held_out_share(found: Translation, name: str) -> None:
    """Translate the share of the examples that is held out, unless the file names held-out data."""
    share = number(found.take(name), name)
    if share and (found.given("eval_dataset") or "data.validation" in found.overrides):
        found.lack(name, f"{found.tool} refuses it together with other held-out examples; keep one of them")
    elif share >= 1:
        found.lack(name, f"{share:g} examples: give a share, data.validation_share=0.05")
    elif "data.validation" not in found.overrides:
        found.set("data.validation_share", share, name)


def _typed(found: Translation, *names: str) -> str:
    """Return the name, of one setting's names, that the file uses."""
    return next((name for name in names if name in found.values), names[0])


def _whole(value: Any, name: str) -> int:
    found = number(value, name)
    if found < 1 or found != int(found):
        raise UserError(f"{name}: {value}: must be a whole number from 1.")
    return int(found)
