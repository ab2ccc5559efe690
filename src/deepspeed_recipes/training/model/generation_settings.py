"""Checks and corrects a model's generation settings when it is loaded.

transformers only warns about invalid settings at that time, and refuses to save them after training.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel

from ...recipe.errors import UserError, errors_only, first_line
from ...recipe.files import Json
from ...recipe.run_folder import read_json

FILE = "generation_config.json"
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "num_beams", "max_length")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check(path: str) -> None:
    """Refuse a generation_config.json that transformers cannot read; `correct` handles settings that cause warnings.

    Args:
        path: a model's folder; a Hub id is not checked.

    Raises:
        UserError: the message has the file and the reason.
    """
    if not (Path(path) / FILE).exists():
        return
    read_json(Path(path) / FILE)  # transformers ignores a file that is not JSON
    try:
        with errors_only("transformers"):
            GenerationConfig.from_pretrained(path)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{Path(path) / FILE}: {first_line(error)} Correct the file.") from error


def correct(model: PreTrainedModel, path: str) -> str | None:
    """Make a model's generation settings valid; return the changes as a line to print, or None if there are none.

    This follows transformers' own advice: sampling settings without `do_sample` set it, unless the temperature is 0,
    and settings that have no effect are unset.

    Args:
        model: as loaded by transformers.
        path: its folder or Hub id, for messages.

    Raises:
        UserError: a value of the wrong type, or a combination that cannot be corrected.
    """
    config: GenerationConfig | None = getattr(model, "generation_config", None)
    if config is None:  # the model does not generate
        return None
    _check_types(config, path)
    changed: Json = {}
    if (issues := _issues(config, path)) and any("`do_sample`" in issue for issue in issues.values()):
        greedy = config.temperature == 0
        changed |= (
            {name: None for name, issue in issues.items() if "`do_sample`" in issue} if greedy else {"do_sample": True}
        )
        config.update(**changed)
        issues = _issues(config, path)
    if issues:
        changed |= dict.fromkeys(issues)
        config.update(**dict.fromkeys(issues))
        if issues := _issues(config, path):
            raise UserError(f"{path}: {FILE}: {' '.join(issues.values())}")
    if not changed:
        return None
    made = ", ".join(f"{name} is unset" if value is None else f"{name}={value}" for name, value in changed.items())
    return f"{path}: its generation settings are invalid, so that no export could be saved; corrected: {made}"


def _issues(config: GenerationConfig, path: str) -> Mapping[str, str]:
    """Return transformers' complaints by setting; transformers reports them only as text."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        found = dict(re.findall(r"^- `(\w+)`: (.*)$", str(error), re.MULTILINE))
        if not found:
            raise UserError(f"{path}: {FILE}: {first_line(error)} Correct the file.") from error
        return found
    return {}


def _check_types(config: GenerationConfig, path: str) -> None:
    for name in (*NUMBERS, *TOKENS):
        value = getattr(config, name, None)
        many = value if name in TOKENS and isinstance(value, list) else [value]
        kinds = int if name in TOKENS else int | float
        if value is not None and not all(isinstance(one, kinds) and not isinstance(one, bool) for one in many):
            raise UserError(f"{path}: {FILE}: {name}={value!r} is not a number; correct the file.")
