"""Add a model family: a page is one Python file with the family's sizes and its variants.

    ds-recipes page new myfamily            write ./myfamily.py, a working page to fill in
    ds-recipes page check ./myfamily.py     list the TODOs that are left and the errors on the page
    ds-recipes page compare llama3-8b       compare the dimensions on a page with the model's config.json on the Hub
    ds-recipes page template llama3-8b      print how the assistant's tokens are found in the model's chat template

The page that `new` writes can be trained immediately, shrunken and without a download: `ds-recipes launch ./myfamily.py
full --draft`. The other actions need the training stack, and `compare` and `template` also need a network. `check` and
`compare` without a name process every page.
"""

import inspect
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ..recipe import deepspeed_file, files, overrides, pages
from ..recipe.compatibility import positions
from ..recipe.errors import UserError, first_line
from ..recipe.project import CONFIGS, PAGES, command, require
from ..recipe.recipe import Model
from .list import built
from .main import Parser

LAUNCH = re.compile(r"^ *(?:python scripts/launch\.py|[\w-]+ launch) (.+)$", re.MULTILINE)
"""A command in a docstring, as typed in a checkout or with an installed package."""
PLACEHOLDER = "TODO"
"""Marks the places of the template that the author has to fill in."""
TOLERANCE = 0.01
"""Relative tolerance between the published number of parameters and the number from the dimensions."""


def main(words: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if something is wrong with a page."""
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
    if options.action == "check":
        problematic = [f"{name}: {problem}" for name in names for problem in problems(pages.known_page(name))]
        print(*problematic or [f"{', '.join(names)}: no problems"], sep="\n")
        return int(bool(problematic))
    if options.action == "compare":
        models: list[tuple[str, Model]] = []
        for name in names:
            family, _, size = name.partition("-")
            sizes = {size: pages.find(name, "full").model} if size else pages.known_page(family).SIZES
            models += [(f"{family}-{key}", model) for key, model in sizes.items()]
        differing = False
        for name, model in models:
            found = compare(model)
            differing |= bool(found)
            source = f"the folder {model.path}" if Path(model.path).is_dir() else "the Hub"
            print(f"{name}: {'differs from' if found else 'matches'} {source}", *found, sep="\n  ", flush=True)
        return int(differing)
    print(f"{names[0]}: {verdict(names[0])}")
    return 0


def new(family: str, folder: Path) -> Path:
    """Write the page of a new family from the template, and return it."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", family):
        raise UserError(f"invalid family name {family!r}: write lower-case letters, digits and underscores, no dash.")
    if family in pages.families():
        raise UserError(f"{family}: this family already has a page; choose another name.")
    file = folder / f"{family}.py"
    if file.exists():
        raise UserError(f"{file}: already exists; choose another name.")
    text = (PAGES / f"{pages.TEMPLATE}.py").read_text(encoding="utf-8")
    text = re.sub(rf"python scripts/launch\.py {pages.TEMPLATE}(-\w+)?", f"{command('launch')} ./{family}.py", text)
    text = re.sub(r"  # not found\?.*", "", text)  # how to install a checkout
    text = re.sub(r"copy (me to [^;]*; |this file [^.]*, and )", "", text).replace(pages.TEMPLATE, family)
    files.write_text(file, text)
    return file


def verdict(name: str) -> str:
    """Return a sentence on how the chat template of a recipe `FAMILY-SIZE` marks the assistant's tokens."""
    from ..training.data import chat_templates

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


def problems(module: ModuleType) -> list[str]:
    """Return the problems of a page, one sentence each."""
    from ..planning.model_profile.lookup import profile_of  # takes seconds, and `new` does not need it

    found: list[str] = []
    doc, page_name = module.__doc__ or "", Path(str(module.__file__)).stem
    for number, line in enumerate(inspect.getsource(module).splitlines(), start=1):
        if PLACEHOLDER in line:
            found.append(f"line {number}: replace the {PLACEHOLDER}: {line.strip()}")
    if not doc.startswith(f"{page_name}: "):
        found.append(f"the docstring has to begin with the page's name, `{page_name}: `, and describe the family")
    things = {pages.family_of(module): module} | {one: pages.variant(module, one) for one in pages.variants(module)}
    for one, thing in things.items():
        line = pages.about(thing)
        if len(line) <= 20 or not line.endswith((".", ".)")):
            found.append(
                f"{one}: the first line of the docstring, which --list prints, has to be a sentence of more than 20 "
                f"characters that ends with a full stop: {line!r}"
            )
    for size, model in module.SIZES.items():
        counted = profile_of(model.config).parameters
        if abs(counted - model.parameters) > TOLERANCE * model.parameters:
            found.append(f"{size}: parameters={model.parameters:,}, but its dimensions give {counted:,}")
    recipes, _ = built(module)  # an inherited variant may be impossible for the sizes of the page
    for file in sorted({recipe.deepspeed for each in recipes.values() for recipe in each}):
        try:
            deepspeed_file.read(str(place) if (place := CONFIGS / file).exists() else file)
        except UserError as error:
            found.append(f"deepspeed={first_line(error)}")
    for size, model in module.SIZES.items():
        most = positions(model.config)
        of_size = (recipe for each in recipes.values() for recipe in each if recipe.size == size)
        if long := next((recipe for recipe in of_size if recipe.sequence_length > most), None):
            what = f"sequence_length={long.sequence_length}, but the model has {most:,} positions"
            found.append(f"{size} {long.variant}: {what}")
    # The run line and the change line: each names this page, and the launcher accepts it.
    commands = [shlex.split(line, comments=True) for line in LAUNCH.findall(doc)]
    if len(commands) < 2 or not any("=" in word for word in commands[1]):
        found.append("the docstring needs a command that runs the page, and a command that sets a key with key=value")
    for typed, variant, *changes in commands:
        page, size = pages.split(typed)
        size = size or next(iter(module.SIZES))
        if Path(page).stem != page_name:
            found.append(f"the command for {typed} names another page")
        elif size not in module.SIZES or variant not in pages.variants(module):
            found.append(f"the command for {typed} {variant}: there is no such size or variant")
        else:
            try:
                overrides.apply(pages.build(module, size, variant), [change for change in changes if "=" in change])
            except UserError as error:
                found.append(f"the command for {typed} {variant}: {error}")
    return found


def compare(model: Model) -> list[str]:
    """Return the differences between a page's model and the model on the Hub (or in a folder)."""
    from transformers import AutoConfig

    try:
        theirs = AutoConfig.from_pretrained(model.path, trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(
            f"{model.path}: cannot be read: {first_line(error)} (no network, or a licence to accept?)"
        ) from error
    ours = AutoConfig.for_model(**model.config)
    found = [
        f"{name}: the page has {getattr(ours, name)}, the Hub {getattr(theirs, name, None)}"
        for name in model.config
        if getattr(ours, name, None) != getattr(theirs, name, None)
    ]
    count = parameters(model.path)
    if count is not None and abs(count / model.parameters - 1) > 0.01:
        found.append(f"parameters: the page has {model.parameters:,}, the Hub {count:,}")
    return found


def parameters(path: str) -> int | None:
    """Return the Hub's parameter count of the safetensors files, or None if it is unavailable."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError

    try:
        return int(sum(get_safetensors_metadata(path).parameter_count.values()))
    except (HfHubHTTPError, NotASafetensorsRepoError, OSError, ValueError):
        return None
