"""`ds-recipes page template`: reports how a chat template marks the assistant's tokens."""

from ...recipe import pages
from ...training.data import chat_templates


def verdict(name: str) -> str:
    """Return a sentence on how the chat template of a recipe `FAMILY-SIZE` marks the assistant's tokens.

    Raises:
        UserError: there is no such recipe, or its tokenizer cannot be loaded or trained on.
    """
    recipe = pages.find(name, "full")
    tokenizer = chat_templates.load_tokenizer(recipe)
    chat_templates.marker(recipe, tokenizer)
    known = {
        tokenizer.chat_template: "marks the assistant's tokens itself",
        chat_templates.CHATML: "is missing; this project's ChatML is used instead",
        None: "does not mark the assistant's tokens, and TRL has no version that does; they are found by rendering it",
    }
    how = known.get(
        chat_templates.training_template(tokenizer),
        "does not mark the assistant's tokens; TRL has a version that does",
    )
    return f"the chat template of {recipe.model.path} {how}"
