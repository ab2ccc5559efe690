"""Derive the schema in `schema.json` from the installed DeepSpeed: `python -m recipes.zero_config.derive`."""

import copy
import enum
import inspect
import json
import logging
import os
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from recipes.zero_config import names
from recipes.zero_config.schema import FORMAT, SAMPLES, SHIPPED

# Read where the config class does not look, so no recording of the config class can show it:
# key -> (the source file that reads it, the text that does). A test looks the text up.
READ_ELSEWHERE = {
    "sequence_parallel_size": ("__init__.py", 'config["sequence_parallel_size"]'),
    "data_parallel_size": ("__init__.py", 'config["data_parallel_size"]'),
}

# Sections whose content DeepSpeed hands on unread; nothing can be said about a key in them.
# path -> (the source file that reads it, a text in it). A test looks the text up.
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

# What these load with depends on the machine that derives, so nothing is recorded; a rule looks at the machine.
MACHINE_DEPENDENT = {("aio", "use_gds")}

_BATCH = {"train_micro_batch_size_per_gpu": 1}
_MISSING = object()


class Recorder(dict):
    """A dictionary that writes down which keys are looked up in it, and with which default."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen: dict[str, object] = {}

    def get(self, key, default=None):  # noqa: D102
        self._saw(key, default)
        return super().get(key, default)

    def pop(self, key, *default):  # noqa: D102
        self._saw(key, *default)
        return super().pop(key, *default)

    def __getitem__(self, key):
        self._saw(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self._saw(key)
        return super().__contains__(key)

    def keys(self):  # noqa: D102
        return _RecordedKeys(self)

    def __bool__(self):
        return True  # an empty section is skipped before anything is looked up in it

    def __copy__(self):
        return self

    def _saw(self, key, default=_MISSING):
        if default is not _MISSING or key not in self.seen:
            self.seen[key] = default


class _RecordedKeys:
    """`key in section.keys()` counts as looking the key up."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def __contains__(self, key):
        return key in self.recorder

    def __iter__(self):
        return dict.__iter__(self.recorder)

    def __len__(self):
        return len(self.recorder)


def derive() -> dict:
    """Return the whole schema as plain JSON data. Imports DeepSpeed; needs no GPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import config as ds

    with _silence():
        root = _recorded_section((), names.texts())
        for name in READ_ELSEWHERE:
            root["keys"].setdefault(name, {"default": None})
        for name in ds._REMOVED_TOP_LEVEL_CONFIG_KEYS:
            root["keys"].pop(name, None)
        return {
            "format": FORMAT,
            "deepspeed": metadata.version("deepspeed"),
            "root": root,
            "removed": dict(ds._REMOVED_TOP_LEVEL_CONFIG_KEYS),
            "removed_zero": dict(ds._REMOVED_ZERO_CONFIG_KEYS),
            "optimizers": names.optimizers(),
            "schedulers": names.schedulers(),
            "torch_optimizers": names.torch_names("optim", "Optimizer"),
            "torch_schedulers": names.torch_names("optim.lr_scheduler", "LRScheduler"),
            "dtypes": sorted(text for kind in ds.DtypeEnum for text in kind._all_values[1:]),
            "expert_presets": names.expert_presets(),
            "tensor_presets": names.tensor_presets(),
        }


def _recorded_section(path: tuple[str, ...], texts: tuple[str, ...]) -> dict:
    """Return the node of the section at `path`, found by recording what DeepSpeedConfig looks up in it."""
    model = _pydantic_section(path)
    if model is not None:
        return _pydantic_node(model)
    recorder = Recorder(_BATCH if not path else _filling(path[-1]))
    _loads(_place(path, recorder))
    node = {"unknown": "open" if ".".join(path) in OPEN else "ignored", "keys": {}}
    for name, default in sorted(recorder.seen.items()):
        if name not in _BATCH or not path:
            node["keys"][name] = _recorded_key((*path, name), default, texts)
    if path == ("pipeline",):
        node["keys"] = _pipeline_keys()
    return node


def _recorded_key(path: tuple[str, ...], default: object, texts: tuple[str, ...]) -> dict:
    name = path[-1]
    loads = [kind for kind, sample in SAMPLES.items() if _loads(_place(path, copy.deepcopy(sample)))]
    key = {"default": _plain(default)}
    if len(loads) < len(SAMPLES) and path not in MACHINE_DEPENDENT:
        key["loads"] = loads
    if "text" not in loads and any(_loads(_place(path, text)) for text in texts):
        accepted = [text for text in texts if _loads(_place(path, text))]
        key["texts"] = sorted({text.lower() for text in accepted})
        key["any_case"] = _loads(_place(path, accepted[0].upper())) and _loads(_place(path, accepted[0].lower()))
    probe = Recorder(_filling(name))
    if _loads(_place(path, probe)) and (probe.seen or ".".join(path) in (*OPEN, "pipeline")):
        key["section"] = _recorded_section(path, texts)
    elif (model := _pydantic_section(path)) is not None:
        key["section"] = _pydantic_node(model)
    return key


def _place(path: tuple[str, ...], value: object) -> dict:
    """Return a loadable config with `value` at `path`."""
    if not path:
        return value
    config = Recorder(_BATCH)
    node = config
    for name in path[:-1]:
        dict.__setitem__(node, name, Recorder(_filling(name)))
        node = dict.__getitem__(node, name)
    if path[-1] in ("train_batch_size", "gradient_accumulation_steps"):
        dict.pop(config, "train_micro_batch_size_per_gpu" if path[-1] == "train_batch_size" else "", None)
    dict.__setitem__(node, path[-1], value)
    return config


_FILLINGS = {
    "optimizer": {"type": "Adam"},
    "scheduler": {"type": "Adam"},
    "curriculum_learning": {"curriculum_metrics": {}},
    "dynamic_batching": {"max_tokens": 1},
}


def _filling(name: str) -> dict:
    """Return what a section needs before DeepSpeed looks at the rest of it."""
    return dict(_FILLINGS.get(name, {}))


def _loads(config: dict) -> bool:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(config)
    except Exception:  # whatever it raises, it did not load
        return False
    return True


def _pydantic_section(path: tuple[str, ...]):
    """Return the pydantic model that reads the section at `path`; a test looks for forgotten ones."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    monitors = {(name,): field.annotation for name, field in DeepSpeedMonitorConfig.model_fields.items()}
    models = {
        ("zero_optimization",): DeepSpeedZeroConfig,
        ("bf16",): DeepSpeedBF16Config,
        ("bfloat16",): DeepSpeedBF16Config,
        ("fp16",): DeepSpeedFP16Config,
        ("compile",): CompileConfig,
        ("tensor_parallel",): TPTrainingConfig,
        ("hybrid_engine",): HybridEngineConfig,
        ("weight_quantization",): WeightQuantConfig,
        ("comms_logger",): CommsLoggerConfig,
        ("timers", "throughput"): DeepSpeedThroughputTimerConfig,
        **monitors,
    }
    return models.get(path)


def _pydantic_node(model) -> dict:
    keys = {}
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra or {}
        key = {"type": _type(field.annotation, field.metadata), "default": _plain(_default(field))}
        if extra.get("deprecated"):
            key["deprecated"] = extra.get("new_param", "")
            key["excludes"] = extra.get("set_new_param", True)
        if inner := _model_in(field.annotation):
            key["section"] = _pydantic_node(inner)
        keys[field.alias or name] = key
        if field.alias and model.model_config.get("populate_by_name"):
            keys[name] = {**key, "alias_of": field.alias}
    return {"unknown": "rejected" if model.model_config.get("extra") == "forbid" else "ignored", "keys": keys}


def _default(field) -> object:
    return field.get_default(call_default_factory=True)


def _model_in(annotation):
    """Return the pydantic model in `Model` or `Model | None`."""
    from pydantic import BaseModel

    for kind in (annotation, *typing.get_args(annotation)):
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            return kind
    return None


def _type(annotation, constraints=()) -> dict:
    """Return a type as JSON data: the kinds that `values.py` knows how to check."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [_type(argument, constraints) for argument in arguments]
        return {"kind": "union", "of": inner}
    if origin is typing.Literal:
        return {"kind": "literal", "values": list(arguments)}
    if origin is list:
        return {"kind": "list", "of": _type(arguments[0])}
    if origin is dict or annotation in (dict, typing.Dict):  # noqa: UP006
        return {"kind": "object"}
    if origin is tuple or annotation is tuple:
        return {"kind": "list", "of": {"kind": "anything"}}
    if annotation is list:
        return {"kind": "list", "of": {"kind": "anything"}}
    if annotation is type(None):
        return {"kind": "null"}
    if annotation in (object, typing.Any):
        return {"kind": "anything"}
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        whole = issubclass(annotation, int)
        return {"kind": "enum", "values": sorted({item.value for item in annotation}), "integer": whole}
    if annotation in (bool, str, int, float):
        return {"kind": annotation.__name__, **_bounds(constraints)}
    if annotation is Path:
        return {"kind": "str"}
    if _model_in(annotation):
        return {"kind": "section"}
    return {"kind": "nothing", "is": getattr(annotation, "__name__", str(annotation))}


def _bounds(constraints) -> dict:
    bounds = {}
    for constraint in constraints:
        for name in ("gt", "ge", "lt", "le"):
            if (limit := getattr(constraint, name, None)) is not None:
                bounds[name] = limit
    return bounds


def _pipeline_keys() -> dict:
    """Return the keys of the default that the pipeline section is merged into: it has no other reader."""
    from deepspeed.runtime.config import get_pipeline_config

    default = get_pipeline_config({})
    return {name: {"default": value} for name, value in sorted(default.items())}


def _plain(value: object) -> object:
    """`value` as JSON data; None where JSON has no word for it."""
    if value is _MISSING:
        return None
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (bool, int, float, str, type(None))):
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None


@contextmanager
def _silence() -> Iterator[None]:
    """DeepSpeed logs several lines per config class; deriving makes thousands."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)


if __name__ == "__main__":
    SHIPPED.write_text(json.dumps(derive(), indent=1, sort_keys=True) + "\n")
    print(f"wrote {SHIPPED.name}")
