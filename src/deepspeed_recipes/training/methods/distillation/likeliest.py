"""The teacher's likeliest next tokens for all training data, computed once and kept on disk.

The folder contains `fingerprint.json`, written last, and an Arrow file per rank (`part-0-of-2.arrow`, ...), in the
order of the training sequences. A token in the loss takes 8 bytes for each likeliest token: a million tokens with 64
of them, 0.5 GB.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeAlias

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
from ...model import load
from .places import LOG_PROBS, PLACES, TOKENS, PlacesCollator
from .served import Served
from .teacher import Teacher, recipe_of

Asked: TypeAlias = Teacher | Served
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
    found: list[Any] = [None]
    if distributed.is_first():
        distill = Distill.of(recipe)
        found = [
            {
                "data": fingerprint.of_data(training),
                "tokenizer": fingerprint.of_tokenizer(tokenizer),
                "teacher": distill.teacher if distill.served else _of_model(recipe_of(recipe)),
                "precision": f"{recipe.precision} {distill.teacher_quantization}",
                "temperature": distill.temperature,
                "top_k": distill.top_k,
            }
        ]
    dist.broadcast_object_list(found)
    return found[0]


def _of_model(recipe: Recipe) -> str:
    """Return a digest of a folder's weights, or the name and commit of a model on the Hub."""
    if files := sorted(Path(recipe.model.path).glob("*.safetensors")):
        return " ".join(digests.of_file(file) for file in files)
    return f"{recipe.model.path}@{getattr(load.load_config(recipe), '_commit_hash', None)}"


def known(folder: Path, mark: Json) -> bool:
    """Return whether a folder is complete and matches `of_run`.

    Raises:
        UserError: it was computed from something else.
    """
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
    folder: Path,
    mark: Json,
    teacher: Asked,
    training: Dataset,
    collator: PlacesCollator,
    batch: int,
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
            columns = _asked(teacher, [training[number] for number in numbers or [0]], collator, mark["top_k"])
            if numbers:
                writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
    dist.barrier()
    if distributed.is_first():
        write_json(folder / MARK, {**mark, "parts": ranks})
    dist.barrier()


def _asked(teacher: Asked, sequences: list[Json], collator: PlacesCollator, count: int) -> list[pa.Array]:
    """Return the columns of sequences: one list each, flat."""
    inputs = collator(sequences)
    on_device = {name: one.to(distributed.device()) if torch.is_tensor(one) else one for name, one in inputs.items()}
    found = teacher.likeliest(on_device, on_device[PLACES], count)
    width = inputs["input_ids"].shape[1]
    each = torch.bincount(inputs[PLACES] // width, minlength=len(sequences)).tolist()
    ends = [0, *accumulate(each)]
    return [
        pa.array([column[start:end].flatten().numpy() for start, end in pairwise(ends)], type=field.type)
        for column, field in zip(found, SCHEMA, strict=True)
    ]


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
