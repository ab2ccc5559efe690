"""Where the project is, and how its commands are typed: a checkout, or the package that pip has installed.

All imports inside the project are relative, so that it runs under either name.
"""

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

NAME = __name__.partition(".")[0]
"""What the project is imported as: `recipes` in a checkout, `deepspeed_recipes` where pip has installed it."""
INSTALLED = NAME == "deepspeed_recipes"
"""Whether pip has installed it, editable or not: then the command is `dsr`, and it works where the user is."""
PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the pages."""
IMPORT_ROOT = PACKAGE.parent
"""What has to be on Python's path for `NAME` to be found: the checkout, or site-packages."""
CHECKOUT = None if (PACKAGE / "configs").is_dir() else PACKAGE.parent
"""The checkout's root, of an editable installation too; None where there is only the package."""
CONFIGS = (CHECKOUT or PACKAGE) / "configs"
"""The DeepSpeed JSON that the project ships."""
SAMPLES = PACKAGE / "samples"
"""The tiny model and the small datasets."""
CONSTRAINTS = (CHECKOUT or PACKAGE) / "constraints.txt"
"""The exact versions that are tested together."""

_SAME = (
    *("launch", "plan", "doctor", "report", "sweep", "export", "shrink"),
    *("generate", "evaluate", "serve", "publish", "benchmark"),
)
SCRIPTS = {
    **{name: name for name in _SAME},
    "check": "check_config",
    "resolve": "resolve_config",
}
"""The commands that a checkout has a script for in `scripts/`, and the script's name."""
_SCRIPT_NAME = re.compile(rf"(?:python )?(?<![\w/])(?:scripts/)?({'|'.join(SCRIPTS.values())})\.py\b")
_INSTALLED_NAME = re.compile(r"\bdsr ([a-z]+)")


def runs() -> Path:
    """Return the folder of run folders: the checkout's, or one where the user is."""
    return (Path.cwd() if INSTALLED else IMPORT_ROOT) / "runs"


def command(name: str) -> str:
    """Return what the user types to run a command: `python scripts/launch.py`, or `dsr launch` where installed."""
    if INSTALLED:
        return f"dsr {name}"
    return f"python scripts/{SCRIPTS[name]}.py" if name in SCRIPTS else f"python -m {NAME}.commands {name}"


def program(name: str) -> str:
    """Return a command's short name, as its error messages begin: `launch.py`, or `dsr launch` where installed."""
    if INSTALLED:
        return f"dsr {name}"
    return f"{SCRIPTS[name]}.py" if name in SCRIPTS else name


def as_typed(text: str) -> str:
    """Return `text` with every command that it names, as `launch.py` or `dsr launch`, as this user types it."""
    if not INSTALLED:
        return _INSTALLED_NAME.sub(lambda found: command(found[1]), text)
    names = {script: name for name, script in SCRIPTS.items()}
    return _SCRIPT_NAME.sub(lambda found: f"dsr {names[found[1]]}", text)


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
