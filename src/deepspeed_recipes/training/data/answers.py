"""Questions with their expected answers, in the tokens of training, and a model's answers to those with images."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..model import processor
from ..model.control_tokens import conversation_tokens
from ..model.generate import greedy
from .collate import IGNORED
from .images import read_all


@dataclass(frozen=True)
class Question:
    """A conversation up to an answer, and the answer."""

    prompt: list[int]
    answer: list[int]
    """The tokens that training teaches, including the token that ends the answer; empty if nothing is in the loss."""
    images: Sequence[dict[str, Any]] = ()
    where: str = ""
    """The file and line of the example, for messages about its images."""


def generation_prompt(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the chat template adds after the last turn to start an answer."""
    greeting = [{"role": "user", "content": "Hello"}]
    asked, plain = (conversation_tokens(tokenizer, greeting, add_generation_prompt=added) for added in (True, False))
    differing = (at for at, pair in enumerate(zip(asked, plain, strict=False)) if pair[0] != pair[1])
    return asked[next(differing, min(len(asked), len(plain))) :]


def question(sequence: Mapping[str, Any], opening: Sequence[int]) -> Question:
    """Return the last answer of a sequence that is in the loss, and everything before it as the prompt.

    The template's own generation prompt is not used: thinking templates render it differently from the training text
    (earlier turns without their empty think blocks), so it would not match the prompts in training.

    Args:
        sequence: one document with `input_ids` and `labels`.
        opening: `generation_prompt`. Templates that put it into the loss teach the model to write it, but at inference
            it is part of the prompt.
    """
    tokens, labels = list(sequence["input_ids"]), sequence["labels"]
    end = next((at for at in range(len(labels), 0, -1) if labels[at - 1] != IGNORED), 0)
    start = next((at for at in range(end, 0, -1) if labels[at - 1] == IGNORED), 0)
    for before in range(len(opening) - 1, -1, -1):
        first = start - before
        if first >= 0 and tokens[first : first + len(opening)] == list(opening):
            start = first + len(opening)
            break
    return Question(tokens[:start], tokens[start:end], sequence.get("images") or (), sequence.get("where") or "")


AT_ONCE = 16
"""Questions whose images are in memory together."""


def generate(
    seen: Any,
    max_pixels: int,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    max_new_tokens: int,
    synced_gpus: bool = False,
    end: Collection[int] = (),
) -> list[list[int]]:
    """Return the tokens of the model's greedy answer to each question.

    Args:
        seen: the model's processor.
        max_pixels: limit per image.
        model: of transformers or PEFT.
        tokenizer: the model's.
        questions: with all images of their conversations; images after the prompt are ignored.
        max_new_tokens: limit per answer.
        synced_gpus: whether ranks that have finished wait for the others.
        end: tokens that end an answer; by default the model's own.
    """
    pictures = [_shown(seen, one.prompt, read_all(one.where, one.images, max_pixels), tokenizer) for one in questions]
    prompts = [one.prompt for one in questions]
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    ids = inputs["input_ids"]
    tower = {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in processor.for_tower(seen, pictures).items()
    }
    given = {"input_ids": ids, "attention_mask": inputs["attention_mask"], **tower}
    given |= processor.token_types(seen, processor.accepted_by(model), ids)
    return greedy(model, tokenizer, given, max_new_tokens, synced_gpus, end)


def _shown(seen: Any, prompt: Sequence[int], pictures: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Return the images whose placeholders are in a prompt, which are the first images."""
    places = list(prompt).count(tokenizer.convert_tokens_to_ids(seen.image_token))
    counts = [text.count(seen.image_token) for text in processor.text_of_pictures(seen, pictures)]
    return [one for at, one in enumerate(pictures) if sum(counts[: at + 1]) <= places]
