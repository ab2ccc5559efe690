"""The permission to run a model's own Python code when its folder is loaded again."""

from pathlib import Path

from ...recipe.run_folder import RunFolder, read_recipe

_PERMITTED = {"here": False}


def permit() -> None:
    """Permit the code of every model that this process loads, as requested by its recipe or command line."""
    _PERMITTED["here"] = True


def here() -> bool:
    """Return whether this process has the permission; without an explicit value transformers prompts the user."""
    return _PERMITTED["here"]


def permitted(folder: str | Path) -> bool:
    """Return whether the code of the model in a folder may run, by this process's recipe or by that of its run.

    Only the recipe in a run's folder counts, not its copy in an export's `training/`.
    """
    if here():
        return True
    runs = map(RunFolder, Path(folder).resolve().parents[:2])
    return any(run.recipe.exists() and read_recipe(run).model.trust_remote_code for run in runs)
