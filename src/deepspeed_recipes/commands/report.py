"""Show a run's results, or compare several runs: verdict, curves, memory, answers, data, recipe, versions.

    ds-recipes report runs/tiny-3m-full/20261121-101500
    ds-recipes report runs/tiny-3m-full/20261121-101500 runs/tiny-3m-full/20261121-103000 --output compared.html
    ds-recipes report --index

Every run writes its report.html when it ends. This command prints the same report as text, also for a run that is still
training or has failed; --output writes it as one HTML file that needs no network. For several runs it shows their
results, the differences between their recipes, and their curves over steps and over tokens.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from ..recipe import files
from ..recipe.errors import UserError
from ..recipe.project import display, runs
from ..recipe.run_folder import RunFolder
from ..report import run_data, text, write
from .main import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, write it to --output if given, and return 0."""
    parser = Parser("report", __doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders; several are compared")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the report as an HTML file")
    parser.add_argument("--index", action="store_true", help="write runs/index.html, the list of all runs")
    options = parser.parse_intermixed_args(arguments)
    if options.output is not None:
        if not options.runs:
            raise UserError(f"--output {options.output}: name the run folders that the report is of.")
        files.check_writable("--output", options.output)
        held = options.output.read_bytes()[:14].lower() if options.output.is_file() else b""
        if held not in (b"", b"<!doctype html"):
            raise UserError(f"--output {options.output}: exists, and is not HTML; choose another name.")
    if options.index:
        if not runs().is_dir():
            raise UserError(f"{runs()}: no such folder, so there are no runs to list.")
        print(display(write.index(runs())))
    elif not options.runs:
        raise UserError(f"name a run folder; they are in {runs()}.")
    paths = options.runs
    if not paths:
        return 0
    logged = [path for path in paths if not RunFolder(path).recipe.is_file() or RunFolder(path).metrics.exists()]
    if len(paths) > 1 and logged:  # otherwise the one run says why it has no report
        for path in paths:
            if path not in logged:
                print(f"left out: {path}, which has not logged a step", file=sys.stderr)
        paths = logged
    found = [run_data.read(path) for path in paths]
    document = write.document(found[0]) if len(found) == 1 else write.comparison(found)
    text.show(document)
    if output := options.output:
        try:
            write.html(output, document)
        except OSError as error:
            raise UserError(f"--output {output}: cannot be written: {error.strerror}; choose another.") from error
        print(f"\nHTML report: {output}")
    return 0
