"""What the scripts beside this file share: they find the project in the folder above and run one of its commands."""

import sys
from pathlib import Path

ENVIRONMENT = "activate the project's environment (source .venv/bin/activate) or make it first (make install)."


def run(command: str) -> None:
    """Run `recipes/commands/COMMAND.py` and end with its exit status."""
    if sys.version_info < (3, 11):  # noqa: UP036  # an older Python can read this file, and nothing else of the project
        print(f"{sys.executable} is Python {sys.version.split()[0]}, not 3.11 or newer; {ENVIRONMENT}", file=sys.stderr)
        sys.exit(2)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from recipes.commands import main

    sys.exit(main.run(command))
