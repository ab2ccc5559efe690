"""Writes Ollama's Modelfile, with the chat template translated into Ollama's template language."""

import json
from typing import Any

ROLES = ("system", "user", "assistant")
_SAID = "What was said."
_FIRST = "What was said first."


def write(tokenizer: Any, file: str) -> str:
    """Return the Modelfile of a model.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        file: the name of the GGUF file in the same folder.
    """
    lines = [f"FROM ./{file}"]
    if template := of_template(tokenizer):
        lines.append(f'TEMPLATE """{template}"""')
    if stop := tokenizer.eos_token:
        # A value has no escapes: it ends at the first line that ends with its quotes.
        lines.append(f'PARAMETER stop """{stop}"""' if set(stop) & set('"\n') else f'PARAMETER stop "{stop}"')
    return "\n".join([*lines, "PARAMETER temperature 0", ""])


def _literal(text: str) -> str:
    """Return text escaped for an Ollama (Go) template between triple quotes."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if set(text) & set('{}"') else text


def of_template(tokenizer: Any) -> str | None:
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


def _turn(tokenizer: Any, role: str) -> tuple[str, str] | None:
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


def _rendered(tokenizer: Any, turns: list[dict[str, str]], **options: Any) -> str:
    text = str(tokenizer.apply_chat_template(turns, tokenize=False, **options))
    return text.removeprefix(tokenizer.bos_token or "")
