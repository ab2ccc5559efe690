"""Keys of public datasets other than text: aliases of fields, flags, template arguments, media.

Standard library only, as `formats.py`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ....recipe.errors import UserError
from ....recipe.files import Json, JsonView
from ..text_files import from_json, reason_of

EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values that count as missing: tables fill empty cells with them."""
ALIASES = {"kto_tag": "label", "functions": "tools", "system_prompt": "system", "system_message": "system"}
"""Other names of fields, from LLaMA-Factory, OpenAI, OpenOrca and chat logs."""
FLAGS = {
    **dict.fromkeys(("train", "training", "trainable"), True),
    **dict.fromkeys(
        ("loss", "weight", "loss_weight", "loss_scale", "loss_mask", "calculate_loss", "compute_loss"), True
    ),
    **dict.fromkeys(("masked", "is_masked", "ignore"), False),
}
"""Flags that put an assistant's turn into the loss, and their value for yes: axolotl's, ms-swift's, OpenAI's and
torchtune's. Other roles' turns are never learned, whatever these flags are."""
MEASURED = "loss"
"""A flag of turns; a whole example may have it as a number too, a measurement that nothing reads."""
DETAIL = "train_detail"
"""axolotl's flags for parts of a turn."""
OPTIONS = ("chat_template_kwargs", "enable_thinking")
"""Arguments of the chat template."""
NOT_OPTIONS = {
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding"),
    *("truncation", "max_length", "sanitize_control_tokens", "tokenizer_kwargs"),
}
"""Arguments of `apply_chat_template` that a template does not get, or that belong elsewhere."""
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Fields with media."""
TEXTS = (None, "text", "input_text", "output_text")
"""Types of content parts whose `text` is the turn's text; a `reasoning` or an `image` may have a text too."""
OF_PART = ("type", "text", "image", "image_url", "path", "url", "bytes", "base64")
"""Keys of content parts that are read."""
PLACEHOLDERS = re.compile(
    r"\A<(?:image|video|audio)>|<(image|video|audio)>$(?!.*</\1>)|<image ?\d+>|<\|(?:image|video|audio)_\w+\|>"
    r"|<start_of_image>",
    re.MULTILINE | re.DOTALL,
)
"""Written for an image or other media: LLaVA's at a text's start or a line's end, since elsewhere they may be HTML, and
anywhere those of MMMU, Phi, Qwen and Gemma."""
REWRITE = "data.transform=FILE.py:FUNCTION can rewrite such examples"
WORDS = {**dict.fromkeys(("true", "yes", "1", "1.0"), True), **dict.fromkeys(("false", "no", "0", "0.0"), False)}
JUDGEMENTS = {
    **WORDS,
    **dict.fromkeys(("good", "desirable", "chosen", "accepted", "up", "thumbs_up", "like"), True),
    **dict.fromkeys(("bad", "undesirable", "rejected", "-1", "down", "thumbs_down", "dislike"), False),
}


def yes_or_no(value: object, words: Mapping[str, bool]) -> bool | None:
    """Return the meaning of a bool, a number or a word of `words`, or None if the value has none."""
    return words.get(str(value).strip().lower()) if isinstance(value, bool | int | float | str) else None


def with_usual_names(where: str, example: Json) -> Json:
    """Return the example with the forms' names of its fields."""
    for other, usual in ALIASES.items():
        if example.get(other) not in EMPTY:
            if example.get(usual) not in EMPTY:
                raise UserError(f"{where}: {other!r} and {usual!r} mean the same; remove one of them.")
            example = {**example, usual: example[other]}
            del example[other]
    return example


def refuse_placeholder(where: str, content: str) -> None:
    """Refuse a placeholder of an image or other media in a text."""
    if written := PLACEHOLDERS.search(content.strip()):
        raise UserError(
            f"{where} has a placeholder, {written[0]}, but the example names no file for it; add the file to 'images', "
            "which only recipes with model.vision=true read, or remove the placeholder."
        )


def is_text(part: object) -> bool:
    """Return whether a content part is text and nothing else."""
    if not isinstance(part, dict) or part.get("type") not in TEXTS or not isinstance(part.get("text"), str):
        return False
    return all(value in EMPTY for key, value in part.items() if key not in ("type", "text"))


def refuse_parts(where: str, parts: Iterable[object]) -> None:
    """Refuse content parts that are not text, or contain more than text."""
    for part in parts:
        if not is_text(part):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if isinstance(part, dict) and kind in TEXTS:
                kind = ", ".join(sorted(part))
            vision = "recipes with model.vision=true, such as tiny_vision's, read images too"
            raise UserError(
                f"{where} has 'content' parts that are not text ({kind}), which is all that this recipe reads; "
                f"{vision if 'image' in str(kind) else REWRITE}."
            )


def is_learned(where: str, flagged: JsonView, whole: bool = False) -> bool:
    """Return whether an assistant's turn, or a `whole` example, is in the loss by its flags.

    None of a turn's flags may concern a part of it.
    """
    given = {name: flagged[name] for name in FLAGS if flagged.get(name) not in EMPTY}
    if whole and str(given.get(MEASURED)).lower() not in ("true", "false"):
        given.pop(MEASURED, None)
    if flagged.get(DETAIL) and not whole:
        raise UserError(
            f"{where} has {DETAIL!r}, flags of parts of a turn; a turn is learned whole or not at all: write 'train' "
            "for all of it, or make a turn of each part."
        )
    found = {name: yes_or_no(value, WORDS) for name, value in given.items()}
    if unclear := next((name for name, one in found.items() if one is None), None):
        raise UserError(
            f"{where}{': the example' if whole else ''} has {unclear!r} {given[unclear]!r}; every token in the loss "
            "counts alike, so it must be 1 (or true), or 0 (or false) to leave the text out of the loss: round it, or "
            "remove it."
        )
    return all(one is FLAGS[name] for name, one in found.items())


def options(where: str, example: JsonView) -> Json | None:
    """Return the example's arguments for the chat template, or None if it has none."""
    found = example.get("chat_template_kwargs") or {}
    if isinstance(found, str):
        found = parsed(f"{where}: 'chat_template_kwargs'", found)
    if not isinstance(found, dict):
        raise UserError(f"{where}: 'chat_template_kwargs' must be an object, the arguments by their names.")
    found = without_nulls(found)
    for name in found:
        if name in NOT_OPTIONS:
            raise UserError(f"{where}: 'chat_template_kwargs' names {name!r}, which templates do not get; remove it.")
    if example.get("enable_thinking") not in EMPTY:
        thinks = yes_or_no(example["enable_thinking"], WORDS)
        if thinks is None:
            raise UserError(f"{where}: 'enable_thinking' must be true or false; it is {example['enable_thinking']!r}.")
        found["enable_thinking"] = thinks
    return found or None


def without_nulls(value: object) -> Any:
    """Return an object without its keys that are null.

    Arrow gives every object of a column the keys of all others, so in Parquet a null cannot be distinguished from a
    missing key; JSON Lines are read in the same way. Arguments that are written as JSON text keep their nulls.
    """
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def parsed(where: str, text: str) -> Any:
    """Return the value of a JSON text."""
    try:
        return from_json(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{where} holds text that should be JSON and is not ({reason_of(error)}): {text[:40]!r}."
        ) from None
