"""seed_oss: ByteDance's Seed-OSS, one dense decoder for long contexts whose reasoning has a budget.

    python scripts/launch.py seed_oss-36b lora
    python scripts/launch.py seed_oss-36b qlora data.path=FILE.jsonl lora.rank=64 epochs=2  # your data

All weights: 1e-5 at batch 128 from NVIDIA-NeMo/Automodel (llm_finetune/seed/seed_oss_36B_hellaswag.yaml). Adapters:
rank 32 and alpha 16 from axolotl (seed-oss/seed-oss-36b-qlora.yaml), which takes 2e-4; here 1e-4, as QLoRA does at this
size (arXiv:2305.14314), DoRA at half the rank (arXiv:2402.09353); DPO 5e-6 from alignment-handbook
(zephyr-7b-beta/dpo/config_qlora.yaml).
Unlike those of most decoders, its configuration trains with dropout of 0.1 in attention and after each block.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

LICENCE = "Apache-2.0"
SIZES = {
    "36b": Model(path="ByteDance-Seed/Seed-OSS-36B-Instruct", parameters=36_151_104_512, config={
        "model_type": "seed_oss", "vocab_size": 155136, "max_position_embeddings": 524288, "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0}, "attention_bias": True,
        "attention_out_bias": False, "attention_dropout": 0.1, "residual_dropout": 0.1, "tie_word_embeddings": False,
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
        "num_key_value_heads": 8, "head_dim": 128,
    }),
}  # fmt: skip


def full(size: str) -> Recipe:
    """All weights: for plenty of data, or a task unlike those that the model was trained on."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3.json",
        learning_rate=1e-5,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=128,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(
        full(size),
        deepspeed="zero3_adapters.json",
        lora=Lora(rank=32, alpha=16),
        learning_rate=1e-4,
        global_batch_size=32,
    )


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens: for long documents and long reasoning."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=16)


if __name__ == "__main__":
    launch(__file__)
