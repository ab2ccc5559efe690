"""tiny_vision: the vision-language model that ships with the project; trains anywhere, offline, on CPU.

A LLaVA (a SigLIP tower and a Qwen3), pre-trained by `scripts/maintain/samples/sight/pretrain.py`; samples/README.md
describes its abilities. The task: answer a question about small images of dials, bar charts and receipts with a word or
a number, scored by exact match.

    python scripts/launch.py tiny_vision full
    python scripts/launch.py tiny_vision full data.path=FILE.jsonl model.train_vision=true     # change anything

Your own data are conversations with images in their turns; recipes/README.md describes the forms.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import SIGHT, Lora, Model, Recipe, Schedule
from deepspeed_recipes.recipe.samples import TINY_VISION

LICENCE = "Apache-2.0"
SIZES = {
    "500k": Model(path=TINY_VISION, parameters=491_088, vision=True, config={
        "model_type": "llava", "image_token_id": 6, "image_seq_length": 36, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full", "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3", "vocab_size": 448, "hidden_size": 96, "intermediate_size": 256,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
            "max_position_embeddings": 512, "tie_word_embeddings": True,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
            "num_attention_heads": 4, "image_size": 48, "patch_size": 8, "vision_use_head": False,
        },
    }),
}  # fmt: skip

WITHOUT = {"qlora": "a model of 0.5M parameters has no memory to save; use lora"}


def full(size: str) -> Recipe:
    """All weights of the language part, ZeRO-3: answers about images of dials, bars and receipts. Start here."""
    return Recipe(
        model=SIZES[size],
        data=replace(SIGHT, metric="exact_match", max_new_tokens=8),
        deepspeed="zero3.json",
        learning_rate=2e-3,
        epochs=3,
        global_batch_size=32,
        micro_batch_size=16,
        sequence_length=128,
        packing=False,  # sequences with images are not packed
        schedule=Schedule("cosine", warmup=0.05),
        precision="fp32",
        gradient_checkpointing=False,
        save_steps=100,
        eval_steps=100,
    )


def lora(size: str) -> Recipe:
    """Adapters on the language part, ZeRO-2: the same task with a fraction of the trained weights."""
    return replace(full(size), deepspeed="zero2.json", lora=Lora(rank=32, alpha=64), learning_rate=4e-3)


if __name__ == "__main__":
    launch(__file__)
