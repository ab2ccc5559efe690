"""The command that runs the ranks of this machine under Nsight Systems."""

import shutil

from ...recipe.errors import UserError
from ...recipe.run_folder import RunFolder

WHERE = "https://developer.nvidia.com/nsight-systems"


def check(gpus: int, here: bool) -> None:
    """Refuse a run that Nsight Systems cannot profile.

    Args:
        gpus: number of GPUs of this machine.
        here: whether the ranks run on this machine.

    Raises:
        UserError: nsys is not installed, there is no GPU, or the ranks run elsewhere.
    """
    if not here:
        raise UserError("--nsys: profiles the ranks of this machine only; remove --hostfile, --slurm or --kubernetes.")
    if shutil.which("nsys") is None:
        raise UserError(
            f"--nsys: nsys is not on PATH; install Nsight Systems ({WHERE}), or use --profile without --nsys."
        )
    if not gpus:
        raise UserError(
            "--nsys: this machine has no GPU that Nsight Systems could profile; use --profile without --nsys."
        )


def command(run: RunFolder) -> list[str]:
    """Return the words to put before the launcher's command.

    nsys follows child processes. Recording begins with the first rank's `cudaProfilerStart`, which is called before the
    first step of `--profile`. `--capture-range-end=stop` lets the run continue after the last recorded step; by default
    nsys would end it.
    """
    return [
        *("nsys", "profile", "--trace=cuda,nvtx,osrt,cublas", "--sample=none", "--cpuctxsw=none"),
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true"),
        f"--output={run.profile / 'nsys'}",
    ]
