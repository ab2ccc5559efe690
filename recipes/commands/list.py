"""List the recipes, their sizes and their variants, with a line on when to choose each.

    dsr list              everything, to read
    dsr list --json       every recipe as JSON: parameters, DeepSpeed file, layout

`dsr launch` takes a name from the list: `dsr launch llama3-8b lora`; the size may be left out if there is only one.
"""

from collections.abc import Sequence

from . import launch
from .main import Parser


def main(words: Sequence[str] | None = None) -> int:
    """Print the list."""
    parser = Parser("list", __doc__)
    parser.add_argument("--json", action="store_true", help="print every recipe as JSON")
    print(launch.listing(parser.parse_args(words).json))
    return 0
