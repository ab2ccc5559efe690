"""Chat with a fine-tuned model, locally or on a server: one question, or several turns.

    ds-recipes generate MODEL_DIR "Tilda Marman paid 51.00 GBP on 3 May 2026 in Lorton."
    ds-recipes generate BASE_MODEL --adapter runs/tiny-3m-lora/20261121-103000/export "..."
    ds-recipes generate runs/tiny-3m-full/20261121-101500 --system "Answer in JSON."       # a chat
    ds-recipes generate runs/tiny_vision-500k-full/20261126-120000 --image photo.jpg "What is in the image?"
    ds-recipes generate --server http://localhost:8000 --temperature 0.7

MODEL_DIR has a whole model, or an adapter that names its base model; a run's folder means its export or, without one,
its newest checkpoint. Without a question a chat starts: answers are printed as they are generated, /reset starts
again, and /exit or Ctrl-D ends the chat. Decoding is greedy unless --temperature is above 0, so the same question
always gets the same answer. --image, several times for several images, puts images before the question. Any server
with OpenAI's protocol works.
"""

import argparse
import base64
import mimetypes
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..export.evaluate import candidates
from ..recipe.errors import UserError, printable, redact
from ..recipe.files import Json
from ..recipe.recipe import Data
from ..recipe.run_folder import RunFolder
from ..training import server
from ..training.model_folder import base_model
from .main import Parser, check_least

Answer = Callable[[list[Json]], Iterator[str]]
"""Yields the answer to a conversation in pieces."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of which a vision-language model's folder has at least one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the model's answer, or chat until the user ends it, and return 0."""
    options = parse(arguments)
    check(options)
    start = [{"role": "system", "content": options.system}] if options.system else []
    if options.server:
        ask = of_server(options)
    elif options.image:
        ask = of_images(options)
    elif options.prompt is not None and not start:
        said = answer(options.model, options.adapter, options.prompt, options.max_new_tokens, sampling(options))
        print(printable(said))
        return 0
    else:
        ask = of_folder(options)
    if options.prompt is not None:
        print(printable("".join(ask([*start, {"role": "user", "content": question(options)}])).strip()))
        return 0
    chat(ask, start, sys.stdin)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; with --server the only word without an option is the question."""
    parser = Parser("generate", __doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL_DIR", help="a run, or any Hugging Face folder")
    parser.add_argument("prompt", nargs="?", help="the question; without it a chat starts")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="a LoRA adapter for MODEL_DIR")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)")
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an image before the question; repeatable",
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt, if the chat template has one")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature: 1 as trained, lower is safer (default: 0)",
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest tokens that make up P")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of sampling, to get the same answers again")
    parser.add_argument("--server", metavar="URL", help="use a model on a server with OpenAI's protocol")
    parser.add_argument("--model", dest="served", metavar="NAME", help="name of the model on a server that has several")
    options = parser.parse_trusting(arguments)
    if options.server and options.prompt is None:
        options.model, options.prompt = None, options.model
    options.model = model_of(Path(options.model)) if options.model else None
    options.adapter = options.adapter and model_of(options.adapter)
    if not options.server:
        parser.refuse(options, ("served",), "only with --server")
    return options


def model_of(folder: Path) -> Path:
    """Return the folder of a run's model: its export, or its newest checkpoint, which is printed; another as it is."""
    if not RunFolder(folder).recipe.exists():
        return folder
    found = candidates.find(str(folder), None).model
    assert isinstance(found, Path)
    print(f"{folder}: a run; its model is {found}", file=sys.stderr)
    return found


def check(options: argparse.Namespace) -> None:
    """Refuse invalid values, and options that contradict each other."""
    if bool(options.model) == bool(options.server):
        raise UserError("name a model folder, or a server with --server URL, and not both.")
    if options.image and options.prompt is None:
        raise UserError('--image: add a question about it, such as "What is in the image?"; a chat takes no images.')
    check_least(options, max_new_tokens=1, temperature=0, top_k=1)
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise UserError(f"--top-p {options.top_p}: must be above 0 and at most 1.")
    if not options.temperature and (options.top_p, options.top_k, options.seed) != (None, None, None):
        raise UserError("--top-p, --top-k and --seed need sampling: add --temperature above 0.")
    if options.server and options.adapter:
        raise UserError("--adapter: a server has its own models; name one with --model NAME.")


def question(options: argparse.Namespace) -> str | list[Json]:
    """Return the content of the question's turn: a text, or parts if there are images.

    A server gets the bytes of the files, which may be on another machine.
    """
    if not options.image:
        return str(options.prompt)
    text = {"type": "text", "text": options.prompt}
    if not options.server:
        return [*({"type": "image"} for _ in options.image), text]
    from ..training.data import images

    for file in options.image:
        images.check("--image", {"path": str(file), "bytes": None})
    urls = [
        f"data:{mimetypes.guess_type(file)[0] or 'image/png'};base64,{base64.b64encode(file.read_bytes()).decode()}"
        for file in options.image
    ]
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), text]


def sampling(options: argparse.Namespace) -> Json:
    """Return the arguments of transformers' `generate` for the sampling options; a temperature of 0 is greedy decoding.

    `top_p` and `top_k` are always given, since the model's own generation settings would apply otherwise.
    """
    if not options.temperature:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": options.temperature,
        "top_p": 1.0 if options.top_p is None else options.top_p,
        "top_k": 0 if options.top_k is None else options.top_k,
        **({} if options.seed is None else {"seed": options.seed}),
    }


def chat(ask: Answer, start: list[dict[str, str]], lines: Iterable[str]) -> None:
    """Print the answers to line after line; each question is sent with all previous turns that were answered."""
    turns = list(start)
    prompt = "> " if sys.stdin.isatty() else ""
    print(prompt, end="", flush=True)
    for line in lines:
        question = line.strip()
        if question == "/exit":
            return
        if question == "/reset":
            turns = list(start)
        elif question:
            asked = [*turns, {"role": "user", "content": question}]
            pieces = []
            try:
                for piece in ask(asked):
                    pieces.append(piece)
                    print(printable(piece), end="", flush=True)
                print()
                turns = [*asked, {"role": "assistant", "content": "".join(pieces).strip()}]
            except UserError as error:
                print(f"{printable(redact(str(error)))} (/reset starts again)", file=sys.stderr)
        print(prompt, end="", flush=True)


def of_server(options: argparse.Namespace) -> Answer:
    """Return a function that gets answers from a server."""
    found = server.connect(options.server, options.served)
    asked: Json = {"temperature": options.temperature, "max_tokens": options.max_new_tokens}
    asked |= {key: value for key in ("top_p", "top_k", "seed") if (value := getattr(options, key)) is not None}
    return lambda turns: server.stream(found, turns, asked)


def of_folder(options: argparse.Namespace) -> Answer:
    """Return a function that gets answers from the model in a folder."""
    model, tokenizer = loaded(options.model, options.adapter)
    if tokenizer.chat_template is None:
        raise UserError(f"{options.model}: its tokenizer has no chat template, which a chat needs; add a prompt.")
    from ..training.model.generate import stream

    return lambda turns: stream(model, tokenizer, turns, options.max_new_tokens, **sampling(options))


def of_images(options: argparse.Namespace) -> Answer:
    """Return a function that gets answers about the images from the vision-language model in a folder.

    Images are made smaller as they were in training.
    """
    check_folder(options.model, options.adapter)
    places = [folder for folder in (options.adapter, options.model) if folder is not None]
    bases = [base_model.find(folder) for folder in places if (folder / base_model.ADAPTER).exists()]
    having = [one for one in (*places, *bases) if any((one / name).exists() for name in PROCESSORS)]
    on_hub = [base for base in bases if not base.exists()]  # `processor.load` refuses a text model
    if not (having or on_hub):
        raise UserError(f"--image: {options.model} is a text model, without an image processor; leave out --image.")
    place = str((having or on_hub)[0])
    from ..training.data import answers, images
    from ..training.model import processor

    pictures: list[Json] = [{"path": str(file), "bytes": None} for file in options.image]
    for picture in pictures:
        images.check("--image", picture)
    recipe = candidates.find(str(options.adapter or options.model), None).recipe
    max_pixels = recipe.data.max_pixels if recipe else Data.max_pixels
    model, tokenizer = loaded(options.model, options.adapter)
    seen = processor.load(place, base_model.may_run_code(Path(place)))
    tokenizer.chat_template = tokenizer.chat_template or seen.chat_template
    if tokenizer.chat_template is None:
        raise UserError(f"{place}: has no chat template, which a question about an image needs.")
    how = sampling(options)

    def ask(turns: list[Json]) -> Iterator[str]:
        asked = answers.asked(processor.adopt(seen, tokenizer), tokenizer, turns, pictures, max_pixels)
        yield answers.answered(seen, max_pixels, model, tokenizer, asked, options.max_new_tokens, how)

    return ask


def answer(folder: Path, adapter: Path | None, prompt: str, max_new_tokens: int, how: Json | None = None) -> str:
    """Return the answer of the model in `folder`, or of `adapter` on it, to one question.

    `how` are the sampling arguments from `sampling`, or None for greedy decoding. Refuses questions that are longer
    than the model's context.
    """
    how = how or {"do_sample": False}
    model, tokenizer = loaded(folder, adapter)
    from ..training.model.generate import seeded, stream

    if tokenizer.chat_template is None:
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, **seeded(how))
        return str(tokenizer.decode(output[0], skip_special_tokens=True))
    return "".join(stream(model, tokenizer, [{"role": "user", "content": prompt}], max_new_tokens, **how)).strip()


def check_folder(folder: Path, adapter: Path | None) -> None:
    """Refuse folders that do not exist, or that have neither a model nor an adapter."""
    for path in filter(None, (folder, adapter)):
        if not path.is_dir():
            raise UserError(f"{path}: no such folder; a run's model is in its export/.")
        if not any((path / name).exists() for name in ("config.json", "adapter_config.json")):
            raise UserError(f"{path}: has neither a model nor an adapter; a run's model is in its export/.")


def loaded(folder: Path, adapter: Path | None) -> tuple[Any, Any]:
    """Return the model, which has to write text, and its tokenizer."""
    check_folder(folder, adapter)
    import transformers

    from ..training import export

    transformers.utils.logging.disable_progress_bar()
    tokenizer = export.load_tokenizer(adapter or folder)
    model = export.load(folder.resolve(), adapter=adapter and adapter.resolve(), placed=True)
    if not model.can_generate():
        writes, how = "a reward model, which outputs a number", "."
        if base_model.head_of(adapter or folder) == "none":
            writes, how = "an embedding model, which outputs vectors", "; its README.md shows how to use it."
        elif base_model.labels_of(adapter or folder):
            writes, how = "a classifier, which outputs a class", "; its README.md shows how to use it."
        raise UserError(f"{folder}: {writes} and no text{how}")
    return model, tokenizer
