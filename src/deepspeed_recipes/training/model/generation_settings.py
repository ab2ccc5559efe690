"""Checks and corrects a model's generation settings when it is loaded.

transformers only warns about invalid settings at that time, and refuses to save them after training, or to generate
with them.
"""

import copy
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ...recipe.bounds import Bounds
from ...recipe.errors import UserError, errors_only, first_line
from ...recipe.files import Json
from ...recipe.run_folder import read_json

FILE = "generation_config.json"
LIMITS = {
    "temperature": Bounds(above=0),
    "top_p": Bounds(least=0, most=1),
    "top_k": Bounds(least=0),
    "min_p": Bounds(least=0, most=1),
    "typical_p": Bounds(above=0, most=1),
    "epsilon_cutoff": Bounds(least=0, below=1),
    "eta_cutoff": Bounds(least=0, below=1),
    "repetition_penalty": Bounds(above=0),
    "no_repeat_ngram_size": Bounds(least=0),
    "num_beams": Bounds(least=1),
    "num_return_sequences": Bounds(least=1),
    "max_length": Bounds(least=1),
}
"""The values with which transformers generates, where it does not check them before; without sampling, most are
unread."""
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

    This follows transformers' own advice: sampling settings without `do_sample` set it, and settings that have no
    effect are unset. A temperature of 0 means no sampling, as for servers, where a `top_k` of -1 means all tokens.
    Tokens that the model does not have are left out.

    Raises:
        UserError: a value of the wrong type, or a combination that cannot be corrected.
    """
    config: GenerationConfig | None = getattr(model, "generation_config", None)
    if config is None:  # the model does not generate
        return None
    _check_types(config, path)
    changed = _known_tokens(model, config, path)
    changed |= {"do_sample": False} if config.do_sample and config.temperature == 0 else {}
    changed |= {"top_k": 0} if config.top_k == -1 else {}
    config.update(**changed)
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
    for name, bounds in LIMITS.items():
        if (value := getattr(config, name, None)) is not None and bounds.broken_by(value):
            raise UserError(f"{path}: {FILE}: {name}={value}: must be {bounds}; correct the file.")
    _check_generates(config, model.config.get_text_config().vocab_size, path)
    if not changed:
        return None
    made = ", ".join(f"{name} is unset" if value is None else f"{name}={value}" for name, value in changed.items())
    return f"{path}: its generation settings are invalid, and an export could not be saved or used; corrected: {made}"


def _check_generates(config: GenerationConfig, tokens: int, path: str) -> None:
    """Refuse settings with which transformers cannot generate, by generating a token with a small model.

    Args:
        config: the settings; what needs a tokenizer or another package is not tried.
        tokens: size of the vocabulary.
        path: the model's folder or Hub id, for the message.
    """
    tried = copy.deepcopy(config)
    beams = min(config.num_beams or 1, 2)
    tried.update(
        max_new_tokens=1, num_beams=beams, num_return_sequences=1, stop_strings=None, cache_implementation=None
    )
    layer = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), errors_only("transformers"):
        try:
            small = LlamaForCausalLM(LlamaConfig(vocab_size=tokens, **layer))
            small.generate(torch.tensor([[0]]), generation_config=tried, synced_gpus=False)  # also under ZeRO-3
        except ImportError:
            pass
        except Exception as error:  # of any kind, for what transformers does not check
            raise UserError(
                f"{path}: {FILE}: transformers cannot generate with these settings ({first_line(error).rstrip('.')}); "
                "correct the file."
            ) from error


def _known_tokens(model: PreTrainedModel, config: GenerationConfig, path: str) -> Json:
    """Return the token settings that name tokens which the model does not have, without those."""
    known: Json = {}
    size = model.config.get_text_config().vocab_size
    for name in TOKENS:
        value = getattr(config, name, None)
        many = value if isinstance(value, list) else [] if value is None else [value]
        kept = [one for one in many if 0 <= one < size]
        if many and not kept and name == "eos_token_id":
            raise UserError(f"{path}: {name}={value}: the model has {size} tokens; correct it in {FILE}.")
        if kept != many:
            known[name] = kept or None
    return known


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
    for name in (*LIMITS, *TOKENS):
        value = getattr(config, name, None)
        many = value if name in TOKENS and isinstance(value, list) else [value]
        kinds = int if name in TOKENS else int | float
        if value is not None and not all(isinstance(one, kinds) and not isinstance(one, bool) for one in many):
            raise UserError(f"{path}: {FILE}: {name}={value!r} is not a number; correct the file.")
