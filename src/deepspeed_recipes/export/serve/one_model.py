"""transformers' server, limited to one model: it has only the routes that answer with that model.

    python -m deepspeed_recipes.export.serve.one_model NAME HOST PORT [--trust-remote-code]

`transformers serve` itself loads any folder of the machine that a request names to `/load_model` or
`/v1/audio/transcriptions`, unloads its model at `/reset`, and opens image files by their path (transformers 5.22.2).
NAME is a folder where this process is started.
"""

import sys
import uuid
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import X_REQUEST_ID, GenerationState, Modality

REACHED = ("data:", "http://", "https://")
"""Prefixes of the image addresses that a request may name; anything else would be a file of this machine."""


class OneModel(ModelManager):
    """Holds the model that it was started with, and loads no other."""

    def load_model_and_processor(self, model_id_and_revision: str, *options: Any, **more: Any) -> Any:
        """Return the model, which is loaded once."""
        if model_id_and_revision != self.process_model_name(self.force_model):
            raise HTTPException(400, f"Only {self.force_model} is served here.")
        return super().load_model_and_processor(model_id_and_revision, *options, **more)


class NoFiles:
    """Part of a handler: refuses images, sounds and videos that are files of this machine."""

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Modality) -> list[dict[str, Any]]:
        """Return the messages as processors take them."""
        found = ChatCompletionHandler.get_processor_inputs_from_messages(messages, modality)
        for message in found:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if "url" in part and not str(part["url"]).startswith(REACHED):
                    raise HTTPException(400, f"An {part['type']} is given as data:, http:// or https://.")
        return found


class Chat(NoFiles, ChatCompletionHandler):
    """Answers `/v1/chat/completions`."""


class Responses(NoFiles, ResponseHandler):
    """Answers `/v1/responses`."""


def app(name: str, trust_remote_code: bool = False) -> FastAPI:
    """Return the server of the model in the folder `name`, whose own code may run if trusted, once it is loaded."""
    manager, state = OneModel(force_model=name, trust_remote_code=trust_remote_code), GenerationState()
    answering = FastAPI(openapi_url=None)
    handlers = {
        "/v1/chat/completions": Chat(manager, state),
        "/v1/completions": CompletionHandler(manager, state),
        "/v1/responses": Responses(manager, state),
    }

    @answering.post("/v1/chat/completions")
    @answering.post("/v1/completions")
    @answering.post("/v1/responses")
    async def answer(request: Request, body: dict[str, Any]) -> Any:
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
