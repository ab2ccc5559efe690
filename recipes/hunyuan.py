"""hunyuan: Tencent's dense Hunyuan models, 1.8B to 7B, which reason first or answer directly.

    python scripts/launch.py hunyuan-7b lora
    python scripts/launch.py hunyuan-4b qlora data.path=FILE.jsonl lora.rank=64 epochs=2  # your data

All weights: 1e-5 as NVIDIA-NeMo/Automodel takes for Tencent's Hy-MT2 (llm_finetune/hy_mt2/hy_mt2_30b_a3b_sft.yaml).
Adapters: rank 32, alpha 16 and 2e-4 from axolotl (hunyuan/hunyuan-v1-dense-qlora.yaml), DoRA at half the rank
(arXiv:2402.09353); DPO 5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
Its answers are `<think>...</think><answer>...</answer>`, with an empty think block where the prompt starts with
`/no_think`: write your examples' answers like that. The licence excludes the EU, the UK and South Korea.
`pretrain` usually starts from base weights: model.path=tencent/Hunyuan-7B-Pretrain.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

SHARED = {
    "model_type": "hunyuan_v1_dense", "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-05,
    "attention_bias": False, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
}  # fmt: skip

LICENCE = "Tencent-Hunyuan"
SIZES = {
    "1.8b": Model(path="tencent/Hunyuan-1.8B-Instruct", parameters=1_791_080_448, config={
        **SHARED, "vocab_size": 120818, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4,
    }),
    "4b": Model(path="tencent/Hunyuan-4B-Instruct", parameters=4_221_757_440, config={
        **SHARED, "vocab_size": 120818, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    }),
    "7b": Model(path="tencent/Hunyuan-7B-Instruct", parameters=7_504_568_320, config={
        **SHARED, "vocab_size": 128167, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    }),
}  # fmt: skip

WHOLE = ("1.8b", "4b")
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
    """All weights on sequences of 32,768 tokens: for long documents and long reasoning."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=16)


if __name__ == "__main__":
    launch(__file__)
