"""The supported forms of examples, and the one form per kind of method that training reads.

Standard library only: the launcher checks local files with these functions before it starts a process, and the ranks
convert every source with the same functions.

    a method that reads  gets from every form
    conversations        messages (turns in OpenAI's form; `train`: false marks those that stay out of the loss), tools,
                         given (leading turns that are not in the loss)
    pairs                prompt, chosen, rejected (turns each), tools
    judged answers       prompt, completion (turns each), label (true: good), tools
    texts                text
    labelled texts       text or messages (the other is None), tools, label (the class's name)
    matching texts       anchor, positive, negative (a list of texts, which may be empty)
    prompts              what conversations get, with or without an answer, and fields (all other fields)

There are also options next to the tools, where an example has arguments for the chat template.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice

from ....recipe import own_code, variants
from ....recipe.errors import UserError, counted
from ....recipe.files import Json, JsonView
from ....recipe.methods import METHODS, Examples, reading
from ....recipe.recipe import Data, names
from ....recipe.samples import ROLES
from ..text_files import Bad, refuse
from . import keys
from .turns import (
    COLUMNS,
    DEFAULT_SYSTEM,
    NOT_LEARNED,
    READ,
    REWRITE,
    SPEAKERS,
    Example,
    Turn,
    as_conversation,
    fields_of,
    in_order,
    misfits,
    read_arguments,
    read_side,
    read_string,
    read_tools,
    read_turns,
    renamed_turns,
    said,
    turns_of,
    with_system,
    wrong,
)

FORMS: dict[str, tuple[Examples, tuple[str, ...]]] = {
    "messages": ("conversations", ("messages",)),
    "sharegpt": ("conversations", ("conversations",)),
    "alpaca": ("conversations", ("instruction", "output")),
    "prompt_completion": ("conversations", ("prompt", "completion")),
    "preference": ("pairs", ("chosen", "rejected")),
    "preference_messages": ("pairs", ("messages", "rejected_response")),
    "judged": ("judged answers", ("prompt", "completion", "label")),
    "judged_messages": ("judged answers", ("messages", "label")),
    "judged_sharegpt": ("judged answers", ("conversations", "label")),
    "judged_alpaca": ("judged answers", ("instruction", "output", "label")),
    "text": ("texts", ("text",)),
    "labelled_text": ("labelled texts", ("text", "label")),
    "labelled_prompt": ("labelled texts", ("prompt", "label")),
    "labelled_messages": ("labelled texts", ("messages", "label")),
    "anchor_positive": ("matching texts", ("anchor", "positive")),
    "query_positive": ("matching texts", ("query", "positive")),
    "prompt": ("prompts", ("prompt",)),
}
"""Each form's kind of examples, and the fields that identify it."""

TRIED = 1000
"""Examples that are tried to find the form of a source, whose first examples may be bad."""
AHEAD = 100
"""Examples that are searched for a column of `data.columns` that the first one lacks."""
PASSAGES = ("input", "context")
"""Fields with a passage that a question refers to, which follows the question: Alpaca's and Dolly's names."""
BY_CHANCE = 20
"""Characters of a passage from which a question does not hold it by chance."""
ASKING = ("prompt", "instruction")
"""The fields with a question, to which passages and an earlier `history` belong."""
PROMPTS = ("prompt", "conversations", "messages", "instruction", "question")
"""The fields with a pair's prompt, including LLaMA-Factory's and those of public pairs; the first that an example has
is read."""

FLAGGED: tuple[Examples, ...] = ("conversations", "pairs", "judged answers")
"""The kinds of examples of which flags may leave one out of the loss."""

COMPARED = FLAGGED[1:]
"""The kinds of examples whose answers are compared: TRL compares all their tokens."""
ANSWERS = ("chosen", "rejected", "completion")
"""The fields of these examples, once converted, that have an answer's turns."""
NAMED = 8
"""Maximum number of keys in a line."""
LONGEST = 2**24
"""Characters of an example; the tokenizer takes about 250 bytes for each."""
TURNS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""The fields that may hold turns."""

FIELDS = (
    *dict.fromkeys(field for _, fields in FORMS.values() for field in fields),
    *(*PASSAGES, "history", "system", "tools", "negative", "images", "image"),
)
"""Every field that a conversion reads, and that `data.columns` may name."""
OF_TURNS = ("role", "content")
"""The keys of turns that `data.columns` may name as well."""
BEFORE = "{} (before data.columns)"
"""Name of a column whose own name another column gets; it is listed among those that nothing reads."""
HOW_TO_RENAME = (
    "write COLUMN:FIELD, several with commas (question:prompt,answer:completion); the fields are "
    f"{', '.join(FIELDS)}, and in turns {' and '.join(OF_TURNS)}."
)
"""The end of messages about `data.columns`."""


def read_by(form: str, method: str) -> set[str]:
    """Return the fields of an example that a method reads in a form."""
    kind, fields = FORMS[form]
    read = {*fields, *(("negative",) if kind == "matching texts" else ())}
    if kind == "texts" or kind == "matching texts" or form == "labelled_text":
        return read
    read |= {
        "system",
        DEFAULT_SYSTEM,
        "tools",
        *keys.OPTIONS,
        *(keys.FLAGS if METHODS[method].examples in FLAGGED else ()),
    }
    read |= {"prompt"} if form == "preference" else {"completion"} if form == "labelled_prompt" else set()
    return read | ({*PASSAGES, "history"} if read & {*ASKING} and _takes_passages(form, method) else set())


def _takes_passages(form: str, method: str) -> bool:
    """Return whether a question's passage is appended to it; a reward function gets all other fields itself."""
    return METHODS[method].examples != "prompts" or form == "alpaca"


def form_of(where: str, example: Example, method: str, asked: str = "auto") -> str:
    """Return the form of a file, detected from the fields of its first example unless the recipe names a form.

    A form that only another method reads is refused.
    """
    example = keys.with_usual_names(where, example)
    if asked != "auto":
        if not _reads(method, asked):
            raise UserError(f"data.form={asked}: is {_serves(asked)}; {_needs(method)}.")
        return asked
    found = [form for form, (_, fields) in FORMS.items() if all(example.get(field) is not None for field in fields)]
    suitable = [form for form in found if _reads(method, form)]
    found = [form for form in found if form != "prompt"]  # its one field is in most forms, known or not
    first = (suitable or found)[:1]
    judged = keys.yes_or_no(example.get("label"), keys.JUDGEMENTS) is not None  # half of the answers may be bad
    if judged and first and FORMS[first[0]][0] == "conversations" and method != "kto":
        raise UserError(
            f"{where}: a 'label' of yes or no marks answers that were judged good or bad, for the variant kto_lora.\n"
            "For another method keep those whose label is true and remove the label, or make pairs of 'chosen' and "
            "'rejected' for dpo_lora; data.form, set to the form without the label, trains on all of them as they are."
        )
    if suitable:
        return suitable[0]
    for kind, fields in FORMS.values():
        if kind == METHODS[method].examples and all(field in example for field in fields):
            empty = next(field for field in fields if example[field] is None)
            raise UserError(f"{where}: the field {empty!r} is empty; fill it, or remove the example.")
    if METHODS[method].examples == "conversations" and (turn := next(filter(example.get, COLUMNS), None)):
        raise UserError(
            f"{where}: is one turn ({fields_of(example)}), and an example is a whole conversation; group the rows of "
            f'each: {{"messages": [{{"role": ..., "content": ...}}, ...]}}. data.roles renames the values of {turn!r}.'
        )
    if found:
        raise UserError(f"{where}: is in the form {found[0]}, {_serves(found[0])}; {_needs(method)}. {keys.REWRITE}.")
    raise UserError(
        f"{where}: its fields ({fields_of(example)}) belong to no known form; {_needs(method)}. Say which is which, as "
        f"in {_named_columns(example, METHODS[method].examples)}."
    )


_ANSWERED = "completion response output solution answer targets target reply"
COLUMNS_OF = {
    **dict.fromkeys(
        ("prompt", "instruction", "anchor"), "prompt question query instruction problem inputs input user q"
    ),
    **dict.fromkeys(("completion", "output"), _ANSWERED),
    "chosen": "chosen preferred accepted better best good winning winner positive j",
    "rejected": "rejected non worse worst poor bad losing loser negative k",
    "positive": f"positive {_ANSWERED}",
    "text": "text sentence comment body review content",
    "label": "label judgement topic class category kind is",
}
"""Words in the names of columns that may be a field, the likeliest first."""
_NO_TEXT = re.compile(r"(?:^|_)(?:id|uuid|model|score|rating|rank|source|domain|lang|language|type|name)s?(?:$|_)|:|,")


def _named_columns(example: Example, kind: Examples) -> str:
    """Return `data.columns` with the example's own columns, or else with invented names and another way."""
    lists = [(name, value[0]) for name, value in example.items() if isinstance(value, list) and value]
    turns = [name for name, one in lists if isinstance(one, dict) and one.keys() & {*SPEAKERS}]
    if turns and kind == "conversations":
        return f"data.columns={turns[0]}:messages"
    fields = next(fields for one, fields in FORMS.values() if one == kind and len(fields) > (kind == "conversations"))
    if kind == "conversations" and "instruction" not in example:
        fields = ("prompt", "completion")
    fields = ("prompt", *fields) if kind == "pairs" else fields
    read = PROMPTS if kind == "pairs" else ()
    missing = [one for one in fields if one not in example and not (one == "prompt" and {*read} & {*example})]
    kinds = {field: (str, bool) if field == "label" else (str,) for field in missing}
    texts = [name for name, value in example.items() if isinstance(value, str | bool) and not _NO_TEXT.search(name)]
    kept = {*fields, *read, "system", "history", "context", *(("input",) if "instruction" in example else ())}
    left = [name for name in texts if name not in kept]
    found: dict[str, str] = {}
    for field in sorted(missing, key="rejected".__ne__):  # a `non_preferred` answer is not the preferred one
        words = COLUMNS_OF.get(field, field).split()
        places = [
            (word not in (name, name.lower()), place, name)
            for place, word in enumerate(words)
            for name in left
            if word in re.split(r"[\W_]+", name.lower()) and isinstance(example[name], kinds[field])
        ]
        if places:
            found[field] = min(places)[2]
            left.remove(found[field])
    only = [name for name in texts if isinstance(example[name], str) and name not in kept]
    if len(found) < len(missing) and len(only) == len(missing) and kind != "pairs":
        found = dict(zip(missing, only, strict=True))
    if len(found) == len(missing):
        return "data.columns=" + ",".join(f"{found[field]}:{field}" for field in missing)
    invented = ("question", "answer", "judgement" if kind == "judged answers" else "worse_answer")
    columns = ",".join(f"{name}:{field}" for name, field in zip(invented, fields, strict=False))
    return f"data.columns={columns}; {REWRITE}"


def _reads(method: str, form: str) -> bool:
    """Return whether a method reads a form; where prompts are enough, those of conversations are too."""
    wanted = METHODS[method].examples
    return FORMS[form][0] == wanted or (wanted == "prompts" and FORMS[form][0] == "conversations")


def converted(
    located: Iterable[tuple[str, Example]],
    method: str,
    form: str = "auto",
    bad: Bad | None = None,
    first: str | None = None,
) -> Iterator[Example]:
    """Yield the examples of one source, (place, example) each, as the method reads them; each file has one form.

    `bad` is called with the errors of examples, which are otherwise raised. `first` is the form of the first example
    that has one, in which those before the first one of a file are read.
    """
    found, file = None, ""
    for where, given in located:
        if file_of(where) != file:
            found, file = None, file_of(where)
        try:
            found = found or form_or_none(where, given, method, form)
            example = _converted(where, given, method, found or first or form_of(where, given, method, form))
        except UserError as error:
            other = form_or_none(where, given, method) if found else None
            forms = UserError(
                f"{where}: is in the form {other}, and the first example of {file.rpartition('/')[2]} in the form "
                f"{found}; give each form a file of its own."
            )
            refuse(error if other in (None, found) else forms, bad)
        else:
            yield example


def file_of(where: str) -> str:
    """Return the file, or the data set, of a place such as `FILE:12` or `FILE: row 12`."""
    return where.rpartition(":")[0]


def form_or_none(where: str, example: Example, method: str, asked: str = "auto") -> str | None:
    """Return an example's form by `form_of`, or None if that is unknown."""
    with contextlib.suppress(UserError):
        return form_of(where, example, method, asked)
    return None


def _converted(where: str, given: Example, method: str, form: str) -> Example:
    kind = METHODS[method].examples
    example = keys.with_usual_names(where, given)
    media = next((name for name in keys.MEDIA if example.get(name) not in keys.EMPTY), None)
    if media and kind != "texts":  # a model that does not receive them would learn to make answers up
        holds = "images, which only recipes with model.vision=true read, such as tiny_vision's"
        if not media.startswith("image"):
            holds = f"{'sound' if media.startswith('audio') else 'video'}, which no recipe reads"
        raise UserError(f"{where}: {media!r} holds {holds}; remove the field to train on the text alone.")
    if not _takes_passages(form, method):
        example = {name: value for name, value in example.items() if name not in (*PASSAGES, "history")}
    field = FORMS[form][1][0]
    if (
        kind == "prompts"
        and form in ("messages", "sharegpt")
        and read_turns(where, example, field)[-1]["role"] == "user"
    ):
        read = _prompt(where, {**example, "prompt": example[field]})  # the model answers
    else:
        read = CONVERSIONS[form](where, example)
    if (size := characters(read)) > LONGEST:
        raise UserError(
            f"{where}: has {size:,} characters, and tokenizing more than {LONGEST:,} at once takes gigabytes; split it "
            "into several examples."
        )
    if kind == "prompts":
        if keys.options(where, given):
            raise UserError(f"{where}: has arguments for the chat template, which prompts do not use; remove them.")
        turns, known = read["messages"], read_by(form, method)
        fields = {name: value for name, value in given.items() if name not in known}
        if turns[-1]["role"] == "assistant" and fields.get("expected") not in (*keys.EMPTY, turns[-1]["content"]):
            raise UserError(
                f"{where}: has an answer and the field 'expected', which a reward function gets under one name; rename "
                "or remove one of them."
            )
        return {
            **read,
            "given": len(turns) - (turns[-1]["role"] == "assistant"),  # an answer may follow
            # For reward functions that are written for TRL, and get a text where the data has a text.
            "text": given["prompt"] if isinstance(given.get("prompt"), str) else None,
            "fields": json.loads(json.dumps(fields, default=str)),
        }
    if kind in FLAGGED:
        learned = keys.is_learned(where, example, whole=True)
        if kind == "conversations" and not learned:
            turns = [turn | NOT_LEARNED if turn["role"] == "assistant" else turn for turn in read["messages"]]
            return {**read, "messages": turns}
        sides = [turn for name in ANSWERS for turn in read.get(name, ())]
        if not learned or any("train" in turn for turn in sides):
            raise UserError(
                f"{where}: a flag excludes this answer from the loss, and the method compares whole answers; remove "
                "the example, or the flag."
            )
    return read


def characters(value: object, other: int = 0) -> int:
    """Return the length of all texts and bytes in a value; numbers, booleans and nulls count as `other` each."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        value = list(value.values())
    return sum(characters(one, other) for one in value) if isinstance(value, list) else other


def first_form(located: Iterable[tuple[str, Example]], method: str, asked: str) -> tuple[str, Example, str] | None:
    """Return the first example of a source whose form is known, its place, and the form; None without examples.

    If no example has one, the first example's error is raised.
    """
    first = None
    for where, example in islice(located, TRIED):
        try:
            return where, example, form_of(where, example, method, asked)
        except UserError as error:
            first = first or error
    if first:
        raise first
    return None


FOR_REWARD, ODD, ODD_AT = "reward: ", "inconsistent: ", "inconsistent at: "
"""Beginnings of keys of reward functions in `unread`, of inconsistencies and of their places."""
RATED = re.compile(r"(?=.*chosen).*(score|rating|reward)", re.IGNORECASE)
"""Keys with a number for a pair's better answer; the same with `rejected` has that of the other."""


def unread(where: str, example: Example, form: str, method: str) -> list[str]:
    """Return the keys of an example that no conversion reads, and with a dot those that only a template may read.

    Tool calls that do not fit the tools, scores that contradict a pair, and others' turns inside an answer that is
    compared are returned too.
    """
    example = keys.with_usual_names(where, example)
    read = read_by(form, method) | ({_prompt_field(example)} if form == "preference" else set())
    found = [name for name, value in example.items() if name not in read and value not in keys.EMPTY]
    found = [FOR_REWARD + name for name in found] if METHODS[method].examples == "prompts" else found
    if (loss := example.get(keys.MEASURED)) not in keys.EMPTY and str(loss).lower() not in ("true", "false"):
        found.append(keys.MEASURED)  # a measurement, not a flag
    lists = [turns_of(where, value) for name, value in example.items() if name in read]
    turns = [one for turns in lists for one in turns if isinstance(one, dict) and ("role" in one or "from" in one)]
    known = {*READ, *keys.FLAGS, keys.DETAIL, "from", "value", "function_call"}
    for turn in turns:
        role = ROLES.get(str(turn.get("role", turn.get("from"))).lower())
        read_here = known if role in ("tool", "call") else known - {"name"}  # templates write a tool's name only
        found += [f"turns.{key}" for key, value in turn.items() if value not in (None, []) and key not in read_here]
        content = turn.get("content")
        for part in content if isinstance(content, list) else ():  # such as OpenAI's `detail`, Qwen's `max_pixels`
            if isinstance(part, dict):
                link = part.get("image_url")
                more = [key for key, value in part.items() if key not in keys.OF_PART and value not in keys.EMPTY]
                more += [key for key in link if key != "url"] if isinstance(link, dict) else []
                found += [f"images.{key}" for key in more]
    if "chat_template_kwargs" in read:
        found += [f"chat_template_kwargs.{name}" for name in keys.options(where, example) or ()]
    odd, named = [], {name.lower(): name for name in example}
    for name, value in example.items() if form == "preference" else ():
        other = named.get(name.lower().replace("chosen", "rejected"), "")
        than = example.get(other)
        if RATED.match(name) and isinstance(value, int | float) and isinstance(than, int | float):
            found = [one for one in found if one not in (name, other)]
            if not value > than:
                odd.append(f"{name} is not above {other}")
    with contextlib.suppress(UserError):  # which the conversion raises
        compared = CONVERSIONS[form](where, example) if METHODS[method].examples in COMPARED else {}
        answers = [turn for field in ANSWERS for turn in compared.get(field, ())]
        if others := {turn["role"] for turn in answers} - {"assistant"}:
            odd.append(f"an answer holds turns of {' and '.join(sorted(others))}, which are learned as part of it")
    with contextlib.suppress(UserError):
        odd += misfits(where, example, (name for name in TURNS if name in read))
    found += [ODD_AT + where, *(ODD + one for one in odd)] if odd else []
    return list(dict.fromkeys(found))


def unread_line(name: str, counts: Mapping[str, int], template: str) -> str | None:
    """Return lines with the keys of a source that neither this project nor the chat template reads, or None.

    `counts` is the number of examples by key, from `unread`. The keys that only a reward function gets are on a line of
    their own, since which of them it reads is not known, and so is what does not fit together in examples.
    """
    found = {}
    named = re.findall(r"\bfor\s+(\w+)\s+in\s+\w*messages|\bset\s+(\w+)\s*=\s*\w*messages\[", template)
    turns = "|".join([r"(?:message|msg|turn)\w*", *filter(None, chain.from_iterable(named))])
    of_turn = rf"\b(?:{turns}|messages\s*\[[^\]]*\])(?:\.|\[['\"]|\.get\(['\"])"
    for key, count in counts.items():
        place, _, last = key.partition(".")
        # A turn's `tools` is not the template's variable of that name, and the other way round.
        before = of_turn if place == "turns" else r"(?<![\w.'\"])"
        if not last or key.startswith(ODD) or not re.search(rf"{before}{re.escape(last)}\b", template):
            found[key] = count
    places = [key.removeprefix(ODD_AT) for key in counts if key.startswith(ODD_AT)]
    misfit = f"warning: inconsistencies in {counted(len(places), 'example')}, first in {[*places, ''][0]}"
    lines = []
    for start, what in (
        ("", "keys that nothing reads, with their numbers of examples"),
        (FOR_REWARD, "keys that only the reward function gets, with their numbers of examples"),
        (ODD, misfit),
    ):
        others = (FOR_REWARD, ODD, ODD_AT)
        names = [key for key in found if (key.startswith(start) if start else not key.startswith(others))]
        names.sort(key=lambda key: -found[key])
        shown = [f"{key.removeprefix(start) or repr(key)} ({found[key]})" for key in names[:NAMED]]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        if shown:
            lines.append(f"{name}: {what}: {', '.join(shown)}{more}")
    return "\n".join(lines) or None


def _serves(form: str) -> str:
    named = [name for name in variants.INHERITED for method in reading(FORMS[form][0]) if name.startswith(method)]
    *others, last = named or ["full", "lora", "distill"]
    return f"for the variant {', '.join(others)}{' or ' if others else ''}{last}"


def _needs(method: str) -> str:
    forms = (f"{form} ({', '.join(fields)})" for form, (_, fields) in FORMS.items() if _reads(method, form))
    return f"the method {method} reads {', '.join(forms)}"


def _messages(where: str, example: Example, field: str = "messages") -> Example:
    return as_conversation(where, example, field, read_turns(where, example, field))


def _alpaca(where: str, example: Example) -> Example:
    turns = _asked(where, example, "instruction")
    return as_conversation(where, example, "output", [*turns, said("assistant", read_string(where, example, "output"))])


def _asked(where: str, example: Example, field: str = "prompt") -> list[Turn]:
    """Return the turns of a question: its history, then the field with its passages."""
    asked = read_side(where, example, field, "user")
    for name in PASSAGES:
        passage = read_string(where, example, name) if example.get(name) not in keys.EMPTY else ""
        # A question may hold its passage already; a short one, such as a number, is in it by chance.
        whole = len(passage) >= BY_CHANCE
        held = (passage in turn["content"] if whole else passage in turn["content"].splitlines() for turn in asked)
        if passage and not any(held):
            if not isinstance(example[field], str):
                raise UserError(
                    f"{where}: {name!r} follows a question that is text; put it into the turns of {field!r}."
                )
            asked = [said("user", f"{asked[0]['content']}\n{passage}")]  # as LLaMA-Factory and ms-swift join them
    history = example.get("history") or []
    if isinstance(history, str):
        history = keys.parsed(f"{where}: 'history'", history)
    if not isinstance(history, list | tuple):
        raise wrong(where, example, "history", "a list of pairs, question and answer")
    turns = []
    for pair in history:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise UserError(f"{where}: every item of 'history' must be a pair of strings, question and answer.")
        turns += [said("user", pair[0]), said("assistant", pair[1])]
    return turns + asked


def _prompt_completion(where: str, example: Example) -> Example:
    prompt = _asked(where, example)
    completion = read_side(where, example, "completion", "assistant")
    earlier = bool(example.get("history")) and isinstance(example["prompt"], str)  # its answers are learned, too
    return as_conversation(where, example, "completion", prompt + completion, given=0 if earlier else len(prompt))


def _prompt_field(pair: Example) -> str:
    return next((name for name in PROMPTS if pair.get(name) not in keys.EMPTY), PROMPTS[0])


def _preference(where: str, example: Example) -> Example:
    chosen, rejected = (read_side(where, example, field, "assistant") for field in ("chosen", "rejected"))
    if chosen == rejected:
        raise UserError(f"{where}: 'chosen' and 'rejected' are equal and show no preference; remove the example.")
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        prompt = _asked(where, example, _prompt_field(example))
    else:  # whole conversations: their common start is the prompt, which the field `prompt` repeats if there is one
        pairs = zip(chosen, rejected, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        # `messages` and `conversations` may repeat a whole conversation, with its answer; these fields may not.
        again = next((name for name in ASKING if example.get(name) not in keys.EMPTY), None)
        asked = read_side(where, example, again, "user") if prompt and again else []
        contents = [turn["content"].strip() for turn in prompt]
        if any(turn["content"].strip() not in contents for turn in asked):
            raise UserError(
                f"{where}: {again!r} is not in the turns with which 'chosen' and 'rejected' start; correct it, or "
                "remove it to train on those turns."
            )
    sides: Json = {}
    for field, answer in (("chosen", chosen), ("rejected", rejected)):
        if not prompt or not answer or answer[0]["role"] != "assistant":
            raise UserError(
                f"{where}: {field!r} must continue the prompt with an assistant turn; give 'prompt', and in 'chosen' "
                "and 'rejected' only the answers, or two conversations that diverge at an assistant turn."
            )
        _check_end(where, field, answer)
        whole = as_conversation(where, example, field, prompt + answer, given=len(prompt))
        sides |= whole | {"prompt": whole["messages"][: whole["given"]], field: answer}
    del sides["messages"], sides["given"]
    return sides


def _preference_messages(where: str, example: Example) -> Example:
    """Return ms-swift's pair: a conversation, and a worse answer than its last."""
    turns = read_turns(where, example, "messages")
    worse = said("assistant", read_string(where, example, "rejected_response"))
    others = {name: value for name, value in example.items() if name != "messages"}
    return _preference(where, {**others, "chosen": turns, "rejected": [*turns[:-1], worse]})


def _check_end(where: str, field: str, answer: list[Turn]) -> None:
    """Refuse an answer to compare that ends with another's words, which would be learned as the model's."""
    if answer[-1]["role"] != "assistant":
        raise UserError(
            f"{where}: {field!r} ends with a turn of the {answer[-1]['role']}, not of the assistant, whose answers are "
            "compared; remove that turn."
        )


def _judged(where: str, example: Example, form: str = "prompt_completion") -> Example:
    label = keys.yes_or_no(example.get("label"), keys.JUDGEMENTS)
    if label is None:
        raise UserError(
            f"{where}: 'label' must be true (a good answer) or false, or words such as good and bad, up and down; it "
            f"is {example.get('label')!r}; {REWRITE}."
        )
    whole = CONVERSIONS[form](where, example)
    turns = whole.pop("messages")
    given = whole.pop("given") or len(turns) - 1
    if not given or turns[given]["role"] != "assistant":
        raise UserError(f"{where}: must end with the assistant's answer, which the label judges, after a question.")
    _check_end(where, "completion", turns[given:])
    return {**whole, "prompt": turns[:given], "completion": turns[given:], "label": label}


def _prompt(where: str, example: Example) -> Example:
    """Return a prompt without an answer; the example's other fields are for the reward function."""
    turns, _ = in_order(where, example, "prompt", read_side(where, example, "prompt", "user"))
    if turns[-1]["role"] not in ("user", "tool"):
        raise UserError(f"{where}: 'prompt' must end with a user's turn, which the model answers.")
    return {"messages": turns, "tools": read_tools(where, example), "given": len(turns)}


def _text(where: str, example: Example) -> Example:
    return {"text": read_string(where, example, "text", empty=True)}


def _labelled(where: str, example: Example, field: str = "prompt") -> Example:
    """Return a text, or a field's turns, with their class; a prompt's `completion`, if it has one, is classified."""
    text = read_string(where, example, "text") if field == "text" else None
    turns = None
    if field != "text":
        turns = _asked(where, example) if field == "prompt" else read_turns(where, example, field)
        if field == "prompt" and example.get("completion"):
            turns += read_side(where, example, "completion", "assistant")
        turns = with_system(where, example, turns)
        turns = [{name: value for name, value in turn.items() if name not in NOT_LEARNED} for turn in turns]
    label = example.get("label")
    if not isinstance(label, bool | int | str) or not str(label).strip():
        found = "missing" if "label" not in example else "empty" if label in (None, "") else f"{label!r}"
        raise UserError(
            f"{where}: 'label' is {found}; it must be the class, as text or a whole number: add it, or remove the "
            "example."
        )
    label = label.strip() if isinstance(label, str) else str(label).lower()
    arguments = {"tools": None} if field == "text" else read_arguments(where, example)
    return {"text": text, "messages": turns, "label": label, **arguments}


def _anchor_positive(where: str, example: Example, anchor: str = "anchor") -> Example:
    found = {"anchor": read_string(where, example, anchor), "positive": read_string(where, example, "positive")}
    given = example.get("negative")
    several = given if isinstance(given, list) else [] if given in keys.EMPTY else [given]
    negatives = [read_string(where, {"negative": one}, "negative") for one in several]
    if found["positive"] in negatives:
        raise UserError(f"{where}: 'positive' and 'negative' are equal; remove 'negative', or the example.")
    return {**found, "negative": negatives}


CONVERSIONS: dict[str, Callable[[str, Example], Example]] = {
    "messages": _messages,
    "sharegpt": partial(_messages, field="conversations"),
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "preference": _preference,
    "preference_messages": _preference_messages,
    "judged": _judged,
    "judged_messages": partial(_judged, form="messages"),
    "judged_sharegpt": partial(_judged, form="sharegpt"),
    "judged_alpaca": partial(_judged, form="alpaca"),
    "text": _text,
    "labelled_text": partial(_labelled, field="text"),
    "labelled_prompt": _labelled,
    "labelled_messages": partial(_labelled, field="messages"),
    "anchor_positive": _anchor_positive,
    "query_positive": partial(_anchor_positive, anchor="query"),
    "prompt": _prompt,
}


def column_fields(text: str | None) -> dict[str, str]:
    """Return the field of each column in `data.columns`; a column's name may contain any character."""
    if text is None:
        return {}
    pairs = re.findall(rf"\s*(.+?)\s*:\s*({'|'.join((*FIELDS, *OF_TURNS))})\s*(?:,|$)", text)
    if re.sub(r"\s", "", ",".join(f"{column}:{field}" for column, field in pairs)) != re.sub(r"\s", "", text):
        raise UserError(f"data.columns={text}: {HOW_TO_RENAME}")
    if twice := [one for one, field in pairs if dict(pairs)[one] != field]:
        raise UserError(f"data.columns={text}: {twice[0]} becomes two fields; keep one of them.")
    return dict(pairs)


def renamed_columns(
    located: Iterable[tuple[str, Example]], columns: Mapping[str, str], several: bool = False
) -> Iterator[tuple[str, Example]]:
    """Yield the examples of one source with the columns renamed that `columns` lists; some examples may lack some.

    The source may lack a column altogether if it is one of `several` and has the column's field all the same, or if it
    has none of the columns: they are other sources' (`refuse_unknown_columns` knows all).
    """
    located = iter(located)
    first = list(islice(located, 1))
    if any(column not in example for _, example in first for column in columns):
        first += islice(located, AHEAD)
    here = {name for _, example in first for name in example}
    missing = [column for column in columns if first and column not in here]
    if several:
        fields = here.union(field for column, field in columns.items() if column in here)
        missing = [column for column in missing if here & columns.keys() and columns[column] not in fields]
    if missing:
        where, example = first[0]
        # A pair with another field is read as the beginning of the next column's name.
        if unknown := re.match(r"[^:]+:\s*([^:,]+?)\s*,", missing[0]):
            raise UserError(f"{where}: data.columns: {unknown[1]!r} is not a field; {HOW_TO_RENAME}")
        raise UserError(f"{where}: data.columns names {missing[0]!r}; this example has {fields_of(example)}.")
    for where, example in chain(first, located):
        new: dict[str, str] = {}
        for name in filter(columns.__contains__, example):
            if columns[name] in new:
                raise UserError(f"{where}: data.columns: {new[columns[name]]!r} and {name!r} are both {columns[name]}.")
            new[columns[name]] = name
        twice = next((field for field in new if field in example and field not in columns), None)
        if twice and several:  # the column may be another source's
            raise UserError(
                f"{where}: data.columns renames {new[twice]!r} to {twice}, and this example has both; name the column "
                "otherwise in one of the sources."
            )
        kept = {BEFORE.format(name) if name in new and name not in columns else name: example[name] for name in example}
        yield where, {columns.get(name, name): value for name, value in kept.items()}


def unused_roles(reading: JsonView, sources: Iterable[Iterable[tuple[str, Example]]]) -> set[str]:
    """Return the names in `data.roles` that no turn has; examples are read until all are found."""
    unused, of_turns = set(reading["roles"]), {"role", "from", *reading["keys"]}
    if reading["transform"]:  # which may make the turns
        return set()
    for located in sources:
        for where, example in located:
            if not unused:
                return unused
            for turn in chain.from_iterable(turns_of(where, value) for value in example.values()):
                if isinstance(turn, dict):
                    unused -= {str(turn.get(key)).lower() for key in of_turns}
    return unused


def refuse_unknown_columns(reading: JsonView, sources: Iterable[Iterable[tuple[str, Example]]]) -> None:
    """Refuse a column of `data.columns` that no source has in its first examples; `reading` is from `reading_of`."""
    if not (reading["columns"] and reading["several"]):
        return
    unknown = dict(reading["columns"])
    for located in sources:
        for _, example in own_code.transformed(islice(located, AHEAD), reading["transform"], on_error=lambda _: None):
            unknown = {column: field for column, field in unknown.items() if column not in example}
        if not unknown:
            return
    raise UserError(f"data.columns names {next(iter(unknown))!r}, which neither data.path nor data.validation has.")


def prepared(
    located: Iterable[tuple[str, Example]],
    reading: JsonView,
    bad: Bad | None = None,
    on_drop: Callable[[], object] = lambda: None,
) -> Iterator[tuple[str, Example]]:
    """Yield the examples of one source transformed, with columns and roles renamed, and turns joined.

    `reading` is from `reading_of`, and `on_drop` is called for each example that `data.transform` drops.
    """
    how = {name: reading[name] for name in ("keys", "roles", "join")}
    fields = TURNS if any(how.values()) else ()
    located = own_code.transformed(located, reading["transform"], on_drop, bad)
    for where, example in renamed_columns(located, reading["columns"], reading["several"]):
        system = {DEFAULT_SYSTEM: reading["system"]} if reading["system"] else {}
        try:
            turns = {
                name: renamed_turns(f"{where}: {name!r}", example[name], **how) for name in fields if name in example
            }
        except UserError as error:
            refuse(error, bad)
        else:
            yield where, {**example, **system, **turns}


def reading_of(data: Data) -> Json:
    """Return how a recipe's examples are read before their form is known, in plain types."""
    fields = column_fields(data.columns)
    columns = {column: field for column, field in fields.items() if field not in OF_TURNS}
    of_turns = {key: field for key, field in fields.items() if field in OF_TURNS}
    roles: dict[str, str] = {}
    for name, _, role in (pair.partition(":") for pair in (data.roles or "").split(",") if pair.strip()):
        if not name.strip() or role.strip().lower() not in ROLES:
            raise UserError(
                f"data.roles={data.roles}: write NAME:ROLE, several with commas (customer:user,agent:assistant); the "
                f"roles are {', '.join(dict.fromkeys(ROLES.values()))}."
            )
        if roles.setdefault(name.strip().lower(), role.strip().lower()) != role.strip().lower():
            raise UserError(f"data.roles={data.roles}: {name.strip()} has two roles; remove one of them.")
    return {
        "columns": columns,
        "several": len(names(data.path) + names(data.validation)) > 1,
        "keys": of_turns,
        "roles": roles,
        "system": data.system,
        "join": data.join_turns,
        "transform": data.transform,
    }
