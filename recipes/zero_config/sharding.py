"""What a DeepSpeed file says that the layout of a run has to go with."""

from pathlib import Path

from recipes.spec.limits import Sharding
from recipes.zero_config.read import read
from recipes.zero_config.rule import Config


def sharding(path: str | Path) -> Sharding:
    """Return the ZeRO stage and hpZ of a file that the linter has passed.

    Raises:
        read.Unreadable: the file is no JSON object.
    """
    config = Config.of(read(path))
    stage = config.stage or 0
    return Sharding(
        stage=stage,
        partition_size=int(config.number("zero_optimization", "zero_hpz_partition_size") or 1) if stage == 3 else 1,
    )
