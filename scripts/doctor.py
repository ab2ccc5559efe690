"""Is this machine ready? Versions, GPU, compilers, DeepSpeed's ops, memory limits, disks, other hosts.

python scripts/doctor.py                      (about 5 s; --build compiles DeepSpeed's ops once, for minutes)
python scripts/doctor.py --nvme /local_nvme --hostfile hosts --checkpoint-gib 120
Exit status 1 when something would stop a run, else 0.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from recipes.machine import hardware, software  # noqa: E402
from recipes.machine.check import Check  # noqa: E402
from recipes.training import ops  # noqa: E402


def main(words: Sequence[str] | None = None) -> int:
    """Run the checks and print them."""
    os.environ |= ops.environment()  # look where runs look for built ops
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.add_argument("--build", action="store_true", help="build DeepSpeed's ops, one process at a time")
    parser.add_argument("--output-dir", type=Path, default=Path("runs"), help="where checkpoints would go")
    parser.add_argument("--checkpoint-gib", type=float, help="size of one checkpoint")
    parser.add_argument("--nvme", type=Path, help="measure this folder with direct I/O (256 MiB)")
    parser.add_argument("--hostfile", type=Path, help="try ssh to each host")
    arguments = parser.parse_args(words)
    checks = list(examine(arguments))
    if arguments.json:
        print(json.dumps([check.as_json() for check in checks], indent=2))
    else:
        show(checks)
    return int(any(check.state == "error" for check in checks))


def examine(arguments: argparse.Namespace) -> Iterator[Check]:
    """Yield the checks in the order of the table."""
    packages = software.versions()
    yield from packages
    torch = next(check for check in packages if check.name == "torch")
    if torch.state != "error":
        yield from software.accelerator()
    yield from software.compilers()
    if torch.state != "error":
        if arguments.build:
            yield from software.build()
        yield from software.ops()
    yield from hardware.memory()
    yield hardware.disk(arguments.output_dir, arguments.checkpoint_gib)
    if arguments.nvme:
        yield from hardware.nvme(arguments.nvme)
    if arguments.hostfile:
        yield from hardware.hosts(arguments.hostfile)
    yield hardware.tracking()


def show(checks: list[Check]) -> None:
    """Print the table, and a last line that sums it up."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.state:8} {check.name:{width}}  {check.found}")
        if check.fix:
            print(f"{'':8} {'':{width}}  fix: {check.fix}")
    errors = sum(check.state == "error" for check in checks)
    warnings = sum(check.state == "warning" for check in checks)
    print(f"{errors or 'no'} error{'s' * (errors != 1)}, {warnings or 'no'} warning{'s' * (warnings != 1)}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
