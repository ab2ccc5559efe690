"""lm-evaluation-harness's tasks: its own command, in this environment, on the same models."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from ..model_folder import base_model
from ..spec.errors import UserError
from .server import Server

VERSION = "0.4.13"
INSTALL = f'pip install "lm-eval[api,hf]=={VERSION}"'


def check() -> None:
    """Refuse where the harness is not installed.

    Raises:
        UserError: says how to install it.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"--tasks needs lm-evaluation-harness: {INSTALL}")


def command(model: Path | Server, tasks: str, folder: Path | None, limit: int | None) -> list[str]:
    """Return the harness's command for one model.

    Args:
        model: a whole model or an adapter, or a server.
        tasks: names with commas.
        folder: holds tasks of one's own, as YAML.
        limit: how many examples of each task; None: all.
    """
    if isinstance(model, Server):
        arguments = f"model={model.model},base_url={model.address}/v1/chat/completions,tokenizer_backend=None"
        kind = "local-chat-completions"
    else:
        kind, arguments = "hf", f"pretrained={model}"
        if (model / base_model.ADAPTER).exists():
            arguments = f"pretrained={base_model.find(model)},peft={model},tokenizer={model}"
    words = [sys.executable, "-m", "lm_eval", "--model", kind, "--model_args", arguments, "--tasks", tasks]
    words += ["--apply_chat_template"]
    words += ["--include_path", str(folder)] if folder else []
    return [*words, *(["--limit", str(limit)] if limit else [])]


def run(model: Path | Server, tasks: str, folder: Path | None, limit: int | None) -> int:
    """Run the harness on one model and return its exit status."""
    return subprocess.call(command(model, tasks, folder, limit))
