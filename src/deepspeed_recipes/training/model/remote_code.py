"""The permission to run a model's own Python code when its folder is loaded again."""

from pathlib import Path

from ...recipe.run_folder import RunFolder, read_recipe

_PERMITTED = {"here": False}


def permit() -> None:
    """Permit the code of every model that this process loads, as its recipe or command line asks."""
    _PERMITTED["here"] = True


def here() -> bool:
    """Return whether this process has the permission; without an explicit answer transformers asks on the terminal."""
    return _PERMITTED["here"]


def permitted(folder: str | Path) -> bool:
    """Return whether the code of the model in a folder may run, by this process's recipe or by that of its run.

    The recipe in a run's folder counts, and not the copy of it that travels in an export's `training/`.
    """
    if here():
        return True
    runs = map(RunFolder, Path(folder).resolve().parents[:2])
    return any(run.recipe.exists() and read_recipe(run).model.trust_remote_code for run in runs)
