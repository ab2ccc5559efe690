"""The tokenizer's `response_template`: extracts an answer from the text that a model has written.

`transformers serve` needs it: without it, for most chat templates, it returns the whole conversation as the answer.
"""

import re
from pathlib import Path
from typing import Any

from ...recipe.files import Json
from ...recipe.run_folder import read_json, write_json

CONFIG = "tokenizer_config.json"
KEY = "response_template"
HERE_ONLY = ("is_local", "local_files_only")
"""Keys in the tokenizer's configuration that transformers writes about how it was loaded on this machine."""
_ASKED, _SAID, _THOUGHT = "Where is it?", "Over there.", "Let me see."
_CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "What."}}},
    },
}
_REASONING = {"open": "<think>", "close": "</think>", "content": "text"}
_JSON_CALLS = {
    # Otherwise the white space before a call would be an empty answer that replaces the previous one.
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
_TAGGED_CALLS = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
_CALLED = {"content": _SAID, "tool_calls": [_CALL]}
_FIELDS: tuple[tuple[str, Json, Json], ...] = (
    ("reasoning_content", _REASONING, {"content": _SAID, "reasoning_content": _THOUGHT}),
    ("tool_calls", _JSON_CALLS, _CALLED),
    ("tool_calls", _TAGGED_CALLS, _CALLED),
)
"""Fields in addition to the answer, in the forms of Qwen's and Hermes' templates, and a message with them."""


def write(folder: Path) -> bool:
    """Write the response template of the tokenizer in `folder` into its configuration; return whether it has one now.

    A template that the tokenizer already has is kept.
    """
    file = folder / CONFIG
    if not file.exists():
        return False
    from transformers import AutoTokenizer

    values = {key: value for key, value in read_json(file).items() if key not in HERE_ONLY}
    if values.get(KEY) is None:
        try:
            found = of_tokenizer(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
        except (OSError, ValueError):  # a tokenizer with its own code, which is not run for this
            found = None
        values |= {KEY: found} if found else {}
    write_json(file, values)
    return KEY in values


def of_tokenizer(tokenizer: Any) -> Json | None:
    """Return the response template derived from a tokenizer's chat template, or None if none can be derived.

    The answer starts after the generation prompt, and ends with the text that the template writes after an answer.
    Reasoning and tool calls become separate fields if a rendered answer that has them is parsed back into them.
    """
    try:
        opened = _rendered(tokenizer, [_user()], add_generation_prompt=True)
        asked = _rendered(tokenizer, [_user()])
        answer = _rendered(tokenizer, [_user(), {"role": "assistant", "content": _SAID}]).rpartition(_SAID)[2]
    except Exception:  # a template may refuse a conversation with any error
        return None
    stop = str(tokenizer.eos_token or "")
    if not opened.startswith(asked):
        asked = asked.removesuffix(stop)  # some templates end every conversation with it
    start = opened.removeprefix(asked).partition("<think>")[0]
    close = answer.strip().removesuffix(stop).strip() or stop
    if not start.strip() or not close:
        return None
    content = {**_closed(close, stop), "content": "text"}
    spec: Json = {"defaults": {"role": "assistant"}, "start_anchor": start, "fields": {"content": content}}
    for name, field, message in _FIELDS:
        wider = spec | {"fields": {name: field, **spec["fields"]}}
        if name not in spec["fields"] and _parses(tokenizer, wider, message):
            spec = wider
    return spec if _parses(tokenizer, spec, {"content": _SAID}) else None


def _closed(close: str, stop: str) -> dict[str, str]:
    """Return where the parser ends an answer: at the text that the template writes, or where the model stops."""
    if stop in ("", close):
        return {"close": close}
    # Otherwise white space between the two would be an empty answer that replaces the previous one.
    return {"close_pattern": rf"\s*(?:{re.escape(close)}|{re.escape(stop)})"}


def _parses(tokenizer: Any, spec: Json, message: Json) -> bool:
    """Return whether an answer, as the chat template writes it, is parsed back into the same message."""
    tools = {"tools": [_TOOL]} if "tool_calls" in message else {}
    anchor = spec["start_anchor"]
    try:
        before = _rendered(tokenizer, [_user()], add_generation_prompt=True, **tools)
        whole = _rendered(tokenizer, [_user(), {"role": "assistant", **message}], **tools)
        written = whole.rpartition(anchor)[2].rstrip()  # a model stops at the token that ends its turn
        parsed = tokenizer.parse_response(written, spec, prefix=before.rpartition(anchor)[0] + anchor)
    except Exception:  # raised by the template or the parser
        return False
    parsed = {key: value.strip() if isinstance(value, str) else value for key, value in parsed.items()}
    return parsed == {"role": "assistant", **message}


def _user() -> dict[str, str]:
    return {"role": "user", "content": _ASKED}


def _rendered(tokenizer: Any, turns: list[Json], **options: object) -> str:
    return str(tokenizer.apply_chat_template(turns, tokenize=False, **options))
