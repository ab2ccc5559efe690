"""Selects the environment variables that a run forwards to other machines: those listed here, and never a secret."""

import re
from collections.abc import Mapping

from ..recipe import project
from ..recipe.errors import UserError, is_secret

PREFIXES = (
    *("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "RDMAV_", "IBV_"),  # networks
    *("OMP_", "KMP_", "MKL_", "GOMP_", "TORCHINDUCTOR_", "TRITON_", "DS_BUILD_"),  # threads and compilers
)
"""Prefixes of variables that are never credentials."""
NAMES = (
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("DS_ACCELERATOR", "DS_SKIP_CUDA_CHECK", "DEEPSPEED_TIMEOUT"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_XET_CACHE", "HF_ASSETS_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE"),
    *("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_VERBOSITY", "HF_HUB_DISABLE_TELEMETRY"),
    *("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_PROGRESS_BARS"),
    *("HF_XET_HIGH_PERFORMANCE", "HF_HUB_ENABLE_HF_TRANSFER", "HF_DATASETS_IN_MEMORY_MAX_SIZE"),
    *("TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_VERBOSITY", "TOKENIZERS_PARALLELISM"),
    *("WANDB_MODE", "WANDB_DISABLED", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_NAME", "WANDB_NOTES"),
    *("WANDB_TAGS", "WANDB_RUN_GROUP", "WANDB_JOB_TYPE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR"),
    *("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR", "WANDB_SILENT", "WANDB_CONSOLE"),
    *("WANDB_INIT_TIMEOUT", "WANDB_HTTP_TIMEOUT", "WANDB_DISABLE_CODE", "WANDB_DISABLE_GIT"),
    *("TORCH_HOME", "TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES"),
    *("TORCH_CUDA_ARCH_LIST", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"),
    *("CUDA_HOME", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE"),
    *("MALLOC_ARENA_MAX", "PYTHONWARNINGS", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"),
    "PYTHONSAFEPATH",  # `recipe.project.python_path`
)
MORE = "DS_RECIPES_FORWARD"
"""The variable that names more variables to forward, separated by commas."""
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
"""Credentials that a run may need; each machine, job or pod has to provide them itself."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a run's ranks need on another machine, without secrets.

    Raises:
        UserError: a value that no script or manifest can contain, or `DS_RECIPES_FORWARD` under its old name.
    """
    listed = _listed(environment)
    found = {name: environment[name] for name in listed if not _secret(name, environment[name])}
    for name, value in found.items():
        if not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise UserError(f"{name}: its value is not UTF-8 text; correct or unset the variable.")
    return found


def withheld(environment: Mapping[str, str]) -> list[str]:
    """Return the names of variables that a run may need but that look like secrets and are not forwarded."""
    listed = [name for name in _listed(environment) if _secret(name, environment[name])]
    return sorted({*listed, *(name for name in SECRETS if name in environment)})


def is_name(text: str) -> bool:
    """Return True if a shell and Kubernetes accept `text` as the name of a variable."""
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text) is not None


def _listed(environment: Mapping[str, str]) -> list[str]:
    asked = {name.strip() for name in project.variable(MORE, environment).split(",")}
    return sorted(
        name for name in environment if is_name(name) and (name.startswith(PREFIXES) or name in NAMES or name in asked)
    )


def _secret(name: str, value: str) -> bool:
    return is_secret("" if name in NAMES else name, value)
