"""minimax_m2: MiniMax-M2.5, an MoE model of 256 experts with 10B of 229B active, for code and agents.

    python scripts/launch.py minimax_m2-229b lora
    python scripts/launch.py minimax_m2-229b lora data.path=FILE.jsonl epochs=2

All weights: 1e-5 from NVIDIA-NeMo/Automodel (llm_finetune/minimax_m2/minimax_m2.5_hellaswag_pp.yaml). Adapters: rank 16
and alpha 32 from axolotl (minimax/m2-qlora.yaml), which takes 2e-4; here 1e-4, as QLoRA does at this size
(arXiv:2305.14314); DPO 5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
The weights are published in FP8 and dequantised on loading. The layers that predict further tokens are neither trained
nor counted, and unchanged in the export.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

LICENCE = "Modified-MIT"
SIZES = {
    "229b": Model(path="MiniMaxAI/MiniMax-M2.5", parameters=228_689_748_992, config={
        "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
        "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
        "num_local_experts": 256, "num_experts_per_tok": 8, "max_position_embeddings": 196608, "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
    }),
}  # fmt: skip

WITHOUT = variants.NO_HEADS


def full(size: str) -> Recipe:
    """All weights, routers included: for plenty of data; the model states are 3.7 TB."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3_moe.json",
        learning_rate=1e-5,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=64,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on attention and on every expert: try this first; a small file to ship."""
    return replace(
        full(size),
        lora=Lora(rank=16, alpha=32, target_modules=variants.ATTENTION, target_parameters=variants.EXPERTS),
        learning_rate=1e-4,
        global_batch_size=32,
    )


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens: for long documents, tools and long reasoning."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=64)


if __name__ == "__main__":
    launch(__file__)
