"""ministral3: the language models of Mistral's Ministral 3, dense, for text: 3B, 8B and 14B of December 2025.

    python scripts/launch.py ministral3-8b lora
    python scripts/launch.py ministral3-14b qlora data.path=FILE.jsonl lora.rank=64 epochs=2  # your data

All weights: 1e-5 at batch 64 from NVIDIA-NeMo/Automodel (llm_finetune/mistral/ministral3_3b_squad.yaml). Adapters: rank
32, alpha 16 and 2e-4 from axolotl (ministral3/ministral3-3b-qlora.yaml), DoRA at half the rank (arXiv:2402.09353); DPO
5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
The checkpoints include a vision tower of 0.4B parameters: not trained or counted, unchanged in the export. Instruct is
published in FP8, which would be dequantised on loading; this is Mistral's bf16 copy. Beyond 16,384 positions queries
are scaled.
`pretrain` usually starts from base weights: model.path=mistralai/Ministral-3-8B-Base-2512.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

YARN = {
    "rope_type": "yarn", "type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
    "original_max_position_embeddings": 16384, "max_position_embeddings": 262144, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

SHARED = {
    "model_type": "ministral3", "vocab_size": 131072, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-05, "rope_parameters": YARN,
}  # fmt: skip

LICENCE = "Apache-2.0"
SIZES = {
    "3b": Model(path="mistralai/Ministral-3-3B-Instruct-2512-BF16", parameters=3_429_006_336, config={
        **SHARED, "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26, "tie_word_embeddings": True,
    }),
    "8b": Model(path="mistralai/Ministral-3-8B-Instruct-2512-BF16", parameters=8_489_553_920, config={
        **SHARED, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
        "tie_word_embeddings": False,
    }),
    "14b": Model(path="mistralai/Ministral-3-14B-Instruct-2512-BF16", parameters=13_506_073_600, config={
        **SHARED, "hidden_size": 5120, "intermediate_size": 16384, "num_hidden_layers": 40,
        "tie_word_embeddings": False, "rope_parameters": {**YARN, "rope_theta": 1000000000.0},
    }),
}  # fmt: skip

WHOLE = ("3b",)
"""Sizes whose parameters stay whole on every GPU (ZeRO-2) when all of them are trained."""


def full(size: str) -> Recipe:
    """All weights: for plenty of data, or a task unlike those that the model was trained on."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json" if size in WHOLE else "zero3.json",
        learning_rate=1e-5,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=64,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(
        full(size),
        deepspeed="zero2.json",
        lora=Lora(rank=32, alpha=16),
        learning_rate=2e-4,
        global_batch_size=32,
    )


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens: for long documents and conversations with tools."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=16)


if __name__ == "__main__":
    launch(__file__)
