"""Derive the schema of the installed DeepSpeed's config from DeepSpeed itself.

    python -m scripts.maintain.schema.derive   # writes config/schemas/deepspeed-VERSION.json; 5 s, needs no GPU

- Sections that DeepSpeed reads with pydantic declare their keys and types.
- All other keys are found by passing `DeepSpeedConfig` a dictionary that records which keys are looked up in it; the
  values that each key accepts are found by trying one value of each kind.
"""

import copy
import json
import logging
import os
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from deepspeed_recipes.config import schema
from deepspeed_recipes.recipe import files

from . import names
from .pydantic_types import section_model, section_node
from .recorder import Recorder, plain

# One value of each kind that JSON has, with falsy and truthy ones separate: DeepSpeed often tests only for emptiness.
SAMPLES = {
    "null": None,
    "false": False,
    "true": True,
    "zero": 0,
    "one": 1,
    "integer": 3,
    "zero point": 0.0,
    "fraction": 2.5,
    "empty text": "",
    "text": "x",
    "auto": "auto",
    "empty list": [],
    "list of text": ["x"],
    "list": [[1]],
    "empty object": {},
    "object": {"x": 1},
}

# Read outside the config class, so recording the config class cannot show it:
# key -> (the source file that reads it, the text that does). A test looks the text up.
READ_ELSEWHERE = {
    "sequence_parallel_size": ("__init__.py", 'config["sequence_parallel_size"]'),
    "data_parallel_size": ("__init__.py", 'config["data_parallel_size"]'),
}

# Sections that DeepSpeed passes on unread, so that their keys cannot be checked:
# path -> (the source file that passes it on, the text that does). A test looks the text up.
OPEN = {
    "data_efficiency.data_sampling": ("runtime/data_pipeline/config.py", "copy.copy(sub_param_dict)"),
    "data_efficiency.data_sampling.curriculum_learning": (
        "runtime/data_pipeline/config.py",
        "copy.copy(param_dict[CURRICULUM_LEARNING])",
    ),
    "data_efficiency.data_sampling.dynamic_batching": (
        "runtime/data_pipeline/config.py",
        "copy.copy(param_dict.get(DYNAMIC_BATCHING, {}))",
    ),
    "data_efficiency.data_routing.random_ltd": (
        "runtime/data_pipeline/config.py",
        "copy.copy(param_dict[RANDOM_LTD])",
    ),
    "datastates_ckpt": ("datastates/config.py", "copy.deepcopy(param_dict.get(DATASTATES_CHECKPOINTING"),
    "optimizer.params": ("runtime/config.py", "return param_dict[OPTIMIZER][OPTIMIZER_PARAMS]"),
    "scheduler.params": ("runtime/config.py", "return param_dict[SCHEDULER][SCHEDULER_PARAMS]"),
    "autotuning.model_info": ("autotuning/config.py", "param_dict[MODEL_INFO]"),
    "autotuning.arg_mappings": ("autotuning/config.py", "AUTOTUNING_ARG_MAPPINGS"),
}

# These load on some machines only, so nothing is recorded; a rule checks the machine.
MACHINE_DEPENDENT = {("aio", "use_gds")}

_BATCH = {"train_micro_batch_size_per_gpu": 1}


def derive() -> dict:
    """Return the whole schema as plain JSON data. Imports DeepSpeed; needs no GPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import config as ds

    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # DeepSpeed logs several lines per config, and this makes thousands of configs
    try:
        root = _recorded_section((), names.texts())
        for name in READ_ELSEWHERE:
            root["keys"].setdefault(name, {"default": None})
        # Before 0.19.7 DeepSpeed did not say which keys it had removed.
        removed = dict(getattr(ds, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}))
        for name in removed:
            root["keys"].pop(name, None)
        return {
            "deepspeed": metadata.version("deepspeed"),
            "root": root,
            "removed": removed,
            "removed_zero": dict(getattr(ds, "_REMOVED_ZERO_CONFIG_KEYS", {})),
            "optimizers": sorted(ds.DEEPSPEED_OPTIMIZERS),
            "optimizer_parameters": names.optimizer_parameters(),
            "schedulers": names.schedulers(),
            "torch_optimizers": names.torch_classes("optim", "Optimizer"),
            "torch_schedulers": names.torch_classes("optim.lr_scheduler", "LRScheduler"),
            "dtypes": sorted(text for kind in ds.DtypeEnum for text in kind._all_values[1:]),
            "expert_presets": names.expert_presets(),
            "tensor_presets": names.tensor_presets(),
        }
    finally:
        logging.disable(level)


def _recorded_section(path: tuple[str, ...], texts: tuple[str, ...]) -> dict:
    """Return the node of the section at `path`, found by recording what DeepSpeedConfig looks up in it."""
    model = section_model(path)
    if model is not None:
        return section_node(model)
    if path == ("pipeline",):  # is merged into these defaults, and nothing else reads it
        from deepspeed.runtime.config import get_pipeline_config

        defaults = sorted(get_pipeline_config({}).items())
        return {"unknown": "ignored", "keys": {name: {"default": value} for name, value in defaults}}
    recorder = Recorder(_FILLINGS.get(path[-1], {}) if path else _BATCH)
    _loads(_place(path, recorder))
    keys = {
        name: _recorded_key((*path, name), default, texts)
        for name, default in sorted(recorder.seen.items())
        if name not in _BATCH or not path
    }
    unknown = "open" if ".".join(path) in OPEN else "ignored"
    return {"unknown": unknown, "keys": keys}


def _recorded_key(path: tuple[str, ...], default: object, texts: tuple[str, ...]) -> dict:
    name = path[-1]
    loads = [kind for kind, sample in SAMPLES.items() if _loads(_place(path, copy.deepcopy(sample)))]
    key = {"default": plain(default)}
    if len(loads) < len(SAMPLES) and path not in MACHINE_DEPENDENT:
        key["loads"] = loads
    if "text" not in loads and (accepted := [text for text in texts if _loads(_place(path, text))]):
        key["texts"] = sorted({text.lower() for text in accepted})
        key["any_case"] = _loads(_place(path, accepted[0].upper())) and _loads(_place(path, accepted[0].lower()))
    probe = Recorder(_FILLINGS.get(name, {}))
    if _loads(_place(path, probe)) and (probe.seen or ".".join(path) in (*OPEN, "pipeline")):
        key["section"] = _recorded_section(path, texts)
    elif (model := section_model(path)) is not None:
        key["section"] = section_node(model)
    return key


def _place(path: tuple[str, ...], value: Any) -> dict:
    """Return a loadable config with `value` at `path`."""
    if not path:
        return value
    config = Recorder(_BATCH)
    node = config
    for name in path[:-1]:
        dict.__setitem__(node, name, Recorder(_FILLINGS.get(name, {})))
        node = dict.__getitem__(node, name)
    if path[-1] in ("train_batch_size", "gradient_accumulation_steps"):
        dict.pop(config, "train_micro_batch_size_per_gpu" if path[-1] == "train_batch_size" else "", None)
    dict.__setitem__(node, path[-1], value)
    return config


# Keys without which DeepSpeed does not read the rest of a section.
_FILLINGS: dict[str, dict] = {
    "optimizer": {"type": "Adam"},
    "scheduler": {"type": "Adam"},
    "curriculum_learning": {"curriculum_metrics": {}},
    "dynamic_batching": {"max_tokens": 1},
}


def _loads(config: dict) -> bool:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(config)
    except Exception:  # any exception means that it did not load
        return False
    return True


def write(derived: dict) -> None:
    """Write a version's schema: the newest version's whole, and the others' as their differences from it."""
    known = {schema.position(one["deepspeed"]): one for one in map(schema.read, schema.SCHEMAS.glob("*.json"))}
    known[schema.position(derived["deepspeed"])] = derived
    newest = known[max(known)]
    for one in known.values():
        version = {"deepspeed": one["deepspeed"], "differs_from": newest["deepspeed"]}
        text = json.dumps(newest, indent=1, sort_keys=True)
        if one is not newest:
            text = json.dumps(version | {"differences": list(differences(newest, one))}, indent=1, sort_keys=True)
        files.write_text(schema.file_of(one["deepspeed"]), text + "\n")


def differences(base: dict, other: dict, path: tuple[str, ...] = ()) -> Iterator[list]:
    """Yield `[path, value]` for every entry that `other` has and `base` has not, and `[path]` for the reverse."""
    for name in sorted(base.keys() | other.keys()):
        if name not in other:
            yield [[*path, name]]
        elif name not in base:
            yield [[*path, name], other[name]]
        elif isinstance(base[name], dict) and isinstance(other[name], dict):
            yield from differences(base[name], other[name], (*path, name))
        elif base[name] != other[name]:
            yield [[*path, name], other[name]]


if __name__ == "__main__":
    derived = derive()
    write(derived)
    print(f"wrote {schema.file_of(derived['deepspeed']).name}")
