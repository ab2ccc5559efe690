"""qwen3_5: the language models of Qwen3.5, dense, three layers of linear attention for one of full attention.

    python scripts/launch.py qwen3_5-9b lora
    python scripts/launch.py qwen3_5-9b lora data.path=FILE.jsonl data.validation=HELD_OUT.jsonl epochs=3  # your data
    python scripts/launch.py qwen3_5-27b lora model.path=Qwen/Qwen3.8-27B  # and Qwen3.6-27B: the same dimensions

All weights: 1e-5, decay and beta2 from NVIDIA-NeMo/Automodel (qwen3_5_4b.yaml, qwen3_5_9b.yaml, qwen3_8_27b.yaml),
2e-5 for the two smallest from TRL's sft.py, raw text at the same rate as in ms-swift (train/pretrain/train.sh).
Adapters: rank 16, alpha 32 and 2e-4 from axolotl (qwen3.5/27b-qlora.yaml), 1e-4 at 27b from Automodel
(qwen3_8_27b_lora.yaml), warm-up from ms-swift (Qwen3_8-Best-Practice.md), DoRA at half the rank (arXiv:2402.09353);
DPO 5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
The checkpoints include a vision tower and a layer that predicts a second token: neither is trained or counted,
and the export has both unchanged.
No variant packs documents. Install flash-linear-attention and causal-conv1d: without them training is slow.
`pretrain` usually starts from base weights: model.path=Qwen/Qwen3.5-9B-Base (there is one for each size up to 9b).
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

SHARED = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "rms_norm_eps": 1e-6, "attention_bias": False,
}  # fmt: skip

LICENCE = "Apache-2.0"
SIZES = {
    "0.8b": Model(path="Qwen/Qwen3.5-0.8B", parameters=752_393_024, config={
        **SHARED, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True,
    }),
    "2b": Model(path="Qwen/Qwen3.5-2B", parameters=1_881_825_088, config={
        **SHARED, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True,
    }),
    "4b": Model(path="Qwen/Qwen3.5-4B", parameters=4_205_751_296, config={
        **SHARED, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "linear_num_value_heads": 32, "tie_word_embeddings": True,
    }),
    "9b": Model(path="Qwen/Qwen3.5-9B", parameters=8_953_803_264, config={
        **SHARED, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "linear_num_value_heads": 32, "tie_word_embeddings": False,
    }),
    "27b": Model(path="Qwen/Qwen3.5-27B", parameters=26_895_998_464, config={
        **SHARED, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "num_key_value_heads": 4, "linear_num_value_heads": 48, "tie_word_embeddings": False,
    }),
}  # fmt: skip

WHOLE = ("0.8b", "2b", "4b")
"""Sizes whose parameters stay whole on every GPU (ZeRO-2) when all of them are trained."""


def full(size: str) -> Recipe:
    """All weights: for plenty of data, or a task unlike those that the model was trained on."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json" if size in WHOLE else "zero3.json",
        learning_rate=2e-5 if size in ("0.8b", "2b") else 1e-5,
        weight_decay=0.1,
        adam_beta2=0.95,
        schedule=Schedule("cosine", warmup=0.05),
        global_batch_size=64,
        sequence_length=4096,
        # Linear attention reads no position ids: its state would carry over from one packed document into the next.
        packing=False,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(
        full(size),
        deepspeed="zero2.json",
        lora=Lora(rank=16, alpha=32),
        learning_rate=1e-4 if size == "27b" else 2e-4,
        weight_decay=0.0,
        global_batch_size=32,
    )


def long_context(size: str) -> Recipe:
    """All weights on conversations of up to 32,768 tokens: for long documents and long reasoning."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=8)


if __name__ == "__main__":
    launch(__file__)
