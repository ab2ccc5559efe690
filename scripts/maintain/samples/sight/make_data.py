"""Writes the images and the questions about them from a seed: the same pixels and words on every machine.

python -m scripts.maintain.samples.sight.make_data                         # the committed data, in seconds
python -m scripts.maintain.samples.sight.make_data --seed 7 --output DIR   # other data of the same kind
"""

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from deepspeed_recipes.recipe.project import SAMPLES

from . import ask
from .draw import draw, png

HERE = SAMPLES / "sight"
TRAIN, HELD_OUT = 3000, 300
"""Number of examples."""
SCHEMA = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
    ]
)
"""Images as `datasets` stores them; `<image>` in the text marks the position of each."""


def rows(count: int, seed: int, name: str) -> list[dict[str, Any]]:
    """Return examples of the task."""
    rng = random.Random(f"{seed}/sight/{name}")
    found = []
    for _ in range(count):
        pictures, asked, answer = ask.question(rng)
        images = [{"bytes": png(draw(one, rng)), "path": None} for one in pictures]
        turns = [("user", "<image>" * len(images) + asked), ("assistant", answer)]
        found.append({"images": images, "messages": [{"role": role, "content": said} for role, said in turns]})
    return found


def write(folder: Path, seed: int, train: int = TRAIN, held_out: int = HELD_OUT) -> None:
    """Write `train.parquet` and `held_out.parquet`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("held_out", held_out)):
        table = pa.Table.from_pylist(rows(count, seed, name), schema=SCHEMA)
        pq.write_table(table, folder / f"{name}.parquet", compression="zstd")


def main() -> None:
    """Read the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "reading")
    parser.add_argument("--seed", type=int, default=2026)
    options = parser.parse_args()
    write(options.output, options.seed)


if __name__ == "__main__":
    main()
