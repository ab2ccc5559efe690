"""What the scripts beside this file share: they run one command of this checkout's package."""

import os
import sys

ENVIRONMENT = "activate the project's environment (source .venv/bin/activate) or make it first (make install)."


def run(command: str) -> None:
    """Run a command of `src/deepspeed_recipes/commands/` and end with its exit status."""
    if sys.version_info < (3, 11):  # noqa: UP036  # an older Python can read this file, and nothing else of the project
        print(f"{sys.executable} is Python {sys.version.split()[0]}, not 3.11 or newer; {ENVIRONMENT}", file=sys.stderr)
        sys.exit(2)
    # Without this folder: its evaluate.py, for one, has the name of a library.
    scripts = os.path.dirname(os.path.realpath(__file__))
    root = os.path.dirname(scripts)
    sys.path[:] = [os.path.join(root, "src"), *(path for path in sys.path if os.path.realpath(path) != scripts)]
    os.environ["DS_RECIPES_SCRIPTS"] = root
    from deepspeed_recipes.commands import main

    sys.exit(main.run(command))
