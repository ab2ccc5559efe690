"""Known defects of libraries, each a script that runs alone: no line of it is this project's.

Its docstring is the text of a report: a title, and what is wrong. It sets `RANKS`, how many processes it needs,
`ONLY` where it shows on one kind of device ("cpu"), and `RIGHT_SINCE` where a version has mended it. `measure()`
returns whether the defect is present, and what was observed. Its folder is named after the library whose project should
know.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Defect:
    """One known defect."""

    path: Path
    title: str
    text: str
    ranks: int
    only: str | None
    """The kind of device on which it shows; None: on all."""
    right_since: str | None
    """The version of the library that is right; None: the newest one is not."""

    @property
    def name(self) -> str:
        """The name of its script."""
        return self.path.stem

    @property
    def library(self) -> str:
        """The library that has it."""
        return self.path.parent.name

    def command(self, script: str) -> str:
        """Return what runs it alone, under a script's name."""
        return f"torchrun --nproc_per_node {self.ranks} {script}"


def known() -> Iterator[Defect]:
    """Yield the defects, by library and name."""
    for path in sorted(Path(__file__).parent.glob("*/*.py")):
        if path.stem != "__init__":
            yield read(path)


def read(path: Path) -> Defect:
    """Return the defect that a script describes, which is not imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    title, _, text = (ast.get_docstring(tree) or "").partition("\n")
    said = _constants(tree)
    return Defect(path, title, text.strip(), said["RANKS"], said.get("ONLY"), said.get("RIGHT_SINCE"))


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return what a script sets the names above to."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    found = {ast.unparse(node.targets[0]): node.value for node in assigned}
    return {name: ast.literal_eval(found[name]) for name in ("RANKS", "ONLY", "RIGHT_SINCE") if name in found}
