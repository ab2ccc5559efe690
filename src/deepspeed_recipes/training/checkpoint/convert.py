"""Runs DeepSpeed's conversion to the universal form without executing code hidden in a checkpoint's pickles.

python -m deepspeed_recipes.training.checkpoint.convert --input_folder CHECKPOINT/global_stepN --output_folder ...
"""

import sys
from pathlib import Path

from deepspeed.checkpoint import ds_to_universal

from ...recipe.errors import UserError
from . import pickles


def main() -> int:
    """Convert, and return the exit status."""
    arguments = ds_to_universal.parse_arguments()
    pickles.load_only_data()
    try:
        with pickles.refusing_code(Path(arguments.input_folder).parent):
            ds_to_universal.main(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
