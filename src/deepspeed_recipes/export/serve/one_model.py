"""transformers' server, limited to one model and to the routes that answer with it.

    python -m deepspeed_recipes.export.serve.one_model NAME HOST PORT [--trust-remote-code]

`transformers serve` itself loads any folder of the machine that a request to `/load_model` or
`/v1/audio/transcriptions` names, unloads its model at `/reset`, and opens image files by their path (transformers
5.22.2). NAME is a folder in this process's working directory.
"""

import json
import sys
import uuid
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import X_REQUEST_ID, BaseHandler, GenerationState, Modality

from ...recipe.errors import UserError
from ...recipe.files import Json
from ...training.model.shown import shown
from ...training.model_folder import complete

REACHED = ("data:", "http://", "https://")
"""Allowed prefixes of image addresses in a request; anything else would be a file on this machine."""


TEXTS = ("text", "input_text", "output_text")
"""The types of content parts that a text model reads."""

FIXED: Json = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": False,
    "top_logprobs": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,  # which transformers takes for a repetition penalty
    "logit_bias": {},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "text": {"format": {"type": "text"}},
    "modalities": ["text"],
    "include": [],
    "truncation": "disabled",
    "background": False,
    "suffix": None,  # which transformers appends to the answer
    "verbosity": None,
    "reasoning": None,
    "conversation": None,
    "context_management": None,
    "generation_config": None,  # replaces the model's whole configuration, and may have any key
}
"""The only values of fields that transformers ignores or misreads, although others would change the answer."""

WITHOUT_EFFECT = {"max_completion_tokens", "metadata", "prediction", "service_tier", "store", "stream_options", "user"}
"""Fields on transformers' list of unused ones that change no answer, or that are translated here."""

RANGES: dict[str, tuple[type, float, float]] = {
    "max_tokens": (int, 1, 2**31),
    "max_completion_tokens": (int, 1, 2**31),
    "max_output_tokens": (int, 1, 2**31),
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "seed": (int, 0, 2**63 - 1),
}
"""The type, the least and the largest value of each number in a request."""


def check(body: dict[str, Any], unused: set[str]) -> None:
    """Refuse what would not be answered as asked: fields that are not read, numbers out of range, odd stop texts."""
    for field, only in (dict.fromkeys(unused - WITHOUT_EFFECT) | FIXED).items():
        value = body.get(field)
        if value not in (None, only) or (value == 0 and isinstance(only, bool) is not isinstance(value, bool)):
            raise HTTPException(400, f"{field}: only {json.dumps(only)} here; vLLM has others (--engine vllm).")
    for field, (kind, least, most) in RANGES.items():
        value = body.get(field)
        if value is None:
            continue
        right = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
        if not right or not least <= value <= most:
            name = "a whole number" if kind is int else "a number"
            raise HTTPException(400, f"{field}: {json.dumps(value)} is not {name} from {least} to {most}.")
    if not isinstance(body.get("stream"), bool | None):
        raise HTTPException(400, f"stream: {json.dumps(body['stream'])} is not true or false.")
    turns = body.get("messages", [{"role": "user"}])
    if not (isinstance(turns, list) and turns and all(isinstance(one, dict) and "role" in one for one in turns)):
        raise HTTPException(400, "messages: give a list of objects with role and content.")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise HTTPException(400, "tools: give a list of objects.")
    stop = body.get("stop") or []
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise HTTPException(400, f"stop: {json.dumps(stop)} is not a text or a list of texts.")
    if stop and body.get("stream"):
        raise HTTPException(400, "stop: not together with stream here; vLLM has both (--engine vllm).")


def cut(answer: JSONResponse, stops: list[str]) -> JSONResponse:
    """Return an answer without its stop text, which transformers leaves at the end."""
    content = json.loads(bytes(answer.body))
    (choice,) = content["choices"]
    holder, key = (choice["message"], "content") if "message" in choice else (choice, "text")
    text = holder.get(key, "")
    holder[key] = min((text.partition(stop)[0] for stop in stops), key=len)
    if holder[key] != text and choice["finish_reason"] == "length":
        choice["finish_reason"] = "stop"
    return JSONResponse(content)


class OneModel(ModelManager):
    """Loads only the model with which the server was started."""

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Return the name as it is, for the answers; transformers' own method appends a revision."""
        return model_id

    def load_model_and_processor(self, model_id_and_revision: str, *options: Any, **more: Any) -> Any:
        """Return the model, which is loaded once."""
        if model_id_and_revision != self.force_model:
            raise HTTPException(400, f"Only {self.force_model} is served here.")
        found = ModelManager.process_model_name(model_id_and_revision)
        model, processor = super().load_model_and_processor(found, *options, **more)
        tokenizer = getattr(processor, "tokenizer", processor)
        if getattr(tokenizer, complete.KEY, None) is None:  # not an export: the whole conversation would be answered
            tokenizer.response_template = complete.of_tokenizer(tokenizer)
        return model, processor


class Sampling:
    """Mixin for handlers: sampled answers are drawn with the seed of their own request."""

    model_manager: ModelManager
    generation_state: GenerationState

    def _build_generation_config(self, body: dict[str, Any], *options: Any, **more: Any) -> GenerationConfig:
        if (seed := body.pop("seed", None)) is not None:  # on the thread that answers, after what it answers now
            self.generation_state.get_manager(self.model_manager.force_model).submit(torch.manual_seed, seed)
        config: GenerationConfig = super()._build_generation_config(body, *options, **more)  # type: ignore[misc]
        if body.get("temperature") or (body.get("temperature") is None and (body.get("top_p") or 1) < 1):
            config.do_sample = True
        return config


class Messages(Sampling):
    """Mixin for handlers of messages: refuses parts that are not read or are files here, and drops nothing else."""

    def _resolve_model(self, body: dict[str, Any]) -> Any:
        found = super()._resolve_model(body)  # type: ignore[misc]
        if body.get("tools"):
            tokenizer = getattr(found[-1], "tokenizer", found[-1])
            try:
                shown(tokenizer, tokenizer.get_chat_template(), [{"role": "user", "content": "a"}], body["tools"])
            except UserError as error:
                raise HTTPException(400, f"tools: the model's chat template: {error}.") from error
        return found

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Modality) -> list[dict[str, Any]]:
        """Return the messages in the processors' format."""
        messages = [{key: one[key] for key in one if one[key] not in (None, [])} for one in messages]
        for message in messages if modality == Modality.LLM else ():
            for part in message["content"] if isinstance(message.get("content"), list) else ():
                if part["type"] not in TEXTS:
                    raise HTTPException(400, f"{part['type']}: this model reads only text.")
        found = ChatCompletionHandler.get_processor_inputs_from_messages(messages, modality)
        for message, given in zip(found, messages, strict=True):
            if "tool_calls" in given and isinstance(given.get("content"), str):  # which transformers leaves out
                message["content"] = given["content"]
            message |= {key: given[key] for key in given.keys() - message.keys()}
            for part in message["content"] if isinstance(message["content"], list) else ():
                if "url" in part and not str(part["url"]).startswith(REACHED):
                    raise HTTPException(400, f"{part['type']}: give a data:, http:// or https:// address.")
        return found


class Chat(Messages, ChatCompletionHandler):
    """Answers `/v1/chat/completions`."""


class Completions(Sampling, CompletionHandler):
    """Answers `/v1/completions`, and vLLM's `prompt_logprobs` for a prompt of token ids, as `certify` requests them."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Return the continuation of a text, or the log-probabilities of a prompt's tokens."""
        if body.get("prompt_logprobs") is None:
            return await super().handle_request(body, request_id)
        if body["prompt_logprobs"] != 1:
            raise HTTPException(400, "prompt_logprobs: only 1 here; vLLM has others (--engine vllm).")
        tokens = body.get("prompt")
        if not (isinstance(tokens, list) and tokens and all(isinstance(token, int) for token in tokens)):
            raise HTTPException(400, "prompt_logprobs: give the prompt as a list of token ids.")
        _, model, _ = self._resolve_model({**body, "prompt": ""})
        size = model.get_input_embeddings().num_embeddings
        if not 0 <= min(tokens) <= max(tokens) < size:
            raise HTTPException(400, f"prompt: the model's token ids are from 0 to {size - 1}.")
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens], device=model.device)).logits[0, :-1].float().cpu()
        places: list[dict[str, dict[str, float]] | None] = [None]
        for token, place in zip(tokens[1:], logits.log_softmax(-1), strict=True):
            places.append({str(one): {"logprob": place[one].item()} for one in (token, int(place.argmax()))})
        return {"object": "text_completion", "choices": [{"index": 0, "text": "", "prompt_logprobs": places}]}


class Responses(Messages, ResponseHandler):
    """Answers `/v1/responses`."""


def app(name: str, trust_remote_code: bool = False) -> FastAPI:
    """Return the server for the model in the folder `name`; the model's own code runs only if trusted."""
    manager, state = OneModel(force_model=name, trust_remote_code=trust_remote_code), GenerationState()
    answering = FastAPI(openapi_url=None)
    handlers: dict[str, BaseHandler] = {
        "/v1/chat/completions": Chat(manager, state),
        "/v1/completions": Completions(manager, state),
        "/v1/responses": Responses(manager, state),
    }

    @answering.post("/v1/chat/completions")
    @answering.post("/v1/completions")
    @answering.post("/v1/responses")
    async def answer(request: Request, body: dict[str, Any]) -> Any:
        handler = handlers[request.url.path]
        if body.get("prompt_logprobs") is None:
            check(body, handler._unused_fields)
        newer, older = body.pop("max_completion_tokens", None), body.get("max_tokens")  # transformers ignores the newer
        if None not in (newer, older) and newer != older:
            raise HTTPException(400, f"max_completion_tokens: {newer}, but max_tokens is {older}; give one of them.")
        body["stream"] = bool(body.get("stream"))  # transformers' default is True for /v1/responses
        if newer is not None:
            body["max_tokens"] = newer
        number = request.headers.get(X_REQUEST_ID) or str(uuid.uuid4())
        stops = body.pop("stop", None) or []
        stops = [stops] if isinstance(stops, str) else stops
        try:
            found = await handler.handle_request(body | ({"stop": stops} if stops else {}), number)
        except (KeyError, TypeError, ValueError, TemplateError) as error:  # of messages, tools and templates
            raise HTTPException(400, f"the request cannot be answered: {type(error).__name__}: {error}") from error
        return cut(found, stops) if stops else found

    @answering.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "you"}]}

    @answering.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    return answering


if __name__ == "__main__":
    uvicorn.run(
        app(sys.argv[1], "--trust-remote-code" in sys.argv[4:]),
        host=sys.argv[2],
        port=int(sys.argv[3]),
        log_level="info",
    )
