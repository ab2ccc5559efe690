"""Known defects of libraries: a module for the library to whose project they are reported, and a function for each.

A function uses none of this project's code, and returns whether the defect is present, and the observed values. Its
docstring is the text of a report: a title, and a description. Its module names in `RANKS` the number of processes, in
`ONLY` the kind of device ("cpu") if the defect shows on one alone, and in `RIGHT_SINCE` the version that has fixed it.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...recipe.files import Json

SCRIPT = "reproduce.py"
"""The name of a defect's script in a report."""
MAIN = """

if __name__ == "__main__":
    present, observed = {}()
    print(f"{{'PRESENT' if present else 'absent'}}: {{observed}}", flush=True)
"""


@dataclass(frozen=True)
class Defect:
    """One known defect."""

    name: str
    library: str
    """The library that has it."""
    title: str
    text: str
    script: str
    """A script that shows the defect alone."""
    ranks: int
    only: str | None
    """The kind of device on which the defect shows, or None for all."""
    right_since: str | None
    """The version of the library that fixes it, or None if the newest does not."""

    @property
    def command(self) -> str:
        """The command that runs the script alone."""
        return f"torchrun --nproc_per_node {self.ranks} {SCRIPT}"


def known() -> Iterator[Defect]:
    """Yield the defects by library and name, without importing a library."""
    for path in sorted(Path(__file__).parent.glob("in_*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        values: Json = {}
        for node in tree.body:
            if isinstance(node, ast.Assign):
                values[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
        for function in tree.body:
            if isinstance(function, ast.FunctionDef):
                title, _, text = (ast.get_docstring(function) or "").partition("\n")
                only, since = (values.get(key, {}).get(function.name) for key in ("ONLY", "RIGHT_SINCE"))
                script = _script(source, tree, function)
                ranks, library = values["RANKS"][function.name], path.stem.removeprefix("in_")
                yield Defect(function.name, library, title, text.strip(), script, ranks, only, since)


def _script(source: str, tree: ast.Module, function: ast.FunctionDef) -> str:
    """Return a script of a function, with the imports and classes of its module that it uses."""

    def names(*nodes: ast.AST) -> set[str]:
        return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}

    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in names(function)]
    used = names(function, *classes)
    imports = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            kept = copy.copy(node)
            kept.names = [alias for alias in node.names if alias.name in used]
            imports += [ast.unparse(kept)] if kept.names else []
        elif isinstance(node, ast.Try) and used & names(node):
            imports.append(ast.unparse(node))
    parts = [ast.get_source_segment(source, node) or "" for node in (*classes, function)]
    return "\n\n\n".join(["\n".join(imports), *parts]) + MAIN.format(function.name)
