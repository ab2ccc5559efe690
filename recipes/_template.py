"""_template: TODO what the family is, in one line; copy this file to add a model, and replace every TODO.

    python scripts/launch.py _template-1b lora --draft
    python scripts/launch.py _template-1b lora --draft data.path=FILE lora.rank=8     # change anything

TODO the sources of the learning rates, and the peculiarities of fine-tuning this family, in two lines.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule

LICENCE = "TODO"
SIZES = {
    # The name that people type; all sizes of a family are on one page.
    "1b": Model(
        path="TODO/Model-1B-Instruct",  # the Hub id
        parameters=1_235_814_400,  # as published; the dimensions below have to agree within 1 %
        # config.json's dimensions, in the words of transformers: what a draft and the planner need without a network.
        config={
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
}


def full(size: str) -> Recipe:
    """All weights: TODO when to choose it."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json",  # zero3.json where 2 bytes per parameter do not fit on a GPU
        learning_rate=2e-5,
        weight_decay=0.1,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=64,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(full(size), lora=Lora(rank=16, alpha=32), learning_rate=2e-4, weight_decay=0.0)


# The other variants are inherited (recipe/variants.py); define a function to override one.
if __name__ == "__main__":
    launch(__file__)
