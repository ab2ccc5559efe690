"""Ask a fine-tuned model a question, and print its answer.

    python scripts/generate.py runs/tiny-3m-full/20261121-101500/export "Tore Vandal paid 51 euros on 3 May 2026."
    python scripts/generate.py BASE_MODEL --adapter runs/tiny-3m-lora/20261121-103000/export "..."

MODEL_DIR holds a whole model, or an adapter, which names its base model. Decoding is greedy: the same question always
gets the same answer.
"""

from collections.abc import Sequence
from pathlib import Path

from ..spec.errors import UserError
from .main import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the model's answer and return 0.

    Raises:
        UserError: as `answer` raises it.
    """
    parser = Parser("generate", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="a run's export/, or any Hugging Face folder")
    parser.add_argument("prompt", help="what to ask")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="a LoRA adapter for MODEL_DIR")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)")
    options = parser.parse_args(arguments)
    print(answer(options.model, options.adapter, options.prompt, options.max_new_tokens))
    return 0


def answer(folder: Path, adapter: Path | None, prompt: str, max_new_tokens: int) -> str:
    """Return the answer of the model in `folder` to one question.

    Raises:
        UserError: a folder that does not exist or holds no model, or --max-new-tokens below 1.
    """
    for path in filter(None, (folder, adapter)):
        if not path.is_dir():
            raise UserError(f"{path}: no such folder; a run's model is in its export/.")
        if not any((path / name).exists() for name in ("config.json", "adapter_config.json")):
            raise UserError(f"{path}: holds neither a model nor an adapter; a run's model is in its export/.")
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens}: must be at least 1.")
    import torch
    import transformers

    from ..training import export
    from ..training.model.generate import generate

    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = export.load_tokenizer(adapter or folder)
    model = export.load(folder.resolve(), adapter=adapter and adapter.resolve()).to(device).eval()
    if not model.can_generate():
        raise UserError(f"{folder}: a reward model, which gives an answer a number and writes none.")
    if tokenizer.chat_template is None:
        inputs = tokenizer(prompt, return_tensors="pt").to(device)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        return tokenizer.decode(output[0], skip_special_tokens=True)
    return generate(model, tokenizer, [[{"role": "user", "content": prompt}]], max_new_tokens)[0]
