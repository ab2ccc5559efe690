"""Adds to llama.cpp's converter what a GGUF file also needs: a pre-tokenizer that it knows, and Ollama's Modelfile.

The converter recognises published tokenizers by their tokens for one text, and refuses all others.
"""

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...recipe.run_folder import read_json

SPLIT = r"\p{L}+|\p{N}| |[^\s\p{L}\p{N}]+|\s"
"""How the project's tokenizer splits a text: letters, digits, white space and other characters are separated."""
COARSER = "ufakzeka"
"""llama.cpp's name for a split that never cuts a piece of `SPLIT`; for example, it keeps a space with its word."""
ROLES = ("system", "user", "assistant")
_SAID = "What was said."
_FIRST = "What was said first."


def pre_tokenizer(folder: Path) -> str | None:
    """Return llama.cpp's name for a pre-tokenizer with the same tokens, or None if none is known.

    Merges happen only inside pieces. If no word of the vocabulary crosses the border of two of our pieces, no merge
    does, and the tokens are the same with or without a cut at that border.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

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
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    words = (bytes(map(byte_of.__getitem__, word)) for word in found["model"]["vocab"] if word not in special)
    return COARSER if all(map(_is_one_piece, words)) else None


def _is_one_piece(content: bytes) -> bool:
    """Return True if a word of the vocabulary, or the part of a character that it holds, lies in one piece."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        starts = [at for at, byte in enumerate(content) if byte >= 0xC0 or byte < 0x80]
        return starts in ([], [0]) and len(content) < 4
    if len(text) == 1:
        return True
    letters = {unicodedata.category(character)[0] == "L" for character in text}
    # Every digit and every white space is a piece of its own.
    alone = any(character.isspace() or unicodedata.category(character)[0] == "N" for character in text)
    return len(letters) == 1 and not alone


def modelfile(tokenizer: Any, file: str, ends: Sequence[int] = ()) -> str:
    """Return the Modelfile of the GGUF `file` in the same folder; `ends` are those of the generation settings."""
    lines = [f"FROM ./{file}"]
    if found := template(tokenizer):
        lines.append(f'TEMPLATE """{found}"""')
    stops = [tokenizer.eos_token, *(tokenizer.convert_ids_to_tokens(end) for end in ends)]
    for stop in filter(None, dict.fromkeys(stops)):
        # A value has no escapes: it ends at the first line that ends with its quotes.
        lines.append(f'PARAMETER stop """{stop}"""' if set(stop) & set('"\n') else f'PARAMETER stop "{stop}"')
    return "\n".join([*lines, "PARAMETER temperature 0", ""])


def _literal(text: str) -> str:
    """Return text escaped for an Ollama (Go) template between triple quotes."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if set(text) & set('{}"') else text


def template(tokenizer: object) -> str | None:
    """Return the chat template in Ollama's language, or None if a turn's text depends on more than its role.

    Ollama itself adds the token that begins a text.
    """
    cases = []
    for role in ROLES:
        turn = _turn(tokenizer, role)
        if turn is None and role != "system":
            return None
        if turn is not None:
            before, after = turn
            text = f"{_literal(before)}{{{{ .Content }}}}{_literal(after)}"
            cases.append(f'{{{{ if eq .Role "{role}" }}}}{text}{{{{ end }}}}')
    asked = [{"role": "user", "content": _FIRST}]
    prompt = _rendered(tokenizer, asked, add_generation_prompt=True)
    answer = prompt[len(_rendered(tokenizer, asked)) :]
    return f"{{{{ range .Messages }}}}{''.join(cases)}{{{{ end }}}}{_literal(answer)}"


def _turn(tokenizer: object, role: str) -> tuple[str, str] | None:
    """Return the text before and after the content of a role's turn, or None if the template has no such turn."""
    before = [] if role == "system" else [{"role": "user", "content": _FIRST}]
    if role == "user":
        before.append({"role": "assistant", "content": _FIRST})
    after = [{"role": "user", "content": _FIRST}] if role == "system" else []
    try:
        whole = _rendered(tokenizer, [*before, {"role": role, "content": _SAID}, *after])
        start = len(_rendered(tokenizer, before)) if before else 0
    except Exception:  # a template may raise any error
        return None
    if role == "system":
        rest = _rendered(tokenizer, after)
        if not whole.endswith(rest):
            return None
        whole = whole[: len(whole) - len(rest)]
    left, found, right = whole[start:].partition(_SAID)
    return (left, right) if found else None


def _rendered(tokenizer: Any, turns: list[dict[str, str]], **options: object) -> str:
    text = str(tokenizer.apply_chat_template(turns, tokenize=False, **options))
    return text.removeprefix(tokenizer.bos_token or "")
