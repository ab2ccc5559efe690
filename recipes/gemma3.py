"""gemma3: the language models of Google's Gemma 3, instruction-tuned, for text.

    python scripts/launch.py gemma3-4b lora
    python scripts/launch.py gemma3-4b lora data.path=FILE learning_rate=1e-4 lora.rank=32     # change anything

Rates: full 5e-5 at 1b (axolotl, examples/gemma3/gemma-3-1b-fft-dft.yml), else 2e-5 (torchtune,
recipes/configs/gemma3/4B_full.yaml), half of it at 27b; adapters 2e-4 up to 12b, 1e-4 above (QLoRA, arXiv:2305.14314);
DPO 5e-6 (alignment-handbook, recipes/zephyr-7b-beta/dpo/config_qlora.yaml); cosine as in axolotl and the handbook.
Special: 4b, 12b and 27b are published with a vision tower and load with it (0.42B more than stated here, no gradient
from text); the vocabulary of 262,208 makes the logits, not the layers, the largest activation.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

LONG_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

LICENCE = "Gemma"
SIZES = {
    "1b": Model(path="google/gemma-3-1b-it", parameters=999_885_952, config={
        "model_type": "gemma3_text", "vocab_size": 262_144, "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32_768,
        "sliding_window": 512,
        "sliding_window_pattern": 6,  # every sixth layer attends to everything
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    }),
    "4b": Model(path="google/gemma-3-4b-it", parameters=3_880_263_168, config={
        "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 2560, "intermediate_size": 10_240,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
        "sliding_window": 1024, "sliding_window_pattern": 6, "rope_parameters": LONG_ROPE, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }),
    "12b": Model(path="google/gemma-3-12b-it", parameters=11_766_034_176, config={
        "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 3840, "intermediate_size": 15_360,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
        "sliding_window": 1024, "sliding_window_pattern": 6, "rope_parameters": LONG_ROPE, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }),
    "27b": Model(path="google/gemma-3-27b-it", parameters=27_009_346_304, config={
        "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 5376, "intermediate_size": 21_504,
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
        "query_pre_attn_scalar": 168, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
        "sliding_window": 1024, "sliding_window_pattern": 6, "rope_parameters": LONG_ROPE, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }),
}  # fmt: skip

SMALL = ("1b", "4b")
RATE = {"1b": 5e-5, "4b": 2e-5, "12b": 2e-5, "27b": 1e-5}


def full(size: str) -> Recipe:
    """All weights, ZeRO-2 up to 4b, ZeRO-3 above: the most that can be learned, given enough GPUs."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json" if size in SMALL else "zero3.json",
        learning_rate=RATE[size],
        weight_decay=0.0,  # it would also shrink the vision tower, to which text gives no gradient
        global_batch_size=64,
        sequence_length=2048 if size == "27b" else 4096,  # 27b: states take 54 GB on each of 8 GPUs
        schedule=Schedule("cosine", warmup=0.03),
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer, ZeRO-2: the usual start; the bf16 weights have to fit on each GPU."""
    return replace(
        full(size),
        deepspeed="zero2.json",
        lora=Lora(rank=16, alpha=32),
        learning_rate=1e-4 if size == "27b" else 2e-4,
    )


def long_context(size: str) -> Recipe:
    """All weights on sequences of 16,384 tokens: for documents longer than `full` takes.

    Whole logits, in bf16 and twice in fp32, would be 2.6 MB per token, 43 GB per sequence; hence the loss in tiles.
    """
    return variants.long_context(full(size), sequence_length=16_384, global_batch_size=16)


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT, with model.path=RUN_FOLDER/export."""
    return variants.dpo(lora(size), learning_rate=5e-6)


if __name__ == "__main__":
    launch(__file__)
