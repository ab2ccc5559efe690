"""The names that a config may use, collected from DeepSpeed and torch: optimizers, schedules, presets, keywords."""

import importlib
import inspect


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


def optimizers() -> list[str]:
    """Return the optimizers that DeepSpeed knows by name."""
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    return sorted(DEEPSPEED_OPTIMIZERS)


def schedulers() -> dict[str, list[str]]:
    """Return DeepSpeed's schedules with their parameters."""
    from deepspeed.runtime import lr_schedules

    result = {}
    for name in lr_schedules.VALID_LR_SCHEDULES:
        parameters = list(inspect.signature(getattr(lr_schedules, name)).parameters)
        result[name] = [parameter for parameter in parameters if parameter != "optimizer"]
    return result


def torch_names(module: str, base: str) -> list[str]:
    """Return the classes that DeepSpeed looks up in torch by the name in the config."""
    found = importlib.import_module(f"torch.{module}")
    parent = getattr(found, base)
    return sorted(
        name
        for name, item in vars(found).items()
        if inspect.isclass(item) and issubclass(item, parent) and item is not parent and not name.startswith("_")
    )


def expert_presets() -> list[str]:
    """Return the models whose experts AutoEP supports."""
    from deepspeed.module_inject.auto_ep_presets.registry import available_preset_names

    return sorted(available_preset_names())


def tensor_presets() -> list[str]:
    """Return the models that AutoTP has a preset for."""
    from deepspeed.module_inject.autotp_config import AutoTPPresets

    names = (name for name in vars(AutoTPPresets) if not name.startswith("_") and name != "get_preset")
    return sorted(name for name in names if AutoTPPresets.get_preset(name) is not None)
