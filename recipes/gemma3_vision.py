"""gemma3_vision: Google's Gemma 3 with its vision tower, instruction-tuned, for images and text.

    python scripts/launch.py gemma3_vision-4b lora
    python scripts/launch.py gemma3_vision-4b lora data.path=FILE learning_rate=1e-4 model.train_vision=true   # change

Rates: those of gemma3.py. Special: the tower is SigLIP So400m (dimensions: transformers,
models/gemma3/convert_gemma3_weights.py), frozen unless model.train_vision=true. It turns every image into 256 tokens,
whatever its size, so data.max_pixels only limits the size of images that are read.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import SIGHT, Lora, Model, Recipe, Schedule

TOWER = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "image_size": 896, "patch_size": 14, "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6, "vision_use_head": False,
}  # fmt: skip
LANGUAGE = {
    "model_type": "gemma3_text", "vocab_size": 262_208, "head_dim": 256, "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072, "sliding_window": 1024,
    "sliding_window_pattern": 6,  # every sixth layer attends to everything
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
"""Settings of all sizes, unless a size overrides them."""


SHARED = {"model_type": "gemma3", "mm_tokens_per_image": 256, "tie_word_embeddings": True, "vision_config": TOWER}


LICENCE = "Gemma"
SIZES = {
    "4b": Model(path="google/gemma-3-4b-it", parameters=4_300_079_472, vision=True, config=SHARED | {
        "text_config": LANGUAGE | {
            "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    }),
    "12b": Model(path="google/gemma-3-12b-it", parameters=12_187_325_040, vision=True, config=SHARED | {
        "text_config": LANGUAGE | {
            "hidden_size": 3840, "intermediate_size": 15_360, "num_hidden_layers": 48, "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
    }),
    "27b": Model(path="google/gemma-3-27b-it", parameters=27_432_406_640, vision=True, config=SHARED | {
        "text_config": LANGUAGE | {
            "hidden_size": 5376, "intermediate_size": 21_504, "num_hidden_layers": 62, "num_attention_heads": 32,
            "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
        },
    }),
}  # fmt: skip


def full(size: str) -> Recipe:
    """All weights of the language part, ZeRO-3: the most that can be learned, given enough GPUs."""
    return Recipe(
        model=SIZES[size],
        data=SIGHT,
        deepspeed="zero3.json",
        learning_rate=1e-5 if size == "27b" else 2e-5,
        weight_decay=0.0,
        global_batch_size=64,
        sequence_length=2048,
        packing=False,  # sequences with images are not packed
        schedule=Schedule("cosine", warmup=0.03),
    )


def lora(size: str) -> Recipe:
    """Adapters on the language part, ZeRO-2: the usual start; the bf16 weights have to fit on each GPU."""
    return replace(
        full(size),
        deepspeed="zero2.json",
        lora=Lora(rank=16, alpha=32),
        learning_rate=1e-4 if size == "27b" else 2e-4,
    )


if __name__ == "__main__":
    launch(__file__)
