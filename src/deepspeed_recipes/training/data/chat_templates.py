"""Chat templates: chooses a run's template, and marks the assistant's tokens in it for the loss."""

import contextlib
import copy
import inspect
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import get_training_chat_template, has_generation_markers, supports_tool_calling

from ...recipe.errors import UserError
from ...recipe.files import Json, JsonView
from ...recipe.recipe import Recipe
from ..console import say
from ..model import new_tokens, stored
from ..model.control_tokens import ControlTokens, control_tokens, conversation_tokens
from ..model.load import WRONG_VALUES, cannot_load, load_config
from ..model.shown import bounded, owners, shown
from ..model_folder import weights

Turns = list[Json]
Marked = tuple[list[int], list[bool]]
"""Tokens, and whether each is the assistant's."""
Rendered = tuple[str, list[tuple[int, int]]]
"""A conversation as text, and the spans in it that the assistant writes."""

CHATML = (Path(__file__).parent / "chatml.jinja").read_text(encoding="utf-8")
"""The project's own template, for base models."""
_TOOL_USE, _OTHERWISE = "{% if tools %}", "{# without tools #}{% else %}"
"""Text before and between two templates that are joined."""


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, with a pad token and the recipe's chat template."""
    if Path(recipe.model.path, "config.json").is_file():
        load_config(recipe)  # which also names the tokenizer's class
        weights.check_has_tokenizer(Path(recipe.model.path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
        tokenizer("A word.")  # which fails with a `model_max_length` that is text, for example
    except Exception as error:  # the library `tokenizers` raises nothing but `Exception`
        if not isinstance(error, (OSError, ValueError, *WRONG_VALUES)) and type(error) is not Exception:
            raise
        raise UserError(cannot_load("tokenizer", recipe, error)) from error
    if tokenizer.pad_token is None:  # attention masks it, so any token works
        spare = (tokenizer.eos_token, tokenizer.unk_token, tokenizer.bos_token, tokenizer.convert_ids_to_tokens(0))
        tokenizer.pad_token = next(token for token in spare if token is not None)
    choose(recipe, tokenizer)
    where = f"model.path={recipe.model.path}"
    if (folder := stored.folder_of(recipe.model.path)) is not None:
        # Special tokens need rows in the embeddings only where the template or the tokenizer adds them.
        adds = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} - adds
        unwritten = {token for token in special if token not in str(tokenizer.chat_template)}
        weights.check_tokens(folder, tokenizer.get_vocab(), unwritten, where)
    new_tokens.add(tokenizer, recipe.model)
    if tokenizer.chat_template is not None:  # one that never ends is detected here, with every method
        # A template may refuse this conversation; its actual use will report why.
        with contextlib.suppress(TemplateError, TypeError, ValueError), bounded(where):
            tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    return tokenizer


def choose(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer the template set by `model.chat_template`; the export then includes it."""
    asked = recipe.model.chat_template
    if not isinstance(tokenizer.chat_template, str | dict | None):
        kind = type(tokenizer.chat_template).__name__
        raise UserError(f"model.path={recipe.model.path}: its chat_template is of type {kind}, not text; correct it.")
    if isinstance(tokenizer.chat_template, dict) and asked == "auto" and recipe.method.name != "pretrain":
        named = tokenizer.chat_template
        if "default" not in named:
            raise UserError(
                f"model.path={recipe.model.path}: its chat templates have names ({', '.join(sorted(named))}), and none "
                "is the default; save the right one to a file, and name that file: model.chat_template=FILE."
            )
        tokenizer.chat_template = named["default"]
        if "tool_use" in named:  # transformers uses it where an example has tools
            both = [named[name].removesuffix("\n") for name in ("tool_use", "default")]
            if len({*map(has_generation_markers, both)}) == 1:  # otherwise one of them would mark nothing to learn
                tokenizer.chat_template = _TOOL_USE + _OTHERWISE.join(both) + "{% endif %}"
    elif asked == "chatml" or (
        asked == "auto" and tokenizer.chat_template is None and recipe.method.name != "pretrain"
    ):
        tokenizer.chat_template = CHATML
        if asked == "auto":
            parts = len(tokenizer.tokenize("<|im_start|>"))
            split = f", whose <|im_start|> is {parts} tokens (model.new_tokens=<|im_start|>,<|im_end|> makes it one)"
            say(
                f"model.path={recipe.model.path}: its tokenizer has no chat template; ChatML is used"
                f"{split if parts > 1 else ''}; model.chat_template=FILE names another"
            )
    elif asked != "auto":
        try:
            tokenizer.chat_template = Path(asked).read_text(encoding="utf-8")
            with bounded(f"model.chat_template={asked}"):
                tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
        except (OSError, UnicodeDecodeError, TemplateError) as error:
            raise UserError(f"model.chat_template={asked}: not a chat template in Jinja: {error}") from error


def marker(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[str, Callable[..., Marked]]:
    """Return the template that a run trains with, and the function that marks the assistant's tokens in it.

    The function gets a conversation's turns, its tools, and arguments of the template, or None.

    The marks come from the template itself, from TRL's version of it or, where TRL has none, from rendering it turn by
    turn. All three put a thinking model's empty think block into the loss, since the model has to write it first. A
    template in which none of the three shows where the assistant's turns end is refused.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"model.path={recipe.model.path}: no chat template; add model.chat_template=chatml, or a file of yours."
        )
    template = training_template(tokenizer)
    if template is not None:
        ends_of_turn(recipe, tokenizer)
        _check_marks(recipe, tokenizer, template)
        return template, partial(_by_template, tokenizer, template)
    question, answer = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}
    try:
        probe = shown(tokenizer, tokenizer.chat_template, [question, answer, question, answer]).turns
        _by_rendering(tokenizer, probe, None)
    except (UserError, TemplateError, NotImplementedError, TypeError, ValueError) as error:
        raise UserError(
            f"model.path={recipe.model.path}: its chat template does not mark the assistant's tokens, and they cannot "
            f"be found in what it renders ({error}).\nmodel.chat_template=chatml trains with the project's template "
            "instead. To keep this one, put {% generation %} ... {% endgeneration %} around the assistant's turn in a "
            "copy of it, and name that file: model.chat_template=FILE."
        ) from None
    return tokenizer.chat_template, partial(_by_rendering, tokenizer)


def _check_marks(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Refuse a template whose marks hold a question, or leave out an answer that is not the last."""
    if recipe.loss_on == "all":
        return
    turns = [{"role": role, "content": f"{role} {at}"} for at in "ab" for role in ("user", "assistant")]
    try:
        turns = shown(tokenizer, template, turns).turns
        chat, spans = with_spans(tokenizer, template, control_tokens(tokenizer, template), turns, None)
    except (UserError, TemplateError, NotImplementedError, TypeError, ValueError):
        return  # it refuses this conversation
    learned = "".join(chat[first:last] for first, last in spans)
    if "user a" in learned or "user b" in learned:
        raise UserError(
            f"{_named(recipe)}: the chat template's marks put what the user says into the loss.\nWrite "
            "{% generation %} ... {% endgeneration %} around the assistant's turns only."
        )
    if "assistant b" in learned and "assistant a" not in learned and recipe.loss_on == "assistant":
        raise UserError(
            f"{_named(recipe)}: the chat template's marks put only the last answer into the loss.\nWrite "
            "{% generation %} ... {% endgeneration %} around every answer, or set loss_on=last."
        )


def _named(recipe: Recipe) -> str:
    own = recipe.model.chat_template not in ("auto", "chatml")
    return f"model.chat_template={recipe.model.chat_template}" if own else f"model.path={recipe.model.path}"


def ends_of_turn(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the control tokens that a run teaches as ends of the assistant's turns: of answers, and of tool calls.

    White space may follow them. They are often not the tokenizer's end, for example where a base model becomes a chat
    model. A template whose marks leave the loss without such a token is refused.
    """
    if tokenizer.chat_template is None or recipe.method.name == "pretrain":
        return []
    marks = training_template(tokenizer)
    template = marks or tokenizer.chat_template
    said = [{"type": "text", "text": "Hello"}] if recipe.model.vision else "Hello"
    user = {"role": "user", "content": said}

    def taught(tools: list[Json] | None = None, **turn: object) -> list[int]:
        try:
            turns = shown(tokenizer, template, [user, {"role": "assistant", "content": said, **turn}], tools).turns
            if marks and recipe.method.packs and recipe.loss_on != "all":
                tokens, learned = _by_template(tokenizer, marks, turns, tools)
                return [token for token, one in zip(tokens, learned, strict=True) if one]
            asked = conversation_tokens(tokenizer, turns[:1], tools, chat_template=template)
            return conversation_tokens(tokenizer, turns, tools, chat_template=template)[len(asked) :]
        except (UserError, TemplateError, NotImplementedError, TypeError, ValueError):
            return []  # it refuses this conversation

    def last(tokens: list[int]) -> int | None:
        return next((token for token in reversed(tokens) if tokenizer.decode([token]).strip()), None)

    answer = taught()
    end = last(answer)
    if end is None or end not in tokenizer.get_added_vocab().values():
        if marks and recipe.method.packs and answer:
            raise UserError(
                f"{_named(recipe)}: the assistant's turn has no control token at its end in the loss, so the model "
                "would not learn to stop.\nWrite the token that ends the turn inside {% generation %} ... "
                "{% endgeneration %}; if the tokenizer does not have it as one token, add model.new_tokens=TOKEN."
            )
        return []
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    takes = {"type": "object", "properties": {"at": {"type": "string", "description": "A place."}}}
    tools = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": takes}}]
    # Some templates write one call in a turn. A token that ends each of several calls does not end the turn.
    calls = taught(tools, content="", tool_calls=[call, call]) or taught(tools, content="", tool_calls=[call])
    after = last(calls)
    if after is None or after not in tokenizer.all_special_ids or calls.count(after) > 1:
        return [end]
    return [*dict.fromkeys((end, after))]


def training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the tokenizer's template if it marks the assistant's tokens, else TRL's version that does, or None."""
    if has_generation_markers(tokenizer.chat_template):
        return tokenizer.chat_template
    try:
        return get_training_chat_template(tokenizer)
    except (ValueError, TypeError):  # TypeError: the template fails on TRL's own conversations
        return _alike(tokenizer, tokenizer.chat_template)


_CALL = {"type": "function", "function": {"name": "add", "arguments": {"one": 1, "text": "a"}}}
_TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
_ASKED: Turns = [{"role": "user", "content": " first\n"}, {"role": "assistant", "content": "answer\n"}]
_REASONED = {"role": "assistant", "content": "second", "reasoning_content": "because"}
_PROBES: tuple[tuple[Turns, Json], ...] = (
    (_ASKED, {}),
    (_ASKED[:1], {"add_generation_prompt": True}),
    ([{"role": "system", "content": "rule"}, *_ASKED, _ASKED[0], _REASONED], {}),
    ([*_ASKED, _ASKED[0], {"role": "assistant", "content": "<think>\nthought\n</think>\n\nsaid"}, *_ASKED], {}),
    (_ASKED[:1], {"add_generation_prompt": True, "enable_thinking": False}),
    (
        [
            _ASKED[0],
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "1"},
            _REASONED,
        ],
        {"tools": [_TOOL]},
    ),
)
"""Conversations, with arguments of the template, on which two templates that render alike are taken for equal."""


def rendered(
    tokenizer: PreTrainedTokenizerBase, template: str | None, turns: Turns, options: JsonView = MappingProxyType({})
) -> str | None:
    """Return a conversation as a chat template writes it, or None without a template, or if it refuses."""
    try:
        with bounded("its chat template"):
            return tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False, **options)
    except (TemplateError, TypeError, ValueError, UserError):
        return None


@lru_cache(maxsize=64)
def _alike(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """Return TRL's training version of a template that renders as `template` does, or None.

    TRL compares texts, and a comment or a line break in another place makes another text.
    """
    expected = [rendered(tokenizer, template, *probe) for probe in _PROBES]
    folder = Path(inspect.getfile(get_training_chat_template)).parent / "chat_templates"
    for training in sorted(folder.glob("*_training.jinja")) if expected[0] else ():
        original = training.with_name(training.name.replace("_training", ""))
        text = original.read_text(encoding="utf-8") if original.exists() else ""
        if text and all(rendered(tokenizer, text, *probe) == one for probe, one in zip(_PROBES, expected, strict=True)):
            return training.read_text(encoding="utf-8")
    return None


def _by_template(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Turns,
    tools: list[Json] | None,
    options: JsonView | None = None,
) -> Marked:
    known = control_tokens(tokenizer, template)
    if known.occur(messages, tools) or _left_out(messages):
        chat, spans = with_spans(tokenizer, template, known, messages, tools, options)
        ids, places = known.encode(tokenizer, chat)
        return ids, [any(first < end and start < last for first, last in spans) for start, end in places]
    how = {"chat_template": template, "return_dict": True, "return_assistant_tokens_mask": True}
    tokens = tokenizer.apply_chat_template(
        messages, tools, **how, tokenizer_kwargs={"verbose": False}, **(options or {})
    )
    return tokens["input_ids"], [bool(assistant) for assistant in tokens["assistant_masks"]]


def with_spans(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    known: ControlTokens,
    messages: Turns,
    tools: list[Json] | None,
    options: JsonView | None = None,
) -> Rendered:
    """Render a conversation in a template that marks the assistant's tokens, with the spans of the learned turns.

    Control tokens that people wrote are marked in the text, for `known.encode`.
    """
    arguments = tokenizer.special_tokens_map | (options or {})

    def render(turns: Turns, described: object) -> Rendered:
        (chat,), (spans,) = render_jinja_template(
            [turns], described, chat_template=template, return_assistant_tokens_mask=True, **arguments
        )
        return chat, spans

    chat, spans = render(*known.mark(messages, tools))
    if left_out := _left_out(messages):
        owned = owners(messages, tools, render)
        if len(owned) != len(spans):
            raise UserError("it divides the assistant's turns by their content, so none can be excluded from the loss")
        spans = [span for span, number in zip(spans, owned, strict=True) if number not in left_out]
    return chat, spans


def only_last_learned(messages: Turns) -> Turns:
    """Return a conversation in which only the assistant's last turn is in the loss."""
    last = max((number for number, turn in enumerate(messages) if turn["role"] == "assistant"), default=0)
    return [
        {**turn, "train": False} if turn["role"] == "assistant" and number < last else turn
        for number, turn in enumerate(messages)
    ]


def check_all_learned(messages: Turns) -> None:
    """Refuse marks that `loss_on=all` would ignore."""
    if _left_out(messages):
        raise UserError("a turn is marked as not learned (`train`: false), and loss_on=all learns every turn")


def _left_out(messages: Turns) -> set[int]:
    """Return the numbers of the turns that are excluded from the loss."""
    return {number for number, turn in enumerate(messages) if turn.get("train") is False}


def turn_by_turn(
    tokenizer: PreTrainedTokenizerBase,
    known: ControlTokens,
    messages: Turns,
    tools: list[Json] | None,
    options: JsonView | None = None,
) -> Rendered:
    """Return what `with_spans` does for the tokenizer's own template, which marks nothing.

    Each beginning of the conversation is rendered too, to find the text that each assistant turn adds.
    """
    left_out = _left_out(messages)
    messages, tools = known.mark(messages, tools)
    render = partial(tokenizer.apply_chat_template, tools=tools, tokenize=False, **(options or {}))
    whole = render(messages)
    spans = []
    for index, turn in enumerate(messages):
        if turn["role"] == "assistant":
            before = render(messages[:index], add_generation_prompt=True)
            after = render(messages[: index + 1])
            if not (after.startswith(before) and whole.startswith(after)):
                raise UserError("it renders a turn differently once another follows")
            if index not in left_out:
                spans.append((len(before), len(after)))
    return whole, spans


def _by_rendering(
    tokenizer: PreTrainedTokenizerBase, messages: Turns, tools: list[Json] | None, options: JsonView | None = None
) -> Marked:
    """Mark the tokens that each assistant turn adds to the conversation before it and the generation prompt."""
    known = control_tokens(tokenizer, tokenizer.chat_template)
    whole, spans = turn_by_turn(tokenizer, known, messages, tools, options)
    ids, places = known.encode(tokenizer, whole)
    starts = [start for start, _ in places]
    control = tokenizer.get_added_vocab().values()
    assistant = [False] * len(starts)
    for first, last in spans:
        inside = range(bisect_left(starts, first), bisect_left(starts, last))
        said = [ids[i] for i in inside if whole[starts[i] : last].strip()]
        if not said or said[-1] not in control:
            raise UserError(
                "it ends the assistant's turn without a control token, so the model would not learn to stop"
            )
        assistant[inside.start : inside.stop] = [True] * len(inside)
    return ids, assistant


def renders_tools(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether `template` writes tool calls and their results; some templates drop them silently."""
    probe = copy.copy(tokenizer)
    probe.chat_template = template
    if template.startswith(_TOOL_USE):  # TRL's check passes no tools
        probe.chat_template = template.removeprefix(_TOOL_USE).partition(_OTHERWISE)[0]
    with contextlib.suppress(TemplateError, TypeError, ValueError):
        return supports_tool_calling(probe)
    return False
