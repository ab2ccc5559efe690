"""Fills the templates of job scripts and manifests; a filter quotes every value.

`shell` quotes for a POSIX shell, `yaml` writes a value as YAML, `yaml_block` writes text of several lines as a readable
indented block, and `python` writes a Python literal.
"""

import json
import math
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..recipe import files

if TYPE_CHECKING:
    from jinja2 import Environment


def fill(template: Path, **values: object) -> str:
    """Return a template with its values filled in; it may include templates of its folder, and needs every value."""
    return str(_environment(template.parent).get_template(template.name).render(values))


def write(folder: Path, texts: Mapping[str, str]) -> Path:
    """Write the files `texts` into `folder`, which is created if necessary, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        files.write_text(folder / file, text)
    return folder


@cache
def _environment(folder: Path) -> "Environment":
    """Return the Jinja environment of a folder, which compiles each template once."""
    # Imported here, so that commands that fill no template do not wait for Jinja.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the filters quote
    )
    environment.filters |= {"shell": shell, "yaml": yaml_scalar, "yaml_block": yaml_block, "python": repr}
    return environment


def shell(value: object) -> str:
    """Return a value as one word of a POSIX shell."""
    return shlex.quote(str(value))


def yaml_scalar(value: object) -> str:
    """Return a string, a number or a truth value as YAML on one line."""
    if not isinstance(value, str):
        return json.dumps(value, default=str)  # for a missing value, str raises
    import yaml

    return yaml.safe_dump(value, default_style='"', width=math.inf, allow_unicode=True).strip()


def yaml_block(text: str, indent: int) -> str:
    """Return text as a YAML block, indented by `indent` spaces, or quoted if a block cannot hold it."""
    import yaml

    lines = "\n".join(f"{' ' * indent}{line}" if line else "" for line in text.rstrip("\n").split("\n"))
    block = ("|\n" if text.endswith("\n") else "|-\n") + lines
    try:
        same = yaml.safe_load(f"key: {block}\n") == {"key": text}
    except yaml.YAMLError:
        same = False
    return block if same else yaml_scalar(text)
