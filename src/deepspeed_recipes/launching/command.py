"""The ranks on a machine: their number, their environment, and the commands of the launchers that start them.

`forwarded` selects the variables that a run forwards to other machines: those listed here, and never a secret.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..machine import ops
from ..recipe import deepspeed_file, project
from ..recipe.errors import UserError, is_secret, redact
from ..recipe.project import python_path
from ..recipe.recipe import Recipe
from ..recipe.run_folder import RunFolder
from ..training.rendezvous import free_port
from .ssh import hostfile
from .supervise import RANK_MODULE


def visible_gpus() -> int:
    """Return the number of GPUs that this process may use; imports torch, which takes seconds, only with a driver."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not any(Path("/dev", name).exists() for name in ("kfd", "dxg")):
        return 0
    import torch

    return int(torch.cuda.device_count())


def rank_count(asked: int | None, gpus: int) -> int:
    """Return the number of ranks to start on this machine: at least one, and at most as many as it has GPUs."""
    if asked is None:
        return gpus or 2
    if asked < 1:
        raise UserError(f"--gpus {asked}: must be at least 1.")
    if gpus and asked > gpus:
        raise UserError(f"--gpus {asked}: this machine has {gpus}.")
    return asked


def deepspeed_command(
    folder: RunFolder, ranks: int, pool: hostfile.HostPool | None = None, master: str | None = None
) -> list[str]:
    """Return the DeepSpeed launcher's command for a run folder, on this machine or on the hosts of a pool."""
    return launcher_command((RANK_MODULE, str(folder.path)), ranks, pool, master)


QUIETLY = ("--log_level", "critical", "--no_local_rank")
"""Options of DeepSpeed's launcher. With `--quiet` its last line, the command and status of a failed rank, would follow
and hide the reason, which the rank has printed or `supervise.explain` prints."""


def launcher_command(
    module: Sequence[str], ranks: int, pool: hostfile.HostPool | None = None, master: str | None = None
) -> list[str]:
    """Return the DeepSpeed launcher's command for a module and its words, on this machine or on the hosts of a pool.

    On this machine the ranks use the first of the GPUs that the user has chosen. GPUs that are named by UUID are
    refused, since the launcher does not accept them.
    """
    chosen = [device.strip() for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]
    if pool:
        if not shutil.which("pdsh"):
            raise UserError(
                "--hostfile: DeepSpeed's launcher needs pdsh on this machine (Debian: apt-get install pdsh)."
            )
        # Without --force_multi a pool of one host would run here, whatever the host's name.
        where = ["--hostfile", str(pool.hostfile), *pool.options]
        where += ["--master_addr", master or pool.hosts[0], "--force_multi"]
    elif not chosen or not visible_gpus():
        where = ["--num_gpus", str(ranks)]
    elif all(device.isdecimal() for device in chosen):
        # With `--num_gpus` DeepSpeed would drop CUDA_VISIBLE_DEVICES and count from 0: with 4,5 the ranks would use
        # GPUs 0 and 1, which may be another user's (deepspeed 0.19.8, launcher/runner.py, `main`).
        where = ["--include", f"localhost:{','.join(chosen[:ranks])}"]
    else:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={','.join(chosen)}: DeepSpeed's launcher accepts numbers only, e.g. 0,1; "
            "nvidia-smi -L lists the number of each UUID."
        )
    launcher = Path(sys.executable).with_name("deepspeed")
    return [
        *([str(launcher)] if launcher.exists() else [sys.executable, "-m", "deepspeed.launcher.runner"]),
        # Not the launcher's default port, which a run that is still ending often holds.
        *(*QUIETLY, *where, "--master_port", str(free_port())),
        *("--module", *module),
    ]


def threads(ranks: int) -> str:
    """Return OMP_NUM_THREADS for this machine's ranks: the user's value, or an equal share of the cores.

    Otherwise each rank would use all cores, also for Adam on the host: 8 times as many threads as cores with 8 GPUs.
    """
    return os.environ.get("OMP_NUM_THREADS") or share_of_cores(ranks)


def share_of_cores(ranks: int) -> str:
    """Return the number of this machine's cores for each of its ranks."""
    return str(max(1, len(os.sched_getaffinity(0)) // ranks))


ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the most that glibc takes
    "MALLOC_TOP_PAD_": str(2**26),
}
"""How CPU ranks allocate memory, unless the user has set it.

glibc keeps freed memory per arena: with one arena instead of two a rank of `tiny` peaks 3% lower, at the same speed.
The others keep freed memory for the next tensors, and large tensors on huge pages. Without them a rank of a draft 512
wide took 75,000 page faults per second, and 1.18 s instead of 0.87 for a step (ZeRO-2, virtual machine with Zen 3).
"""


def rank_environment(ranks: int, gpus: int, here: bool = True) -> dict[str, str]:
    """Return the environment of the ranks; unless they run `here`, each node counts its own cores."""
    extra = {
        **python_path(os.environ),
        "TOKENIZERS_PARALLELISM": "false",
        **({"OMP_NUM_THREADS": threads(ranks)} if here else {}),
        # Silences PyTorch's profiler, which prints each start and stop on stderr.
        "KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99"),
        **ops.environment(),
    }
    if not gpus:
        extra |= {
            "DS_ACCELERATOR": "cpu",
            # Leaves out the stack that torch's store warns with where another rank has ended and printed why. On GPUs
            # the warnings stay: NCCL's name causes of a hang.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            **{name: os.environ.get(name, value) for name, value in ALLOCATOR.items()},
        }
    return os.environ | extra


def compile_ops(recipe: Recipe, ranks: int, gpus: int) -> None:
    """Compile the DeepSpeed ops that a run needs and this machine lacks, so that not all ranks compile them at once."""
    file = deepspeed_file.read(recipe.deepspeed)
    if recipe.layout.expert > 1:
        file = replace(file, optimizer=None)  # as in `training_arguments`: the Trainer makes the optimizer
    ops.prepare(ops.needed(file), rank_environment(ranks, gpus))


def record(folder: RunFolder, command: list[str] | None = None) -> None:
    """Append the user's command to the run's command.txt, and print and append the DeepSpeed launcher's command."""
    lines = [redact(shlex.join([sys.executable, *sys.argv]))]
    if command:
        lines.append(redact(shlex.join(command)))
        print(lines[-1], flush=True)
    with folder.command.open("a", encoding="utf-8") as log:
        log.write("".join(f"{line}\n" for line in lines))


HOST = "HOST"
"""Placeholder for the host of rank 0."""


def other_launchers(run: RunFolder, ranks: int, nodes: int) -> dict[str, str]:
    """Return each launcher's shell command, by the launcher's name, for `ranks` ranks per node."""
    variables = python_path({})
    path = [f"{name}={value}" for name, value in variables.items()]
    # Otherwise each rank would use all cores; torchrun sets 1, which is too few for CPU Adam.
    threads = f"OMP_NUM_THREADS={max(1, (os.cpu_count() or 1) // ranks)}"
    rank = (*("-m", RANK_MODULE), str(run.path.resolve()))
    one = nodes == 1
    meet = ("--standalone",) if one else ("--nnodes", str(nodes), "--rdzv_backend", "c10d", "--rdzv_endpoint", HOST)
    found = {
        "torchrun": (sys.executable, "-m", "torch.distributed.run", *meet, "--nproc_per_node", str(ranks), *rank),
        "mpirun": (
            *("mpirun", "-np", str(ranks * nodes)),
            *(() if one else ("--map-by", f"ppr:{ranks}:node", "-x", f"MASTER_ADDR={HOST}")),
            *(() if one else [word for name in variables for word in ("-x", name)]),
            *(sys.executable, *rank),
        ),
        "srun": ("srun", "--nodes", str(nodes), "--ntasks-per-node", str(ranks), sys.executable, *rank),
    }
    return {name: shlex.join([*path, threads, *words]) for name, words in found.items()}


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
    *ALLOCATOR,
    *("PYTHONWARNINGS", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"),
    "PYTHONSAFEPATH",  # `recipe.project.python_path`
)
MORE = "DS_RECIPES_FORWARD"
"""The variable that names more variables to forward, separated by commas."""
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
"""Credentials that a run may need; each machine, job or pod has to provide them itself."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a run's ranks need on another machine, without secrets.

    Refuses a value that no script or manifest can contain, and `DS_RECIPES_FORWARD` under its old name.
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
