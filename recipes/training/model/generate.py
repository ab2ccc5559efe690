"""A model's answers to conversations: greedily to many at once, or one as it is written."""

from collections.abc import Iterator, Mapping, Sequence
from threading import Thread
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextIteratorStreamer

from ...spec.errors import UserError
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
    inputs = tokenizer.pad({"input_ids": tokens}, padding_side="left", return_tensors="pt")
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    return greedy(model, tokenizer, given, max_new_tokens, synced_gpus)


def greedy(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Mapping[str, torch.Tensor],
    max_new_tokens: int,
    synced_gpus: bool = False,
) -> list[str]:
    """Return what the model writes after each prompt of `inputs`, which are padded on the left."""
    output = model.generate(
        **{name: value.to(model.device) for name, value in inputs.items()},
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
        synced_gpus=synced_gpus,
        pad_token_id=tokenizer.pad_token_id,
    )
    new = output[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]


def stream(
    model: Any, tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], max_new_tokens: int, **how: Any
) -> Iterator[str]:
    """Yield the model's answer to a conversation in the pieces in which it is written.

    Args:
        model: of transformers or PEFT.
        tokenizer: the model's, with a chat template.
        turns: the conversation; a user's turn is its last.
        max_new_tokens: of the answer.
        how: tokens are chosen: arguments of transformers' `generate`, and a `seed`.

    Raises:
        UserError: the conversation does not fit into the model's context, or its chat template refuses it.
    """
    try:
        tokens = conversation_tokens(tokenizer, turns, add_generation_prompt=True)
    except TemplateError as error:
        raise UserError(f"the model's chat template refuses this conversation: {error}.") from None
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


def seeded(how: dict[str, Any]) -> dict[str, Any]:
    """Seed torch, where a `seed` is given, and return the other arguments."""
    if (seed := how.get("seed")) is not None:
        torch.manual_seed(seed)
    return {key: value for key, value in how.items() if key != "seed"}
