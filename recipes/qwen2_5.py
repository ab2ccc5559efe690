"""qwen2_5: Qwen2.5, Alibaba's dense decoders of September 2024, in seven sizes.

    python scripts/launch.py qwen2_5-7b lora
    python scripts/launch.py qwen2_5-72b qlora data.path=FILE.jsonl lora.rank=64 epochs=2  # your data

All weights: 1e-5 from NVIDIA-NeMo/Automodel (llm_finetune/qwen/qwen2_5_7b_squad.yaml), 2e-5 for the two smallest from
torchtune (qwen2_5/0.5B_full.yaml, 1.5B_full.yaml), decay of Qwen's own SFT (arXiv:2412.15115). Adapters: rank 32, alpha
64 and 2e-4 from axolotl (qwen2/qlora-fsdp.yaml), 1e-4 from 32b on as in QLoRA (arXiv:2305.14314), DoRA at half the rank
(arXiv:2402.09353); DPO 5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
Its chat template adds a default system prompt to conversations without one: give each a system turn.
Coder and Math are the same architecture: model.path=Qwen/Qwen2.5-Coder-7B-Instruct. Up to 3b the output layer and the
embedding are one weight.
`pretrain` usually starts from base weights: model.path=Qwen/Qwen2.5-7B (there is one for each size).
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

SHARED = {
    "model_type": "qwen2", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}  # fmt: skip

LICENCE = {
    "0.5b": "Apache-2.0",
    "1.5b": "Apache-2.0",
    "3b": "Qwen-Research",
    "7b": "Apache-2.0",
    "14b": "Apache-2.0",
    "32b": "Apache-2.0",
    "72b": "Qwen",
}
SIZES = {
    "0.5b": Model(path="Qwen/Qwen2.5-0.5B-Instruct", parameters=494_032_768, config={
        **SHARED, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "1.5b": Model(path="Qwen/Qwen2.5-1.5B-Instruct", parameters=1_543_714_304, config={
        **SHARED, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "3b": Model(path="Qwen/Qwen2.5-3B-Instruct", parameters=3_085_938_688, config={
        **SHARED, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "7b": Model(path="Qwen/Qwen2.5-7B-Instruct", parameters=7_615_616_512, config={
        **SHARED, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    }),
    "14b": Model(path="Qwen/Qwen2.5-14B-Instruct", parameters=14_770_033_664, config={
        **SHARED, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False,
    }),
    "32b": Model(path="Qwen/Qwen2.5-32B-Instruct", parameters=32_763_876_352, config={
        **SHARED, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False,
    }),
    "72b": Model(path="Qwen/Qwen2.5-72B-Instruct", parameters=72_706_203_648, config={
        **SHARED, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False,
    }),
}  # fmt: skip

WHOLE = ("0.5b", "1.5b", "3b")
"""Sizes whose parameters stay whole on every GPU (ZeRO-2) when all of them are trained."""


def full(size: str) -> Recipe:
    """All weights: for plenty of data, or a task unlike those that the model was trained on."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json" if size in WHOLE else "zero3.json",
        learning_rate=2e-5 if size in ("0.5b", "1.5b") else 1e-5,
        weight_decay=0.1,
        schedule=Schedule("cosine", warmup=0.05),
        global_batch_size=64,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(
        full(size),
        deepspeed="zero3_adapters.json" if size in ("32b", "72b") else "zero2.json",
        lora=Lora(rank=32, alpha=64),
        learning_rate=1e-4 if size in ("32b", "72b") else 2e-4,
        weight_decay=0.0,
        global_batch_size=32,
    )


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens, the most without YaRN: for long documents and conversations."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=32 if size == "72b" else 8)


if __name__ == "__main__":
    launch(__file__)
