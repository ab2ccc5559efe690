"""Write the result of a run, or one of its checkpoints, as a Hugging Face folder that loads anywhere.

    ds-recipes export runs/tiny-3m-full/20261121-101500 --output my-model
    ds-recipes export runs/tiny-3m-lora/20261121-103000 --output my-model --merge
    ds-recipes export runs/tiny-3m-lora/20261121-103000/checkpoints/checkpoint-100 --output my-adapter
    ds-recipes export runs/tiny-3m-lora/20261121-103000 --add runs/tiny-3m-lora/20261121-110000=0.5 --output both
    ds-recipes export runs/tiny-3m-full/20261121-101500 --quantize int8 --output my-model-int8
    ds-recipes export runs/tiny-3m-full/20261121-101500 --gguf q4_k_m --output my-model-gguf

The folder has a whole model, or the adapter if the run trained an adapter; --merge writes the base model with the
adapter merged into it. --add adds other adapters of the same base model, each multiplied by its weight. --quantize
writes a smaller model: int8, int4 and fp8 for vLLM (by llm-compressor, which `make serving` installs), nf4 and
int8-bitsandbytes for transformers, and fp8-block in the format of DeepSeek's and Qwen's FP8 releases, which fp8 is as
well if the base model was published in it. The smaller model is compared with the original on the run's held-out
examples, and refused if it lost more than two points. --gguf writes one file for llama.cpp and Ollama (f16, q8_0 or
q4_k_m; `make gguf` installs the converter), which is compared in the same way. Only safetensors are read, no pickles.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from ..export.quantize import DROP, names
from ..machine import children
from ..recipe.errors import UserError
from ..recipe.run_folder import RunFolder, model_of
from .main import Parser, check_least


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folder, print its contents, and return 0, or 1 if the model differs from the trained one."""
    parser = Parser("export", __doc__)
    parser.add_argument(
        "source", type=Path, metavar="RUN_FOLDER_OR_CHECKPOINT", help="a run's folder, or a checkpoint in it"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="a new or empty folder for the result"
    )
    parser.add_argument("--merge", action="store_true", help="merge a LoRA adapter into its base model")
    parser.add_argument(
        "--add", action="append", default=[], metavar="RUN=WEIGHT", help="add another adapter times WEIGHT; repeatable"
    )
    parser.add_argument("--weight", type=float, metavar="W", help="with --add: the first adapter's weight (default: 1)")
    parser.add_argument("--quantize", metavar="KIND", help=f"{', '.join(names('--quantize'))}; merges adapters")
    parser.add_argument("--gguf", metavar="KIND", help="one file for llama.cpp and Ollama: f16, q8_0 or q4_k_m")
    parser.add_argument(
        "--no-certify", action="store_true", help="do not compare a merged or smaller model with the trained model"
    )
    parser.add_argument("--data", type=Path, metavar="FILE", help="examples to compare a smaller model on")
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="examples to measure on (default: 200)")
    parser.add_argument(
        "--allow-drop", type=float, default=DROP, metavar="P", help="percentage points it may lose (default: 2)"
    )
    options = parser.parse_trusting(arguments)
    if not (options.quantize or options.gguf):
        parser.refuse(options, ("data", "limit", "allow_drop"), "only with --quantize or --gguf, which measure")
    source = find_model(options.source)
    if options.quantize or options.gguf:
        return smaller(options, source)
    if options.add:
        return add(options.source, source, options.weight, options.add, options.output.resolve(), options.merge)
    if options.weight is not None:
        raise UserError(f"--weight {options.weight:g}: only for a sum of adapters; add others with --add RUN=WEIGHT.")
    from ..training import export

    kind = export.write(source, options.output.resolve(), options.merge)
    print(f"{options.output}: {kind}, from {source}")
    return certified(options.output) if options.merge and not options.no_certify else 0


def certified(folder: Path) -> int:
    """Compare a merged or smaller model with what was trained, print the result, and return 1 if it differs."""
    from ..training.model_folder.base_model import EXPECTED
    from .certify import certificate_of, shown

    if not (folder / EXPECTED).exists():
        print(f"not compared with the trained model: the export that it is from has no {EXPECTED}")
        return 0
    found = certificate_of(folder.resolve(), "none")
    print("\n".join(shown(str(folder), found)))
    if found.agrees:
        found.record(folder, "llama.cpp" if any(folder.glob("*.gguf")) else "transformers")
    return 0 if found.agrees else 1


def smaller(options: argparse.Namespace, source: Path) -> int:
    """Write a quantised copy or a GGUF file, print its loss in quality, and return as `certified` does."""
    if options.add:
        raise UserError("--quantize, --gguf and --add: write the sum first, then name that folder.")
    if options.weight is not None:
        raise UserError(f"--weight {options.weight:g}: only with --add; leave it out.")
    if options.quantize and options.gguf:
        raise UserError("--quantize and --gguf: two formats; write one after the other.")
    check_least(options, limit=1)
    if options.allow_drop < 0:
        raise UserError(f"--allow-drop {options.allow_drop:g}: must be at least 0.")
    from ..export import quantize
    from ..export.quantize import write
    from ..training.model_folder import record

    kind = quantize.find("--gguf", options.gguf) if options.gguf else quantize.find("--quantize", options.quantize)
    held = record.read(source)
    if kind.name == "fp8" and held and held.results.get("dequantized") == "fp8":
        kind = quantize.find("--quantize", "fp8-block")
        print(f"as the base model was published: {kind.title}")
    output = options.output.resolve()
    write.check(source, output, kind)
    from transformers import utils

    from ..export.evaluate import candidates, held_out

    utils.logging.disable_progress_bar()
    recipe = candidates.find(str(source), None).recipe
    with held_out.alone():
        known = held_out.read(recipe, options.data, None, options.limit) if recipe or options.data else None
        lines = write.write(source, output, kind, known, options.allow_drop, print)
    form = f"GGUF, {kind.title}" if options.gguf else kind.title
    print("\n".join([f"{options.output}: {form}, from {source}", *lines]), flush=True)
    return 0 if options.no_certify else certified(options.output)


def find_model(source: Path) -> Path:
    """Return the folder with the weights: a run's export or newest complete checkpoint, or `source` itself."""
    source = source.resolve()
    if not source.is_dir():
        raise UserError(f"{source}: no such folder.")
    return model_of(RunFolder(source)) if RunFolder(source).recipe.exists() else source


def add(name: Path, source: Path, weight: float | None, others: Sequence[str], output: Path, merge: bool) -> int:
    """Write the weighted sum of adapters, or the base model merged with the sum, and return 0."""
    from ..export.weighted_sum import Part, check
    from ..export.weighted_sum import add as write_sum

    parts = [Part(str(name), source, 1.0 if weight is None else weight)]
    for other in others:
        path, equals, factor = other.rpartition("=")
        folder = find_model(Path(path)) if path else Path()
        try:
            times = float(factor)
        except ValueError:
            times = math.nan
        if not equals or not math.isfinite(times):
            raise UserError(f"--add {other}: write RUN=WEIGHT, for instance {other.partition('=')[0]}=0.5.")
        parts.append(Part(path, folder, times))
    check(parts)
    from ..training import export
    from ..training.model_folder import base_model

    # In the nearest existing folder, since a folder can only be renamed on the same disk.
    with children.scratch(inside=next(above for above in output.parents if above.is_dir())) as place:
        folder = place / "adapter"
        write_sum(export.load_base(base_model.find(source), source), parts, folder, merge)
        for pattern in ("token*", "chat_template.jinja", "base_quantization.json"):
            for file in source.glob(pattern):
                (folder / file.name).write_bytes(file.read_bytes())
        kind = export.write(folder, output, merge)
    print(f"{output}: {kind}, the sum of {', '.join(f'{part.weight:g} x {part.name}' for part in parts)}")
    return 0
