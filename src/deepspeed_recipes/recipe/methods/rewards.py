"""Reads and checks a recipe's reward functions (`FILE.py:FUNCTION`, comma-separated) without running user code."""

import ast
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError

EXAMPLE = "reward=src/deepspeed_recipes/samples/rewards.py:exact_match"


@dataclass(frozen=True)
class Function:
    """A function in one of the user's files."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


def functions(reward: str | None) -> list[Function]:
    """Return the functions that the recipe's `reward` names.

    Raises:
        UserError: `reward` is empty or not of the form FILE.py:FUNCTION.
    """
    found = [text.strip() for text in (reward or "").split(",") if text.strip()]
    if not found:
        raise UserError(f"reward: GRPO needs a function that scores an answer, FILE.py:FUNCTION; e.g. {EXAMPLE}.")
    named = []
    for text in found:
        path, _, name = text.rpartition(":")
        if not path.endswith(".py") or not name.isidentifier():
            raise UserError(f"reward={text}: write FILE.py:FUNCTION, e.g. {EXAMPLE}.")
        named.append(Function(path, name))
    if len({function.name for function in named}) < len(named):
        raise UserError(f"reward={reward}: two functions have the same name, by which rewards are logged; rename one.")
    return named


def weights(reward: str | None, reward_weights: str | None) -> list[float]:
    """Return the weight of each function.

    Raises:
        UserError: there is not exactly one finite number per function.
    """
    named = functions(reward)
    if reward_weights is None:
        return [1.0] * len(named)
    try:
        found = [float(weight) for weight in reward_weights.split(",")]
    except ValueError:
        found = []
    if len(found) != len(named) or any(abs(weight) == float("inf") or weight != weight for weight in found):
        raise UserError(
            f"grpo.reward_weights={reward_weights}: reward names {len(named)} functions, so {len(named)} numbers are "
            f"expected, separated by commas ({','.join(['1'] * len(named))})."
        )
    return found


def check_files(reward: str | None) -> None:
    """Check that each function is defined in its file, without running the file.

    Raises:
        UserError: the file is missing or not Python, or does not define the function.
    """
    for function in functions(reward):
        key = f"reward={function}"
        if not Path(function.path).is_file():
            raise UserError(f"{key}: no such file.")
        try:
            tree = ast.parse(Path(function.path).read_bytes())
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            where = f" at line {line}" if line else ""
            raise UserError(f"{key}: not Python{where} ({getattr(error, 'msg', error)}).") from None
        _check_defined(key, function, tree)


def _check_defined(key: str, function: Function, tree: ast.Module) -> None:
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    found = defined.get(function.name)
    if found is None:
        if not _may_be_assigned(function.name, tree):
            has = f"it defines {', '.join(defined)}" if defined else "it defines no functions"
            raise UserError(f"{key}: no function of that name in the file; {has}.")
        return
    if isinstance(found, ast.AsyncFunctionDef):
        raise UserError(f"{key}: must not be async; write `def {function.name}(answer, example)`.")
    least = len(found.args.posonlyargs + found.args.args) - len(found.args.defaults)
    most = len(found.args.posonlyargs + found.args.args)
    if least > 2 or (most < 2 and found.args.vararg is None):
        raise UserError(
            f"{key}: must take two arguments, the answer's text and the fields of its example; write "
            f"`def {function.name}(answer, example)`."
        )


def _may_be_assigned(name: str, tree: ast.Module) -> bool:
    """Return True if the file may define the name by an import or an assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.alias) and ((node.asname or node.name) == name or node.name == "*"):
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
    return False
