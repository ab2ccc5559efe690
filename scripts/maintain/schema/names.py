"""The names that a config may use, collected from DeepSpeed and torch: optimizers, schedules, presets, keywords.

Optimizers and schedules come with their parameters: the names from the signatures, the types and ranges from building
the class with one sample after the other and stepping it. DeepSpeed's optimizers are compiled when they are built, so
they take the types and ranges of the torch optimizer that they reimplement.
"""

import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

MUON_HALVES = ("lr", "momentum", "weight_decay", "ns_method", "betas", "eps")
"""Settings that DeepSpeed's engine reads separately for weights updated by Muon and by Adam (`engine.py`)."""


def texts() -> tuple[str, ...]:
    """Return the strings in DeepSpeed's constants: candidates for keys that accept only certain words."""
    from deepspeed.runtime import config, constants
    from deepspeed.runtime.model_checkpointing import constants as checkpointing

    words = {value for kind in config.DtypeEnum for value in kind._all_values if isinstance(value, str)}
    words |= {word for kind in config.DtypeEnum for word in (kind.name,)}
    for module in (constants, checkpointing):
        for value in vars(module).values():
            values = vars(value).values() if inspect.isclass(value) else [value]
            words |= {item for item in values if isinstance(item, str) and item.isidentifier()}
    return tuple(sorted(words - {"auto"}))


def optimizer_parameters() -> dict[str, dict[str, dict]]:
    """Return the parameters of DeepSpeed's optimizers, for each class that a name may stand for.

    `gpu` is the class without optimizer offload, `cpu` the class with it, `torch` the class that `torch_adam` selects.
    """
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    adam, adagrad = parameters_of(torch.optim.AdamW), parameters_of(torch.optim.Adagrad)
    # Keys that the engine removes before it builds the class, and arguments that the engine itself passes to the class.
    taken = {name: _entry({"kind": "truth"}) for name in ("adam_w_mode", "torch_adam", "fp32_optimizer_states")}
    passed = ("adamw_mode",)

    def like(twin: dict, kind: type, *without: str) -> dict[str, dict]:
        """Return the parameters of a class that cannot be built here, with the types of the twin's."""
        _, *parameters = inspect.signature(kind).parameters.values()
        kept = [item for item in parameters if item.name not in without]
        result = {item.name: twin.get(item.name, _entry(_type_of_default(item.default))) for item in kept}
        if "does not support the AMSGrad variant" in inspect.getsource(kind):
            result["amsgrad"] = _entry({"kind": "literal", "values": [False]})
        return result

    momentum = parameters_of(torch.optim.SGD)["momentum"]
    muon = {name: adam.get(name, momentum if name == "momentum" else _entry({"kind": "str"})) for name in MUON_HALVES}
    return {
        "adam": {
            "gpu": {**like(adam, FusedAdam), **taken},
            "cpu": {**like(adam, DeepSpeedCPUAdam, *passed), **taken},
            "torch": {**adam, **taken},
        },
        "adagrad": {"gpu": adagrad, "cpu": like(adagrad, DeepSpeedCPUAdagrad)},
        "lamb": {"gpu": like(adam, FusedLamb)},
        "lion": {"gpu": like(adam, FusedLion), "cpu": like(adam, DeepSpeedCPULion)},
        "muon": {"gpu": {**muon, **taken, "muon_lr": adam["lr"], "adam_lr": adam["lr"]}},
    }


def schedulers() -> dict[str, dict]:
    """Return DeepSpeed's schedules with their parameters."""
    from deepspeed.runtime import lr_schedules

    rates = sorted(
        value for name, value in vars(lr_schedules).items() if name in ("WARMUP_LOG_RATE", "WARMUP_LINEAR_RATE")
    )
    result = {name: parameters_of(getattr(lr_schedules, name)) for name in lr_schedules.VALID_LR_SCHEDULES}
    for parameters in result.values():
        if "warmup_type" in parameters:  # any other word is replaced with a warning
            parameters["warmup_type"] = _entry({"kind": "literal", "values": rates})
    return result


def torch_classes(module: str, base: str) -> dict[str, dict]:
    """Return the classes that DeepSpeed looks up in torch by the name in the config, with their parameters."""
    found = importlib.import_module(f"torch.{module}")
    parent = getattr(found, base)
    return {
        name: parameters_of(item)
        for name, item in sorted(vars(found).items())
        if inspect.isclass(item) and issubclass(item, parent) and item is not parent and not name.startswith("_")
    }


def parameters_of(kind: type) -> dict[str, dict]:
    """Return each parameter of an optimizer or a schedule as `{"type": ..., "required": ...}`.

    A type is None if no sample determines it.
    """
    _, *parameters = inspect.signature(kind).parameters.values()
    required = {item.name: 2 for item in parameters if item.default is item.empty and item.kind is not item.VAR_KEYWORD}

    def runs(name: str) -> Callable[[Any], bool]:
        return lambda value: _runs(kind, {**required, name: value})

    return {item.name: _entry(_tried(runs(item.name), item.default), item.name in required) for item in parameters}


def _entry(kind: dict | None, required: bool = False) -> dict:
    return {"type": kind, "required": required}


def _type_of_default(default: object) -> dict | None:
    if isinstance(default, bool):
        return {"kind": "truth"}
    return {"kind": "number"} if isinstance(default, (int, float)) else None


def _tried(runs: Callable[[Any], bool], default: Any) -> dict | None:
    """Return the type of one parameter, found by trying a value of each kind."""
    if isinstance(default, bool):
        return {"kind": "truth"}
    if isinstance(default, tuple) and all(isinstance(item, float) for item in default):
        items = _tried(lambda value: runs([value] * len(default)), default[0])
        return items and {"kind": "list", "of": items, "length": len(default)}
    numeric = runs(0.5) or runs(2.5) or runs(2)
    listed, null, text = runs([0.1]), runs(None), runs("x")
    if numeric == (listed and null and text):  # nothing is refused, or everything
        return _type_of_default(default)
    kinds = [_numbers(runs)] if numeric else []
    kinds += [{"kind": "list", "of": {"kind": "number"}}] if listed else []
    kinds += [{"kind": "null"}] if null else []
    kinds += [{"kind": "str"}] if text else []
    return kinds[0] if len(kinds) == 1 else {"kind": "union", "of": kinds}


def _numbers(runs: Callable[[Any], bool]) -> dict:
    """Return which numbers run; `float` is a number that may also be in quotes."""
    whole = not (runs(0.5) or runs(2.5))
    minus, zero, one = (-1, 0, 1) if whole else (-1.0, 0.0, 1.0)  # torch distinguishes 0 from 0.0 in betas
    kind: dict = {"kind": "float" if runs("2") else "whole" if whole else "number"}
    if not runs(minus):
        kind.update({"ge": 0} if runs(zero) else {"gt": 0})
    if not runs(one) and runs(0.5):
        kind["lt"] = 1
    return kind


def _runs(kind: type, parameters: dict[str, Any]) -> bool:
    """Return whether an optimizer or a schedule can be built with `parameters` and takes three steps."""
    import torch

    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = kind([weight] if issubclass(kind, torch.optim.Optimizer) else optimizer, **parameters)
            for _ in range(3):
                built.step()
    except Exception:  # any exception means that it does not run
        return False
    return True


def expert_presets() -> list[str]:
    """Return the models whose experts AutoEP supports."""
    try:
        from deepspeed.module_inject.auto_ep_presets.registry import available_preset_names
    except ImportError:  # DeepSpeed before 0.19.2
        return []
    return sorted(available_preset_names())


def tensor_presets() -> list[str]:
    """Return the models that AutoTP has a preset for."""
    from deepspeed.module_inject.autotp_config import AutoTPPresets

    names = (name for name in vars(AutoTPPresets) if not name.startswith("_") and name != "get_preset")
    return sorted(name for name in names if AutoTPPresets.get_preset(name) is not None)
