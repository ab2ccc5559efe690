"""Checks that every tensor in a model's files becomes a weight of the loaded model."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ...recipe.errors import UserError
from ..model_folder import weights

RECOMPUTED = ("rotary_emb.inv_freq", "position_ids", "attention.bias", "attn.bias", "masked_bias")
"""Buffers in older files that follow from the configuration: frequencies, positions, causal masks."""

_ADAPTER = re.compile(r"\.lora_|\.base_layer\.|\.modules_to_save\.")
"""Names of the parts that PEFT adds to a layer."""

NOT_LOADED: dict[str, list[str]] = {}
"""Results of `check` by a model's path, for the run's summary."""
MTP: dict[str, list[str]] = {}
"""The parts among them that predict further tokens, with which servers draft (multi-token prediction)."""

_MTP = re.compile(r"mtp|nextn|\.eh_proj\.")
"""Names of their tensors: Qwen's, MiMo's and others', and the projection of DeepSeek's and GLM's, which are layers."""


def folder_of(path: str) -> Path | None:
    """Return the folder of a model's files on this machine, or None if it is not there or not downloaded."""
    folder = Path(path)
    if not folder.is_dir():
        try:
            cached = try_to_load_from_cache(path, "config.json")
        except HFValidationError:  # a folder that has been moved
            return None
        folder = Path(cached).parent if isinstance(cached, str) else folder
    return folder if any((folder / name).exists() for name in (weights.WHOLE, weights.INDEX)) else None


def check_tied(path: str, config: PreTrainedConfig) -> None:
    """Refuse a separate head where config.json ties it to the embedding: some programs would not read it.

    transformers reads it on one rank, with a warning, and writes the wrong configuration again; vLLM ignores it.
    """
    folder = folder_of(path)
    if folder is None or not getattr(config.get_text_config(), "tie_word_embeddings", False):
        return
    held = {name: file for file in weights.files(folder) for name in weights.header(file)}
    head = next((name for name in held if re.fullmatch(r"(.*\.)?(lm_head|embed_out)\.weight", name)), None)
    embedding = next(filter(weights.EMBEDDING.search, held), None)
    if head is None or embedding is None:
        return
    # Not at the top: datasets hashes everything that tokenizing refers to, including this module, and caches nothing
    # if it cannot.
    from safetensors import safe_open

    found = []
    for name in (head, embedding):
        with safe_open(held[name], "pt") as opened:
            found.append(opened.get_tensor(name))
    if not torch.equal(*found):
        raise UserError(
            f"model.path={path}: config.json has tie_word_embeddings=true, but the files hold a {head} that differs "
            f"from {embedding}; set it to false, or remove the tensor that is not the model's."
        )


def check(path: str, model: PreTrainedModel, key_mapping: dict[str, str] | None = None) -> list[str]:
    """Return the parts of a model's files that the loaded model lacks, such as `model.visual`, a vision tower.

    transformers reports such tensors only in part: not those that a class ignores by pattern, and none under ZeRO-3.
    `model` is whole, on any device, without adapters, and was loaded with `key_mapping`. A tensor of a loaded layer
    that has no place for it, or that is not a floating-point number where the model has one, is refused.
    """
    folder = folder_of(path)
    if folder is None:
        return []
    quantizer = getattr(model, "hf_quantizer", None)
    known: dict[str, torch.Tensor] = model.state_dict()
    modules = {name for name, _ in model.named_modules()}
    unneeded = model._keys_to_ignore_on_load_unexpected or ()  # listed by its class
    inside: list[str] = []
    parts: dict[str, bool] = {}
    held = weights.unquantized(weights.tensors(folder))
    places = loaded_as(held, model, key_mapping)
    for name, tensor in held.items():
        renamed = places[name]
        if renamed in known:
            whole = tensor.dtype in weights.FLOATS or (quantizer is not None and quantizer.pre_quantized)
            if known[renamed].is_floating_point() and not whole:
                raise UserError(
                    f"model.path={path}: {name} is {tensor.dtype}, and the model has floating-point numbers there; "
                    "name the unquantised model that it was made from."
                )
        elif not renamed.endswith(RECOMPUTED):
            steps = renamed.split(".")
            parents = [".".join(steps[:count]) for count in range(1, len(steps))]
            of_layers = any(one in modules and (one == parents[-1] or one[-1].isdigit()) for one in parents)
            if not parents or of_layers or _ADAPTER.search(renamed):
                # The tensor belongs to an existing module or numbered layer, or to an adapter that a merge has left.
                if not any(re.search(pattern, renamed) for pattern in unneeded):
                    inside.append(name)
            else:
                part = next(one for one in parents if one not in modules)
                parts[part] = parts.get(part, False) or bool(_MTP.search(name))
    if inside:
        raise UserError(
            f"model.path={path}: its files hold {inside[0]}{weights.more(inside)}, for which {type(model).__name__} "
            "has no place in its layers; correct its config.json, or name the model that belongs to it."
        )
    NOT_LOADED[path], MTP[path] = list(parts), [part for part, drafts in parts.items() if drafts]
    return list(parts)


def loaded_as(
    names: Iterable[str], model: PreTrainedModel, key_mapping: dict[str, str] | None = None
) -> dict[str, str]:
    """Return the name of the model's weight that each tensor of its files becomes, or a name that the model lacks."""
    mapping = get_model_conversion_mapping(model, key_mapping, getattr(model, "hf_quantizer", None))
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    known: dict[str, torch.Tensor] = model.state_dict()
    found = {}
    for name in names:
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if renamed not in known:
            bare, _ = rename_source_key(name, [], [], model.base_model_prefix, known)
            renamed = bare if bare in known else renamed
        found[name] = renamed
    return found
