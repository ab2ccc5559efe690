"""Build DeepSpeed's C++ ops once, in one process: ranks that build the same op at the same time break each other.

Run as `python -m recipes.training.ops` (`make install` does); it is quick when they are built already.
"""

import os
import sys
from pathlib import Path

CPU_OPS = ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "PinMemoryBuilder", "AsyncIOBuilder")
"""What ranks on a CPU compile at their first step: collectives, two kinds of Adam, pinned memory, NVMe."""


def extensions_dir() -> Path:
    """Return where ops are compiled to: inside the environment, so that two environments never share one."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    inside = Path(sys.prefix) / "torch_extensions"
    if chosen or not os.access(sys.prefix, os.W_OK):
        return Path(chosen or Path.home() / ".cache" / "torch_extensions" / "deepspeed-recipes")
    return inside


def environment() -> dict[str, str]:
    """Return the variables under which ops are compiled and found again, for this process and for the ranks."""
    return {
        "TORCH_EXTENSIONS_DIR": str(extensions_dir()),
        # ninja is a Python package here, and is looked up on the PATH.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def build() -> None:
    """Compile the ops that a machine without GPUs needs; about a minute each the first time."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        print("DeepSpeed ops: compiled by the first run that needs them, on this machine's GPUs")
        return
    for name in CPU_OPS:
        print(f"DeepSpeed op {name.removesuffix('Builder')}: ", end="", flush=True)
        if name == "AsyncIOBuilder" and not Path("/usr/include/libaio.h").exists():
            print("left out, libaio's headers are not installed (Debian: libaio-dev)")
            continue
        accelerator.get_op_builder(name)().load(verbose=False)
        print("ready")


if __name__ == "__main__":
    os.environ |= environment()
    build()
