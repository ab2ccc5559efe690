"""Chat templates: which one a run uses, and how it marks the assistant's tokens for the loss."""

import copy
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import get_training_chat_template, has_generation_markers, supports_tool_calling

from recipes.spec.errors import UserError
from recipes.spec.recipe import Recipe

CHATML = (Path(__file__).parent / "chatml.jinja").read_text(encoding="utf-8")
"""The project's own, for base models."""


def choose(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer the template that `model.chat_template` asks for; the export then carries it too.

    Raises:
        UserError: a template file that cannot be read, or is not Jinja.
    """
    asked = recipe.model.chat_template
    if asked == "chatml" or (asked == "auto" and tokenizer.chat_template is None and recipe.method != "pretrain"):
        tokenizer.chat_template = CHATML
    elif asked != "auto":
        try:
            tokenizer.chat_template = Path(asked).read_text(encoding="utf-8")
            tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
        except (OSError, UnicodeDecodeError, TemplateError) as error:
            raise UserError(f"model.chat_template={asked}: not a chat template in Jinja: {error}") from error


def marking(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a template that marks the assistant's tokens: the tokenizer's, or TRL's twin of it.

    Both put a thinking model's empty think block into the loss, since the model has to write it before its answer.

    Raises:
        UserError: the tokenizer's template does not, and TRL does not know it.
    """
    if tokenizer.chat_template is None:
        raise UserError(f"model.path={recipe.model.path}: no chat template; add model.chat_template=chatml.")
    if has_generation_markers(tokenizer.chat_template):
        return tokenizer.chat_template
    try:
        return get_training_chat_template(tokenizer)
    except ValueError:
        raise UserError(
            f"model.path={recipe.model.path}: its chat template does not mark the assistant's tokens, and TRL has no "
            "twin of it that does.\nPut {% generation %} ... {% endgeneration %} around the assistant's turn in a copy "
            "of it, and name that file: model.chat_template=FILE."
        ) from None


def renders_tools(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether `template` writes out tool calls and their results; some leave them out without a word."""
    probe = copy.copy(tokenizer)
    probe.chat_template = template
    return supports_tool_calling(probe)
