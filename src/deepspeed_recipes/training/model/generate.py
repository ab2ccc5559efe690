"""Generates a model's answers to conversations: greedily for many at once, or one as a stream."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from threading import Thread

import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, TextIteratorStreamer

from ...recipe.errors import UserError
from ...recipe.files import Json
from .control_tokens import conversation_tokens


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[dict[str, str]]],
    max_new_tokens: int,
    synced_gpus: bool = False,
) -> list[str]:
    """Return the model's greedy answer to each conversation, without surrounding white space."""
    tokens = [conversation_tokens(tokenizer, turns, add_generation_prompt=True) for turns in prompts]
    answers = continued(model, tokenizer, tokens, max_new_tokens, synced_gpus)
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
    named = model.generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])} - {None})


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
    """Yield the model's answer to a conversation in pieces, as it is written.

    Args:
        model: of transformers or PEFT.
        tokenizer: the model's, with a chat template.
        turns: the conversation; its last turn is a user's.
        max_new_tokens: limit of the answer.
        how: arguments of transformers' `generate` that choose tokens, and a `seed`.

    Raises:
        UserError: the conversation does not fit into the model's context, or its chat template refuses it.
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
