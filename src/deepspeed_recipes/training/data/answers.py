"""Questions with their expected answers, in the tokens of training, and a model's answers to those with images."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ...recipe.errors import UserError, first_line
from ...recipe.files import Json, JsonView
from ..model import processor
from ..model.control_tokens import control_tokens, conversation_tokens
from ..model.generate import greedy, seeded
from ..model.shown import shown
from .collate import IGNORED
from .image_conversations import widened
from .images import read_all


@dataclass(frozen=True)
class Question:
    """A conversation up to an answer, and the answer."""

    prompt: list[int]
    answer: list[int]
    """The tokens that training teaches, including the token that ends the answer; empty if nothing is in the loss."""
    images: Sequence[Json] = ()
    where: str = ""
    """The file and line of the example, for messages about its images."""


def generation_prompt(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the chat template adds after the last turn to start an answer."""
    greeting = [{"role": "user", "content": "Hello"}]
    asked, plain = (conversation_tokens(tokenizer, greeting, add_generation_prompt=added) for added in (True, False))
    differing = (at for at, pair in enumerate(zip(asked, plain, strict=False)) if pair[0] != pair[1])
    return asked[next(differing, min(len(asked), len(plain))) :]


def question(sequence: JsonView, opening: Sequence[int]) -> Question:
    """Return the last answer of a sequence that is in the loss, and everything before it as the prompt.

    The template's own generation prompt is not used: thinking templates render it differently from the training text
    (earlier turns without their empty think blocks), so it would not match the prompts in training. Templates that put
    `opening`, from `generation_prompt`, into the loss teach the model to write it, but at inference it is part of the
    prompt.
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
    seen: ProcessorMixin,
    max_pixels: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    max_new_tokens: int,
    synced_gpus: bool = False,
    end: Collection[int] = (),
) -> list[list[int]]:
    """Return the tokens of the model's greedy answer to each question; images after its prompt are ignored.

    With `synced_gpus`, ranks that have finished wait for the others. `end` are the tokens that end an answer, by
    default the model's own.
    """
    given = _inputs(seen, max_pixels, model, tokenizer, questions)
    return greedy(model, tokenizer, given, max_new_tokens, synced_gpus, end)


def _inputs(
    seen: ProcessorMixin,
    max_pixels: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
) -> dict[str, torch.Tensor]:
    """Return the model's inputs for questions, padded on the left."""
    pictures = []
    for one in questions:
        images = read_all(one.where, one.images, max_pixels)
        counts = [text.count(seen.image_token) for text in processor.text_of_pictures(seen, images)]
        # The images whose placeholders are in the prompt are the first ones.
        places = one.prompt.count(tokenizer.convert_tokens_to_ids(seen.image_token))
        pictures.append([image for at, image in enumerate(images, start=1) if sum(counts[:at]) <= places])
    prompts = [one.prompt for one in questions]
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    ids = inputs["input_ids"]
    tower = {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in processor.for_tower(seen, pictures).items()
    }
    given = {"input_ids": ids, "attention_mask": inputs["attention_mask"], **tower}
    return given | processor.token_types(seen, processor.accepted_by(model), ids)


def asked(
    seen: ProcessorMixin,
    tokenizer: PreTrainedTokenizerBase,
    turns: list[Json],
    pictures: Sequence[Json],
    max_pixels: int,
) -> Question:
    """Return a conversation that waits for an answer, in the tokens of training.

    The contents of `turns` are texts, or lists of parts, in which {"type": "image"} stands for the next of the
    pictures. `max_pixels` is the limit per image.
    """
    where = "--image"
    template = tokenizer.chat_template
    texts = processor.text_of_pictures(seen, read_all(where, pictures, max_pixels))
    known = control_tokens(tokenizer, template, [seen.image_token])
    try:
        found = shown(tokenizer, template, turns, None, {}, True).turns
        marked, _ = known.mark(found, None)
        chat = tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError) as error:
        raise UserError(f"the model's chat template refuses this conversation: {first_line(error)}.") from error
    chat, _ = widened(where, chat, [], seen.image_token, texts, known)
    return Question(known.encode(tokenizer, chat)[0], [], pictures, where)


def answered(
    seen: ProcessorMixin,
    max_pixels: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    question: Question,
    max_new_tokens: int,
    how: JsonView,
) -> str:
    """Return the model's answer to a question from `asked`.

    `how` are arguments of transformers' `generate` that choose tokens, and a `seed`.
    """
    given = {
        name: one.to(model.device) for name, one in _inputs(seen, max_pixels, model, tokenizer, [question]).items()
    }
    output = model.generate(
        **given, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id, **seeded(dict(how))
    )
    return tokenizer.decode(output[0, len(question.prompt) :], skip_special_tokens=True)
