"""qwen2_5_vl: Qwen2.5-VL, Alibaba's Qwen2.5 with a vision tower, instruction-tuned, for images and text.

    python scripts/launch.py qwen2_5_vl-7b lora
    python scripts/launch.py qwen2_5_vl-7b lora data.path=FILE data.max_pixels=1000000 sequence_length=4096   # change

Special: an image keeps its proportions and takes a token per 28 x 28 pixels, so data.max_pixels determines the cost of
an image: at most 576 tokens here, 1,275 with the default of other pages. Small print and dense documents need more,
and a larger sequence_length. The tower and its projection are frozen unless model.train_vision=true. Training uses
images only; an export still reads videos. As in Qwen2.5, the chat template adds a default system prompt to
conversations without one.
Rates: 1e-5 for all weights and 1e-4 for adapters from LLaMA-Factory (train_full/qwen2_5vl_full_sft.yaml and
train_lora/qwen2_5vl_lora_sft.yaml, for 7b). Qwen's own script (QwenLM/Qwen3-VL, qwen-vl-finetune), from which
data.max_pixels, decay and warmup are taken, advises 2e-7 to 1e-6 for all weights: use that for much data of a kind that
the model was trained on.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import SIGHT, Lora, Model, Recipe, Schedule

TOWER = {
    "model_type": "qwen2_5_vl_vision", "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu",
}  # fmt: skip
LANGUAGE = {
    "model_type": "qwen2_5_vl_text", "vocab_size": 152_064, "max_position_embeddings": 128_000, "rms_norm_eps": 1e-6,
    # Numbers of a head's rotary pairs for time, height and width.
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": False,
}  # fmt: skip
SHARED = {"model_type": "qwen2_5_vl", "tie_word_embeddings": False}
"""Settings of all sizes, unless a size overrides them."""

PIXELS_PER_TOKEN = 28 * 28

LICENCE = {"3b": "Qwen-Research", "7b": "Apache-2.0", "32b": "Apache-2.0", "72b": "Qwen"}
SIZES = {
    "3b": Model(path="Qwen/Qwen2.5-VL-3B-Instruct", parameters=3_754_622_976, vision=True, config=SHARED | {
        "tie_word_embeddings": True, "vision_config": TOWER | {"out_hidden_size": 2048},
        "text_config": LANGUAGE | {
            "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
    }),
    "7b": Model(path="Qwen/Qwen2.5-VL-7B-Instruct", parameters=8_292_166_656, vision=True, config=SHARED | {
        "vision_config": TOWER | {"out_hidden_size": 3584},
        "text_config": LANGUAGE | {
            "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    }),
    "32b": Model(path="Qwen/Qwen2.5-VL-32B-Instruct", parameters=33_452_718_336, vision=True, config=SHARED | {
        "vision_config": TOWER | {"intermediate_size": 3456, "out_hidden_size": 5120},
        "text_config": LANGUAGE | {
            "hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8,
        },
    }),
    "72b": Model(path="Qwen/Qwen2.5-VL-72B-Instruct", parameters=73_410_777_344, vision=True, config=SHARED | {
        "vision_config": TOWER | {"intermediate_size": 3456, "out_hidden_size": 8192},
        "text_config": LANGUAGE | {
            "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    }),
}  # fmt: skip


def full(size: str) -> Recipe:
    """All weights of the language part, ZeRO-3: the most that can be learned, given enough GPUs."""
    return Recipe(
        model=SIZES[size],
        data=replace(SIGHT, max_pixels=576 * PIXELS_PER_TOKEN),
        deepspeed="zero3.json",
        learning_rate=1e-5,
        weight_decay=0.01,
        global_batch_size=64,
        sequence_length=2048,
        packing=False,  # sequences with images are not packed
        schedule=Schedule("cosine", warmup=0.03),
    )


def lora(size: str) -> Recipe:
    """Adapters on the language part: the usual start; from 32b on the ranks share the frozen weights (ZeRO-3)."""
    return replace(
        full(size),
        deepspeed="zero3_adapters.json" if size in ("32b", "72b") else "zero2.json",
        lora=Lora(rank=16, alpha=32),
        learning_rate=1e-4,
        weight_decay=0.0,
    )


if __name__ == "__main__":
    launch(__file__)
