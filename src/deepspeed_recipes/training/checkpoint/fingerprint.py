"""Fingerprint of a checkpoint's run: the recipe, the model's configuration, the tokenizer, the data and their order.

A run that resumes on other data would skip sequences that it has never read, or read some twice, without an error.
"""

import json
from datetime import datetime
from itertools import islice
from pathlib import Path

import pyarrow
import xxhash
from datasets import Dataset
from torch import distributed as dist
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...recipe import own_code
from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.layout import data_parallel_size
from ...recipe.methods import Distill, Embed, Kto
from ...recipe.recipe import Recipe
from ...recipe.run_folder import COMPLETE, read_json
from .. import distributed
from ..data.load import Datasets
from ..data.tokenize import Stream
from ..model import load, stored
from ..model_folder import expected

FIRST = 64
"""Number of a stream's sequences that are compared; its end is unknown."""
MEANT = {
    "recipe": "another recipe",
    "model": "another config.json of its model",
    "teacher": "another config.json of its teacher",
    "base": "other weights of its base, its reference or its teacher",
    "tokenizer": "another tokenizer or chat template",
    "together": "another micro_batch_size x data-parallel ranks, whose examples are compared with each other",
    "data": "other data",
    "held_out": "other held-out examples",
    "transform": "another data.transform",
    "order": "another order of the data",
}
"""The meaning of a difference, by the fingerprint's key."""
ACCEPTABLE = ("tokenizer", "together", "data", "held_out", "transform", "order")
"""Differences that `data.changed=true` accepts."""
IDLE = (
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "initializer_range", "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict"),
)
"""Keys of a config.json that change nothing that a resumed run computes: the recipe decides, or the weights exist."""


def began(checkpoint: Path | None) -> str:
    """Return when the run that wrote a checkpoint began, or now if there is none, in ISO 8601; a collective."""

    def first() -> str:
        saved = read_json(checkpoint / COMPLETE).get("fingerprint", {}) if checkpoint else {}
        return saved.get("began", datetime.now().astimezone().isoformat(timespec="seconds"))

    return distributed.of_first(first)


def of_run(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, datasets: Datasets, began: str) -> Json:
    """Return the fingerprint of a run, computed by rank 0; a collective."""

    def first() -> Json:
        # The models that a run reads again when it resumes: a checkpoint of adapters has no weights of their base.
        again = recipe.lora is not None or recipe.method.asks_reference
        teacher = recipe.method.teacher if isinstance(recipe.method, Distill) and not recipe.method.served else None
        folders = [stored.folder_of(path) for path in (recipe.model.path if again else None, teacher) if path]
        here, judged = [folder for folder in folders if folder], datasets.judged
        ranks = data_parallel_size(recipe.layout, dist.get_world_size())
        return {
            "recipe": recipe.name,
            "model": computing(load.load_config(recipe)),
            **({"teacher": computing(load.config_of(teacher, recipe.model.trust_remote_code))} if teacher else {}),
            "base": expected.of_weights(here) if here and here == folders else None,
            "tokenizer": of_tokenizer(tokenizer),
            "together": recipe.micro_batch_size * ranks if isinstance(recipe.method, (Embed, Kto)) else None,
            "data": of_data(datasets.training),
            "held_out": None if judged is None else of_data(judged),
            "transform": own_code.digests(recipe).get("data.transform"),
            # A step's place in the data is its number times the global batch size.
            "order": {"seed": recipe.seed, "global_batch_size": recipe.global_batch_size},
            "began": began,
        }

    return distributed.of_first(first)


def check(fingerprint: Json, checkpoint: Path | None, changed: bool) -> None:
    """Refuse to resume from a checkpoint of something else; `changed` data are allowed by the user.

    `checkpoint` is None for a new run. One without a fingerprint, written by an older version, is accepted.
    """
    saved = read_json(checkpoint / COMPLETE).get("fingerprint", {}) if checkpoint else {}
    for name, meaning in MEANT.items():
        now = fingerprint.get(name)
        then = saved.get(name, now)
        if isinstance(now, dict) and isinstance(then, dict):
            then, now = _apart(then, now)
        if then == now or (changed and name in ACCEPTABLE) or (name in ("base", "held_out") and None in (then, now)):
            continue
        pairs = "" if isinstance(now, str) and name != "recipe" else f" ({_shown(then)}, now {_shown(now)})"
        fix = "data.changed=true accepts it" if name in ACCEPTABLE else "remove that checkpoint, or start a new run"
        if back := {"base": "weights", "model": "config.json", "teacher": "config.json"}.get(name):
            fix = f"put back the {back} with which it began, or start a new run"
        raise UserError(f"{checkpoint} was trained with {meaning}{pairs}: resuming would not continue it; {fix}.")


def _apart(then: Json, now: Json) -> tuple[Json, Json]:
    """Return the items of two objects that differ.

    Another version of transformers has other keys, and older checkpoints hold a model's dimensions alone: only the keys
    of both are then compared.
    """
    version = "transformers_version"
    same = then.get(version) == now.get(version)
    keys = [
        key
        for key in (*then, *(now.keys() - then.keys()))
        if key != version and then.get(key) != now.get(key) and (same or (key in then and key in now))
    ]
    return {key: then.get(key) for key in keys}, {key: now.get(key) for key in keys}


def computing(config: PreTrainedConfig) -> Json:
    """Return the values of a model's configuration that change what it computes, and the version that read them."""

    def used(values: Json) -> Json:
        kept = {key: value for key, value in values.items() if key not in IDLE}
        return {key: used(value) if isinstance(value, dict) else value for key, value in kept.items()}

    return used(json.loads(config.to_json_string(use_diff=False)))


def of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of a tokenizer's vocabulary, special tokens and chat template."""
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    text = json.dumps([sorted(tokenizer.get_vocab().items()), special, str(tokenizer.chat_template)], sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


def of_data(training: Dataset | Stream) -> str:
    """Return a digest of all training data in its order; 1 GB of tokens takes a second."""
    if isinstance(training, Stream):
        first = list(islice(training.sequences, FIRST))
        return xxhash.xxh3_128_hexdigest(json.dumps(first, sort_keys=True, default=str).encode())
    digest = xxhash.xxh3_128()
    for table in training.with_format("arrow").iter(batch_size=1000):
        for name in sorted(table.column_names):
            digest.update(name.encode())
            column = table[name].combine_chunks()  # its content counts, whatever its layout in Arrow
            if pyarrow.types.is_list(column.type) and pyarrow.types.is_primitive(column.type.value_type):
                for part in (column.flatten(), column.value_lengths()):
                    digest.update(part.to_numpy(zero_copy_only=False).tobytes())
            else:
                text = json.dumps(column.to_pylist(), sort_keys=True, default=str)
                digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _shown(value: object) -> str:
    return " ".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else str(value)
