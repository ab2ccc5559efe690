"""The user's own code in a recipe, named as `FILE.py:NAME`: which keys take it, and checks that do not run it."""

import ast
import hashlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import UserError
from .files import Json

WRITTEN = {
    "reward": "def {}(answer, example)",
    "loss": "def {}(outputs, labels, num_items_in_batch)",
    "data.metric": "def {}(answers, references)",
    "data.transform": "def {}(example)",
    "callbacks": "class {}(TrainerCallback)",
}
"""The form of the code of each key; `{}` is its name."""
MEANT = {
    "reward": "two arguments, the answer's text and the fields of its example",
    "loss": "three arguments, the model's output, the labels and the number of labelled tokens of the step",
    "data.metric": "two arguments, the answers and the references",
    "data.transform": "one argument, an example",
}
"""The arguments of the functions of each key."""


@dataclass(frozen=True)
class Function:
    """A function or class in one of the user's files."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


def is_own(text: str) -> bool:
    """Return True if a value names a file, unlike a built-in metric."""
    return ":" in text or text.endswith(".py")


def functions(key: str, text: str | None) -> list[Function]:
    """Return the functions that a key names; of `data.metric`, leave out the built-in metrics. No two have one name."""
    named = []
    for part in (part.strip() for part in (text or "").split(",")):
        if not part or (key == "data.metric" and not is_own(part)):
            continue
        path, _, name = part.rpartition(":")
        if not path.endswith(".py") or not name.isidentifier():
            model = "; a function may load a reward model" if key == "reward" and not path.endswith(".py") else ""
            raise UserError(f"{key}={part}: write FILE.py:{'CLASS' if key == 'callbacks' else 'FUNCTION'}{model}.")
        named.append(Function(path, name))
    if len({function.name for function in named}) < len(named):
        raise UserError(f"{key}={text}: two have the same name, and results are reported by name; rename one.")
    if len(named) > 1 and key in ("loss", "data.transform"):
        raise UserError(f"{key}={text}: must be one function; call the others from it.")
    return named


def of_recipe(recipe: Any) -> dict[str, list[Function]]:
    """Return the code that a run executes, by key."""
    texts = {
        "reward": recipe.reward if recipe.method.rollouts else None,
        "loss": recipe.loss,
        "data.metric": recipe.data.metric,
        "data.transform": recipe.data.transform,
        "callbacks": recipe.callbacks,
    }
    return {key: found for key, text in texts.items() if (found := functions(key, text))}


def digests(recipe: object) -> dict[str, str]:
    """Return the SHA-256 of the files of each key, in order; `unknown` for a file that only other machines have."""
    found = {}
    for key, functions_of_key in of_recipe(recipe).items():
        hashes = []
        for function in functions_of_key:
            try:
                hashes.append(hashlib.sha256(Path(function.path).read_bytes()).hexdigest())
            except FileNotFoundError:
                hashes.append("unknown")
            except OSError as error:
                raise UserError(f"{function.path}: cannot be read ({error.strerror}); check its permissions.") from None
        found[key] = ",".join(hashes)
    return found


def changed(recipe: object, then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield the key and value of each piece of a recipe's code whose file had another content."""
    for key, found in of_recipe(recipe).items():
        before, after = (digests.get(key, "unknown").split(",") for digests in (then, now))
        if len(before) == len(after) == len(found):
            for function, old, new in zip(found, before, after, strict=True):
                if old != new and "unknown" not in (old, new):
                    yield f"{key}={function} (SHA-256 {old[:12]}, now {new[:12]})"


def check_files(key: str, found: list[Function]) -> None:
    """Check that each function or class is defined in its file, without running the file."""
    wanted: Any = ast.ClassDef if key == "callbacks" else (ast.FunctionDef, ast.AsyncFunctionDef)
    for function in found:
        shown, written = f"{key}={function}", WRITTEN[key].format(function.name)
        if not Path(function.path).is_file():
            raise UserError(f"{shown}: no such file.")
        try:
            tree = ast.parse(Path(function.path).read_bytes())
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            where = f" at line {line}" if line else ""
            raise UserError(f"{shown}: not Python{where} ({getattr(error, 'msg', error)}).") from None
        defined = {node.name: node for node in tree.body if isinstance(node, wanted)}
        node = defined.get(function.name)
        if node is None:
            imported_or_assigned = any(
                (isinstance(one, ast.alias) and (one.asname or one.name) in (function.name, "*"))
                or (isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) and one.id == function.name)
                for one in ast.walk(tree)
            )
            if not imported_or_assigned:
                kind, plural = ("class", "classes") if key == "callbacks" else ("function", "functions")
                has = f"it defines {', '.join(defined)}" if defined else f"it defines no {plural}"
                raise UserError(f"{shown}: no {kind} of that name in the file; {has}.")
            continue
        if isinstance(node, ast.ClassDef):
            continue
        if isinstance(node, ast.AsyncFunctionDef):
            raise UserError(f"{shown}: must not be async; write `{written}`.")
        positional = node.args.posonlyargs + node.args.args
        number, least = written.count(",") + 1, len(positional) - len(node.args.defaults)
        most = len(positional) + len(node.args.kwonlyargs)
        if key == "reward" and any(one.arg == "completions" for one in node.args.args + node.args.kwonlyargs):
            continue  # it takes lists, as TRL's functions do
        of_trainer = key == "loss" and [one.arg for one in node.args.args[:1]] == ["model"]  # `Trainer.compute_loss`
        few = most < number and not node.args.vararg and not (node.args.kwarg and key == "loss")
        if of_trainer or least > number or few:
            raise UserError(f"{shown}: must take {MEANT[key]}; write `{written}`.")


def load(key: str, function: Function) -> Any:
    """Return the function or class, after running its file, once per process; it may import modules of its folder."""
    try:
        return getattr(_module(function.path), function.name)
    except BaseException as error:  # a file may also call sys.exit
        if isinstance(error, KeyboardInterrupt):
            raise
        fix = "correct the file, or leave the setting out"
        if isinstance(error, ModuleNotFoundError):
            fix = f"install {error.name} in this environment, or leave the setting out"
        raise UserError(f"{key}={function}: cannot be loaded: {described(error, function.path)};\n{fix}.") from error


@cache
def _module(path: str) -> ModuleType:
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last: a file next to it must not hide an installed package
    name = f"own_code_{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    module = sys.modules[name] = ModuleType(name)  # dataclasses and pickles look their module up by its name
    module.__file__ = path
    # Not from __pycache__, which has an older version of a file that changed twice within a second.
    exec(compile(Path(path).read_bytes(), path, "exec"), module.__dict__)
    return module


def transformed(
    located: Iterable[tuple[str, Json]],
    transform: str | None,
    on_drop: Callable[[], object] = lambda: None,
    on_error: Callable[[UserError], object] | None = None,
) -> Iterator[tuple[str, Json]]:
    """Yield the examples of one source, (place, example) each, as `data.transform`, if any, returns them.

    `on_drop` is called for each example that the function drops, and `on_error` with the errors, which are otherwise
    raised.
    """
    for function in functions("data.transform", transform):
        change = load("data.transform", function)
        break
    else:
        yield from located
        return
    for where, example in located:
        try:
            found = change(dict(example))
        except Exception as error:
            failure = UserError(f"{where}: data.transform={function}: {described(error, function.path)}.")
            if on_error is None:
                raise failure from error
            on_error(failure)
            continue
        if found is None:
            on_drop()
        elif isinstance(found, Mapping):
            yield where, dict(found)
        else:
            raise UserError(
                f"{where}: data.transform={function}: returned a {type(found).__name__}; return the example as a dict, "
                "or None to drop it."
            )


def described(error: BaseException, path: str) -> str:
    """Return the last line of an error's traceback, and the line of the user's file."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines() or [type(error).__name__]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{lines[-1][:300]} ({path}:{frames[-1].lineno})" if frames else lines[-1][:300]
