"""Creates the models and conversations for a proof; the models make wrong gradients visible."""

import json
from pathlib import Path

from ..recipe.files import Json
from ..recipe.samples import TINY_MODEL

STEEP = 0.2
"""Spread of the initial weights: at the usual 0.02 the output is nearly uniform, and wrong gradients hardly show."""


def conversations(path: Path) -> Path:
    """Write eight conversations whose answers differ in length, so that a wrong weighting is detected."""
    rows = [conversation(f"Count to {n}, please.", " ".join(str(i) for i in range(n))) for n in range(1, 24, 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def conversation(question: str, answer: str) -> Json:
    """Return one conversation in the messages form."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def random_qwen3(folder: Path, seed: int = 0, padding: int = 0, **changes: object) -> Path:
    """Write a random Qwen3 with the tokenizer of `tiny`, and return its folder."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    return _write(folder, "qwen3", seed, padding, **sizes | {"tie_word_embeddings": True} | changes)


def random_mixture(folder: Path) -> Path:
    """Write a random MoE model with eight experts and the tokenizer of `tiny`, and return its folder."""
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "decoder_sparse_step": 1}
    return _write(folder, "qwen3_moe", 0, 0, **experts | sizes)


def random_model(folder: Path, config: object, seed: int = 0) -> Path:
    """Write a random language model of a configuration with the tokenizer of `tiny`, and return its folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(folder)
    return folder


def _write(folder: Path, kind: str, seed: int, padding: int, **sizes: object) -> Path:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": STEEP}
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer) + padding, **heads | special | sizes)
    return random_model(folder, config, seed)
