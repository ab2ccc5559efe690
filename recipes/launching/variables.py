"""Which environment variables go to other machines with a run; a secret never does."""

from collections.abc import Mapping

from recipes.spec.errors import is_secret

PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "HF_", "WANDB_", "TRANSFORMERS_", "DS_ACCELERATOR")
"""Networks (NCCL, gloo, UCX, libfabric), Hugging Face's caches and mirrors, W&B, and which device DeepSpeed takes."""
NAMES = (
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "TOKENIZERS_PARALLELISM", "PYTHONWARNINGS"),
)
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
"""What a run may need of the account it runs under: each machine, job or pod has to have them by itself."""


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a run's ranks need on another machine, secrets left out."""
    return {name: value for name, value in sorted(environment.items()) if _wanted(name) and not _secret(name, value)}


def staying(environment: Mapping[str, str]) -> list[str]:
    """Return the names of variables that would travel, were they not secrets."""
    return sorted(name for name, value in environment.items() if _wanted(name) and _secret(name, value))


def _wanted(name: str) -> bool:
    return name.startswith(PREFIXES) or name in NAMES


def _secret(name: str, value: str) -> bool:
    return is_secret("" if name in NAMES else name, value)
