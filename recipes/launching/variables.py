"""Which environment variables a run takes along to other machines; secrets never are."""

import re
from collections.abc import Mapping

from ..spec.errors import UserError, is_secret

PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "HF_", "WANDB_", "TRANSFORMERS_", "DS_ACCELERATOR")
"""Networks (NCCL, gloo, UCX, libfabric), Hugging Face's caches and mirrors, W&B, and DeepSpeed's choice of device."""
NAMES = (
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "TOKENIZERS_PARALLELISM", "PYTHONWARNINGS"),
)
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
"""Credentials that a run may need; each machine, job or pod has to provide them itself."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a run's ranks need on another machine, without secrets.

    Raises:
        UserError: a value that no script or manifest can hold.
    """
    found = {name: value for name, value in sorted(environment.items()) if _wanted(name) and not _secret(name, value)}
    for name, value in found.items():
        if not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise UserError(f"{name}: its value is not UTF-8 text; correct it, or unset it.")
    return found


def withheld(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that would be forwarded if they did not look like secrets."""
    return sorted(name for name, value in environment.items() if _wanted(name) and _secret(name, value))


def is_name(text: str) -> bool:
    """Return whether a shell and Kubernetes accept `text` as the name of a variable."""
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text) is not None


def _wanted(name: str) -> bool:
    return is_name(name) and (name.startswith(PREFIXES) or name in NAMES)


def _secret(name: str, value: str) -> bool:
    return is_secret("" if name in NAMES else name, value)
