"""The command `benchmark` of this checkout; src/deepspeed_recipes/commands/benchmark.py says what it does."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0] or ".")  # python -I and PYTHONSAFEPATH leave this folder out
from _checkout import run

if __name__ == "__main__":  # the processes that it forks read this file, too
    run("benchmark")
