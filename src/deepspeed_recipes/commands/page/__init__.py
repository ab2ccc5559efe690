"""Add a model family: a page is one Python file with the family's sizes and its variants.

    ds-recipes page new myfamily            write ./myfamily.py, a working page to fill in
    ds-recipes page check ./myfamily.py     list the TODOs that are left and the errors on the page
    ds-recipes page compare llama3-8b       compare the dimensions on a page with the model's config.json on the Hub
    ds-recipes page template llama3-8b      print how the assistant's tokens are found in the model's chat template

The page that `new` writes can be trained immediately, shrunken and without a download: `ds-recipes launch ./myfamily.py
full --draft`. The other actions need the training stack, and `compare` and `template` also need a network. `check` and
`compare` without a name process every page.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from ...recipe import files, pages
from ...recipe.errors import UserError
from ...recipe.project import PAGES, command, require
from ..main import Parser


def main(words: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if something is wrong with a page.

    Raises:
        UserError: there is no such page, or it cannot be written, read or compared.
    """
    parser = Parser("page", __doc__)
    parser.add_argument("action", choices=["new", "check", "compare", "template"], help="one of the actions above")
    parser.add_argument("names", nargs="*", metavar="FAMILY[-SIZE]", help="the family, or one of its sizes")
    options = parser.parse_args(words)
    if options.action in ("new", "template") and len(options.names) != 1:
        parser.error(f"{options.action}: name one FAMILY{'-SIZE' if options.action == 'template' else ''}.")
    names = options.names or pages.families()
    if options.action == "new":
        written = new(names[0], Path())
        print(f"written: {written}; to try it: {command('launch')} ./{written} full --draft")
        return 0
    require("transformers")
    # These imports take seconds, and `new` does not need them.
    if options.action == "check":
        from . import docstring

        return int(docstring.check_all(names))
    if options.action == "compare":
        from . import hub

        return int(hub.compare_all(names))
    print(f"{names[0]}: {verdict(names[0])}")
    return 0


def new(family: str, folder: Path) -> Path:
    """Write the page of a new family from the template, and return it.

    Raises:
        UserError: an invalid name, the name of one of the project's pages, or a file that exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", family):
        raise UserError(f"invalid family name {family!r}: write lower-case letters, digits and underscores, no dash.")
    if family in pages.families():
        raise UserError(f"{family}: this family already has a page; choose another name.")
    file = folder / f"{family}.py"
    if file.exists():
        raise UserError(f"{file}: already exists; choose another name.")
    text = (PAGES / f"{pages.TEMPLATE}.py").read_text(encoding="utf-8")
    text = re.sub(rf"python scripts/launch\.py {pages.TEMPLATE}(-\w+)?", f"{command('launch')} ./{family}.py", text)
    text = re.sub(r"copy (me to [^;]*; |this file [^.]*, and )", "", text).replace(pages.TEMPLATE, family)
    files.write_text(file, text)
    return file


def verdict(name: str) -> str:
    """Return a sentence on how the chat template of a recipe `FAMILY-SIZE` marks the assistant's tokens.

    Raises:
        UserError: there is no such recipe, or its tokenizer cannot be loaded or trained on.
    """
    from ...training.data import chat_templates

    recipe = pages.find(name, "full")
    tokenizer = chat_templates.load_tokenizer(recipe)
    chat_templates.marker(recipe, tokenizer)
    known = {
        tokenizer.chat_template: "marks the assistant's tokens itself",
        chat_templates.CHATML: "is missing; this project's ChatML is used instead",
        None: "does not mark the assistant's tokens, and TRL has no version that does; they are found by rendering it",
    }
    how = known.get(
        chat_templates.training_template(tokenizer), "does not mark the assistant's tokens; TRL has a version that does"
    )
    return f"the chat template of {recipe.model.path} {how}"
