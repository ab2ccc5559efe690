"""A run whose second copies of the parameters, ZeRO++'s hpZ, are never brought up to date."""

from deepspeed.runtime.zero.partition_parameters import Init

from deepspeed_recipes.training import run


def main(folder: str) -> None:
    """Train what `folder` says."""
    partition = Init._partition_param_sec
    Init._partition_param_sec = lambda self, param, buffer=None, has_been_updated=False: partition(self, param, buffer)
    run.main(folder)
