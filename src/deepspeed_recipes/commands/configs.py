"""Copy one of the project's DeepSpeed JSON files, to read, to change, or to use in another project.

    ds-recipes configs copy zero3                 writes ./zero3.json
    ds-recipes configs copy zero3_offload conf    writes conf/zero3_offload.json

The files are templates: "auto" values are filled by the Hugging Face Trainer and by this project's launcher
(deepspeed=./zero3.json). Plain deepspeed.initialize does not understand "auto", so resolve the file first:
`ds-recipes resolve zero3.json --world-size 8`. An existing file is never overwritten.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path

from ..recipe import files
from ..recipe.errors import UserError
from ..recipe.project import CONFIGS, command
from .main import Parser


def main(words: Sequence[str] | None = None) -> int:
    """Copy a file, print its path, and return 0."""
    parser = Parser("configs", __doc__, epilog=f"configs: {', '.join(names())}")
    parser.add_argument("action", choices=["copy"], help="copy is the only action")
    parser.add_argument("name", metavar="NAME", help="one of the configs below, with or without .json")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(), metavar="DIR", help="default: the current folder"
    )
    options = parser.parse_args(words)
    written = copy(options.name, options.folder)
    print(f"written: {written}  (check your changes: {command('check')} {written})")
    return 0


def names() -> list[str]:
    """Return the names of the shipped configs."""
    return sorted(file.stem for file in CONFIGS.glob("*.json"))


def copy(name: str, folder: Path) -> Path:
    """Copy a shipped config into `folder`, created if necessary, and return the new file; nothing is overwritten."""
    stem = name.removesuffix(".json")
    if stem not in names():
        near = difflib.get_close_matches(stem, names(), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"unknown config {name!r}; {hint}There are: {', '.join(names())}.")
    file = folder / f"{stem}.json"
    if file.exists():
        raise UserError(f"{file}: already exists; name another folder, or remove the file first.")
    files.write_bytes(file, (CONFIGS / file.name).read_bytes())
    return file
