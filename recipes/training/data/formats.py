"""The forms in which examples are written, and the one form per kind of method that training reads.

Standard library only: the launcher checks local files with these functions before it starts a process, and the ranks
convert every source with the same ones.

    a method that reads  gets from every form
    conversations        messages (turns in OpenAI's form), tools, given (leading turns that are not in the loss)
    pairs                prompt, chosen, rejected (turns each), tools
    judged answers       prompt, completion (turns each), label (true: good), tools
    texts                text
    labelled texts       text or messages (the other is None), tools, label (the class's name)
    matching texts       anchor, positive, negative (None: there is none)
    prompts              what conversations get, with or without an answer, and fields (all other fields)
"""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

from ...spec.errors import UserError
from ...spec.methods.traits import TRAITS, Examples, Method, reading
from .text_files import from_json

Example = dict[str, Any]
Turn = dict[str, Any]

FORMS: dict[str, tuple[Examples, tuple[str, ...]]] = {
    "messages": ("conversations", ("messages",)),
    "sharegpt": ("conversations", ("conversations",)),
    "alpaca": ("conversations", ("instruction", "output")),
    "prompt_completion": ("conversations", ("prompt", "completion")),
    "preference": ("pairs", ("chosen", "rejected")),
    "judged": ("judged answers", ("prompt", "completion", "label")),
    "text": ("texts", ("text",)),
    "labelled_text": ("labelled texts", ("text", "label")),
    "labelled_prompt": ("labelled texts", ("prompt", "label")),
    "labelled_messages": ("labelled texts", ("messages", "label")),
    "anchor_positive": ("matching texts", ("anchor", "positive")),
    "query_positive": ("matching texts", ("query", "positive")),
    "prompt": ("prompts", ("prompt",)),
}
"""Each form's kind of examples, and the fields by which it is recognised."""

FIELDS = (
    *dict.fromkeys(field for _, fields in FORMS.values() for field in fields),
    *("input", "history", "system", "tools", "negative"),
)
"""Every field that a conversion reads."""

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
"""Names of roles in use, and the role that each means; `call`: an assistant's turn that holds a tool call as JSON."""


def form_of(where: str, example: Example, method: Method, asked: str = "auto") -> str:
    """Return the form of a source, recognised by the fields of its first example unless the recipe names one.

    Raises:
        UserError: the fields belong to no form, or to one that another method reads.
    """
    if asked != "auto":
        if not _reads(method, asked):
            raise UserError(f"data.form={asked}: is {_serves(asked)}; {_needs(method)}.")
        return asked
    found = [form for form, (_, fields) in FORMS.items() if all(example.get(field) is not None for field in fields)]
    suitable = [form for form in found if _reads(method, form)]
    found = [form for form in found if form != "prompt"]  # its one field is in most forms, known or not
    if (suitable or found)[:1] == ["prompt_completion"] and method != "kto":
        _refuse_judged(where, example)
    if suitable:
        return suitable[0]
    for kind, fields in FORMS.values():
        if kind == TRAITS[method].examples and all(field in example for field in fields):
            empty = next(field for field in fields if example[field] is None)
            raise UserError(f"{where}: the field {empty!r} is empty; fill it, or remove the example.")
    if found:
        raise UserError(f"{where}: is in the form {found[0]}, {_serves(found[0])}; {_needs(method)}.")
    raise UserError(
        f"{where}: its fields ({fields_of(example)}) belong to no known form; {_needs(method)}. Say which is which: "
        "data.columns=question:prompt,answer:completion."
    )


def _reads(method: Method, form: str) -> bool:
    """Return whether a method reads a form; where prompts are enough, those of conversations are too."""
    wanted = TRAITS[method].examples
    return FORMS[form][0] == wanted or (wanted == "prompts" and FORMS[form][0] == "conversations")


def _refuse_judged(where: str, example: Example) -> None:
    """Refuse KTO's form, whose fields contain those of another: half of its answers are examples of what not to say."""
    if str(example.get("label")).lower() in ("true", "false", "0", "1"):
        raise UserError(
            f"{where}: 'prompt', 'completion' and a 'label' of yes or no are answers that were judged (KTO), good ones "
            "and bad ones; the method kto reads them.\nOr keep those whose label is true and remove the label, or make "
            "pairs of 'chosen' and 'rejected' for dpo; data.form=prompt_completion trains on all of them as they are."
        )


def converted(located: Iterable[tuple[str, Example]], method: Method, form: str = "auto") -> Iterator[Example]:
    """Yield the examples of one source, (place, example) each, as the method reads them.

    Raises:
        UserError: names the place, the field, what was expected and the fix.
    """
    found = None
    for where, example in located:
        found = found or form_of(where, example, method, form)
        converted = CONVERSIONS[found](where, example)
        yield _prompt_of(converted, example, found) if TRAITS[method].examples == "prompts" else converted


def _serves(form: str) -> str:
    *others, last = reading(FORMS[form][0])
    return f"for the method {', '.join(others)}{' or ' if others else ''}{last}"


def _needs(method: Method) -> str:
    forms = (f"{form} ({', '.join(fields)})" for form, (_, fields) in FORMS.items() if _reads(method, form))
    return f"the method {method} reads {', '.join(forms)}"


def _messages(where: str, example: Example, field: str = "messages") -> Example:
    return _conversation(where, example, field, _turns(where, example, field))


def _sharegpt(where: str, example: Example) -> Example:
    return _messages(where, example, "conversations")


def _alpaca(where: str, example: Example) -> Example:
    turns = []
    for pair in example.get("history") or []:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise UserError(f"{where}: every item of 'history' must be a pair of strings, question and answer.")
        turns += [_said("user", pair[0]), _said("assistant", pair[1])]
    question = _string(where, example, "instruction")
    if example.get("input"):
        question += "\n\n" + _string(where, example, "input")
    turns += [_said("user", question), _said("assistant", _string(where, example, "output"))]
    return _conversation(where, example, "output", turns)


def _prompt_completion(where: str, example: Example) -> Example:
    prompt = _side(where, example, "prompt", "user")
    completion = _side(where, example, "completion", "assistant")
    return _conversation(where, example, "completion", prompt + completion, given=len(prompt))


def _preference(where: str, example: Example) -> Example:
    chosen, rejected = (_side(where, example, field, "assistant") for field in ("chosen", "rejected"))
    if chosen == rejected:
        raise UserError(f"{where}: 'chosen' and 'rejected' are equal, so there is no preference; remove the example.")
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        prompt = _side(where, example, "prompt", "user")
    else:  # whole conversations: their common start is the prompt, whatever `prompt` says
        pairs = zip(chosen, rejected, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    sides: dict[str, Any] = {}
    for field, answer in (("chosen", chosen), ("rejected", rejected)):
        if not prompt or not answer or answer[0]["role"] != "assistant":
            raise UserError(
                f"{where}: {field!r} must continue the prompt with an assistant turn; give 'prompt', and in 'chosen' "
                "and 'rejected' only the answers, or two conversations that diverge at an assistant turn."
            )
        whole = _conversation(where, example, field, prompt + answer, given=len(prompt))
        sides |= {"prompt": whole["messages"][: whole["given"]], field: answer, "tools": whole["tools"]}
    return sides


def _judged(where: str, example: Example) -> Example:
    label = example.get("label")
    label = {"true": True, "false": False}.get(label.lower()) if isinstance(label, str) else label  # of a table
    if not isinstance(label, bool):
        raise UserError(f"{where}: 'label' must be true (a good answer) or false; it is {example.get('label')!r}.")
    prompt, completion = _side(where, example, "prompt", "user"), _side(where, example, "completion", "assistant")
    whole = _conversation(where, example, "completion", prompt + completion, given=len(prompt))
    given = whole["messages"][: whole["given"]]
    return {"prompt": given, "completion": completion, "label": label, "tools": whole["tools"]}


def _prompt(where: str, example: Example) -> Example:
    """Return a prompt without an answer; what a reward function needs is in the example's other fields."""
    turns, _ = _in_order(where, example, "prompt", _side(where, example, "prompt", "user"))
    if turns[-1]["role"] not in ("user", "tool"):
        raise UserError(f"{where}: 'prompt' must end with a user's turn, which the model answers.")
    return {"messages": turns, "tools": _tools(where, example), "given": len(turns)}


def _prompt_of(conversation: Example, example: Example, form: str) -> Example:
    """Return a conversation as a prompt, which is its `given` turns, and the answer that may follow."""
    turns = conversation["messages"]
    read = {*FORMS[form][1], "system", "tools", *(("input", "history") if form == "alpaca" else ())}
    fields = {name: value for name, value in example.items() if name not in read}
    return {
        **conversation,
        "given": len(turns) - (turns[-1]["role"] == "assistant"),
        "fields": json.loads(json.dumps(fields, default=str)),
    }


def _text(where: str, example: Example) -> Example:
    return {"text": _string(where, example, "text", empty=True)}


def _labelled_text(where: str, example: Example) -> Example:
    text = _string(where, example, "text")
    return {"text": text, "messages": None, "tools": None, "label": _class(where, example)}


def _labelled_prompt(where: str, example: Example) -> Example:
    """Return a prompt with its class; with a `completion` it is the answer that is classified."""
    turns = _side(where, example, "prompt", "user")
    if example.get("completion"):
        turns += _side(where, example, "completion", "assistant")
    return _labelled(where, example, turns)


def _labelled_messages(where: str, example: Example) -> Example:
    return _labelled(where, example, _turns(where, example, "messages"))


def _labelled(where: str, example: Example, turns: list[Turn]) -> Example:
    if example.get("system"):
        turns = [_said("system", _string(where, example, "system")), *turns]
    return {"text": None, "messages": turns, "tools": _tools(where, example), "label": _class(where, example)}


def _class(where: str, example: Example) -> str:
    """Return the name of an example's class."""
    label = example.get("label")
    if isinstance(label, bool | int):
        return str(label).lower()
    if not isinstance(label, str) or not label.strip():
        found = "missing" if "label" not in example else "empty" if label in (None, "") else f"{label!r}"
        raise UserError(
            f"{where}: 'label' is {found}; it must be the class, as text or a whole number: add it, or remove the "
            "example."
        )
    return label.strip()


def _anchor_positive(where: str, example: Example, anchor: str = "anchor") -> Example:
    found = {"anchor": _string(where, example, anchor), "positive": _string(where, example, "positive")}
    negative = None if example.get("negative") is None else _string(where, example, "negative")
    if negative == found["positive"]:
        raise UserError(f"{where}: 'positive' and 'negative' are equal; remove 'negative', or the example.")
    return {**found, "negative": negative}


def _query_positive(where: str, example: Example) -> Example:
    return _anchor_positive(where, example, "query")


CONVERSIONS: dict[str, Callable[[str, Example], Example]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "preference": _preference,
    "judged": _judged,
    "text": _text,
    "labelled_text": _labelled_text,
    "labelled_prompt": _labelled_prompt,
    "labelled_messages": _labelled_messages,
    "anchor_positive": _anchor_positive,
    "query_positive": _query_positive,
    "prompt": _prompt,
}


def _conversation(where: str, example: Example, field: str, turns: list[Turn], given: int = 0) -> Example:
    """Return the turns with the example's system prompt and tools, once their order has been checked."""
    turns, given = _in_order(where, example, field, turns, given)
    if not any(turn["role"] == "assistant" for turn in turns[given:]):
        raise UserError(f"{where}: no assistant turn in {field!r}, so there is nothing to learn; remove the example.")
    return {"messages": turns, "tools": _tools(where, example), "given": given}


def _in_order(where: str, example: Example, field: str, turns: list[Turn], given: int = 0) -> tuple[list[Turn], int]:
    """Return the turns with the example's system prompt, and how many are given, once their order has been checked."""
    if example.get("system"):
        turns = [_said("system", _string(where, example, "system")), *turns]
        given += given > 0
    for number, (before, turn) in enumerate(pairwise(turns), start=2):
        if before["role"] == turn["role"] == "user":
            raise UserError(
                f"{where}: turns {number - 1} and {number} of {field!r} are both the user's; join them, or add the "
                "answer between them."
            )
    return turns, given


def _side(where: str, example: Example, field: str, role: str) -> list[Turn]:
    """Return the turns of a field, which is a list of them or one string, spoken by `role`."""
    if isinstance(example.get(field), str):
        return [_said(role, _string(where, example, field))]
    return _turns(where, example, field, "a string or a list of turns")


def _turns(where: str, example: Example, field: str, expected: str = "a list of turns") -> list[Turn]:
    turns = example.get(field)
    if not isinstance(turns, list) or not turns:
        raise _wrong(where, example, field, expected)
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


def _tools(where: str, example: Example) -> list[dict[str, Any]] | None:
    tools = example.get("tools") or None
    if isinstance(tools, str):
        tools = _parsed(f"{where}: 'tools'", tools) or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise _wrong(where, example, "tools", "a list of function descriptions")
    return tools and [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _parsed(where: str, text: str) -> Any:
    try:
        return from_json(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error).partition(";")[0]
        raise UserError(f"{where} holds text that should be JSON and is not ({reason}): {text[:40]!r}.") from None


def _string(where: str, example: Example, field: str, empty: bool = False) -> str:
    value = example.get(field)
    if not isinstance(value, str):
        raise _wrong(where, example, field, "a string")
    if not empty and not value.strip():
        raise UserError(f"{where}: the field {field!r} is empty; fill it, or remove the example.")
    return value


def _said(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


def _wrong(where: str, example: Example, field: str, expected: str) -> UserError:
    found = f"it is {_kind(example[field])}" if field in example else f"this example has {fields_of(example)}"
    return UserError(f"{where}: the field {field!r} must be {expected}; {found}.")


def fields_of(example: Example) -> str:
    """Return the names of an example's fields, for messages."""
    return ", ".join(repr(key) for key in example) or "none"


def _kind(value: Any) -> str:
    if value in ([], "", None):
        return "empty"
    return f"of type {type(value).__name__}"
