"""Synthetic models and data: random weights with a page's real dimensions, and documents of random tokens."""

from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from trl import pack_dataset

from ..recipe.recipe import Draft, Recipe
from ..training.model import attention
from ..training.model import lora as adapters
from ..training.model.draft import TINY_MODEL, shrink
from ..training.model.load import DTYPES

MEAN, SPREAD = 900, 0.7
"""Median in tokens and standard deviation of the logarithm of the documents' lengths: log-normal, as in chat data."""


def tokenizer() -> Any:
    """Return a tokenizer that only provides the padding token; its vocabulary is not the model's."""
    return AutoTokenizer.from_pretrained(TINY_MODEL)


def config_of(recipe: Recipe, draft: bool | Draft) -> PreTrainedConfig:
    """Return the page's dimensions, or a draft's, by default the smallest."""
    config = AutoConfig.for_model(**recipe.model.config)
    if draft:
        config = shrink(config, draft if isinstance(draft, Draft) else Draft(), tokenizer())
    config.use_cache = False
    return config


def random_model(recipe: Recipe, draft: bool, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return the model with random weights, on the device where it will train, in 4 bits if the recipe sets that."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(recipe.seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config_of(recipe, draft),
            dtype=dtype or DTYPES[recipe.precision],
            attn_implementation=attention.loadable(recipe.model.attention),
        )
    return quantized(model) if recipe.model.quantization == "nf4" else model


def quantized(model: PreTrainedModel) -> PreTrainedModel:
    """Quantise every linear layer but the head to 4 bits, as loading with `adapters.nf4` does."""
    import bitsandbytes as bnb

    settings = adapters.nf4(model.dtype)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            packed = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=layer.bias is not None, compute_dtype=model.dtype,
                compress_statistics=settings.bnb_4bit_use_double_quant, quant_type=settings.bnb_4bit_quant_type,
                quant_storage=model.dtype, device="meta",
            )  # fmt: skip
            packed.weight = bnb.nn.Params4bit(
                layer.weight.data, requires_grad=False, quant_type=settings.bnb_4bit_quant_type,
                compress_statistics=True, quant_storage=model.dtype, module=packed,
            )  # fmt: skip
            packed.bias = layer.bias
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, packed.to(layer.weight.device))
    model.is_loaded_in_4bit = True
    return model


def documents(recipe: Recipe, vocabulary: int, count: int) -> Dataset:
    """Return `count` documents, `input_ids` and `labels`, with lengths like those of chat data."""
    random = np.random.default_rng(0)
    median = min(MEAN, recipe.sequence_length / 4)
    lengths = np.exp(random.normal(np.log(median), SPREAD, count)).clip(8, recipe.sequence_length).astype(int)
    tokens = [random.integers(5, vocabulary, length).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": tokens, "labels": [[-100, *document[1:]] for document in tokens]})


def sequences_of(recipe: Recipe, vocabulary: int, count: int) -> Dataset:
    """Return at least `count` sequences in the form that training reads: packed, or one document each."""
    if not recipe.packing:
        alone = documents(recipe, vocabulary, count)
        return alone.add_column("seq_lengths", [[len(tokens)] for tokens in alone["input_ids"]])
    made = documents(recipe, vocabulary, 8 * count)
    packed = pack_dataset(made, recipe.sequence_length, "bfd")
    return packed.shuffle(seed=0)


def mean_lengths(sequences: Dataset) -> tuple[float, float]:
    """Return two means over the sequences: of tokens, and of the sum of the documents' squared lengths."""
    lengths = sequences["seq_lengths"]
    return (
        float(np.mean([sum(documents) for documents in lengths])),
        float(np.mean([sum(length**2 for length in documents) for documents in lengths])),
    )
