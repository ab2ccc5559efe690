"""The paths of the package and its data, and the names of its commands as typed."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from .errors import UserError

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package."""
IMPORT_ROOT = PACKAGE.parent
"""The folder that must be on Python's path to import the package."""
PAGES = (PACKAGE / "pages").resolve()
"""The recipe pages; in a checkout a link to `recipes/`."""
CONFIGS = (PACKAGE / "configs").resolve()
"""The project's DeepSpeed JSON files."""
SAMPLES = PACKAGE / "samples"
"""The tiny models and the small datasets."""
CONSTRAINTS = (PACKAGE / "constraints.txt").resolve()
"""The exact versions that are tested together."""

SCRIPTS = {
    **{name: name for name in ("launch", "plan", "doctor", "report", "sweep", "export", "shrink")},
    **{name: name for name in ("generate", "evaluate", "serve", "certify", "publish", "benchmark")},
    "check": "check_config",
    "resolve": "resolve_config",
}
"""The commands that have a script in `scripts/`, and the script's name."""
TYPED = "DS_RECIPES_SCRIPTS"
"""The scripts in `scripts/` set this variable to its parent folder, so that printed commands have the same form."""

RENAMED = {"DS_RECIPES_FORWARD": "DSR_FORWARD", "DS_RECIPES_SERVING": "DSR_SERVING"}
"""Environment variables that had another name, and the old name."""


def variable(name: str, environment: Mapping[str, str]) -> str:
    """Return the value of one of the project's environment variables, or refuse its old name, which would do nothing.

    It is empty if it is not set.
    """
    old = RENAMED.get(name, "")
    if name not in environment and old in environment:
        raise UserError(f"{old}={environment[old]}: this variable is now called {name}; set that, and unset {old}.")
    return environment.get(name, "")


def runs() -> Path:
    """Return the folder that contains the run folders."""
    return Path.cwd() / "runs"


def command(name: str) -> str:
    """Return a command as typed: `ds-recipes launch`, or `python scripts/launch.py` if the user started a script."""
    return f"python scripts/{SCRIPTS[name]}.py" if TYPED in os.environ and name in SCRIPTS else f"ds-recipes {name}"


def program(name: str) -> str:
    """Return the name that begins a command's error messages: `launch.py`, or `ds-recipes launch`."""
    return command(name).removeprefix("python scripts/")


def python_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a child's Python imports this project, but nothing from the current folder.

    `python -m` and `-c` search the current folder first, and so does Python if PYTHONPATH has an empty or relative
    entry: an `xxhash.py` or a `wandb/` in a folder of downloaded data would run in every rank.
    """
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = dict.fromkeys([str(IMPORT_ROOT), *filter(os.path.isabs, given)])
    return {"PYTHONPATH": os.pathsep.join(kept), "PYTHONSAFEPATH": "1"}


def require(package: str) -> None:
    """Require a package as an import does, without the seconds that the import takes.

    Raises ModuleNotFoundError, to which the command that needs the package adds the fix.
    """
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def display(path: Path) -> str:
    """Return a path as typed: relative if it is inside the current folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
