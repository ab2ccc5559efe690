"""A server that speaks OpenAI's protocol: vLLM, `transformers serve`, SGLang, llama.cpp and the services."""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..spec.errors import UserError

TIMEOUT = 600
"""Seconds that one answer may take."""
AT_ONCE = 8
"""Requests that wait at the same time."""
KEY = "OPENAI_API_KEY"
"""The variable whose value is sent as the key, where it is set."""

Turns = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Server:
    """A model on a server."""

    address: str
    """Without the `/v1` that every path has."""
    model: str


def is_address(text: str) -> bool:
    """Return whether a word names a server."""
    return text.startswith(("http://", "https://"))


def connect(address: str, model: str | None = None) -> Server:
    """Return a model on a server: the one asked for, or the only one that it has.

    Raises:
        UserError: the server cannot be reached, has several models, or not this one.
    """
    address = address.rstrip("/").removesuffix("/v1")
    if model:
        return Server(address, model)
    names = [str(one["id"]) for one in json.loads(_request(address, "/v1/models", None).read())["data"]]
    if len(names) > 1:
        raise UserError(f"{address}: has {', '.join(names)}; name one with --model NAME.")
    # `transformers serve MODEL` lists the Hub's cache only, and answers a request without a name with its model.
    return Server(address, names[0] if names else "")


def answers(server: Server, conversations: Sequence[Turns], options: Mapping[str, Any]) -> list[str]:
    """Return the answers to conversations, in their order; `options` are those of the protocol."""
    with ThreadPoolExecutor(AT_ONCE) as waiting:
        return list(waiting.map(lambda turns: "".join(stream(server, turns, options, whole=True)), conversations))


def stream(server: Server, turns: Turns, options: Mapping[str, Any], whole: bool = False) -> Iterator[str]:
    """Yield the answer to a conversation in the pieces in which it comes, or `whole`.

    Raises:
        UserError: the server cannot be reached, or refuses.
    """
    named = {"model": server.model} if server.model else {}
    asked = {**named, "messages": [dict(turn) for turn in turns], "stream": not whole, **options}
    answer = _request(server.address, "/v1/chat/completions", asked)
    try:
        if whole:
            yield json.loads(answer.read())["choices"][0]["message"].get("content") or ""
            return
        for line in answer:
            text = line.decode().strip().removeprefix("data:").strip()
            if text.startswith("{"):
                for choice in json.loads(text).get("choices", ()):
                    yield choice.get("delta", {}).get("content") or ""
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"{server.address}: the answer broke off ({type(error).__name__}: {error}).") from None


def _request(address: str, path: str, body: Mapping[str, Any] | None) -> Any:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    content = json.dumps(body).encode() if body is not None else None
    try:
        return urllib.request.urlopen(urllib.request.Request(address + path, content, headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(500).decode(errors="replace").split())[:200]
        raise UserError(f"{address}{path}: the server answered {error.code}: {said}") from None
    except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"{address}: no answer ({reason}); is a server running there?") from None
