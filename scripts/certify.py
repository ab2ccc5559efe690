"""The command `certify` of this checkout, documented in src/deepspeed_recipes/commands/certify."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0] or ".")  # python -I and PYTHONSAFEPATH omit this folder
from _checkout import run

run("certify")
