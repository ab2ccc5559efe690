"""Say whether the assistant's tokens can be told apart in the chat template that a model's tokenizer has on the Hub.

python -m recipes.training.templates FAMILY-SIZE
"""

import sys

from recipes.spec import pages
from recipes.spec.errors import UserError
from recipes.training import model, templates


def main(name: str) -> int:
    """Print the verdict on the model of a recipe; return 2 where it cannot be loaded or cannot be trained on."""
    try:
        recipe = pages.find(name, "full")
        tokenizer = model.load_tokenizer(recipe)
        templates.marker(recipe, tokenizer)
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    known = {
        tokenizer.chat_template: "marks the assistant's tokens itself",
        templates.CHATML: "is missing, and the ChatML of this project takes its place",
        None: "does not mark the assistant's tokens and TRL does not know it; they are told from what it renders",
    }
    verdict = known.get(templates.marked(tokenizer), "is known to TRL, whose twin of it marks the assistant's tokens")
    print(f"{name}: the chat template of {recipe.model.path} {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
