"""Runs a command of this checkout's package; shared by the scripts in this folder."""

import os
import sys

ENVIRONMENT = "activate the project's environment (source .venv/bin/activate) or make it first (make install)."


def run(command: str) -> None:
    """Run a command of `src/deepspeed_recipes/commands/` and exit with its status."""
    if sys.version_info < (3, 11):  # noqa: UP036  # only this file of the project must run under an older Python
        print(f"{sys.executable} is Python {sys.version.split()[0]}, not 3.11 or newer; {ENVIRONMENT}", file=sys.stderr)
        sys.exit(2)
    # This folder must not be on the path: its evaluate.py, for example, has the name of a library.
    scripts = os.path.dirname(os.path.realpath(__file__))
    root = os.path.dirname(scripts)
    sys.path[:] = [os.path.join(root, "src"), *(path for path in sys.path if os.path.realpath(path) != scripts)]
    os.environ["DS_RECIPES_SCRIPTS"] = root
    from deepspeed_recipes.commands import main

    sys.exit(main.run(command))
