"""Ask a fine-tuned model something.

    python scripts/generate.py runs/tiny-3m-full/20261121-101500/export "Tore Vandal paid 51 euros on 3 May 2026."
    python scripts/generate.py BASE_MODEL --adapter runs/tiny-3m-lora/20261121-103000/export "..."

The folder may hold a whole model or an adapter (which names its base model). Decoding is greedy: the same
question always gets the same answer.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.spec.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the model's answer; return 2 for a mistake in what was asked for."""
    parser = argparse.ArgumentParser(
        prog="generate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="a run's export/, or any Hugging Face folder")
    parser.add_argument("prompt", help="what to ask")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="a LoRA adapter to put on MODEL_DIR")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)")
    options = parser.parse_args(arguments)
    try:
        print(answer(options.model, options.adapter, options.prompt, options.max_new_tokens))
    except UserError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    return 0


def answer(folder: Path, adapter: Path | None, prompt: str, max_new_tokens: int) -> str:
    """Return the answer of the model in `folder` to one question.

    Raises:
        UserError: a folder that does not exist or holds no model, or an answer of no tokens.
    """
    for place in filter(None, (folder, adapter)):
        if not place.is_dir():
            raise UserError(f"{place}: no such folder; a run's model is in its export/.")
        if not any((place / name).exists() for name in ("config.json", "adapter_config.json")):
            raise UserError(f"{place}: holds neither a model nor an adapter; a run's model is in its export/.")
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens}: must be at least 1.")
    import torch
    import transformers

    from recipes.training import export, score

    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = export.load_tokenizer(adapter or folder)
    model = export.load(folder.resolve(), adapter=adapter and adapter.resolve()).to(device).eval()
    if tokenizer.chat_template is None:
        inputs = tokenizer(prompt, return_tensors="pt").to(device)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        return tokenizer.decode(output[0], skip_special_tokens=True)
    return score.generate(model, tokenizer, [[{"role": "user", "content": prompt}]], max_new_tokens)[0]


if __name__ == "__main__":
    sys.exit(main())
