"""What an example's fields hold: turns in OpenAI's form, their tool calls, and the tools that may be called.

Standard library only, as `formats.py`. Every function raises UserError, which names the place, the field, what was
expected and the fix.
"""

from itertools import pairwise
from typing import Any

from ....spec.errors import UserError
from ..text_files import from_json

Example = dict[str, Any]
Turn = dict[str, Any]

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
"""Names of roles in use, and the role that each means; `call`: an assistant's turn that holds a tool call as JSON."""


def as_conversation(where: str, example: Example, field: str, turns: list[Turn], given: int = 0) -> Example:
    """Return the turns with the example's system prompt and tools, once their order has been checked."""
    turns, given = in_order(where, example, field, turns, given)
    if not any(turn["role"] == "assistant" for turn in turns[given:]):
        raise UserError(f"{where}: no assistant turn in {field!r}, so there is nothing to learn; remove the example.")
    return {"messages": turns, "tools": read_tools(where, example), "given": given}


def in_order(where: str, example: Example, field: str, turns: list[Turn], given: int = 0) -> tuple[list[Turn], int]:
    """Return the turns with the example's system prompt, and how many are given, once their order has been checked."""
    if example.get("system"):
        turns = [said("system", read_string(where, example, "system")), *turns]
        given += given > 0
    for number, (before, turn) in enumerate(pairwise(turns), start=2):
        if before["role"] == turn["role"] == "user":
            raise UserError(
                f"{where}: turns {number - 1} and {number} of {field!r} are both the user's; join them, or add the "
                "answer between them."
            )
    return turns, given


def read_side(where: str, example: Example, field: str, role: str) -> list[Turn]:
    """Return the turns of a field, which is a list of them or one string, spoken by `role`."""
    if isinstance(example.get(field), str):
        return [said(role, read_string(where, example, field))]
    return read_turns(where, example, field, "a string or a list of turns")


def read_turns(where: str, example: Example, field: str, expected: str = "a list of turns") -> list[Turn]:
    """Return the turns of a field, which is a list of them."""
    turns = example.get(field)
    if not isinstance(turns, list) or not turns:
        raise wrong(where, example, field, expected)
    return [_turn(f"{where}: turn {number} of {field!r}", turn) for number, turn in enumerate(turns, start=1)]


def _turn(where: str, turn: Any) -> Turn:
    if not isinstance(turn, dict):
        raise UserError(f"{where} must be an object with 'role' and 'content'; it is {_kind(turn)}.")
    # Tables give a turn the keys of all others, set to null, and templates would print that.
    turn = {key: value for key, value in turn.items() if value is not None}
    said = turn.pop("from", None) if "role" not in turn else turn.pop("role")
    content = turn.pop("value", "") if "content" not in turn else turn.pop("content")
    if not isinstance(said, str):
        raise UserError(f"{where} needs a 'role' and a 'content', both strings.")
    role = ROLES.get(said.lower())
    if role is None:
        raise UserError(f"{where} has the unknown role {said!r}; known roles are {', '.join(ROLES)}.")
    if turn.get("weight") == 0:
        raise UserError(
            f"{where} has weight 0, which is not supported; split the example into 'prompt' and 'completion'."
        )
    if isinstance(content, list):
        content = _joined(where, content)
    if not isinstance(content, str):
        raise UserError(f"{where} needs a 'role' and a 'content', both strings; the content is {_kind(content)}.")
    if role == "call":
        role, content, turn["tool_calls"] = "assistant", "", _parsed(where, content)
    if "function_call" in turn:
        turn["tool_calls"] = turn.pop("function_call")
    if turn.get("tool_calls"):
        turn["tool_calls"] = _calls(where, turn["tool_calls"])
    elif not content.strip() and role != "tool":
        raise UserError(f"{where} ({said}) is empty: no 'content'; fill it, or remove the example.")
    return {"role": role, "content": content, **turn}


def _joined(where: str, parts: list[Any]) -> str:
    """Return the text of OpenAI's content parts."""
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise UserError(
            f"{where} has 'content' parts that are not text, which is all that this recipe reads; recipes with "
            "model.vision=true, such as tiny_vision's, read pictures too."
        )
    return "".join(part["text"] for part in parts)


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's form, with arguments as an object: templates write them as JSON themselves."""
    checked = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(where, arguments)
        if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
            raise UserError(f"{where}: every tool call needs a 'name' and 'arguments', a string and an object.")
        function = {"name": function["name"], "arguments": arguments}
        checked.append({**({"id": call["id"]} if call.get("id") else {}), "type": "function", "function": function})
    return checked


def read_tools(where: str, example: Example) -> list[dict[str, Any]] | None:
    """Return the example's tools in OpenAI's form; None: it has none."""
    tools = example.get("tools") or None
    if isinstance(tools, str):
        tools = _parsed(f"{where}: 'tools'", tools) or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise wrong(where, example, "tools", "a list of function descriptions")
    return tools and [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _parsed(where: str, text: str) -> Any:
    try:
        return from_json(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error).partition(";")[0]
        raise UserError(f"{where} holds text that should be JSON and is not ({reason}): {text[:40]!r}.") from None


def read_string(where: str, example: Example, field: str, empty: bool = False) -> str:
    """Return a field that is a string, and not blank unless it may be."""
    value = example.get(field)
    if not isinstance(value, str):
        raise wrong(where, example, field, "a string")
    if not empty and not value.strip():
        raise UserError(f"{where}: the field {field!r} is empty; fill it, or remove the example.")
    return value


def said(role: str, content: str) -> Turn:
    """Return a turn."""
    return {"role": role, "content": content}


def wrong(where: str, example: Example, field: str, expected: str) -> UserError:
    """Return what is wrong with a field that is missing, or of another type than expected."""
    found = f"it is {_kind(example[field])}" if field in example else f"this example has {fields_of(example)}"
    return UserError(f"{where}: the field {field!r} must be {expected}; {found}.")


def fields_of(example: Example) -> str:
    """Return the names of an example's fields, for messages."""
    return ", ".join(repr(key) for key in example) or "none"


def _kind(value: Any) -> str:
    if value in ([], "", None):
        return "empty"
    return f"of type {type(value).__name__}"
