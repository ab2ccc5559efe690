"""Compare a model folder, or a model on a server, with the model that was trained.

    ds-recipes certify runs/tiny-3m-lora/20261121-103000          # the run's export, by transformers
    ds-recipes certify my-model                                    # a folder that ds-recipes export wrote
    ds-recipes certify http://127.0.0.1:8000 --folder my-model     # what a server answers, for a folder that you have
    ds-recipes certify my-model --server vllm                      # starts the server, asks it, and ends it
    ds-recipes certify my-base --adapter mine=my-adapter           # an adapter on its base model, or at an address
    ds-recipes certify my-gguf                                     # a GGUF file, by llama.cpp

Every export holds `expected.json`: the trained model's log-probabilities of sixteen fixed answers. They are computed
again and compared. A difference beyond the bound is printed with the causes that the folder shows: tensors that are
missing or have other values, settings, end tokens, the chat template. The exit status is 1 then.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..export.serve import engines, process, served
from ..machine import children
from ..recipe.errors import UserError
from ..training import server as servers
from ..training.model_folder.base_model import ADAPTER
from ..training.rendezvous import free_port
from .main import Parser

if TYPE_CHECKING:
    from ..export.certificate import Certificate

HOST = "127.0.0.1"
SERVERS = ("none", "transformers", "vllm", "llama.cpp")
WORST = 3
"""Number of texts that are shown where a model differs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the model is the trained one, and 1 if it differs."""
    parser = Parser("certify", __doc__)
    parser.add_argument(
        "model", metavar="RUN|FOLDER|URL", help="a run, a model or adapter folder, or a server's address"
    )
    parser.add_argument("--folder", type=Path, metavar="F", help="with a URL: the folder whose model it should be")
    parser.add_argument("--model", dest="name", metavar="NAME", help="with a URL: the model's or adapter's name there")
    parser.add_argument("--adapter", metavar="NAME=F", help="this adapter, by its name on a server, and its folder")
    parser.add_argument(
        "--server", choices=SERVERS, default="none", help="start this server and ask it; llama.cpp: on a converted copy"
    )
    parser.add_argument(
        "--card", action="store_true", help="write the result into the folder's model card if it agrees"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison of each text as JSON")
    options = parser.parse_trusting(arguments)
    from ..export import certificate  # takes seconds, and --help does without

    if options.adapter:
        name, _, folder = options.adapter.partition("=")
        if options.folder or options.name:
            raise UserError(f"--adapter {options.adapter}: names model and folder; leave out --model and --folder.")
        if not (name and folder):
            raise UserError(f"--adapter {options.adapter}: write NAME=FOLDER.")
        if servers.is_address(options.model):
            options.name, options.folder = name, Path(folder)
        else:
            options.model = str(served.find(Path(options.model), None, [options.adapter]).adapters[-1].folder)
    if options.card and servers.is_address(options.model):
        raise UserError(f"--card: {options.model} does not tell its version; use --server NAME with the folder.")
    if servers.is_address(options.model):
        if options.folder is None:
            raise UserError(f"{options.model}: add --folder F, the folder of the model that the server should have.")
        folder = served.model_folder(options.folder)
        found = certificate.of_server(servers.connect(options.model, options.name), folder)
    else:
        if options.folder or options.name:
            raise UserError(f"{options.model}: --folder and --model are for a server's address.")
        found = certificate_of(Path(options.model), options.server)
    if options.card and found.agrees:
        folder = Path(options.model).resolve()
        folder = folder if (gguf := any(folder.glob("*.gguf"))) else served.model_folder(folder)
        if not found.record(folder, "llama.cpp" if gguf else options.server.replace("none", "transformers")):
            raise UserError(f"--card: {folder} has no training/, so it has no model card of this project.")
    if options.json:
        said = {name: getattr(found, name) for name in ("agrees", "difference", "bound", "like_base", "causes")}
        print(json.dumps(said | {"texts": [vars(result) for result in found.results]}, indent=2))
    else:
        print("\n".join(shown(options.model, found)))
    return 0 if found.agrees else 1


def certificate_of(folder: Path, engine: str) -> "Certificate":
    """Return the certificate of a folder: by transformers here, by llama.cpp, or by a server on a free port."""
    from ..export import certificate

    if any(folder.glob("*.gguf")):
        if engine not in ("none", "llama.cpp"):
            raise UserError(f"{folder}: holds a GGUF file, which only llama.cpp reads; leave out --server {engine}.")
        return certificate.of_llama_cpp(folder.resolve())
    folder = served.model_folder(folder)
    if engine == "none":
        return certificate.of_folder(folder)
    if engine == "llama.cpp":
        if (folder / ADAPTER).exists():
            raise UserError(
                f"{folder}: an adapter; merge it for llama.cpp: ds-recipes export {folder} --merge --output DIR."
            )
        return certificate.of_llama_cpp(folder)
    found = served.find(folder, None, [])
    chosen, port = engines.choose(engine, found), free_port()
    with children.scratch("ds-recipes-certify-") as place:
        server = engines.build(chosen, found, HOST, port, place)
        with process.running(server, found.asked, HOST, port, place / "server.log"):
            return certificate.of_server(servers.connect(process.address(HOST, port), found.asked), folder)


def shown(name: str, found: "Certificate") -> list[str]:
    """Return the verdict, and where the model differs the causes and the texts that are furthest off."""
    lines = [f"{name}: {found}"]
    if found.agrees:
        return lines
    if found.like_base:
        lines.append("  its answers are the base model's: the adapter is not applied")
    lines += [f"  {cause}" for cause in found.causes]
    if not found.causes and not found.like_base:
        lines.append(
            "  the folder is as it was written: look for the cause in the server (version, dtype, quantisation), or in "
            "the base model of an adapter"
        )
    worst = sorted(found.results, key=lambda result: -result.difference)[:WORST]
    return lines + [
        f"  {result.text[:60]!r}: {result.difference:.2g} nats, {result.likeliest} of {result.places} likeliest differ"
        for result in worst
    ]
