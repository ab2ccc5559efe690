"""The command `doctor` of this checkout, documented in src/deepspeed_recipes/commands/doctor/."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0] or ".")  # python -I and PYTHONSAFEPATH omit this folder
from _checkout import run

if __name__ == "__main__":  # the ranks of --prove and --measure import this file too
    run("doctor")
