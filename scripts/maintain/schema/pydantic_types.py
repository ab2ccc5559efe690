"""The sections that DeepSpeed reads with pydantic: their keys, types and defaults as JSON data."""

import contextlib
import enum
import inspect
import types
import typing
from pathlib import Path

from .recorder import plain


def section_model(path: tuple[str, ...]):
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


def section_node(model) -> dict:
    """Return a pydantic model as a node of the schema, with the sections inside it."""
    from pydantic import ValidationError

    keys = {}
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra or {}
        kind = type_of(field.annotation, field.metadata)
        if kind["kind"] == "list":
            with contextlib.suppress(ValidationError):  # only trying shows whether a single string is taken too
                model(**{name: "x"})
                kind = {"kind": "union", "of": [kind, {"kind": "str"}]}
        key = {"type": kind, "default": plain(field.get_default(call_default_factory=True))}
        if extra.get("deprecated"):
            key["deprecated"] = extra.get("new_param", "")
            key["excludes"] = extra.get("set_new_param", True)
        if inner := _model_in(field.annotation):
            key["section"] = section_node(inner)
        keys[field.alias or name] = key
        if field.alias and model.model_config.get("populate_by_name"):
            keys[name] = {**key, "alias_of": field.alias}
    return {"unknown": "rejected" if model.model_config.get("extra") == "forbid" else "ignored", "keys": keys}


def _model_in(annotation):
    """Return the pydantic model in `Model` or `Model | None`."""
    from pydantic import BaseModel

    for kind in (annotation, *typing.get_args(annotation)):
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            return kind
    return None


def type_of(annotation, constraints=()) -> dict:
    """Return a type as JSON data, in the kinds that `config/schema.py` checks."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [type_of(argument, constraints) for argument in arguments]
        return {"kind": "union", "of": inner}
    if origin is typing.Literal:
        return {"kind": "literal", "values": list(arguments)}
    if origin is list:
        return {"kind": "list", "of": type_of(arguments[0])}
    if origin is dict or annotation in (dict, typing.Dict):  # noqa: UP006
        return {"kind": "object"}
    if origin is tuple or annotation in (tuple, list):
        return {"kind": "list", "of": {"kind": "anything"}}
    if annotation is type(None):
        return {"kind": "null"}
    if annotation in (object, typing.Any):
        return {"kind": "anything"}
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        whole = issubclass(annotation, int)
        return {"kind": "enum", "values": sorted({item.value for item in annotation}), "integer": whole}
    if annotation in (bool, str, int, float):
        named = ((name, getattr(one, name, None)) for one in constraints for name in ("gt", "ge", "lt", "le"))
        return {"kind": annotation.__name__, **{name: limit for name, limit in named if limit is not None}}
    if annotation is Path:
        return {"kind": "str"}
    if _model_in(annotation):
        return {"kind": "section"}
    return {"kind": "nothing", "is": getattr(annotation, "__name__", str(annotation))}
