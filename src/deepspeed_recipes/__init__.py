"""Fine-tuning recipes for Hugging Face models under DeepSpeed: planner, linter, launcher, trainer, export."""

import os
import sys

if os.environ.get("PYTHONPATH"):
    # An empty or relative entry is the current folder: a `json.py` beside the user's data would replace Python's.
    _here = {os.path.abspath(entry) for entry in os.environ["PYTHONPATH"].split(os.pathsep) if not os.path.isabs(entry)}
    _here.discard(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) not in _here]


def launch(page: str) -> None:
    """Run the launcher on a page that was started as a script (`python recipes/llama3.py 8b lora ...`), and exit."""
    caller = sys._getframe(1).f_globals
    if caller.get("__file__") == page and caller.get("__name__") != "__main__":
        return  # the page is being read, and lacks the usual `if`
    here = os.path.dirname(os.path.realpath(page))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]  # a page may have a library's name
    from .commands.main import run

    sys.exit(run("script", [page, *sys.argv[1:]], os.path.basename(page)))
