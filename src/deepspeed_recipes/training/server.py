"""Client of servers with OpenAI's protocol: vLLM, `transformers serve`, SGLang, llama.cpp and hosted services."""

import base64
import contextlib
import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..recipe.errors import UserError
from ..recipe.files import Json, JsonView
from ..recipe.samples import REASONING

TIMEOUT = 600
"""Time limit of an answer, in seconds."""
AT_ONCE = 8
"""Number of concurrent requests."""
BUSY, TRIES = (429, 500, 502, 503, 504), 6
"""Statuses after which a request is repeated, and how often it is sent: half a minute in all without a Retry-After."""
KEY = "OPENAI_API_KEY"
"""The environment variable with the key; without it no key is sent."""

Turns = Sequence[JsonView]


@dataclass(frozen=True)
class Server:
    """A model on a server."""

    address: str
    """The server's address without `/v1`, with which every path begins."""
    model: str


def is_address(text: str) -> bool:
    """Return True if a word is a server's address."""
    return text.startswith(("http://", "https://"))


def connect(address: str, model: str | None = None) -> Server:
    """Return a model on a server: the given model, or the server's only model; refuse to choose one of several."""
    address = address.rstrip("/").removesuffix("/v1")
    if model:
        return Server(address, model)
    with _unbroken(Server(address, "")):
        names = [str(one["id"]) for one in json.loads(_request(address, "/v1/models", None).read())["data"]]
    if len(names) > 1:
        raise UserError(f"{address}: has several models ({', '.join(names)}); name one with --model NAME.")
    # `transformers serve MODEL` lists the Hub's cache only, and answers a request without a name with its model.
    return Server(address, names[0] if names else "")


@dataclass(frozen=True)
class Answer:
    """A server's answer: the message, and True in `cut_off` if it did not end by itself."""

    message: JsonView
    cut_off: bool

    def __str__(self) -> str:
        """Return the answer's text, and its tool calls as JSON."""
        _, content, calls = _parts(self.message)
        return "\n".join(filter(None, [content, *(json.dumps(call, ensure_ascii=False) for call in calls)]))

    def right(self, wanted: JsonView) -> bool:
        """Return True if text and tool calls equal those of a turn, up to white space, and its reasoning, if any."""
        given, expected = _parts(self.message), _parts(wanted)
        return not self.cut_off and given[1:] == expected[1:] and expected[0] in ("", given[0])


def _parts(message: JsonView) -> tuple[str, str, list[Json]]:
    """Return a message's reasoning, text and tool calls; servers without a parser leave reasoning in the text."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content)
    before, _, after = str(content).rpartition("</think>")
    inline = before.partition("<think>")[2] if "<think>" in before else before
    reasoning = next((message[name] for name in REASONING if message.get(name)), inline)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    read = [{"name": one["name"], "arguments": _read(one.get("arguments"))} for one in calls]
    return str(reasoning).strip(), after.strip(), read


def _read(arguments: object) -> Any:
    """Return a call's arguments, which the protocol encodes as JSON in a string."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def answers(
    server: Server, conversations: Sequence[Turns], options: JsonView, own: Sequence[JsonView] | None = None
) -> list[Answer]:
    """Return the answers to conversations in this project's format, in their order.

    `options` are the protocol's, and `own` those of each conversation, such as its tools; empty ones are not sent.
    """

    def answer(turns: Turns, more: JsonView) -> Answer:
        asked = {**options, **{name: value for name, value in more.items() if value}}
        with _complete(server, _as_protocol(turns), asked, stream=False) as reply, _unbroken(server):
            choice = _read_reply(server, reply.read())["choices"][0]
            return Answer(choice["message"], choice.get("finish_reason") == "length")

    with ThreadPoolExecutor(AT_ONCE) as waiting:
        return list(waiting.map(answer, conversations, own or [{}] * len(conversations)))


def _as_protocol(turns: Turns) -> list[Json]:
    """Return turns with tool calls in the protocol's format: with ids, and with arguments as JSON in a string."""
    written: list[Json] = []
    waiting: list[str] = []
    for number, turn in enumerate(turns):
        message = dict(turn)
        if message.get("tool_calls"):
            calls = [
                {"id": f"call_{number}_{at}", **call}
                | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
                for at, call in enumerate(message["tool_calls"])
            ]
            message["tool_calls"], waiting = calls, [call["id"] for call in calls]
        elif message["role"] == "tool" and waiting:
            message = {"tool_call_id": waiting.pop(0), **message}
        written.append(message)
    return written


def stream(server: Server, turns: Turns, options: JsonView) -> Iterator[str]:
    """Yield the answer to a conversation in pieces, as they arrive."""
    answer = _complete(server, [dict(turn) for turn in turns], options, stream=True)
    ended, given = False, set()
    with _unbroken(server):
        for line in answer:
            text = line.decode().strip().removeprefix("data:").strip()
            ended |= text == "[DONE]"
            for choice in _read_reply(server, text).get("choices", ()) if text.startswith("{") else ():
                said = choice.get("delta") or choice.get("message") or {}  # a message if the server does not stream
                given |= {key for key in said if key != "role" and said[key]}
                ended |= bool(choice.get("finish_reason"))
                yield said.get("content") or ""
    if not ended:
        raise UserError(f"{server.address}: the answer broke off.")
    if given and "content" not in given:
        raise UserError(f"{server.address}: answered without text, only with {', '.join(sorted(given))}.")


def _complete(server: Server, messages: list[Json], options: JsonView, stream: bool) -> Any:
    return _request(
        server.address, "/v1/chat/completions", {**_named(server), "messages": messages, "stream": stream, **options}
    )


def _named(server: Server) -> dict[str, str]:
    return {"model": server.model} if server.model else {}


def log_probabilities(server: Server, tokens: list[int], start: int) -> dict[str, list[Any]]:
    """Return the log-probabilities of a prompt's tokens from `start`, and the likeliest token at each place.

    vLLM and `ds-recipes serve` answer `prompt_logprobs`, which names tokens by their ids.
    """
    body = {**_named(server), "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    with _unbroken(server):
        choice = _read_reply(server, _request(server.address, "/v1/completions", body).read())["choices"][0]
        places = choice.get("prompt_logprobs")
        if not places:
            raise UserError(
                f"{server.address}: gives no log-probabilities of a prompt (`prompt_logprobs`); vLLM and "
                "ds-recipes serve do."
            )
        kept = list(zip(tokens, places, strict=False))[start:]
        if len(places) != len(tokens) or not all(str(token) in place for token, place in kept):
            raise UserError(f"{server.address}: its log-probabilities are of other tokens; is it another model there?")
        return {
            "logprobs": [float(place[str(token)]["logprob"]) for token, place in kept],
            "likeliest": [int(max(place, key=lambda name: place[name]["logprob"])) for _, place in kept],
        }


def prompt_tokens(server: Server, messages: list[Json]) -> int | None:
    """Return how many tokens a server makes of messages, or None if it does not tell."""
    with _unbroken(server):
        reply = _complete(server, messages, {"max_tokens": 1, "temperature": 0}, stream=False)
        answer = _read_reply(server, reply.read())
        counted = (answer.get("usage") or {}).get("prompt_tokens")
        return int(counted) if counted else None


def _read_reply(server: Server, text: str | bytes) -> Json:
    """Return a reply, or refuse the error that some servers send with status 200 or amid a stream."""
    reply: Json = json.loads(text)
    if reply.get("error"):
        raise UserError(f"{server.address}: the server answered an error: {json.dumps(reply['error'])[:200]}")
    return reply


@contextlib.contextmanager
def _unbroken(server: Server) -> Iterator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{server.address}: the answer broke off ({type(error).__name__}: {error}).") from None


def _request(address: str, path: str, body: JsonView | None) -> Any:
    """Return the open answer; what a busy or restarting server refuses is asked again, at most `TRIES` times."""
    for tried in range(1, TRIES + 1):
        try:
            return _ask_once(address, path, body)
        except urllib.error.HTTPError as error:
            if error.code not in BUSY or tried == TRIES:
                text = " ".join(error.read(500).decode(errors="replace").split())[:200]
                fix = f"; set {KEY} to its key" if error.code in (401, 403) else ""
                raise UserError(f"{address}{path}: the server answered {error.code}: {text}{fix}") from None
            wait = error.headers.get("Retry-After") or ""
            time.sleep(min(60, float(wait) if wait.isdigit() else 2 ** (tried - 1)))
        except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UserError(f"{address}: no answer ({reason}); is a server running there?") from None
    raise AssertionError("the last try returns or raises")


def _ask_once(address: str, path: str, body: JsonView | None) -> Any:
    headers = {"Content-Type": "application/json"}
    content = json.dumps(body).encode() if body is not None else None
    parts = urllib.parse.urlsplit(address)
    if key := os.environ.get(KEY):
        if not (key.isascii() and key.isprintable()):  # the error would print it
            raise UserError(f"{KEY}: has characters that no header can have; set it to the server's key alone.")
        headers["Authorization"] = f"Bearer {key}"
    elif parts.username:  # urllib would take the name and the password for a part of the host's name
        pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return urllib.request.urlopen(urllib.request.Request(address + path, content, headers), timeout=TIMEOUT)
