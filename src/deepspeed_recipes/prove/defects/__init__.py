"""Known defects of libraries, each a script that runs alone: it uses none of this project's code.

Its docstring is the text of a report: a title, and a description of the defect. It sets `RANKS`, the number of
processes, `ONLY` if the defect shows on one kind of device ("cpu"), and `RIGHT_SINCE` if a version has fixed it.
`measure()` returns whether the defect is present, and the observed values. Its folder is named after the library to
whose project it should be reported.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...recipe.files import Json


@dataclass(frozen=True)
class Defect:
    """One known defect."""

    path: Path
    title: str
    text: str
    ranks: int
    only: str | None
    """The kind of device on which the defect shows, or None for all."""
    right_since: str | None
    """The version of the library that fixes it, or None if the newest does not."""

    @property
    def name(self) -> str:
        """The name of its script."""
        return self.path.stem

    @property
    def library(self) -> str:
        """The library that has it."""
        return self.path.parent.name

    def command(self, script: str) -> str:
        """Return the command that runs the script alone, under the name `script`."""
        return f"torchrun --nproc_per_node {self.ranks} {script}"


def known() -> Iterator[Defect]:
    """Yield the defects, by library and name."""
    for path in sorted(Path(__file__).parent.glob("*/*.py")):
        if path.stem != "__init__":
            yield read(path)


def read(path: Path) -> Defect:
    """Return the defect that a script describes, without importing it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    title, _, text = (ast.get_docstring(tree) or "").partition("\n")
    set_to = _constants(tree)
    return Defect(path, title, text.strip(), set_to["RANKS"], set_to.get("ONLY"), set_to.get("RIGHT_SINCE"))


def _constants(tree: ast.Module) -> Json:
    """Return the values of the names above in a script."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    found = {ast.unparse(node.targets[0]): node.value for node in assigned}
    return {name: ast.literal_eval(found[name]) for name in ("RANKS", "ONLY", "RIGHT_SINCE") if name in found}
