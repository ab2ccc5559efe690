"""Saves a fine-tuned tiny model as the teacher that ships with the project, with weights rounded to bfloat16.

    python scripts/launch.py tiny full --gpus 2                           # three minutes on two cores
    python -m scripts.maintain.samples.teacher runs/tiny-3m-full/RUN/export
    python scripts/shrink.py src/deepspeed_recipes/samples/tiny_teacher --layers 2 --intermediate 208 --output STUDENT

The last command makes the student of `tiny distill`, in `tiny_student`, with the same bytes every time.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.recipe.project import SAMPLES

from .pretrain import save


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, and save the model with the tokenizer."""
    parser = argparse.ArgumentParser(
        description="Keep a run's export as the teacher of `tiny distill`.",
        epilog="Example: python -m scripts.maintain.samples.teacher runs/tiny-3m-full/20261122-211043/export",
    )
    parser.add_argument("export", type=Path, help="a folder that `tiny full` has exported")
    parser.add_argument(
        "--output",
        type=Path,
        default=SAMPLES / "tiny_teacher",
        help="folder to write (default: tiny_teacher beside this script)",
    )
    options = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(options.export, dtype=torch.float32)
    model.config.use_cache = True  # training had turned it off
    save(model, AutoTokenizer.from_pretrained(SAMPLES / "tiny_model"), options.output)


if __name__ == "__main__":
    main()
