"""Make a smaller model from a larger model's weights, as an untrained student for distillation.

    ds-recipes shrink src/deepspeed_recipes/samples/tiny_teacher --layers 2 --output student
    ds-recipes shrink Qwen/Qwen3-4B --layers 18 --intermediate 4864 --output student

--layers keeps that many layers, evenly spaced, including the first and the last. --intermediate keeps that many neurons
of each feed-forward layer, those whose weights have the largest norms. The tokenizer stays the same, so that the larger
model can teach the smaller one (variant `distill`). The smaller model writes nonsense until it is trained.
"""

from collections.abc import Sequence
from pathlib import Path

from ..recipe.errors import UserError
from .main import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the smaller model, print its size, and return 0."""
    parser = Parser("shrink", __doc__)
    parser.add_argument("model", metavar="MODEL", help="a folder, a run's export/ or a Hub id")
    parser.add_argument("--layers", type=int, metavar="N", help="number of layers to keep (default: all)")
    parser.add_argument(
        "--intermediate", type=int, metavar="N", help="width of the feed-forward layers (default: unchanged)"
    )
    parser.add_argument("--hidden", type=int, metavar="N", help="not supported; prints the reason")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")
    options = parser.parse_args(arguments)
    from ..export import shrink

    if options.hidden is not None:
        raise UserError(shrink.HIDDEN)
    if options.layers is None and options.intermediate is None:
        raise UserError("shrink: nothing to do; add --layers N, --intermediate N or both.")
    made = shrink.shrink(options.model, options.output, options.layers, options.intermediate)
    print(
        f"{options.output}: {made.after:,} of {made.before:,} parameters; layers {', '.join(map(str, made.layers))}"
        + (f"; feed-forward width {made.intermediate}" if options.intermediate else "")
    )
    return 0
