"""The command `doctor` of this checkout; src/deepspeed_recipes/commands/doctor/ says what it does."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0] or ".")  # python -I and PYTHONSAFEPATH leave this folder out
from _checkout import run

if __name__ == "__main__":  # the ranks of --prove import this file too
    run("doctor")
