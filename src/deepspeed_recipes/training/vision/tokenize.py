"""Converts conversations with images to tokens with labels: rendered, then widened by the images' placeholders."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ...recipe.errors import UserError
from ...recipe.recipe import Recipe
from ..data import chat_templates, thinking
from ..model.control_tokens import ControlTokens, control_tokens
from ..model.shown import shown
from . import files, processor

IGNORED = -100
"""Label of a token that is excluded from the loss (PyTorch's `ignore_index`)."""
Spans = list[tuple[int, int]]
"""The assistant's spans in a rendered conversation: first character, and the one after the last."""


def conversation(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that computes an example's `input_ids` and `labels`; no image is ever in the loss.

    Raises:
        UserError: the template cannot mark the assistant's tokens, or the model has no processor.
    """
    seen = processor.adopt(processor.of_recipe(recipe), tokenizer)
    template, render = chat_templates.renderer(recipe, tokenizer, [seen.image_token])
    known = control_tokens(tokenizer, template, [seen.image_token])
    silent = {one for one in (*seen.image_token_ids, getattr(seen, "image_token_id", None)) if one is not None}

    def tokenize(example: dict[str, Any]) -> dict[str, Any]:
        turns, tools, given, where = (example[name] for name in ("messages", "tools", "given", "where"))
        options = example.get("options") or {}
        if recipe.data.thinking == "strip":
            turns = thinking.stripped(turns)
        pictures = read_all(where, example["images"], recipe.data.max_pixels)
        texts = processor.text_of_pictures(seen, pictures)
        try:
            with chat_templates.bounded(f"model.path={recipe.model.path}"):
                found = shown(tokenizer, template, turns, tools, options)
                chat, spans = render(found.turns, tools, options)
                before = 0
                if given:
                    asked, described = known.mark(found.turns[:given], tools)
                    how = {"chat_template": template, "tokenize": False, **options}
                    before = len(tokenizer.apply_chat_template(asked, described, **how))
        except (TemplateError, TypeError, ValueError, UserError) as error:
            raise UserError(
                f"{where}: the model's chat template cannot be trained on this conversation: {error}."
            ) from error
        learned = [span for span in spans if span[0] >= before]
        chat, learned = widened(where, chat, learned, seen.image_token, texts, known)
        ids, places = known.encode(tokenizer, chat)
        said = [any(first < end and start < last for first, last in learned) for start, end in places]
        if recipe.data.thinking == "read":
            said = thinking.unlearned(tokenizer, turns, ids, said)
        labels = [one if told and one not in silent else IGNORED for one, told in zip(ids, said, strict=True)]
        return {"input_ids": ids, "labels": [IGNORED, *labels[1:]], "forgets": found.forgets}

    return tokenize


def read_all(where: str, pictures: Sequence[dict[str, Any]], max_pixels: int) -> list[Any]:
    """Return an example's images as Pillow's images.

    Raises:
        UserError: an image cannot be read; the message has the example's place.
    """
    return [files.read(f"{where}: image {n}", one, max_pixels) for n, one in enumerate(pictures, start=1)]


def widened(
    where: str, chat: str, spans: Spans, token: str, texts: Sequence[str], known: ControlTokens
) -> tuple[str, Spans]:
    """Return a rendered conversation with each image's token replaced by its placeholder, and the spans in it.

    Such a token that was typed in a text is marked as text, and stays.

    Raises:
        UserError: the template has not written one token for each image.
    """
    typed = [found.span() for found in known.markers.finditer(chat)]
    places = [
        found.span()
        for found in re.finditer(re.escape(token), chat)
        if not any(start <= found.start() < end for start, end in typed)
    ]
    if len(places) != len(texts):
        raise UserError(
            f"{where}: the chat template writes {len(places)} places for {len(texts)} images; it may drop the images "
            "of this role, or be a text model's template: name another with model.chat_template."
        )
    pieces, shifts, end, gained = [], [], 0, 0
    for (start, stop), text in zip(places, texts, strict=True):
        pieces += [chat[end:start], text]
        gained += len(text) - (stop - start)
        shifts.append((stop, gained))
        end = stop

    def moved(place: int) -> int:
        return place + next((more for stop, more in reversed(shifts) if stop <= place), 0)

    return "".join([*pieces, chat[end:]]), [(moved(first), moved(last)) for first, last in spans]
