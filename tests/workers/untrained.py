"""A run whose learning rate is lost in rounding, so that its export has to be what it started from."""

from deepspeed_recipes.training import run


def main(folder: str) -> None:
    """Train what `folder` says, without the check that training has changed the weights."""
    run.check_moved = lambda trainer: None
    run.main(folder)
