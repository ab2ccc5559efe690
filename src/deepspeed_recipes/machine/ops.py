"""Finds the C++ ops of DeepSpeed that a run needs, and compiles the missing ones once, in a single process.

    python -m deepspeed_recipes.machine.ops NAME ...  compiles these ops, unless they are compiled already

Without this, all ranks would compile a missing op at their first step, at the same time and silently.
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..recipe.deepspeed_file import DeepSpeedFile
from ..recipe.errors import UserError
from . import children, system


@dataclass(frozen=True)
class Op:
    """A C++ op of DeepSpeed, which is compiled on the machine that uses it."""

    name: str
    """The name of the op's folder and file in the extensions folder."""
    builder: str
    """DeepSpeed's builder class."""
    seconds: int
    """Seconds to compile it for CPU ranks, measured on two cores."""
    purpose: str
    """The feature that needs the op, for messages."""


SHARED_MEMORY = Op("deepspeed_shm_comm", "ShareMemCommBuilder", 20, "DeepSpeed by itself on a CPU")
CPU_ADAM = Op("cpu_adam", "CPUAdamBuilder", 35, "optimizer offload")
FUSED_ADAM = Op("fused_adam", "FusedAdamBuilder", 30, "a DeepSpeed optimizer block")
PIN_MEMORY = Op("pin_memory", "PinMemoryBuilder", 15, "NVMe offload")
ASYNC_IO = Op("async_io", "AsyncIOBuilder", 95, "NVMe offload")
OPS = {
    "cpu": (SHARED_MEMORY, CPU_ADAM, FUSED_ADAM, PIN_MEMORY, ASYNC_IO),
    "cuda": (FUSED_ADAM, CPU_ADAM, PIN_MEMORY, ASYNC_IO),
}
"""The ops that runs may need, by DeepSpeed's name of the accelerator."""
STAMP = "compiled.json"
"""The file in an op's folder with the versions and the processor that it was compiled for."""
LONGEST = 30 * 60
"""Seconds after which a build is stopped."""


def needed(file: DeepSpeedFile) -> tuple[Op, ...]:
    """Return the ops that a run with this DeepSpeed file loads.

    torch's own AdamW, which the Trainer uses if the file names no optimizer, needs no op. On a CPU DeepSpeed by default
    also loads SHARED_MEMORY, which runs leave out (`upstream.leave_out_shared_memory`).
    """
    found: tuple[Op, ...] = ()
    # Under offload the Trainer's AdamW becomes CPUAdam; Muon uses Adam for weights that are not matrices.
    parameters = file.content["optimizer"].get("params") if file.optimizer else None
    of_torch = isinstance(parameters, Mapping) and parameters.get("torch_adam")
    adam = not of_torch and (file.optimizer or "adamw").lower() in ("adam", "adamw", "muon")
    if adam and file.offload_optimizer != "none":
        found += (CPU_ADAM,)
    elif adam and file.optimizer:
        found += (FUSED_ADAM,)
    return found + ((PIN_MEMORY, ASYNC_IO) if "nvme" in (file.offload_optimizer, file.offload_parameters) else ())


def extensions_dir() -> Path:
    """Return the folder for compiled ops. It is inside the environment, so that environments do not share it."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    if os.access(sys.prefix, os.W_OK):
        return Path(sys.prefix) / "torch_extensions"
    return Path.home() / ".cache" / "torch_extensions" / "deepspeed-recipes"


def environment() -> dict[str, str]:
    """Return the environment variables for compiling and finding ops, in this process and in the ranks."""
    return {
        "TORCH_EXTENSIONS_DIR": str(extensions_dir()),
        # torch looks for ninja, here a Python package, on the PATH.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def missing(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Return the ops that are not compiled yet. Fast: only the file system is read."""
    return tuple(op for op in ops if not is_compiled(op.name) and not shipped(op))


def is_compiled(name: str) -> bool:
    """Return whether an op was compiled completely, with this environment's versions and for this processor.

    Paths and times are ignored: ninja, which compares them, would compile again when an environment is copied or
    mounted elsewhere.
    """
    folder = extensions_dir() / name
    try:
        return (folder / f"{name}.so").exists() and (folder / STAMP).read_text(encoding="utf-8") == _key()
    except OSError:
        return False


def stamp(name: str) -> None:
    """Record that an op was compiled completely. A killed build may leave any other file, but not this stamp."""
    part = extensions_dir() / name / f"{STAMP}.{os.getpid()}"
    part.write_text(_key(), encoding="utf-8")
    part.replace(part.with_name(STAMP))


def _key() -> str:
    versions: dict[str, str | None] = dict.fromkeys(("torch", "deepspeed"))
    for name in versions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    # Ops are compiled for the processor's own instructions.
    found = {"python": sys.implementation.cache_tag, **versions, "processor": " ".join(sorted(system.cpu_flags()))}
    return json.dumps(found, indent=2)


def shipped(op: Op) -> bool:
    """Return whether DeepSpeed was installed with this op (DS_BUILD_OPS)."""
    try:
        folder = metadata.distribution("deepspeed").locate_file("deepspeed/ops")
    except metadata.PackageNotFoundError:
        return False
    return any(Path(str(folder)).rglob(f"{op.name}_op*.so"))


def prepare(wanted: Sequence[Op], variables: Mapping[str, str]) -> None:
    """Compile the ops that ranks need and this machine lacks, before the ranks start."""
    names = [op.name for op in missing(wanted)]
    if not names:
        return
    command = [sys.executable, "-m", "deepspeed_recipes.machine.ops", *names]
    try:
        done = children.run(command, env=dict(variables), timeout=LONGEST)
    except subprocess.TimeoutExpired:
        raise UserError(f"DeepSpeed's {', '.join(names)}: still compiling after {LONGEST // 60} minutes.") from None
    if done.returncode or missing(wanted):
        raise UserError(f"DeepSpeed's {', '.join(names)}: does not compile; ds-recipes doctor lists what is missing.")


def build(ops: Iterable[Op]) -> None:
    """Compile ops, and print the purpose and the duration of each; a failure is the compiler's exception."""
    from deepspeed.accelerator import get_accelerator

    on_cpu = get_accelerator().device_name() == "cpu"
    for op in ops:
        if op is ASYNC_IO and not has_libaio():
            print(f"DeepSpeed op {op.name} ({op.purpose}): left out, install libaio-dev for it", flush=True)
            continue
        with lock(op.name):
            absent = bool(missing([op]))
            if absent:
                estimate = f"about {op.seconds} s on two cores" if on_cpu else "this can take minutes"
                print(f"DeepSpeed op {op.name} ({op.purpose}): compiling, {estimate}, once", flush=True)
            started = time.monotonic()
            load(op)
            if absent:
                print(f"DeepSpeed op {op.name}: compiled in {time.monotonic() - started:.0f} s", flush=True)


def load(op: Op) -> None:
    """Load an op, compiled first if necessary."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(op.builder).load(verbose=False)
    if (extensions_dir() / op.name).is_dir():  # unless DeepSpeed was installed with it
        stamp(op.name)


def has_libaio() -> bool:
    """Return whether libaio's header is installed, which ASYNC_IO needs to compile."""
    return any(Path(folder, "libaio.h").exists() for folder in ("/usr/include", "/usr/local/include"))


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Wait until no other process of this project compiles an op, and make others wait during a `with` block.

    The operating system releases this lock when its holder dies. torch has its own lock, a file in the folder of each
    op, which survives a killed build, so that later builds would wait forever. This project takes torch's lock only
    inside its own. An existing lock file that no process has open is therefore stale, and is removed.
    """
    folder = extensions_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another build of {name} is running; waiting for it to end", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        left = folder / name / "lock"
        if left.exists() and not _is_open(left):
            print(f"removing {left}, which a build that was killed has left", file=sys.stderr, flush=True)
            left.unlink(missing_ok=True)
        yield


def _is_open(file: Path) -> bool:
    """Return whether a process of this machine has a file open; torch keeps its lock open while it compiles."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # another user's process, or a process that has just ended
            if file.samefile(descriptor):
                return True
    return False


def kind() -> str:
    """Return DeepSpeed's name for this machine's accelerator. Imports torch."""
    import torch

    wanted = os.environ.get("DS_ACCELERATOR")
    return wanted if wanted in OPS else "cuda" if torch.cuda.is_available() else "cpu"


def main(names: list[str]) -> int:
    """Compile the ops of these names and return the exit status."""
    os.environ |= environment()
    accelerator = kind()
    os.environ.setdefault("DS_ACCELERATOR", accelerator)
    wanted = missing(op for op in OPS[accelerator] if op.name in names)
    if not wanted:
        return 0
    try:
        build(wanted)
    except Exception as error:  # a compiler can fail in any way
        print(why(error), file=sys.stderr)
        return 2
    return 0


def why(error: Exception) -> str:
    """Return the line of a failed build's output that gives the reason."""
    lines = [line for line in str(error).splitlines() if "error" in line.lower()] or [str(error)]
    return lines[0][:200]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
