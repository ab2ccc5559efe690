"""lfm2: Liquid AI's LFM2, small hybrids for devices: most layers are short convolutions, the others attention.

    python scripts/launch.py lfm2-1.2b lora
    python scripts/launch.py lfm2-1.2b lora model.path=LiquidAI/LFM2.5-1.2B-Instruct data.path=FILE.jsonl epochs=2

All weights: 5e-5, batch and warm-up from axolotl (LiquidAI/lfm2-350m-fft.yaml). Adapters: rank 32 and alpha 16 from
axolotl (LiquidAI/lfm2-8b-a1b-lora.yaml), 2e-4 as QLoRA at this size (arXiv:2305.14314), DoRA at half the rank
(arXiv:2402.09353); DPO 5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
No variant packs documents: convolutions read the two preceding tokens, even those of the previous document.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

SMALL = [("full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv") for layer in range(16)]
LARGE = [("full_attention" if layer in (2, 5, 9, 13, 17, 21, 24, 27) else "conv") for layer in range(30)]
"""The kinds of the layers of 350m to 1.2b, and of 2.6b."""

SHARED = {
    "model_type": "lfm2", "vocab_size": 65536, "num_key_value_heads": 8, "max_position_embeddings": 128000,
    "norm_eps": 1e-05, "conv_L_cache": 3, "conv_bias": False, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}  # fmt: skip

LICENCE = "LFM1.0"
SIZES = {
    "350m": Model(path="LiquidAI/LFM2-350M", parameters=354_483_968, config={
        **SHARED, "hidden_size": 1024, "intermediate_size": 6656, "num_hidden_layers": 16, "num_attention_heads": 16,
        "layer_types": SMALL,
    }),
    "700m": Model(path="LiquidAI/LFM2-700M", parameters=742_489_344, config={
        **SHARED, "hidden_size": 1536, "intermediate_size": 10240, "num_hidden_layers": 16, "num_attention_heads": 24,
        "layer_types": SMALL,
    }),
    "1.2b": Model(path="LiquidAI/LFM2-1.2B", parameters=1_170_340_608, config={
        **SHARED, "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16, "num_attention_heads": 32,
        "layer_types": SMALL,
    }),
    "2.6b": Model(path="LiquidAI/LFM2-2.6B", parameters=2_569_272_320, config={
        **SHARED, "hidden_size": 2048, "intermediate_size": 10752, "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 30, "num_attention_heads": 32, "layer_types": LARGE,
    }),
}  # fmt: skip

WITHOUT = variants.NO_HEADS


def full(size: str) -> Recipe:
    """All weights: for plenty of data, or a task unlike those that the model was trained on."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json",
        learning_rate=5e-5,
        schedule=Schedule("cosine", warmup=0.1),
        global_batch_size=32,
        sequence_length=4096,
        # Convolutions read the preceding tokens, even those of another document.
        packing=False,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(full(size), deepspeed="zero2.json", lora=Lora(rank=32, alpha=16), learning_rate=2e-4)


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens: for long documents and conversations with tools."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=16)


if __name__ == "__main__":
    launch(__file__)
