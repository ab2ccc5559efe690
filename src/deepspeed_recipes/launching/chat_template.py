"""Checks before the ranks start that the model's chat template can train and renders the examples in full.

transformers' renderer takes a second to import, and a tokenizer several. The ranks check every example again, with the
tokenizer.
"""

import contextlib
import importlib.util
import re
from itertools import pairwise
from pathlib import Path

from ..recipe.errors import UserError, first_line
from ..recipe.files import Json, JsonView
from ..recipe.recipe import Recipe
from ..recipe.run_folder import read_json
from ..recipe.samples import REASONING, TINY_MODEL

Turns = list[Json]

OWN = Path(__file__).parents[1] / "training" / "data" / "chatml.jinja"
"""The project's template, for base models."""
MOST = 200
"""Kinds of conversations that are rendered."""


def check(recipe: Recipe) -> None:
    """Refuse a chat template in which the assistant's tokens or the end of its turn cannot be found.

    The project's template, a model's own if TRL knows it, and one with marks that end in a token need no tokenizer;
    others take the seconds of importing one.
    """
    if recipe.draft.enabled or not recipe.method.packs or recipe.method.examples != "conversations":
        return
    text = _source(recipe)
    if text is None or text == _read(OWN) or not importlib.util.find_spec("trl"):
        return
    marked = _marked(text)
    if marked == text:
        # A turn that ends in a token which the tokenizer's file lists, if it has one, needs no tokenizer.
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        from ..training.model.shown import bounded

        folder, probe = _folder(recipe), [{"role": role, "content": "Hello"} for role in ("user", "assistant")]
        how = {"return_assistant_tokens_mask": True, **_Template(text, folder).special}
        unclear = (UserError, TemplateError, KeyError, TypeError, ValueError)
        with contextlib.suppress(*unclear), bounded("its chat template"):
            listed = tuple(token["content"] for token in read_json(folder / "tokenizer.json")["added_tokens"])
            (chat,), (spans,) = render_jinja_template([probe], None, None, text, **how)
            if any(chat[first:last].rstrip().endswith(listed) for first, last in spans[-1:]):
                return
    elif marked and recipe.model.chat_template == "auto":
        return
    from ..training.data import chat_templates  # imports torch, which few runs need to wait for here

    chat_templates.marker(recipe, chat_templates.load_tokenizer(recipe))


class Rendering:
    """Renders the first conversation of each kind, and refuses texts that the template drops."""

    def __init__(self, recipe: Recipe) -> None:
        """Read the template that the ranks will use, unless only they can find it."""
        self.template: _Template | None = None
        self.thinking, self.model = recipe.data.thinking, f"model.path={recipe.model.path}"
        other = "the draft's chat template, which is not the model's,"
        self.whose = other if recipe.draft.enabled else "the model's chat template"
        self.kinds: set[object] = set()
        self.folder, self.longest = _folder(recipe), recipe.sequence_length
        if recipe.method.examples in ("texts", "matching texts") or not importlib.util.find_spec("transformers"):
            return
        text = _source(recipe)
        if text is not None and recipe.method.packs and recipe.method.examples == "conversations":
            text = _marked(text) or text
        if text is not None:
            self.template = _Template(text, self.folder)

    def check(self, where: str, example: JsonView) -> None:
        """Render an example's conversations if they are the first of their kind; refuse one that loses a text."""
        if self.template is None or len(self.kinds) >= MOST:
            return
        tools, options = example.get("tools"), example.get("options") or {}
        conversations: list[tuple[Turns, bool]] = []  # each with whether it is a prompt
        if "prompt" in example:
            answers = (example[name] for name in ("chosen", "rejected", "completion") if name in example)
            conversations = [(example["prompt"], True), *((example["prompt"] + turns, False) for turns in answers)]
        elif "fields" in example:  # the model writes the answers
            conversations = [(example["messages"][: example["given"]], True)]
        elif example.get("messages"):
            conversations = [(example["messages"], False)]
        for turns, prompt in conversations:
            features: list[tuple[object, ...] | None] = [None]
            for turn in turns:
                content = turn.get("content")
                special = "</think>" in content if isinstance(content, str) else isinstance(content, list)
                parts = [name for name in ("tool_calls", *REASONING) if turn.get(name)]
                features.append((turn["role"], bool(content), special, *parts))
            kind = frozenset(pairwise([*features, None])), bool(tools), prompt, str(options)
            if kind not in self.kinds:
                self.kinds.add(kind)
                self._render(where, turns, tools, options, prompt)

    def _render(self, where: str, turns: Turns, tools: list[Json] | None, options: Json, prompt: bool) -> None:
        import transformers.utils.chat_template_utils  # noqa: F401  # not within the bounds
        from jinja2 import TemplateError

        from ..training.data import thinking
        from ..training.model.shown import bounded, shown

        assert self.template
        try:
            with bounded(self.model):
                if self.thinking == "strip":
                    turns = thinking.stripped(turns)
                found = shown(self.template, self.template.text, turns, tools, options, prompt)
                self.template.apply_chat_template(found.turns, tools, add_generation_prompt=prompt, **options)
        except (TemplateError, UserError) as error:
            # Their subclasses may come of a special token that only the ranks' tokenizer knows.
            if type(error) not in (TemplateError, UserError):
                return
            own = ""
            if re.search("role|tool|reasoning", str(error)):
                own = " The project's own template has tools and reasoning: model.chat_template=chatml"
                with contextlib.suppress(Exception):  # which is all that `tokenizers` raises; `error` is shown
                    from tokenizers import Tokenizer

                    from ..training.data.report import enough

                    chat = _Template(_read(OWN), self.folder).apply_chat_template(turns, tools, **options)
                    tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
                    tokens = len(tokenizer.encode(chat, add_special_tokens=False).ids)
                    if tokens > self.longest:
                        own += f" {enough(tokens)}, since this example then has {tokens} tokens"
                own += "."
            raise UserError(
                f"{where}: {self.whose} cannot be trained on this conversation: {first_line(error).rstrip('.')}.{own}"
            ) from error
        except (TypeError, ValueError):
            pass


class _Template:
    """Stands for a tokenizer whose `apply_chat_template` returns text."""

    def __init__(self, text: str, folder: Path) -> None:
        self.text = text
        found: Json = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            with contextlib.suppress(UserError):
                found |= {key: value for key, value in read_json(folder / name).items() if key.endswith("_token")}
        self.special = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in found.items()
            if value is not None
        }

    def apply_chat_template(
        self,
        turns: Turns,
        tools: list[Json] | None = None,
        chat_template: str | None = None,
        tokenize: bool = False,
        **options: object,
    ) -> str:
        """Return the conversation as text."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered = render_jinja_template(
            [turns], tools or None, None, chat_template or self.text, **self.special, **options
        )
        return str(rendered[0][0])


def _folder(recipe: Recipe) -> Path:
    """Return the folder with the tokenizer: drafts borrow that of `tiny`."""
    return Path(TINY_MODEL if recipe.draft.enabled else recipe.model.path)


def _source(recipe: Recipe) -> str | None:
    """Return the text of the chat template that the recipe uses, or None if only the ranks can find it."""
    named, folder = recipe.model.chat_template, _folder(recipe)
    if recipe.model.trust_remote_code or (recipe.draft.enabled and recipe.model.vision):
        return None
    if named == "chatml":
        return _read(OWN)
    if named != "auto":
        return _read(Path(named)) if Path(named).is_file() else None
    if (folder / "chat_template.jinja").is_file():
        return _read(folder / "chat_template.jinja")
    config = folder / "tokenizer_config.json"
    if not config.is_file() or any(
        (folder / other).exists() for other in ("chat_template.json", "additional_chat_templates")
    ):
        return None
    found = read_json(config).get("chat_template")
    if not isinstance(found, str | list | None):
        kind = type(found).__name__
        raise UserError(f"{config}: its chat_template is of type {kind}, not text; correct it.")
    return _read(OWN) if found is None else found if isinstance(found, str) else None


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _marked(text: str) -> str | None:
    """Return a template that marks the assistant's tokens: this one, or TRL's version of it; None if there is none."""
    if re.search(r"{%-?\s*generation\b", text):
        return text
    library = importlib.util.find_spec("trl")
    if library is None or not library.origin:
        return None
    for file in Path(library.origin).with_name("chat_templates").glob("*_training.jinja"):
        original = file.with_name(file.name.replace("_training", ""))
        if original.exists() and _read(original) == text:
            return _read(file)
    return None
