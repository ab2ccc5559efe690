"""tiny: a 3-million-parameter Qwen3 that ships with the project; runs anywhere, offline, on CPU, in minutes.

PLACEHOLDER
"""

from dataclasses import replace

from recipes.spec.recipe import Data, Lora, Model, Recipe, Schedule

SAMPLES = "recipes/samples"

SIZES = {
    "3m": Model(path=f"{SAMPLES}/tiny_model"),
}


def full(size: str) -> Recipe:
    """All weights, ZeRO-3: the default; free text to JSON in two minutes on two cores."""
    return Recipe(
        family="tiny",
        size=size,
        variant="full",
        method="sft",
        model=SIZES[size],
        data=Data(
            path=f"{SAMPLES}/extract/train.jsonl",
            validation=f"{SAMPLES}/extract/held_out.jsonl",
            metric="exact_match",
        ),
        deepspeed="zero3.json",
        learning_rate=1e-3,
        epochs=3,
        global_batch_size=16,
        micro_batch_size=8,
        sequence_length=256,
        schedule=Schedule("cosine", warmup=0.05),
        precision="fp32",
        gradient_checkpointing=False,
        save_steps=100,
        eval_steps=50,
    )


def lora(size: str) -> Recipe:
    """Adapters only, ZeRO-2."""
    return replace(full(size), variant="lora", deepspeed="zero2.json", lora=Lora(rank=32, alpha=64), learning_rate=4e-3)
