"""Write the result of a run, or one of its checkpoints, as a Hugging Face folder that loads anywhere.

    python scripts/export.py runs/tiny-3m-full/20261121-101500 --output my-model
    python scripts/export.py runs/tiny-3m-lora/20261121-103000 --output my-model --merge
    python scripts/export.py runs/tiny-3m-lora/20261121-103000/checkpoints/checkpoint-100 --output my-adapter

The folder holds a whole model, or the adapter if the run trained one; --merge writes the base model with the adapter
merged into it. Only safetensors are read and written, never pickles.
"""

from collections.abc import Sequence
from pathlib import Path

from ..spec.errors import UserError
from ..spec.run_folder import CHECK_FAILED, RunFolder, newest_checkpoint
from .main import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folder, say what it holds, and return 0.

    Raises:
        UserError: there is nothing to export, it cannot be loaded, or the folder is not empty.
    """
    parser = Parser("export", __doc__)
    parser.add_argument(
        "source", type=Path, metavar="RUN_FOLDER_OR_CHECKPOINT", help="a run's folder, or a checkpoint in it"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="where to write: a new or empty folder"
    )
    parser.add_argument("--merge", action="store_true", help="merge a LoRA adapter into its base model")
    options = parser.parse_args(arguments)
    source = find_model(options.source)
    from ..training import export

    kind = export.write(source, options.output.resolve(), options.merge)
    print(f"{options.output}: {kind}, from {source}")
    return 0


def find_model(source: Path) -> Path:
    """Return the folder with the weights: a run's export, or else its newest complete checkpoint; else `source`.

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
    if (run.unverified / CHECK_FAILED).exists():
        raise UserError(
            f"{source}: the export of this run failed its check: reloaded, it computes other logits than the trained "
            f"model ({run.unverified / CHECK_FAILED}). Name a checkpoint to export that instead."
        )
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        raise UserError(f"{source}: this run has neither an export nor a complete checkpoint yet.")
    return checkpoint
