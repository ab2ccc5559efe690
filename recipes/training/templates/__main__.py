"""Say whether the assistant's tokens can be told apart in the chat template that a model's tokenizer has on the Hub.

python -m recipes.training.templates FAMILY-SIZE
"""

import sys

from recipes.spec import pages
from recipes.spec.errors import UserError
from recipes.training import model, templates


def main(name: str) -> int:
    """Print the verdict on the model of a recipe; return 2 where it cannot be loaded or cannot be trained on."""
    family = name.partition("-")[0]
    try:
        variant = pages.variants(pages.page(family))[0] if family in pages.families() else ""
        recipe = pages.find(name, variant)
        tokenizer = model.load_tokenizer(recipe)
        own = tokenizer.chat_template
        template = templates.marking(recipe, tokenizer)
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    kind = "ChatML of this project" if template == templates.CHATML else "it marks the assistant's tokens itself"
    print(f"{name}: {recipe.model.path}: {kind if template == own else 'TRL has a twin of it that marks them'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
