"""_template: copy me to `recipes/FAMILY.py` to add a model; one line here says what the family is.

    size  layers  hidden  heads  parameters  context  licence     weights
    1b    16      2048    32     1.24B       131,072  your model  organisation/Model-1B-Instruct

    variant   method    trains       DeepSpeed  measured peak
    full      SFT       all weights  ZeRO-2     -
    lora      SFT       adapters     ZeRO-2     -
    pretrain  raw text  all weights  ZeRO-2     -

    python scripts/launch.py _template-1b lora --draft
    python scripts/launch.py _template-1b lora --draft data.path=FILE lora.rank=8     # change anything

Then say where the learning rates come from, and what someone who fine-tunes this family must know, in two lines.
"""

from dataclasses import replace

from recipes.spec.recipe import Lora, Model, Recipe, Schedule
from recipes.spec.samples import CHAT, TEXT

SIZES = {
    # The name people type. Several sizes of a family stand on one page.
    "1b": Model(
        path="organisation/Model-1B-Instruct",  # the Hub id
        parameters=1_235_814_400,  # as published; the tests hold the dimensions below against it, within 1 %
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
    """All weights: the one function that is written whole. Say in this line when to choose it."""
    return Recipe(
        family="_template",  # the file's name
        size=size,
        variant="full",  # the function's name
        method="sft",
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
    """Adapters on every linear layer: a variant is a delta on another one, of a few lines."""
    return replace(full(size), variant="lora", lora=Lora(rank=16, alpha=32), learning_rate=2e-4, weight_decay=0.0)


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: a new domain or language, before SFT."""
    return replace(
        full(size),
        variant="pretrain",
        method="pretrain",
        data=TEXT,
    )
