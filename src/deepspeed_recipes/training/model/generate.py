"""Generates a model's answers to conversations, greedily or as a stream, and corrects its generation settings.

transformers only warns about invalid settings when a model is loaded, and refuses to save them after training, or to
generate with them.
"""

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextIteratorStreamer,
)

from ...recipe.bounds import Bounds
from ...recipe.errors import UserError, errors_only, first_line
from ...recipe.files import Json
from ...recipe.run_folder import read_json
from .control_tokens import conversation_tokens


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[dict[str, str]]],
    max_new_tokens: int,
) -> list[str]:
    """Return the model's greedy answer to each conversation, without surrounding white space."""
    tokens = [conversation_tokens(tokenizer, turns, add_generation_prompt=True) for turns in prompts]
    answers = continued(model, tokenizer, tokens, max_new_tokens)
    return [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]


def continued(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    synced_gpus: bool = False,
    end: Collection[int] = (),
    noise: LogitsProcessor | None = None,
) -> list[list[int]]:
    """Return the tokens that the model writes after each prompt; see `greedy`."""
    inputs = tokenizer.pad({"input_ids": list(prompts)}, padding_side="left", return_tensors="pt")
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    return greedy(model, tokenizer, given, max_new_tokens, synced_gpus, end, noise)


def ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an answer: the tokenizer's, and those in the model's generation settings."""
    return sorted({tokenizer.eos_token_id, *_listed(model.generation_config.eos_token_id)} - {None})


def ends_in(folder: Path) -> list[int]:
    """Return the tokens at which the generation settings in a model's or an adapter's folder stop."""
    return _listed(read_json(folder / FILE, {}).get("eos_token_id"))


def _listed(named: int | list[int] | None) -> list[int]:
    return named if isinstance(named, list) else [] if named is None else [named]


def stop_at(model: torch.nn.Module, *tokens: int) -> None:
    """Add tokens to those at which the model, and its export, stops; `model` may have a pipeline's stages."""
    for part in model.modules():
        settings = getattr(part, "generation_config", None)
        if settings is not None:
            known = _listed(settings.eos_token_id)
            if new := [token for token in tokens if token not in known]:
                settings.update(eos_token_id=[*known, *new])


def until(tokens: list[int], end: Collection[int]) -> list[int]:
    """Return the tokens up to the first that ends an answer, which is included; all of them if none does."""
    last = next((at for at, token in enumerate(tokens) if token in end), len(tokens) - 1)
    return tokens[: last + 1]


def greedy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Mapping[str, torch.Tensor],
    max_new_tokens: int,
    synced_gpus: bool = False,
    end: Collection[int] = (),
    noise: LogitsProcessor | None = None,
) -> list[list[int]]:
    """Return the tokens that the model writes after each prompt of `inputs`, which are padded on the left.

    An answer includes the token that ends it, if any: one of `end`, or of `ends` if `end` is empty. Each token is the
    likeliest; `noise` changes the logits before, for example so that it is a sample.
    """
    stop = sorted({*end} or ends(model, tokenizer))
    output = model.generate(
        **{name: value.to(model.device) for name, value in inputs.items()},
        max_new_tokens=max_new_tokens,
        do_sample=False,
        logits_processor=[noise] if noise else [],
        use_cache=True,
        synced_gpus=synced_gpus,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=stop or None,
    )
    return [until(answer, stop) for answer in output[:, inputs["input_ids"].shape[1] :].tolist()]


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    turns: list[dict[str, str]],
    max_new_tokens: int,
    **how: object,
) -> Iterator[str]:
    """Yield the model's answer to a conversation, whose last turn is a user's, in pieces as it is written.

    `how` are arguments of transformers' `generate` that choose tokens, and a `seed`. A conversation that does not fit
    into the model's context, or that its chat template refuses, is refused.
    """
    tokens = conversation_tokens(tokenizer, turns, add_generation_prompt=True)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context and len(tokens) >= context:
        raise UserError(f"the conversation has {len(tokens)} tokens, and the model's context is {context}.")
    inputs = torch.tensor([tokens], device=model.device)
    pieces = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    failures: list[BaseException] = []

    def write() -> None:
        try:
            model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                streamer=pieces,
                **seeded(how),
            )
        except BaseException as error:
            failures.append(error)
            pieces.end()

    writer = Thread(target=write, daemon=True)
    writer.start()
    yield from pieces
    writer.join()
    if failures:
        raise failures[0]


def seeded(how: Json) -> Json:
    """Seed torch, where a `seed` is given, and return the other arguments."""
    if (seed := how.get("seed")) is not None:
        torch.manual_seed(seed)
    return {key: value for key, value in how.items() if key != "seed"}


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


def check_settings(path: str) -> None:
    """Refuse a folder's generation_config.json that transformers cannot read; a Hub id is not checked.

    `correct_settings` handles what causes warnings.
    """
    if not (Path(path) / FILE).exists():
        return
    read_json(Path(path) / FILE)  # transformers ignores a file that is not JSON
    try:
        with errors_only("transformers"):
            GenerationConfig.from_pretrained(path)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{Path(path) / FILE}: {first_line(error)} Correct the file.") from error


def correct_settings(model: PreTrainedModel, path: str) -> str | None:
    """Make a model's generation settings valid; return the changes as a line to print, or None if there are none.

    This follows transformers' own advice: sampling settings without `do_sample` set it, and settings that have no
    effect are unset. A temperature of 0 means no sampling, as for servers, where a `top_k` of -1 means all tokens.
    Tokens that the model does not have are left out. What cannot be corrected is refused.
    """
    config: GenerationConfig | None = getattr(model, "generation_config", None)
    if config is None:  # the model does not generate
        return None
    for name in (*LIMITS, *TOKENS):
        given = getattr(config, name, None)
        many = given if name in TOKENS and isinstance(given, list) else [given]
        kinds = int if name in TOKENS else int | float
        if given is not None and not all(isinstance(one, kinds) and not isinstance(one, bool) for one in many):
            raise UserError(f"{path}: {FILE}: {name}={given!r} is not a number; correct the file.")
    stops = config.stop_strings or []
    if not (isinstance(stops, str | list) and all(isinstance(one, str) and one for one in stops)):
        raise UserError(f"{path}: {FILE}: stop_strings={stops!r}: must be text or a list of texts; correct the file.")
    changed: Json = {}
    size = model.config.get_text_config().vocab_size
    for name in TOKENS:
        many = _listed(value := getattr(config, name, None))
        known = [one for one in many if 0 <= one < size]
        if many and not known and name == "eos_token_id":
            raise UserError(
                f"{path}: {name}={value}: the model has {size} tokens, so no answer would end; correct it in {FILE}."
            )
        if known != many:
            changed[name] = known or None
    changed |= {"do_sample": False} if config.do_sample and config.temperature == 0 else {}
    changed |= {"top_k": 0} if config.top_k == -1 else {}
    config.update(**changed)
    issues = _issues(config, path)
    if unread := [name for name, issue in issues.items() if "`do_sample`" in issue]:
        changed |= dict.fromkeys(unread) if config.temperature == 0 else {"do_sample": True}
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
    _check_generates(config, size, path)
    if not changed:
        return None
    made = ", ".join(f"{name} is unset" if value is None else f"{name}={value}" for name, value in changed.items())
    return f"{path}: its generation settings are invalid, and an export could not be saved or used; corrected: {made}"


def _check_generates(config: GenerationConfig, tokens: int, path: str) -> None:
    """Refuse settings with which transformers cannot generate, by generating a token with a small model.

    What needs a tokenizer or another package is not tried. `tokens` is the size of the vocabulary, and `path` the
    model's, for the message.
    """
    tried = copy.deepcopy(config)
    tried.update(max_new_tokens=1, num_beams=min(config.num_beams or 1, 2), num_return_sequences=1)
    tried.update(stop_strings=None, cache_implementation=None)
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
