"""Finds a llama.cpp pre-tokenizer with the same tokens as a tokenizer that llama.cpp's converter does not recognise.

The converter recognises published tokenizers by their tokens for one text, and refuses all others.
"""

import unicodedata
from pathlib import Path

from ...recipe.run_folder import read_json

SPLIT = r"\p{L}+|\p{N}| |[^\s\p{L}\p{N}]+|\s"
"""How the project's tokenizer splits a text: letters, digits, white space and other characters are separated."""
COARSER = "ufakzeka"
"""llama.cpp's name for a split that never cuts a piece of `SPLIT`; for example, it keeps a space with its word."""
COARSER_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # src/llama-vocab.cpp
)


def substitute(folder: Path) -> str | None:
    """Return llama.cpp's name for a pre-tokenizer with the same tokens, or None if none is known.

    Merges happen only inside pieces. If no word of the vocabulary crosses the border of two of our pieces, no merge
    does, and the tokens are the same with or without a cut at that border.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    found = read_json(file)
    ours = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    steps = (found.get("pre_tokenizer") or {}).get("pretokenizers") or [None, {}]
    if found.get("normalizer") or found["model"]["type"] != "BPE" or steps[0] != ours:
        return None
    if len(steps) != 2 or steps[1].get("type") != "ByteLevel" or steps[1].get("use_regex", True):
        return None
    special = {token["content"] for token in found.get("added_tokens") or ()}
    words = (word for word in found["model"]["vocab"] if word not in special)
    return COARSER if all(_is_one_piece(word) for word in words) else None


def _is_one_piece(word: str) -> bool:
    """Return True if a word of the vocabulary, or the part of a character that it holds, lies in one piece."""
    content = bytes(_BYTES[character] for character in word)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        starts = [at for at, byte in enumerate(content) if byte >= 0xC0 or byte < 0x80]
        return starts in ([], [0]) and len(content) < 4
    return len(text) == 1 or {_kind(character) for character in text} in ({"L"}, {"other"})


def _kind(character: str) -> str:
    kind = unicodedata.category(character)[0]
    return "space" if character.isspace() else kind if kind in "LN" else "other"


def _byte_of_character() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary (GPT-2's table)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_of_character()
