"""The teacher's likeliest next tokens for all training data: computed or requested from a server once, kept on disk.

The folder contains `fingerprint.json`, written last, and an Arrow file per rank (`part-0-of-2.arrow`, ...), in the
order of the training sequences. A token in the loss takes 8 bytes for each likeliest token: a million tokens with 64
of them, 0.5 GB.

`Served` is a teacher on a vLLM server. `prompt_logprobs` is vLLM's addition to OpenAI's protocol: for each place in a
prompt the likeliest tokens, by the softmax of the unmodified logits (`--logprobs-mode raw_logprobs`, its default).
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from ....recipe.errors import UserError
from ....recipe.files import Json
from ....recipe.methods import Distill
from ....recipe.recipe import Recipe
from ....recipe.run_folder import read_json, write_json
from ... import distributed
from ...checkpoint import digests, fingerprint
from ...console import say
from ...data.collate import IGNORED, Batch, Collator, next_labels
from ...model import load
from .teacher import Teacher, recipe_of

PLACES, TARGETS = "places", "targets"
"""Keys of a batch: numbers of tokens when all sequences are concatenated, and the token after each, [places]."""
TOKENS, LOG_PROBS = "likeliest", "log_probs"
"""The teacher's likeliest tokens at each place, [places, k], and the log-probabilities of these and of all others,
[places, k + 1], or [places, k] where k is the whole vocabulary; in a sequence the same, flat."""


@dataclass(frozen=True)
class PlacesCollator:
    """Collates sequences, and adds the places in the loss."""

    collator: Collator
    top_k: int | None = None
    """Number of the teacher's likeliest tokens in the sequences, or None if they have none."""

    def __call__(self, sequences: Sequence[Json]) -> Batch:
        """Return the collator's batch with the places, and the tokens and log-probabilities at each of them."""
        inputs = self.collator(sequences)
        labels = next_labels(inputs["labels"]).flatten()
        places = (labels != IGNORED).nonzero()[:, 0]
        found = {PLACES: places, TARGETS: labels[places]}
        if self.top_k and TOKENS in sequences[0]:
            flat = {name: np.concatenate([one[name] for one in sequences]) for name in (TOKENS, LOG_PROBS)}
            found[TOKENS] = torch.from_numpy(flat[TOKENS]).long().view(-1, self.top_k)
            found[LOG_PROBS] = torch.from_numpy(flat[LOG_PROBS]).view(len(places), -1)
        return {**inputs, **found}


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
        """Return the teacher of a recipe."""
        address = str(Distill.of(recipe).teacher).rstrip("/").removesuffix("/v1")
        models = _asked_for(address, "/v1/models")["data"]
        if not models:
            raise UserError(f"distill.teacher={address}: has no model.")
        return cls(address, models[0]["id"], vocabulary)

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a server that does not return its tokens, or whose model has another tokenizer than the student."""
        body = {"model": self.model, "prompt": SAMPLE, "add_special_tokens": False}
        theirs = _asked_for(self.address, "/tokenize", body)["tokens"]
        ours = tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
        if theirs != ours:
            raise UserError(
                f"distill.teacher={self.address}: {self.model} has another tokenizer than the model that learns; "
                "choose two models of one family."
            )

    def likeliest(self, inputs: Batch, places: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens at some places, and their log-probabilities with that of all others, on the CPU.

        `inputs` is a batch of packed or single sequences, each of whose documents is a prompt by itself. `places` are
        numbers of tokens, all sequences of the batch laid end to end, with `count` tokens each.
        """
        ids, positions = (inputs[name].flatten().tolist() for name in ("input_ids", "position_ids"))
        documents: dict[int, list[int]] = {}
        for place in places.tolist():
            documents.setdefault(place - positions[place], []).append(place)
        prompts = [ids[first : inside[-1] + 2] for first, inside in documents.items()]
        options = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": count}
        answer = _asked_for(self.address, "/v1/completions", {"model": self.model, "prompt": prompts, **options})
        likely = [choice["prompt_logprobs"] for choice in sorted(answer["choices"], key=lambda one: one["index"])]
        tokens, log_probs = [], []
        for (first, inside), of_document in zip(documents.items(), likely, strict=True):
            for place in inside:
                listed = of_document[place - first + 1].items()
                kept = sorted((one["rank"], int(token), one["logprob"]) for token, one in listed)[:count]
                tokens.append([token for _, token, _ in kept])
                if max(tokens[-1]) >= self.vocabulary:
                    raise UserError(
                        f"distill.teacher={self.address}: finds token {max(tokens[-1])} likely, and the model that "
                        f"learns has only {self.vocabulary}; choose two models of one family."
                    )
                others = max(1 - sum(math.exp(log_prob) for *_, log_prob in kept), ROUNDING)
                log_probs.append([*(log_prob for *_, log_prob in kept), math.log(others)])
        return torch.tensor(tokens, dtype=torch.int32), torch.tensor(log_probs)


def _asked_for(address: str, path: str, body: Json | None = None) -> Any:
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


MARK = "fingerprint.json"
SCHEMA = pa.schema({TOKENS: pa.list_(pa.int32()), LOG_PROBS: pa.list_(pa.float32())})
MEANT = {
    "data": "other data",
    "tokenizer": "another tokenizer or chat template",
    "teacher": "another teacher",
    "precision": "a teacher in another precision",
    "temperature": "another distill.temperature",
    "top_k": "another distill.top_k",
}
"""The meaning of a difference, by the fingerprint's key."""


def of_run(recipe: Recipe, training: Dataset, tokenizer: PreTrainedTokenizerBase) -> Json:
    """Return the inputs that determine the numbers, found by rank 0; a collective."""

    def inputs() -> Json:
        distill = Distill.of(recipe)
        teacher: str | None = distill.teacher
        if not distill.served:
            loaded = recipe_of(recipe)
            files = sorted(Path(loaded.model.path).glob("*.safetensors"))
            if files:  # the same weights are another teacher with another configuration, or with other code
                files += [*Path(loaded.model.path).glob("config.json"), *sorted(Path(loaded.model.path).glob("*.py"))]
            commit = None if files else getattr(load.load_config(loaded), "_commit_hash", None)  # of a model on the Hub
            teacher = " ".join(map(digests.of_file, files)) or f"{loaded.model.path}@{commit}"
        return {
            "data": fingerprint.of_data(training),
            "tokenizer": fingerprint.of_tokenizer(tokenizer),
            "teacher": teacher,
            "precision": f"{recipe.precision} {distill.teacher_quantization}",
            "temperature": distill.temperature,
            "top_k": distill.top_k,
        }

    return distributed.of_first(inputs)


def known(folder: Path, mark: Json) -> bool:
    """Return whether a folder is complete; refuse it if it was computed from something else than `of_run`."""
    if not (folder / MARK).exists():
        return False
    found = read_json(folder / MARK)
    for name, meaning in MEANT.items():
        if found.get(name) != mark[name]:
            raise UserError(
                f"distill.cache={folder}: was computed from {meaning}; name another folder, or remove this folder."
            )
    return True


def compute(
    folder: Path, mark: Json, teacher: Teacher | Served, training: Dataset, collator: PlacesCollator, batch: int
) -> None:
    """Write the folder, on each rank a share of the sequences; a collective."""
    say(f"teacher: computing its {mark['top_k']} likeliest next tokens of all training data once, into {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = math.ceil(len(training) / ranks)
    part = folder / f"part-{rank}-of-{ranks}.arrow"
    with pa.OSFile(str(part), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
        for start in range(rank * share, (rank + 1) * share, batch):  # equally many passes on each rank, for ZeRO-3
            numbers = [*range(start, min(start + batch, (rank + 1) * share, len(training)))]
            inputs = collator([training[number] for number in numbers or [0]])
            sent = {name: one.to(distributed.device()) if torch.is_tensor(one) else one for name, one in inputs.items()}
            found = teacher.likeliest(sent, sent[PLACES], mark["top_k"])
            if not numbers:
                continue
            each = torch.bincount(inputs[PLACES] // inputs["input_ids"].shape[1], minlength=len(numbers)).tolist()
            spans = list(pairwise([0, *accumulate(each)]))
            columns = [  # one list per sequence, flat
                pa.array([column[start:end].flatten().numpy() for start, end in spans], type=field.type)
                for column, field in zip(found, SCHEMA, strict=True)
            ]
            writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
    dist.barrier()
    if distributed.is_first():
        write_json(folder / MARK, {**mark, "parts": ranks})
    dist.barrier()


def read(folder: Path, training: Dataset) -> "WithLikeliest":
    """Return the training sequences with their numbers from the folder."""
    parts = read_json(folder / MARK)["parts"]
    files = [Dataset.from_file(str(folder / f"part-{part}-of-{parts}.arrow")) for part in range(parts)]
    return WithLikeliest(training, concatenate_datasets(files).with_format("numpy"))


@dataclass(frozen=True)
class WithLikeliest:
    """Training sequences with the teacher's likeliest tokens at each place in the loss."""

    sequences: Dataset
    likeliest: Dataset

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, number: int) -> Json:
        return {**self.sequences[number], **self.likeliest[number]}
