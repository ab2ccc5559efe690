"""Run one instance's ranks of a SageMaker training job.

    python -m deepspeed_recipes.launching.cloud.sagemaker_node NAME ...

SageMaker starts the same container on every instance, and names the instance in a file; `node.py` does the rest. The
reason of a failure is written to another file, which SageMaker's console shows.
"""

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from ...recipe import files
from ...recipe.errors import UserError, redact
from ...recipe.run_folder import RunFolder, read_json
from .. import node
from . import ML

SHOWN = 1024
"""Characters of a failure that SageMaker shows.
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-output.html"""


def main(words: Sequence[str] | None = None, ml: Path = ML) -> int:
    """Run this instance's ranks, write the reason of a failure to SageMaker's file, and return the exit status."""
    parser = argparse.ArgumentParser(prog="sagemaker_node.py", description=__doc__)
    parser.add_argument("name", help="name of the run's folder")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="ranks on this instance")
    parser.add_argument("--port", default="29500", metavar="P", help="port on the first instance")
    options = parser.parse_args(words)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(Both(errors)):
            status = node.main(place(options.name, options.gpus, options.port, ml))
    except UserError as error:
        print(error, file=sys.stderr)
        errors.write(str(error))
        status = 2
    if status:
        text = errors.getvalue().strip() or f"exit status {status}"
        files.write_text(ml / "output" / "failure", redact(text)[:SHOWN])
    return status


def place(name: str, gpus: int, port: str, ml: Path) -> list[str]:
    """Return the words for `node.py`: this instance's number, the first instance's address and the run's folder.

    Several instances need a shared file system.
    """
    found = read_json(ml / "input" / "config" / "resourceconfig.json")
    hosts, own = sorted(found["hosts"], key=_number), found["current_host"]
    shared = ml / "input" / "data" / "runs"
    if len(hosts) > 1 and not shared.is_dir():
        raise UserError(f"{shared}: no such folder; {len(hosts)} instances need a file system: add --file-system.")
    run = RunFolder((shared if shared.is_dir() else ml / "checkpoints") / name)
    recipe = ml / "input" / "data" / "recipe" / "recipe.json"
    words = [str(run.path), "--recipe", str(recipe), "--nodes", str(len(hosts)), "--gpus", str(gpus)]
    words += ["--node-rank", str(hosts.index(own)), "--master-addr", hosts[0], "--master-port", port]
    return words


def _number(host: str) -> tuple[str, int]:
    """Return a sort key that puts algo-2 before algo-10."""
    name, _, number = host.rpartition("-")
    return (name, int(number)) if number.isdecimal() else (host, 0)


class Both(io.TextIOBase):
    """Writes to standard error, and to a buffer as well."""

    def __init__(self, buffer: io.StringIO) -> None:
        self.streams = (sys.stderr, buffer)

    def write(self, text: str) -> int:
        """Write `text`."""
        for stream in self.streams:
            stream.write(text)
        return len(text)


if __name__ == "__main__":
    sys.exit(main())
