"""The command `shrink` of this checkout, documented in src/deepspeed_recipes/commands/shrink.py."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0] or ".")  # python -I and PYTHONSAFEPATH omit this folder
from _checkout import run

run("shrink")
