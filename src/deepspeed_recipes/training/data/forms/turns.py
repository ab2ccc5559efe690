"""Reads an example's fields: turns in OpenAI's form, their tool calls, and the available tools.

Standard library only, as `formats.py`. Every function raises UserError with the place, the field, the expected value
and the fix.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise, takewhile
from typing import Any

from ....recipe.errors import UserError
from ....recipe.files import Json
from ....recipe.samples import REASONING, ROLES
from . import keys
from .keys import REWRITE, parsed, without_nulls

Example = Json
Turn = Json

NOT_LEARNED = {"train": False}
"""Marks an assistant's turn that is in the context but not in the loss."""
READ = ("role", "content", "tool_calls", "tool_call_id", "name", *NOT_LEARNED, *REASONING)
"""Keys of a turn that are read here or by most templates; a template may read others too."""

COLUMNS = ("role", "speaker", "sender", "author", "from")
"""Columns of tables whose rows are turns, that say who speaks."""
SPEAKERS = (*COLUMNS, "name", "who", "type")
"""Keys of turns that may say who speaks."""
TEXTS = ("text", "msg", "message", "utterance", "body")
"""Keys of turns that hold what is said."""
NO_TEXTS = re.compile(r"(^|_)(id|uuid|ts|at|on)$|time|date|^(created|lang|language|url|refusal)$")
"""Keys of turns that hold something else: a date, a number, an identifier."""
CALL = ("id", "type", "index", "function", "name", "arguments")
"""Keys of a tool call."""


def as_conversation(where: str, example: Example, field: str, turns: list[Turn], given: int = 0) -> Example:
    """Return the turns with the example's system prompt and tools, after checking their order."""
    turns, given = in_order(where, example, field, turns, given)
    if not any(turn["role"] == "assistant" for turn in turns[given:]):
        raise UserError(f"{where}: no assistant turn in {field!r}, so there is nothing to learn; remove the example.")
    return {"messages": turns, "given": given, **read_arguments(where, example)}


def in_order(where: str, example: Example, field: str, turns: list[Turn], given: int = 0) -> tuple[list[Turn], int]:
    """Return the turns with the example's system prompt, and the number of given turns, after checking their order."""
    count = len(turns)
    turns = with_system(where, example, turns)
    given += (len(turns) - count) * (given > 0)
    for number, (before, turn) in enumerate(pairwise(turns), start=2):
        if before["role"] == turn["role"] == "user":
            raise UserError(
                f"{where}: turns {number - 1} and {number} of {field!r} are both the user's; join them "
                "(data.join_turns=true does), or add the answer between them."
            )
        if before["role"] == turn["role"] == "system":
            raise UserError(
                f"{where}: turns {number - 1} and {number} of {field!r} are both system prompts, of which templates "
                "show one; join them."
            )
    made: set[str] = set()  # calls may have no ids
    for number, turn in enumerate(turns, start=1):
        made |= {call["id"] for call in turn.get("tool_calls", ()) if "id" in call}
        answered = turn.get("tool_call_id")
        if made and answered and answered not in made:
            raise UserError(
                f"{where}: turn {number} of {field!r} answers the tool call {answered!r}, which no turn before it "
                f"makes (those have {', '.join(sorted(made)[:3])}); correct the 'tool_call_id'."
            )
    return turns, given


DEFAULT_SYSTEM = "system (data.system)"
"""The field of an example with the system prompt that it gets if it has none."""


def with_system(where: str, example: Example, turns: list[Turn]) -> list[Turn]:
    """Return the turns with the system prompt from the example's own field, or the recipe's if there is none."""
    if not example.get("system"):
        default = example.get(DEFAULT_SYSTEM) if turns[0]["role"] != "system" else None
        return [said("system", default), *turns] if default else turns
    system = said("system", read_string(where, example, "system"))
    if turns[0]["role"] != "system":
        return [system, *turns]
    if turns[0]["content"].strip() != system["content"].strip():
        raise UserError(f"{where}: 'system' and the first turn are two system prompts that differ; remove one of them.")
    return turns


def read_side(where: str, example: Example, field: str, role: str) -> list[Turn]:
    """Return the turns of a field that holds a list of turns, one turn, or a string by `role`."""
    value = example.get(field)
    if isinstance(value, str) and _DIALOGUE.match(value):
        parts = re.split(r"(?:\A\s*|\n\n)(Human|Assistant):", value)[1:]
        turns = [said(role.lower(), content.strip()) for role, content in zip(parts[::2], parts[1::2], strict=True)]
        waits = turns[1:] and turns[-1] == {"role": "assistant", "content": ""}  # for the answer, which follows
        example = {**example, field: turns[:-1] if waits else turns}
    elif isinstance(value, str) and value.lstrip().startswith(("[{", "{")) and re.search('"(role|from)"', value):
        with contextlib.suppress(UserError):  # otherwise it is no JSON in a table's cell, but text
            found = parsed("", value)
            named = ({"role", "content"}, {"from", "value"})
            turns = found if isinstance(found, list) else [found]
            if all(isinstance(turn, dict) and any(one <= {*turn} for one in named) for turn in turns):
                example = {**example, field: found}
    value = example.get(field)
    if isinstance(value, dict):
        return [_turn(f"{where}: {field!r}", value)]
    if not isinstance(value, str):
        return read_turns(where, example, field, "a string or a list of turns")
    if role == "user":
        keys.refuse_placeholder(f"{where}: {field!r}", value)
    return [said(role, read_string(where, example, field))]


_DIALOGUE = re.compile(r"\s*Human:.*?\n\nAssistant:|\n\n(?:Human|Assistant):", re.DOTALL)
"""The beginning of a dialogue in the format of Anthropic's hh-rlhf, whole or in part."""


def read_turns(where: str, example: Example, field: str, expected: str = "a list of turns") -> list[Turn]:
    """Return the turns of a field that holds a list of turns, possibly as JSON text, as in a table's cell."""
    turns = example.get(field)
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = parsed(f"{where}: {field!r}", turns)
    if not isinstance(turns, list) or not turns:
        raise wrong(where, example, field, expected)
    numbered = []
    for number, turn in enumerate(turns, start=1):
        one = turn if isinstance(turn, dict) else {}
        role, content = one.get("role") or one.get("from"), one.get("content") or one.get("value") or ""
        # Tools write an empty system prompt for conversations without one.
        if not (isinstance(role, str) and ROLES.get(role.lower()) == "system" and not str(content).strip()):
            numbered.append((number, turn))
    if not numbered:
        raise wrong(where, example, field, expected)
    speakers = [turn.get("role", turn.get("from")) for _, turn in numbered if isinstance(turn, dict)]
    turns = [_turn(f"{where}: turn {number} of {field!r}", turn, speakers) for number, turn in numbered]
    # Most templates render no ids: to the model, the first result is the first call's. So results get the order of
    # the calls, as their ids or names say.
    for at, calls, results in _called(turns):
        ids, names = [call.get("id") for call in calls], [call["function"]["name"] for call in calls]
        for key, called in (("tool_call_id", ids), ("name", names)):
            answered = [turn.get(key) for turn in results]
            if {*answered} <= {*called} - {None} and len({*answered}) == len(answered) and len({*called}) == len(calls):
                turns[at : at + len(results)] = sorted(results, key=lambda turn: called.index(turn[key]))
                break
    return turns


def _called(turns: list[Turn]) -> Iterator[tuple[int, list[Json], list[Turn]]]:
    """Yield the calls of each turn that has some, the results that follow it, and the place of the first."""
    for at, turn in enumerate(turns, start=1):
        if turn.get("tool_calls"):
            yield at, turn["tool_calls"], [*takewhile(lambda one: one["role"] == "tool", turns[at:])]


def misfits(where: str, example: Example, fields: Iterable[str]) -> list[str]:
    """Return the mistakes in an example's tool calls: against its `tools`, and against the results that follow.

    Public data has such examples, so they are counted and not refused.
    """
    found: list[str] = []
    tools = {tool["function"]["name"]: tool["function"] for tool in read_tools(where, example) or ()}
    for field in fields:
        if not re.search("call|tool|observation|function", str(example.get(field))):  # most, not to be read twice
            continue
        value = example[field]
        if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
            # Text recipes refuse questions with images or their placeholders.
            asked = [ROLES.get(str(turn.get("role", turn.get("from"))).lower()) == "user" for turn in value]
            value = [
                {key: "." if user and key in ("content", "value") else one for key, one in turn.items()}
                for user, turn in zip(asked, value, strict=True)
            ]
        turns = read_side(where, {**example, field: value}, field, "assistant")
        for before, turn in pairwise(turns):
            # Some data spells a call out in the answer's text.
            called = before["role"] == "assistant" and (before.get("tool_calls") or "{" in before["content"])
            if turn["role"] == "tool" and before["role"] != "tool" and not called:
                found.append("a result follows no call")
        for at, calls, results in _called(turns):
            ids = [call["id"] for call in calls if "id" in call]
            answered = [turn["tool_call_id"] for turn in results if turn.get("tool_call_id")]
            if len({*ids}) < len(ids) or len({*answered}) < len(answered):
                found.append("several calls or results of a turn have one id")
            elif answered and ids and {*answered} - {*ids}:
                found.append("a result follows another turn's calls")
            elif len(results) > len(calls):
                found.append("a turn has more results than calls")
            if (not results and turns[at:]) or (answered and {*ids} - {*answered}):
                found.append("a call has no result before the next turn")
        if example.get("tools") is None:
            continue
        every = [call for _, calls, _ in _called(turns) for call in calls]
        said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        for written in chain.from_iterable(map(_WRITTEN.findall, said)):
            with contextlib.suppress(UserError):  # to the model, it is text like any other
                every += _calls(where, written)
        for call in every:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if name not in tools:
                found.append(f"{name!r} is not in 'tools'")
                continue
            known, required = _parameters(tools[name])
            found += [f"{name!r} is called without {one!r}" for one in required if one not in arguments]
            found += [f"{name!r} has no {one!r}" for one in arguments if known is not None and one not in known]
    return list(dict.fromkeys(found))


_WRITTEN = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""A call that an answer spells out, as in Hermes's data."""


def _parameters(function: Json) -> tuple[Iterable[str] | None, list[str]]:
    """Return the names of a function's parameters, None if any may be given, and those that are required."""
    schema = function.get("parameters")
    if not isinstance(schema, dict) or any(key in schema for key in ("anyOf", "oneOf", "allOf", "$ref")):
        return None, []
    if isinstance(schema.get("type"), str) or isinstance(schema.get("required"), list):
        known, required = schema.get("properties"), schema.get("required")
        others = schema.get("additionalProperties") or schema.get("patternProperties")
        required = [one for one in required if isinstance(one, str)] if isinstance(required, list) else []
        return None if others or not isinstance(known, dict) else known, required
    return schema if schema and all(isinstance(one, dict) for one in schema.values()) else None, []  # as xLAM's


def renamed_turns(where: str, value: Any, keys: Mapping[str, str], roles: Mapping[str, str], join: bool) -> Any:
    """Return a field's turns with their keys and roles renamed and, with `join`, consecutive turns of one role joined.

    A value that holds no turns is returned unchanged.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed(where, value)
    if not isinstance(value, list | dict):
        return value
    turns: list[object] = []
    for turn in value if isinstance(value, list) else [value]:
        if isinstance(turn, dict):
            turn = {keys.get(key, key): one for key, one in turn.items() if key in keys or key not in keys.values()}
            key = "role" if isinstance(turn.get("role"), str) else "from"
            if isinstance(role := turn.get(key), str):
                turn[key] = roles.get(role.lower(), role)
        if join and turns and (joined := _joined(turns[-1], turn)):
            turns[-1] = joined
        else:
            turns.append(turn)
    return turns if isinstance(value, list) else turns[0]


def turns_of(where: str, value: object) -> list[Any]:
    """Return the items of a list, or of one that is JSON text, as in a table; none of any other value."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(UserError):  # which the conversion raises
            value = parsed(where, value)
    return value if isinstance(value, list) else []


def _joined(before: object, turn: object) -> Turn | None:
    """Return two turns as one, or None if their roles, or anything but their texts, differ."""
    if not (isinstance(before, dict) and isinstance(turn, dict)):
        return None
    for role, content in (("role", "content"), ("from", "value")):
        texts = [text for text in (before.get(content), turn.get(content)) if isinstance(text, str)]
        if len(texts) == 2:
            own, other = ({**one, role: ROLES.get(str(one.get(role)).lower()), content: ""} for one in (before, turn))
            if own == other and own[role] in ("system", "user", "assistant"):
                return {**before, content: "\n".join(text for text in texts if text.strip())}
    return None


def _turn(where: str, turn: object, speakers: Iterable[object] = ()) -> Turn:
    """Return a turn in OpenAI's form; `speakers` are those of its conversation, for a message that renames them."""
    if not isinstance(turn, dict):
        raise UserError(f"{where} must be an object with 'role' and 'content'; it is {_kind(turn)}; {REWRITE}.")
    # Tables give a turn the keys of all others, with empty values, and templates would print or count them.
    turn = {
        key: value
        for key, value in turn.items()
        if not (value in (None, []) or (isinstance(value, bytes) and key not in keys.MEDIA))
    }
    for one, other in (("role", "from"), ("content", "value"), ("tool_calls", "function_call")):
        if one in turn and other in turn:
            raise UserError(f"{where} has {one!r} and {other!r}, which mean the same; remove one of them.")
    if shown := [name for name in keys.MEDIA if turn.get(name) not in keys.EMPTY]:
        raise UserError(
            f"{where} has {shown[0]!r}, which no turn has: name images in the example's own 'images', which recipes "
            "with model.vision=true read, or remove the field to train on the text alone."
        )
    text_key = "value" if "from" in turn else "content"
    speaker = turn.pop("from", None) if "role" not in turn else turn.pop("role")
    content = turn.pop("value", "") if "content" not in turn else turn.pop("content")
    role = _role(where, turn, speaker, content, speakers)
    if isinstance(content, list):
        keys.refuse_parts(where, content)
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UserError(f"{where} needs a 'role' and a 'content', both strings; the content is {_kind(content)}.")
    if role == "user":
        keys.refuse_placeholder(where, content)
    if role == "call":
        role, content, turn["tool_calls"] = "assistant", "", content
    if "function_call" in turn:
        turn["tool_calls"] = turn.pop("function_call")
    if role != "assistant" and "tool_calls" in turn:
        raise UserError(f"{where} ({speaker}) has 'tool_calls'; only the assistant calls tools: correct the role.")
    if turn.get("tool_calls"):
        turn["tool_calls"] = _calls(where, turn["tool_calls"])
    reasoning = ""
    for name in filter(turn.__contains__, REASONING):
        if turn[name] in ("", False):
            del turn[name]
        elif role != "assistant" or not isinstance(turn[name], str):
            raise UserError(f"{where} has {name!r}, which must be a string, and only the assistant's turns have it.")
        elif not reasoning:
            reasoning = name
        elif turn.pop(name).strip() != turn[reasoning].strip():
            raise UserError(f"{where} has {reasoning!r} and {name!r}, which mean the same; remove one of them.")
    if not (content.strip() or turn.get("tool_calls") or reasoning or role == "tool"):
        raise UserError(f"{where} ({speaker}) is empty: no {text_key!r}; fill it, or remove the example.")
    learned = role != "assistant" or keys.is_learned(where, turn)
    turn = {key: value for key, value in turn.items() if key not in (*keys.FLAGS, keys.DETAIL)}
    return {"role": role, "content": content, **turn, **({} if learned else NOT_LEARNED)}


def _role(where: str, turn: Turn, speaker: Any, content: object, speakers: Iterable[object]) -> str:
    """Return the role of a turn's speaker, or say how to rename its keys or roles; `turn` has the other keys."""
    unnamed = not isinstance(speaker, str)
    known = {*READ, *keys.FLAGS} - ({"name"} if unnamed else set())
    others = [key for key, value in turn.items() if isinstance(value, str) and value and key not in known]
    if unnamed or (content == "" and others and not turn.keys() & {*READ, "function_call"}):
        missing = ["role"] * (speaker is None) + ["content"] * (content == "")
        who = next(filter(others.__contains__, SPEAKERS), None)
        who = who or next((key for key in others if turn[key].lower() in ROLES), None)
        left = [key for key in others if key not in (*SPEAKERS, who)]
        written = [key for key in left if key in TEXTS] or [
            key
            for key in left
            if not NO_TEXTS.search(key.lower())
            and re.search(r"[^\W\d_]{2}", turn[key])
            and not re.fullmatch(r"[\da-fA-F-]{8,}", turn[key])
        ]
        columns = {"role": who, "content": written[0] if len(written) == 1 else "KEY_OF_THE_TEXT"}
        if ("role" in missing and who is None) or not written:
            columns = {}  # such as a question with its answer, of which neither says who speaks
        pairs = ",".join(f"{columns[field]}:{field}" for field in missing if field in columns)
        fix = f"Rename the keys of turns: data.columns={pairs}." if pairs else f"It has {fields_of(turn)}; {REWRITE}."
        raise UserError(f"{where} needs a 'role' and a 'content', both strings. {fix}")
    if speaker.lower() in ROLES:
        return ROLES[speaker.lower()]
    spoken = {one.lower(): one for one in [speaker, *speakers][::-1] if isinstance(one, str)}
    roles = [ROLES.get(name) for name in spoken]
    free = [one for one in ("user", "assistant") if one not in roles] or ["assistant"]
    names = [spoken[name] for name in reversed(spoken) if name not in ROLES][: len(free)]
    names += ["NAME"] * (len(free) - len(names))
    pairs = ",".join(f"{name}:{one}" for name, one in zip(names, free, strict=True))
    raise UserError(
        f"{where} has the unknown role {speaker!r}; known roles are {', '.join(ROLES)}. Rename others: "
        f"data.roles={pairs}."
    )


def _calls(where: str, calls: Any) -> list[Json]:
    """Return tool calls in OpenAI's form, with their arguments as an object: templates convert it to JSON.

    Calls that are JSON text keep their nulls, see `without_nulls`.
    """
    as_text = isinstance(calls, str)
    if as_text:
        calls = parsed(where, calls)
    checked = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = (call.get("function") or call) if isinstance(call, dict) else {}
        arguments = function.get("arguments") if isinstance(function, dict) else 0
        held = {**call, **function} if isinstance(call, dict) and isinstance(function, dict) else {}
        if other := [key for key, value in held.items() if key not in CALL and value not in keys.EMPTY]:
            raise UserError(
                f"{where} has a tool call with {other[0]!r}, which is not read; a call has a 'name' and 'arguments'."
            )
        if isinstance(arguments, str):
            arguments = parsed(where, arguments) if arguments.strip() else {}
        elif arguments is None:
            arguments = {}
        elif not as_text:
            arguments = without_nulls(arguments)
        if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
            raise UserError(
                f"{where} has a malformed tool call: {str(call)[:60]}\n"
                'A call needs a name and an object of arguments: {"name": "add", "arguments": {"a": 1}}.'
            )
        _check_numbers(f"{where}: the arguments of {function['name']!r}", arguments)
        function = {"name": function["name"], "arguments": arguments}
        checked.append({**({"id": call["id"]} if call.get("id") else {}), "type": "function", "function": function})
    return checked


def read_arguments(where: str, example: Example) -> Example:
    """Return the chat template's other arguments: the tools, or None, and options if the example has any."""
    options = keys.options(where, example)
    return {"tools": read_tools(where, example), **({"options": options} if options else {})}


def read_tools(where: str, example: Example) -> list[Json] | None:
    """Return the example's tools in OpenAI's form, or None if it has none."""
    tools = example.get("tools") or None
    if isinstance(tools, str):
        tools = parsed(f"{where}: 'tools'", tools) if tools.strip() else None
    elif isinstance(tools, list):
        tools = [parsed(f"{where}: 'tools'", tool) if isinstance(tool, str) else without_nulls(tool) for tool in tools]
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise wrong(where, example, "tools", "a list of function descriptions")
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or ()]
    for number, tool in enumerate(tools, start=1):
        if not (isinstance(tool["function"], dict) and tool["function"].get("name")):
            raise UserError(f"{where}: 'tools': the function {number} has no name; add it, or remove the function.")
    _check_numbers(f"{where}: 'tools'", tools)
    return tools or None


def _check_numbers(where: str, value: object) -> None:
    """Refuse NaN and infinity, which templates would write into JSON that no client can parse."""
    try:
        json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        raise UserError(f"{where} hold NaN or Infinity, which are not JSON; write a number or null.") from None


def read_string(where: str, example: Example, field: str, empty: bool = False) -> str:
    """Return a string field, which must not be blank unless `empty`."""
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
    """Return the error for a field that is missing or has another type than expected."""
    found = f"this example has {fields_of(example)}; name the right one with data.columns=NAME:{field}"
    if field in example:
        found = f"it is {_kind(example[field])}" + f"; {REWRITE}" * (example[field] not in ([], "", None))
    return UserError(f"{where}: the field {field!r} must be {expected}; {found}.")


def fields_of(example: Example) -> str:
    """Return the names of an example's fields, for messages."""
    return ", ".join(repr(key) for key in example) or "none"


def _kind(value: object) -> str:
    if value in ([], "", None):
        return "empty"
    return f"of type {type(value).__name__}"
