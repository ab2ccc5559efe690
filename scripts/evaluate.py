"""The command `evaluate` of this checkout; src/deepspeed_recipes/commands/evaluate says what it does."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0] or ".")  # python -I and PYTHONSAFEPATH leave this folder out
from _checkout import run

run("evaluate")
