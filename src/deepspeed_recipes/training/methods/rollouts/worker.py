"""Runs the user's reward functions in a separate process, which the rank kills when it takes too long.

Standard library only, and no import of the project: it is started by its path. Each line of standard input is a JSON
object, `{"answer": ..., "example": ...}`; the reply is a list with a number, or an error message, for each function.
Whatever the functions print goes to standard error, and so into the rank's log.

    python worker.py SECONDS FILE.py:FUNCTION ...
"""

import importlib.util
import inspect
import json
import logging
import math
import numbers
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Function = Callable[[str, dict[str, Any]], Any]


def main(seconds: float, names: list[str]) -> None:
    """Load the functions, report that, and answer every line until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # as in the ranks: see training/__init__.py

    def reply(value: Any) -> None:
        print(json.dumps(value), file=replies, flush=True)

    try:
        functions = [load(*name.rpartition(":")[::2]) for name in names]
    except BaseException as error:
        reply(_described(error))
        return
    reply(None)
    for line in sys.stdin:
        asked = json.loads(line)
        scored: list[float | str] = []  # each function's number, or an error message
        # If the rank is dead by then, nothing else would end a function that never returns.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        for function in functions:
            try:
                reward = function(asked["answer"], dict(asked["example"]))
            except BaseException as error:  # even sys.exit ends only this example
                scored.append(_described(error))
                continue
            if not isinstance(reward, numbers.Real):
                scored.append(f"returned {_kind(reward)}; one number for the answer is expected")
            elif not math.isfinite(reward):
                scored.append(f"returned {float(reward)}; a finite number is expected")
            else:
                scored.append(float(reward))
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(scored)


def load(path: str, name: str) -> Function:
    """Return a function of a file, which may import modules from its folder.

    One that takes lists, as for TRL, is called with lists of one: texts if the data has texts, otherwise turns.
    Raises AttributeError if the file has no such name, and TypeError if it is not that of a function.
    """
    sys.path.insert(0, str(Path(path).resolve().parent))
    found = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    assert found is not None and found.loader is not None, path
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    taken = inspect.signature(function).parameters
    if "completions" not in taken:
        return function
    all_taken = any(one.kind is one.VAR_KEYWORD for one in taken.values())

    def scored(answer: str, example: dict[str, Any]) -> Any:
        text, turns = example.pop("prompt_text", None), example.pop("prompt", [])
        given: dict[str, list[Any]] = {name: [value] for name, value in example.items()}
        given["prompts"] = [turns if text is None else text]
        given["completions"] = [answer if text is not None else [{"role": "assistant", "content": answer}]]
        found = function(**{name: value for name, value in given.items() if all_taken or name in taken})
        if not isinstance(found, list | tuple) or len(found) != 1:
            raise TypeError(f"returned {_kind(found)} for a list of one answer; a list of one number is expected")
        return found[0]

    return scored


def _kind(value: Any) -> str:
    if value is None:
        return "nothing (None)"
    sized = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return f"a {type(value).__name__}{sized}"


def _described(error: BaseException) -> str:
    """Return an error as one line, with the place in the user's file."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in places if not frame.filename.startswith("<")]
    return f"{text} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else text


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
