"""`dsr page template`: whether the assistant's tokens can be found in the chat template of a model's tokenizer."""

from ..spec import pages
from ..training.data import chat_templates


def verdict(name: str) -> str:
    """Return, in a sentence, how the chat template of a recipe `FAMILY-SIZE` marks what the assistant says.

    Raises:
        UserError: there is no such recipe, or its tokenizer cannot be loaded or trained on.
    """
    recipe = pages.find(name, "full")
    tokenizer = chat_templates.load_tokenizer(recipe)
    chat_templates.marker(recipe, tokenizer)
    known = {
        tokenizer.chat_template: "marks the assistant's tokens itself",
        chat_templates.CHATML: "is missing; the ChatML of this project takes its place",
        None: "does not mark the assistant's tokens and TRL does not know it; they are found by rendering it",
    }
    how = known.get(
        chat_templates.training_template(tokenizer),
        "is known to TRL, which has a version that marks the assistant's tokens",
    )
    return f"the chat template of {recipe.model.path} {how}"
