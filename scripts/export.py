"""Take the result of a run, or one of its checkpoints, away as a Hugging Face folder.

    python scripts/export.py runs/tiny-3m-full/20261121-101500 --output my-model
    python scripts/export.py runs/tiny-3m-lora/20261121-103000 --output my-model --merge
    python scripts/export.py runs/tiny-3m-lora/20261121-103000/checkpoints/checkpoint-100 --output my-adapter

Only safetensors are read and written: no pickle is opened.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.spec.errors import UserError
from recipes.spec.run_folder import RunFolder, newest_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folder and say what it is; return 2 for a mistake in what was asked for."""
    parser = argparse.ArgumentParser(
        prog="export.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="RUN_FOLDER_OR_CHECKPOINT", help="what to export")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--merge", action="store_true", help="merge a LoRA adapter into its base model")
    options = parser.parse_args(arguments)
    try:
        source = find_model(options.source)
        from recipes.training import export

        kind = export.write(source, options.output.resolve(), options.merge)
    except UserError as error:
        print(f"export.py: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {kind}, from {source}")
    return 0


def find_model(source: Path) -> Path:
    """Return the folder with the weights: a finished run's export, else its newest whole checkpoint, else `source`.

    Raises:
        UserError: no such folder, or a run that has not saved anything yet.
    """
    source = source.resolve()
    if not source.is_dir():
        raise UserError(f"{source}: no such folder.")
    run = RunFolder(source)
    if not run.recipe.exists():
        return source
    if run.export.exists():
        return run.export
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        raise UserError(f"{source}: this run has neither an export nor a whole checkpoint yet.")
    return checkpoint


if __name__ == "__main__":
    sys.exit(main())
