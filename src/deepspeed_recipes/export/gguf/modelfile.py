"""Ollama's Modelfile: its own template language says what the chat template says."""

import json
from typing import Any

ROLES = ("system", "user", "assistant")
_SAID = "What was said."
_FIRST = "What was said first."


def write(tokenizer: Any, file: str) -> str:
    """Return the Modelfile of a model.

    Args:
        tokenizer: of transformers, with a chat template.
        file: the GGUF file's name, beside it.
    """
    lines = [f"FROM ./{file}"]
    if template := of_template(tokenizer):
        lines.append(f'TEMPLATE """{template}"""')
    if stop := tokenizer.eos_token:
        # A value has no escapes: it ends with the line that ends with its quotes.
        lines.append(f'PARAMETER stop """{stop}"""' if set(stop) & set('"\n') else f'PARAMETER stop "{stop}"')
    return "\n".join([*lines, "PARAMETER temperature 0", ""])


def _literal(text: str) -> str:
    """Return text for a template of Ollama (Go's) between triple quotes, neither of which takes it for its own."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if set(text) & set('{}"') else text


def of_template(tokenizer: Any) -> str | None:
    """Return Ollama's form of the chat template; None where a turn's text depends on more than its role.

    Ollama adds the token that begins a text by itself.
    """
    cases = []
    for role in ROLES:
        turn = _turn(tokenizer, role)
        if turn is None and role != "system":
            return None
        if turn is not None:
            before, after = turn
            said = f"{_literal(before)}{{{{ .Content }}}}{_literal(after)}"
            cases.append(f'{{{{ if eq .Role "{role}" }}}}{said}{{{{ end }}}}')
    asked = [{"role": "user", "content": _FIRST}]
    prompt = _rendered(tokenizer, asked, add_generation_prompt=True)
    answer = prompt[len(_rendered(tokenizer, asked)) :]
    return f"{{{{ range .Messages }}}}{''.join(cases)}{{{{ end }}}}{_literal(answer)}"


def _turn(tokenizer: Any, role: str) -> tuple[str, str] | None:
    """Return what stands before and after what a role says; None where the template has no such turn."""
    before = [] if role == "system" else [{"role": "user", "content": _FIRST}]
    if role == "user":
        before.append({"role": "assistant", "content": _FIRST})
    after = [{"role": "user", "content": _FIRST}] if role == "system" else []
    try:
        whole = _rendered(tokenizer, [*before, {"role": role, "content": _SAID}, *after])
        start = len(_rendered(tokenizer, before)) if before else 0
    except Exception:  # whatever a template raises
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
