"""Reads `model.new_tokens`: the tokens that a run adds to its model's tokenizer, from the key itself or from a file."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .bounds import shown
from .errors import UserError
from .files import unique

FILES = (".txt", ".json")


@dataclass(frozen=True)
class NewToken:
    """A token to add, as it is written in a text."""

    content: str
    special: bool = False
    """Leave the token out of a decoded text, and read it as text where people wrote it, as `<|im_end|>` is."""


def read(text: str | None) -> tuple[NewToken, ...]:
    """Return the tokens that a value of `model.new_tokens` names, in their order.

    It is a text file with one token a line, a JSON file or text with a list of texts or of objects (`{"content": "<a>",
    "special": true}`), or tokens separated by commas; None names none.
    """
    if text is None:
        return ()
    where, file = f"model.new_tokens={shown(text)}", Path(text) if text.endswith(FILES) else None
    content = text
    if file:
        try:
            content = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
            raise UserError(f"{where}: {why}; name a text file with one token a line, or a JSON list.") from None
    found: object = content.splitlines() if file and file.suffix == ".txt" else content.split(",")
    if content.lstrip().startswith(("[", "{")) and not (file and file.suffix == ".txt"):
        try:
            found = json.loads(content, object_pairs_hook=unique)
        except ValueError as error:
            if file or content.lstrip().startswith(("[{", '["', "{")):  # `[PAD],[SEP]` is no JSON
                raise UserError(f"{where}: not JSON: {error}.") from None
    elif file and file.suffix == ".json":
        raise UserError(f'{where}: not a list; write ["<a>", "<b>"].')
    if isinstance(found, Mapping) or not isinstance(found, Iterable):
        raise UserError(f'{where}: not a list; write ["<a>", "<b>"].')
    tokens = []
    for one in found:
        if isinstance(one, Mapping):
            name, special = one.get("content"), one.get("special", False)
            if not isinstance(name, str) or not isinstance(special, bool) or one.keys() - {"content", "special"}:
                raise UserError(f'{where}: {shown(one)}: write {{"content": "<a>", "special": true}}.')
            tokens.append(NewToken(name, special))
        elif isinstance(one, str):
            tokens.append(NewToken(one))
        else:
            raise UserError(f"{where}: {shown(one)} is not a text; write it in quotes.")
    if not tokens:
        raise UserError(f"{where}: names no token; leave model.new_tokens out.")
    known: set[str] = set()
    for number, token in enumerate(tokens, start=1):
        if not token.content.strip():
            raise UserError(f"{where}: token {number} is empty; remove it.")
        if token.content in known:
            raise UserError(f"{where}: {token.content!r} is there twice; remove one of them.")
        known.add(token.content)
    return tuple(tokens)


def as_text(tokens: Iterable[NewToken]) -> str:
    """Return tokens as a value of `model.new_tokens` that needs no file."""
    written = [{"content": one.content, "special": True} if one.special else one.content for one in tokens]
    return json.dumps(written, ensure_ascii=False)


def check(tokens: Iterable[NewToken], known: Mapping[str, int], path: str) -> None:
    """Refuse tokens that a tokenizer has already."""
    if old := [one.content for one in tokens if one.content in known]:
        more = f" and {len(old) - 1} more" if len(old) > 1 else ""
        has = f"the tokenizer of {path} has {old[0]!r}{more} already"
        raise UserError(f"model.new_tokens: {has}; remove {'them' if more else 'it'} from the list.")
