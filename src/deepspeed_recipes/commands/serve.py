"""Serve a model over OpenAI's protocol: a run, a checkpoint, a model folder, or several adapters of a base model.

    ds-recipes serve runs/tiny-3m-full/20261121-101500
    ds-recipes serve runs/tiny-3m-lora/20261121-103000 --adapter other=runs/tiny-3m-lora/20261121-110000
    ds-recipes serve my-model-int8 --port 9000 --name invoices
    ds-recipes serve my-70b --tensor-parallel 4 --pipeline-parallel 2        # one model over eight GPUs

The server is vLLM if it is installed (`make serving`), otherwise `transformers serve`. It uses the chat template, the
end-of-answer tokens and the generation defaults with which the model was trained. What it answers is compared with what
the trained model answers (`ds-recipes certify`), and a server that differs is ended. Ctrl-C ends the server.
"""

import argparse
import json
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from ..export.serve import engines, process, served
from ..export.serve.served import Served
from ..machine import children
from ..recipe import files
from ..recipe.errors import UserError
from ..training.server import Server
from .certify import shown
from .main import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the user ends the server, and return 0."""
    options = parse(arguments)
    if options.log is not None:
        files.check_writable("--log", options.log)
    found = served.find(options.model, options.name, options.adapter)
    if not 0 < options.port < 65536:
        raise UserError(f"--port {options.port}: must be between 1 and 65535.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.host, options.port))
        except (OSError, OverflowError, TypeError) as error:
            what = f"--host {options.host} --port {options.port}: {error}"
            raise UserError(f"{what}; choose another with --host or --port N.") from None
    engine = engines.choose(options.engine, found)
    split = engines.Split(options.tensor_parallel, options.pipeline_parallel)
    engines.check_split(engine, found, split)
    if unread := engines.unread_settings(engine, found):
        print(f"warning: vLLM does not read {', '.join(unread)} in generation_config.json; send them in each request")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background processes with SIGINT ignored
    with children.scratch("ds-recipes-serve-") as place:
        log = options.log or place / "server.log"
        print(f"starting {engine}, which takes {'minutes' if engine == 'vllm' else 'seconds'}", flush=True)
        server = engines.build(engine, found, options.host, options.port, place, split)
        print(shlex.join(server.command), flush=True)
        try:
            with process.running(server, found.asked, options.host, options.port, log) as running:
                if not (options.no_certify or agrees(found, process.address(options.host, options.port))):
                    return 1
                print("\n".join(ready(found, server, process.address(options.host, options.port))), flush=True)
                running.wait()
                raise UserError(f"{server.title} ended with status {running.returncode}; --log FILE keeps its output.")
        except KeyboardInterrupt:
            print()
    return 0


def agrees(found: Served, url: str) -> bool:
    """Compare what a server answers with what was trained, for the model or each of its adapters, and print it."""
    from ..export import certificate  # takes seconds, and --help does without
    from ..training.model_folder.base_model import EXPECTED

    for name, folder in [(one.name, one.folder) for one in found.adapters] or [(found.name, found.model)]:
        if not (folder / EXPECTED).exists():
            print(f"{name}: not compared with the trained model: {folder} has no {EXPECTED}", flush=True)
            continue
        result = certificate.of_server(Server(url, name), folder, read_tensors=False)
        if not result.agrees:
            print("\n".join([*shown(name, result), "--no-certify serves it all the same."]), file=sys.stderr)
            return False
        print(f"{name}: {result}", flush=True)
    return True


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser("serve", __doc__)
    parser.add_argument("model", type=Path, metavar="RUN|FOLDER", help="a run, a checkpoint, a model or an adapter")
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=DIR", help="an adapter of the same base; repeatable"
    )
    parser.add_argument("--name", help="the model's name in requests (default: the recipe's name, or the folder's)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: this machine only); with 0.0.0.0 every host that reaches it can use it",
    )
    parser.add_argument("--port", type=int, default=8000, metavar="P", help="default: 8000")
    parser.add_argument("--engine", choices=engines.ENGINES, default="auto", help="default: vllm if it is installed")
    parser.add_argument(
        "--no-certify", action="store_true", help="do not compare the server's answers with the trained model's"
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="vLLM: split each layer over N GPUs (default: 1)"
    )
    parser.add_argument(
        "--pipeline-parallel", type=int, default=1, metavar="N", help="vLLM: N stages of layers (default: 1)"
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="write the server's output to FILE")
    return parser.parse_trusting(arguments)


def ready(found: Served, server: engines.Engine, url: str) -> list[str]:
    """Return the lines to print as soon as the server answers."""
    ask = {"model": found.asked, "messages": [{"role": "user", "content": "Hello"}]}
    body = json.dumps(ask).replace("'", "'\\''")
    names = ", ".join(server.names)
    return [
        f"ready: {names} by {server.title} at {url}/v1 (health: {url}/health; Ctrl-C ends the server)",
        "",
        f"    curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        "",
        "    from openai import OpenAI",
        f'    client = OpenAI(base_url="{url}/v1", api_key="none")',
        f"    answer = client.chat.completions.create(model={ask['model']!r}, messages={ask['messages']!r})",
        "    print(answer.choices[0].message.content)",
        "",
        f"    ds-recipes generate --server {url} --model {shlex.quote(found.asked)}",
    ]
