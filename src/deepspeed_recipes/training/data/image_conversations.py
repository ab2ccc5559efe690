"""Converts conversations with images to tokens with labels, and collates them.

A conversation is rendered, then widened by the images' placeholders. Its images are read and processed when a batch
needs them; tokens are padded on the right.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.recipe import Recipe
from ..model import processor
from ..model.control_tokens import ControlTokens, control_tokens
from ..model.shown import bounded, shown
from . import chat_templates, thinking
from .collate import IGNORED, Batch, padded, rows
from .images import read_all

Spans = list[tuple[int, int]]
"""The assistant's spans in a rendered conversation: first character, and the one after the last."""


def conversation(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Callable[[Json], Json]:
    """Return the function that computes an example's `input_ids` and `labels`; no image is ever in the loss."""
    seen = processor.adopt(processor.of_recipe(recipe), tokenizer)
    template, _ = chat_templates.marker(recipe, tokenizer)
    known = control_tokens(tokenizer, template, [seen.image_token])
    render = partial(chat_templates.turn_by_turn, tokenizer, known)
    if chat_templates.training_template(tokenizer):
        render = partial(chat_templates.with_spans, tokenizer, template, known)
    silent = {one for one in (*seen.image_token_ids, getattr(seen, "image_token_id", None)) if one is not None}

    def tokenize(example: Json) -> Json:
        turns, tools, given, where = (example[name] for name in ("messages", "tools", "given", "where"))
        options = example.get("options") or {}
        if recipe.data.thinking == "strip":
            turns = thinking.stripped(turns)
        if recipe.loss_on == "last":
            turns = chat_templates.only_last_learned(turns)
        pictures = read_all(where, example["images"], recipe.data.max_pixels)
        texts = processor.text_of_pictures(seen, pictures)
        try:
            with bounded(f"model.path={recipe.model.path}"):
                found = shown(tokenizer, template, turns, tools, options)
                chat, spans = render(found.turns, tools, options)
                if recipe.loss_on == "all":
                    chat_templates.check_all_learned(turns)
                    spans, given = [(0, len(chat))], 0
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


def widened(
    where: str, chat: str, spans: Spans, token: str, texts: Sequence[str], known: ControlTokens
) -> tuple[str, Spans]:
    """Return a rendered conversation with each image's token replaced by its placeholder, and the spans in it.

    Such a token that was typed in a text is marked as text, and stays. The template has to write one token for each
    image.
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


@dataclass(frozen=True)
class PictureCollator:
    """Collates single conversations into the model's inputs.

    There are no position ids: models with two-dimensional positions in images compute them from the tokens.
    """

    seen: ProcessorMixin
    pad_token_id: int
    max_pixels: int
    accepted: Collection[str]
    """Names of the parameters of the model's `forward`."""
    multiple: int = 8

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> "PictureCollator":
        """Return the collator of a run."""
        seen = processor.adopt(processor.of_recipe(recipe), tokenizer)
        return cls(seen, tokenizer.pad_token_id, recipe.data.max_pixels, processor.accepted_by(model))

    def alone(self, sequence: Json) -> dict[str, torch.Tensor]:
        """Return the model's inputs for one sequence except its tokens, without padding."""
        inputs = replace(self, multiple=1)([sequence])
        of_tokens = ("input_ids", "labels", "attention_mask")
        return {name: value for name, value in inputs.items() if name not in of_tokens and torch.is_tensor(value)}

    def __call__(self, sequences: Sequence[Json]) -> Batch:
        """Return `input_ids`, `labels`, `attention_mask`, [sequences, longest], and the tower's inputs."""
        inputs = padded([one["input_ids"] for one in sequences], self.pad_token_id, self.multiple)
        ids = inputs["input_ids"]
        pictures = [read_all(one["where"], one["images"], self.max_pixels) for one in sequences]
        return {
            **inputs,
            "labels": rows([one["labels"] for one in sequences], ids.shape[1], IGNORED),
            **processor.token_types(self.seen, self.accepted, ids),
            **processor.for_tower(self.seen, pictures),
        }
