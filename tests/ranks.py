"""Real ranks for tests: forks of a process that has imported the stack and every worker that needs it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from deepspeed_recipes.prove.ranks import Ranks, free_port, read_logs
from deepspeed_recipes.recipe.recipe import Recipe
from deepspeed_recipes.recipe.run_folder import RunFolder, write_recipe

__all__ = ["PRELOADED", "Ranks", "free_port", "read_logs", "run_on"]

PRELOADED = ("tests.preload", "tests.workers.use_config")


def run_on(
    ranks: Ranks,
    recipe: Recipe,
    folder: Path,
    world_size: int = 2,
    name: str = "run",
    function: Callable[..., None] | None = None,
    words: Sequence[str] = (),
) -> RunFolder:
    """Train a recipe on ranks, fail unless all succeed, and return the run; what each prints is in `folder`/log.*.

    `function` gets the run's folder and the `words` instead of `training.run.main`.
    """
    from deepspeed_recipes.training import run as training_run  # imports the whole stack

    run = RunFolder(folder / name)
    write_recipe(run, recipe)
    ranks.check(function or training_run.main, str(run.path), *words, log=folder / "log", world_size=world_size)
    return run
