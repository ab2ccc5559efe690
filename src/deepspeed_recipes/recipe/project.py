"""Where the package and its data are, and how its commands are typed."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from .errors import UserError

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package."""
IMPORT_ROOT = PACKAGE.parent
"""What has to be on Python's path for the package to be found."""
PAGES = (PACKAGE / "pages").resolve()
"""The recipes: in a checkout a link to `recipes/`."""
CONFIGS = (PACKAGE / "configs").resolve()
"""The DeepSpeed JSON that the project ships."""
SAMPLES = PACKAGE / "samples"
"""The tiny models and the small datasets."""
CONSTRAINTS = (PACKAGE / "constraints.txt").resolve()
"""The exact versions that are tested together."""

SCRIPTS = {
    **{name: name for name in ("launch", "plan", "doctor", "report", "sweep", "export", "shrink")},
    **{name: name for name in ("generate", "evaluate", "serve", "publish", "benchmark")},
    "check": "check_config",
    "resolve": "resolve_config",
}
"""The commands that have a script in `scripts/`, and the script's name."""
TYPED = "DS_RECIPES_SCRIPTS"
"""Set to the folder above `scripts/` by its scripts, so that what a command prints is typed the same way."""

RENAMED = {"DS_RECIPES_FORWARD": "DSR_FORWARD", "DS_RECIPES_SERVING": "DSR_SERVING"}
"""Environment variables that had another name, and the old name."""


def variable(name: str, environment: Mapping[str, str]) -> str:
    """Return the value of one of the project's environment variables, empty if it is not set.

    Raises:
        UserError: only its old name is set, which would do nothing.
    """
    old = RENAMED.get(name, "")
    if name not in environment and old in environment:
        raise UserError(f"{old}={environment[old]}: this variable is now called {name}; set that, and unset {old}.")
    return environment.get(name, "")


def runs() -> Path:
    """Return the folder of run folders."""
    return Path.cwd() / "runs"


def command(name: str) -> str:
    """Return what to type to run a command: `ds-recipes launch`, or `python scripts/launch.py` where that was typed."""
    return f"python scripts/{SCRIPTS[name]}.py" if TYPED in os.environ and name in SCRIPTS else f"ds-recipes {name}"


def program(name: str) -> str:
    """Return how a command's error messages begin: `launch.py`, or `ds-recipes launch`."""
    return command(name).removeprefix("python scripts/")


def python_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a child's Python finds this project, and no file of the folder that the user is in.

    `python -m` and `-c` look there first, and so does Python where PYTHONPATH has an empty or relative entry: an
    `xxhash.py` or a `wandb/` in a folder of downloaded data would run in every rank.
    """
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = dict.fromkeys([str(IMPORT_ROOT), *filter(os.path.isabs, given)])
    return {"PYTHONPATH": os.pathsep.join(kept), "PYTHONSAFEPATH": "1"}


def require(package: str) -> None:
    """Ask for a package as an import does, without the seconds that the import takes.

    Raises:
        ModuleNotFoundError: it is not installed; the command that needs it says what to do.
    """
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def display(path: Path) -> str:
    """Return a path as the user would type it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
