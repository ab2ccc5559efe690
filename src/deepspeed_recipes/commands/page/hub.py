"""`ds-recipes page compare`: compares the dimensions on the pages with the models' configurations on the Hub."""

from collections.abc import Sequence

from huggingface_hub import get_safetensors_metadata
from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError
from transformers import AutoConfig, PreTrainedConfig

from ...recipe import pages
from ...recipe.errors import UserError, first_line
from ...recipe.files import JsonView
from ...recipe.recipe import Model


def compare_all(names: Sequence[str]) -> bool:
    """Print a verdict on each of the pages `FAMILY[-SIZE]`, and return True if a page differs from the Hub.

    Raises:
        UserError: there is no such page, or a model cannot be reached.
    """
    differing = False
    for name, model in _models(names):
        found = compare(model)
        differing |= bool(found)
        print(f"{name}: {'differs from the Hub' if found else 'matches the Hub'}", *found, sep="\n  ", flush=True)
    return differing


def _models(names: Sequence[str]) -> list[tuple[str, Model]]:
    found = []
    for name in names:
        family, _, size = name.partition("-")
        sizes = {size: pages.find(name, "full").model} if size else pages.known_page(family).SIZES
        found += [(f"{family}-{key}", model) for key, model in sizes.items()]
    return found


def compare(model: Model) -> list[str]:
    """Return the differences between a page's model and the model on the Hub (or in a folder).

    Raises:
        UserError: the model cannot be reached.
    """
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(
            f"{model.path}: cannot be read: {first_line(error)} (no network, or a licence to accept?)"
        ) from error
    found = differences(model.config, config)
    count = parameters(model.path)
    if count is not None and abs(count / model.parameters - 1) > 0.01:
        found.append(f"parameters: the page has {model.parameters:,}, the Hub {count:,}")
    return found


def differences(stated: JsonView, config: PreTrainedConfig) -> list[str]:
    """Return the dimensions on a page that differ from a configuration."""
    ours = AutoConfig.for_model(**stated)
    names = [name for name in stated if getattr(ours, name, None) != getattr(config, name, None)]
    return [f"{name}: the page has {getattr(ours, name)}, the Hub {getattr(config, name, None)}" for name in names]


def parameters(path: str) -> int | None:
    """Return the Hub's parameter count of the safetensors files, or None if it is unavailable."""
    try:
        return int(sum(get_safetensors_metadata(path).parameter_count.values()))
    except (HfHubHTTPError, NotASafetensorsRepoError, OSError, ValueError):
        return None
