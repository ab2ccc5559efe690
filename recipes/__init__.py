"""Fine-tuning recipes: every module here is the page of one model family."""

import os
import sys

if os.environ.get("PYTHONPATH"):
    # An empty or relative entry is the current folder: a `json.py` beside the user's data would replace Python's.
    _here = {os.path.abspath(entry) for entry in os.environ["PYTHONPATH"].split(os.pathsep) if not os.path.isabs(entry)}
    _here.discard(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) not in _here]
