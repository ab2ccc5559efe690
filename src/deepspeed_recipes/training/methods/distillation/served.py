"""A teacher on a vLLM server: requests over HTTP its likeliest next tokens in the training data.

`prompt_logprobs` is vLLM's addition to OpenAI's protocol: for each place in a prompt the likeliest tokens, by the
softmax of the unmodified logits (`--logprobs-mode raw_logprobs`, its default).
"""

import math
import os
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from transformers import PreTrainedTokenizerBase

from ....recipe.errors import UserError
from ....recipe.files import Json
from ....recipe.methods import Distill
from ....recipe.recipe import Recipe
from ...data.collate import Batch

SECONDS = 600
"""Time limit of the server for a micro-batch."""
KEY = "OPENAI_API_KEY"
"""The variable whose value is sent as the key, if it is set."""
SAMPLE = "Tokenizers differ in 1 234.50 €, \tnaïve Größen, 数字, def f(x):\n    return x**2  # and in  spaces"
"""A text that tokenizers with another vocabulary split differently."""
ROUNDING = 1e-7
"""Probability of all other tokens where the likeliest have all of it in fp32."""


@dataclass(frozen=True)
class Served:
    """A teacher on a vLLM server, which returns its likeliest tokens over HTTP."""

    address: str
    """Without `/v1`."""
    model: str
    vocabulary: int
    """Number of entries in the student's head."""

    @classmethod
    def of(cls, recipe: Recipe, vocabulary: int) -> "Served":
        """Return the teacher of a recipe.

        Raises:
            UserError: the server does not answer, or has no model.
        """
        address = str(Distill.of(recipe).teacher).rstrip("/").removesuffix("/v1")
        models = _asked(address, "/v1/models")["data"]
        if not models:
            raise UserError(f"distill.teacher={address}: has no model.")
        return cls(address, models[0]["id"], vocabulary)

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a server whose model has another tokenizer than the student.

        Raises:
            UserError: the tokenizers split a text differently, or the server does not return its tokens.
        """
        body = {"model": self.model, "prompt": SAMPLE, "add_special_tokens": False}
        theirs = _asked(self.address, "/tokenize", body)["tokens"]
        ours = tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
        if theirs != ours:
            raise UserError(
                f"distill.teacher={self.address}: {self.model} has another tokenizer than the model that learns; "
                "choose two models of one family."
            )

    def likeliest(self, inputs: Batch, places: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens at some places, and their log-probabilities with that of all others, on the CPU.

        Args:
            inputs: a batch of packed or single sequences; each document is a prompt by itself.
            places: numbers of tokens, all sequences of the batch laid end to end.
            count: number of tokens per place.

        Raises:
            UserError: the server does not answer, or refuses this number of tokens.
        """
        ids, positions = (inputs[name].flatten().tolist() for name in ("input_ids", "position_ids"))
        documents: dict[int, list[int]] = {}
        for place in places.tolist():
            documents.setdefault(place - positions[place], []).append(place)
        prompts = [ids[first : inside[-1] + 2] for first, inside in documents.items()]
        options = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": count}
        answer = _asked(self.address, "/v1/completions", {"model": self.model, "prompt": prompts, **options})
        likely = [choice["prompt_logprobs"] for choice in sorted(answer["choices"], key=lambda one: one["index"])]
        found = [
            self._outcomes(of_document[place - first + 1], count)
            for (first, inside), of_document in zip(documents.items(), likely, strict=True)
            for place in inside
        ]
        tokens, log_probs = zip(*found, strict=True)
        return torch.tensor(tokens, dtype=torch.int32), torch.tensor(log_probs)

    def _outcomes(self, likely: dict[str, Json], count: int) -> tuple[list[int], list[float]]:
        """Return a place's likeliest tokens, and the log-probabilities of these and of all others."""
        kept = sorted(((one["rank"], int(token), one["logprob"]) for token, one in likely.items()))[:count]
        tokens, log_probs = [token for _, token, _ in kept], [log_prob for *_, log_prob in kept]
        if max(tokens) >= self.vocabulary:
            raise UserError(
                f"distill.teacher={self.address}: finds token {max(tokens)} likely, and the model that learns has only "
                f"{self.vocabulary}; choose two models of one family."
            )
        others = max(1 - sum(map(math.exp, log_probs)), ROUNDING)
        return tokens, [*log_probs, math.log(others)]


def _asked(address: str, path: str, body: Json | None = None) -> Any:
    key = os.environ.get(KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    method = "GET" if body is None else "POST"
    try:
        answer = httpx.request(method, address + path, json=body, headers=headers, timeout=SECONDS)
        answer.raise_for_status()
        return answer.json()
    except httpx.HTTPStatusError as error:
        reason = " ".join(error.response.text.split())[:200]
        raise UserError(f"distill.teacher={address}: {path} answered {error.response.status_code}: {reason}") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise UserError(f"distill.teacher={address}: no answer ({error}); is vLLM running there?") from None
