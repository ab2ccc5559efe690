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
from typing import Any

from ....spec.errors import UserError
from ....spec.methods.traits import TRAITS, Examples, Method, reading
from .turns import (
    Example,
    Turn,
    as_conversation,
    fields_of,
    in_order,
    read_side,
    read_string,
    read_tools,
    read_turns,
    said,
    wrong,
)

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
    return as_conversation(where, example, field, read_turns(where, example, field))


def _sharegpt(where: str, example: Example) -> Example:
    return _messages(where, example, "conversations")


def _alpaca(where: str, example: Example) -> Example:
    turns, history = [], example.get("history") or []
    if not isinstance(history, list | tuple):
        raise wrong(where, example, "history", "a list of pairs, question and answer")
    for pair in history:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise UserError(f"{where}: every item of 'history' must be a pair of strings, question and answer.")
        turns += [said("user", pair[0]), said("assistant", pair[1])]
    question = read_string(where, example, "instruction")
    if example.get("input"):
        question += "\n\n" + read_string(where, example, "input")
    turns += [said("user", question), said("assistant", read_string(where, example, "output"))]
    return as_conversation(where, example, "output", turns)


def _prompt_completion(where: str, example: Example) -> Example:
    prompt = read_side(where, example, "prompt", "user")
    completion = read_side(where, example, "completion", "assistant")
    return as_conversation(where, example, "completion", prompt + completion, given=len(prompt))


def _preference(where: str, example: Example) -> Example:
    chosen, rejected = (read_side(where, example, field, "assistant") for field in ("chosen", "rejected"))
    if chosen == rejected:
        raise UserError(f"{where}: 'chosen' and 'rejected' are equal, so there is no preference; remove the example.")
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        prompt = read_side(where, example, "prompt", "user")
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
        whole = as_conversation(where, example, field, prompt + answer, given=len(prompt))
        sides |= {"prompt": whole["messages"][: whole["given"]], field: answer, "tools": whole["tools"]}
    return sides


def _judged(where: str, example: Example) -> Example:
    label = example.get("label")
    label = {"true": True, "false": False}.get(label.lower()) if isinstance(label, str) else label  # of a table
    if not isinstance(label, bool):
        raise UserError(f"{where}: 'label' must be true (a good answer) or false; it is {example.get('label')!r}.")
    prompt, completion = (
        read_side(where, example, "prompt", "user"),
        read_side(where, example, "completion", "assistant"),
    )
    whole = as_conversation(where, example, "completion", prompt + completion, given=len(prompt))
    given = whole["messages"][: whole["given"]]
    return {"prompt": given, "completion": completion, "label": label, "tools": whole["tools"]}


def _prompt(where: str, example: Example) -> Example:
    """Return a prompt without an answer; what a reward function needs is in the example's other fields."""
    turns, _ = in_order(where, example, "prompt", read_side(where, example, "prompt", "user"))
    if turns[-1]["role"] not in ("user", "tool"):
        raise UserError(f"{where}: 'prompt' must end with a user's turn, which the model answers.")
    return {"messages": turns, "tools": read_tools(where, example), "given": len(turns)}


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
    return {"text": read_string(where, example, "text", empty=True)}


def _labelled_text(where: str, example: Example) -> Example:
    text = read_string(where, example, "text")
    return {"text": text, "messages": None, "tools": None, "label": _class(where, example)}


def _labelled_prompt(where: str, example: Example) -> Example:
    """Return a prompt with its class; with a `completion` it is the answer that is classified."""
    turns = read_side(where, example, "prompt", "user")
    if example.get("completion"):
        turns += read_side(where, example, "completion", "assistant")
    return _labelled(where, example, turns)


def _labelled_messages(where: str, example: Example) -> Example:
    return _labelled(where, example, read_turns(where, example, "messages"))


def _labelled(where: str, example: Example, turns: list[Turn]) -> Example:
    if example.get("system"):
        turns = [said("system", read_string(where, example, "system")), *turns]
    return {"text": None, "messages": turns, "tools": read_tools(where, example), "label": _class(where, example)}


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
    found = {"anchor": read_string(where, example, anchor), "positive": read_string(where, example, "positive")}
    negative = None if example.get("negative") is None else read_string(where, example, "negative")
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
