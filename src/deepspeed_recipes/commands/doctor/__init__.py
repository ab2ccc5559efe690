"""Check that this machine is ready: versions, GPUs, compilers, DeepSpeed's ops, memory limits, disks, other hosts.

    ds-recipes doctor            # about 5 s; with --build it also compiles DeepSpeed's ops, which takes minutes
    ds-recipes doctor --nvme /local_nvme --hostfile hosts --checkpoint-gib 120
    ds-recipes doctor --prove    # compare training on this stack with plain PyTorch; about 2 minutes
    ds-recipes doctor --measure  # time this machine, about a minute; plans then use the figures (--quick: to try it)

--prove trains a small model with every technique, compares it with a plain PyTorch loop, and tests for the known
defects of DeepSpeed and transformers, with the installed versions and on this machine's devices.

--measure times matrix products, attention, copies, collectives, and the cost of Python and ZeRO-3 on the host, on all
GPUs at once, or on CPU ranks; with --hostfile also collectives over all its hosts, which share --output-dir. The result
replaces datasheets in plans on this machine. To plan elsewhere for machines like it, name a file: `doctor --measure
node.json`, then `plan ... --machine node.json`.

Exit status: 1 if something would stop a run, or if a technique does not train like plain PyTorch; otherwise 0.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ...launching.ssh import hostfile
from ...machine import ops, software, system
from ...machine.system import Check
from ...planning.hardware import machine_file
from ...recipe import files
from ...recipe.errors import UserError
from ...recipe.run_folder import write_json
from ..main import Parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the checks, print them, and return the exit status."""
    os.environ |= ops.environment()  # search for compiled ops in the same folder as runs
    parser = Parser("doctor", __doc__)
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print the result as JSON, or write it to FILE"
    )
    parser.add_argument("--build", action="store_true", help="also compile DeepSpeed's ops, one after another")
    parser.add_argument("--output-dir", type=Path, default=Path("runs"), help="folder for checkpoints (default: runs)")
    parser.add_argument("--checkpoint-gib", type=float, metavar="GIB", help="size of one checkpoint, to check the disk")
    parser.add_argument(
        "--nvme", type=Path, metavar="DIR", help="measure this folder's speed with direct I/O (256 MiB)"
    )
    parser.add_argument(
        "--hostfile",
        type=Path,
        metavar="F",
        help="log in to each host over ssh; with --measure time the network between them",
    )
    group = parser.add_argument_group("compare training on this stack with plain PyTorch")
    group.add_argument("--prove", action="store_true", help="train with every technique, and compare with a plain loop")
    group.add_argument("--only", metavar="NAME,...", help="only these techniques and known defects, e.g. zero3,tensor")
    group.add_argument("--reports", type=Path, metavar="DIR", help="write an upstream bug report for each defect found")
    measuring = parser.add_argument_group("time this machine")
    measuring.add_argument(
        "--measure", nargs="?", const="", metavar="FILE",
        help=f"write its rates to FILE (default: {machine_file.default_file()}); with --nvme also those of a drive",
    )  # fmt: skip
    measuring.add_argument("--quick", action="store_true", help="with few repetitions, to try it: less precise")
    parser.add_argument(
        "--gpus", type=int, metavar="N",
        help="ranks of --prove and --measure (default: all GPUs; without GPUs 2 CPU ranks)",
    )  # fmt: skip
    arguments = parser.parse_args(words)
    if arguments.json not in (None, "-"):
        files.check_writable("--json", Path(arguments.json))
    if arguments.prove:
        parser.refuse(
            arguments,
            ("build", "output_dir", "checkpoint_gib", "nvme", "hostfile", "measure", "quick"),
            "not with --prove",
        )
        from ...prove import prove  # needs packages that a machine may not have before it is ready

        return prove.run(arguments.only, arguments.gpus, arguments.json, arguments.reports)
    parser.refuse(arguments, ("only", "reports"), "only with --prove")
    if arguments.measure is not None:
        shared = () if arguments.hostfile else ("output_dir",)
        parser.refuse(arguments, ("build", "checkpoint_gib", "json", *shared), "not with --measure")
        from . import measure  # likewise

        return measure.run(arguments)
    parser.refuse(arguments, ("quick",), "only with --measure")
    parser.refuse(arguments, ("gpus",), "only with --prove or --measure")
    if arguments.checkpoint_gib is not None and arguments.checkpoint_gib <= 0:
        raise UserError(f"--checkpoint-gib {arguments.checkpoint_gib:g}: must be above 0.")
    arguments.hosts = hostfile.parse(arguments.hostfile) if arguments.hostfile else ()
    checks = list(examine(arguments))
    found = [asdict(check) for check in checks]
    if arguments.json == "-":
        print(json.dumps(found, indent=2))
    elif arguments.json:
        write_json(Path(arguments.json), found)
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
    yield from system.memory()
    yield system.disk(arguments.output_dir, arguments.checkpoint_gib)
    if arguments.nvme:
        yield from system.nvme(arguments.nvme)
    if arguments.hostfile:
        yield from system.hosts(arguments.hosts)
    yield system.tracking()


def show(checks: list[Check]) -> None:
    """Print the table and a summary line."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.state:8} {check.name:{width}}  {check.found}")
        if check.fix:
            print(f"{'':8} {'':{width}}  fix: {check.fix}")
    errors = sum(check.state == "error" for check in checks)
    warnings = sum(check.state == "warning" for check in checks)
    print(f"{errors or 'no'} error{'s' * (errors != 1)}, {warnings or 'no'} warning{'s' * (warnings != 1)}")
