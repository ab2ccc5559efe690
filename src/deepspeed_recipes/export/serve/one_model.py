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
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import X_REQUEST_ID, BaseHandler, GenerationState, Modality

from ...recipe.files import Json

REACHED = ("data:", "http://", "https://")
"""Allowed prefixes of image addresses in a request; anything else would be a file on this machine."""


FIXED: Json = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": False,
    "presence_penalty": 0,
    "tool_choice": "auto",
    "response_format": {"type": "text"},
}
"""The only values of fields that transformers ignores, although others would change the answer."""


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
        return super().load_model_and_processor(found, *options, **more)


class NoFiles:
    """Mixin for handlers that refuses images, sounds and videos that are files on this machine."""

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Modality) -> list[dict[str, Any]]:
        """Return the messages in the processors' format."""
        found = ChatCompletionHandler.get_processor_inputs_from_messages(messages, modality)
        for message in found:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if "url" in part and not str(part["url"]).startswith(REACHED):
                    raise HTTPException(400, f"{part['type']}: give a data:, http:// or https:// address.")
        return found


class Chat(NoFiles, ChatCompletionHandler):
    """Answers `/v1/chat/completions`."""


class Completions(CompletionHandler):
    """Answers `/v1/completions`, and vLLM's `prompt_logprobs` for a prompt of token ids, as `certify` asks for them."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Return the continuation of a text, or the log-probabilities of a prompt's tokens."""
        if "prompt_logprobs" not in body:
            return await super().handle_request(body, request_id)
        tokens = body.get("prompt")
        if not (isinstance(tokens, list) and tokens and all(isinstance(token, int) for token in tokens)):
            raise HTTPException(400, "prompt_logprobs: give the prompt as a list of token ids.")
        _, model, _ = self._resolve_model({**body, "prompt": ""})
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens], device=model.device)).logits[0, :-1].float().cpu()
        places: list[dict[str, dict[str, float]] | None] = [None]
        for token, place in zip(tokens[1:], logits.log_softmax(-1), strict=True):
            places.append({str(one): {"logprob": place[one].item()} for one in (token, int(place.argmax()))})
        return {"object": "text_completion", "choices": [{"index": 0, "text": "", "prompt_logprobs": places}]}


class Responses(NoFiles, ResponseHandler):
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
        for field, only in FIXED.items():
            if body.get(field) not in (None, only):
                raise HTTPException(400, f"{field}: only {json.dumps(only)} here; vLLM has others (--engine vllm).")
        if "max_completion_tokens" in body:  # OpenAI's newer name, which transformers ignores
            body.setdefault("max_tokens", body.pop("max_completion_tokens"))
        number = request.headers.get(X_REQUEST_ID) or str(uuid.uuid4())
        return await handlers[request.url.path].handle_request(body, number)

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
