"""Nsight Systems: the command under which it watches the ranks of this machine."""

import shutil

from ...recipe.errors import UserError
from ...recipe.run_folder import RunFolder

WHERE = "https://developer.nvidia.com/nsight-systems"


def check(gpus: int, here: bool) -> None:
    """Refuse to start what could not be watched.

    Args:
        gpus: of this machine.
        here: whether the ranks run on this machine.

    Raises:
        UserError: nsys is not installed, there is no GPU, or the ranks run elsewhere.
    """
    if not here:
        raise UserError(
            "--nsys: watches the ranks of this machine only; leave out --hostfile, --slurm or --kubernetes."
        )
    if shutil.which("nsys") is None:
        raise UserError(
            f"--nsys: there is no nsys on PATH; install Nsight Systems ({WHERE}), or use --profile without --nsys."
        )
    if not gpus:
        raise UserError(
            "--nsys: this machine has no GPU that Nsight Systems could watch; use --profile without --nsys."
        )


def command(run: RunFolder) -> list[str]:
    """Return the words before the launcher's command.

    nsys follows child processes. It records from the first rank's `cudaProfilerStart`, which is called before the first
    step that `--profile` names, and `stop` lets the run continue after the last one; nsys by itself would end it.
    """
    return [
        *("nsys", "profile", "--trace=cuda,nvtx,osrt,cublas", "--sample=none", "--cpuctxsw=none"),
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true"),
        f"--output={run.profile / 'nsys'}",
    ]
