"""tiny: the model that ships with the project; every variant runs anywhere, offline, on CPU, in minutes.

A Qwen3 pre-trained by `scripts/maintain/samples/pretrain.py`, so that runs are real fine-tuning and not training from
noise. The task: turn a sentence into a JSON object, scored by exact match.

    python scripts/launch.py tiny full
    python scripts/launch.py tiny full learning_rate=5e-4 epochs=2 deepspeed=zero2.json     # change anything
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Distill, Grpo, Lora, Model, Recipe, Schedule, variants
from deepspeed_recipes.recipe.samples import HALF_TRAINED, TINY_MODEL, TINY_STUDENT, TINY_TEACHER

LICENCE = "Apache-2.0"
SIZES = {
    "3m": Model(path=TINY_MODEL, parameters=3_049_984, config={
        "model_type": "qwen3", "vocab_size": 1152, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }),
}  # fmt: skip
NARROW = {**SIZES["3m"].config, "num_hidden_layers": 2, "intermediate_size": 208}
STUDENT = Model(path=TINY_STUDENT, parameters=1_009_024, config=NARROW)
"""Two narrowed layers of the fine-tuned model (`scripts/shrink.py`), almost always wrong before training."""

WITHOUT = dict.fromkeys(
    ("qlora", "dora", "full_offload"), "a model of 3M parameters has no memory to save; use full or lora"
)


def full(size: str) -> Recipe:
    """All weights, ZeRO-3: learns to turn free text into JSON. The place to start."""
    return Recipe(
        model=SIZES[size],
        data=replace(CHAT, metric="exact_match"),
        deepspeed="zero3.json",
        learning_rate=2e-3,
        epochs=0.7,
        global_batch_size=8,
        micro_batch_size=4,
        sequence_length=256,
        schedule=Schedule("cosine", warmup=0.05),
        precision="fp32",  # CPUs without bf16 units are slower in bf16, and memory is not scarce here
        gradient_checkpointing=False,
        save_steps=100,
        eval_steps=100,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer, ZeRO-2: the same task with a fifth of the trained weights."""
    return replace(full(size), deepspeed="zero2.json", lora=Lora(rank=32, alpha=64), learning_rate=4e-3)


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters, ZeRO-2: prefer the right JSON to a plausible mistake; after `full`."""
    return variants.dpo(lora(size), learning_rate=1e-3)


def kto_lora(size: str) -> Recipe:
    """Judged answers (KTO) with adapters, ZeRO-2: each is labelled good or bad, no pairs needed."""
    return variants.kto(lora(size), learning_rate=1e-3, epochs=0.5)


def orpo_lora(size: str) -> Recipe:
    """Preference pairs (ORPO) with adapters, ZeRO-2: also imitates the right JSON, so no earlier run is needed."""
    return variants.orpo(lora(size), learning_rate=2e-3)


def simpo_lora(size: str) -> Recipe:
    """Preference pairs (SimPO) with adapters, ZeRO-2: as DPO, without computing a reference model; after `full`."""
    return variants.simpo(lora(size), learning_rate=5e-4)


def dpo_full(size: str) -> Recipe:
    """Preference pairs (DPO), all weights, ZeRO-3: the initial model is the reference, also sharded; after `full`."""
    return variants.dpo(full(size), learning_rate=2e-4)


def reward(size: str) -> Recipe:
    """Train a reward model on preference pairs, all weights, ZeRO-3: a number, higher for the right JSON."""
    return variants.reward(full(size), learning_rate=1e-3, epochs=0.5)


def grpo(size: str) -> Recipe:
    """Own answers, scored by a function (GRPO), all weights, ZeRO-2: reinforces the right answers.

    It starts from a half-trained model, since a model that is never right has nothing to learn from.
    """
    return variants.grpo(
        replace(full(size), model=replace(SIZES[size], path=HALF_TRAINED)),
        method=Grpo(group_size=8, max_new_tokens=64),
        deepspeed="zero2.json",
        learning_rate=1e-4,
        max_steps=60,
        global_batch_size=64,
        micro_batch_size=32,
        logging_steps=5,
        schedule=Schedule("constant_with_warmup", warmup=0.05),
    )


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights, ZeRO-1."""
    return variants.pretrain(full(size), deepspeed="zero1.json", learning_rate=5e-4)


def classify(size: str) -> Recipe:
    """Train a classifier on labelled texts, all weights, ZeRO-3: the topic of a notice."""
    return variants.classify(full(size), learning_rate=5e-4, epochs=0.5)


def embed(size: str) -> Recipe:
    """Train embeddings on pairs of texts, all weights, ZeRO-3: finds the notice that contains given facts."""
    return variants.embed(full(size), learning_rate=5e-4, epochs=3, global_batch_size=32, micro_batch_size=16)


def distill(size: str) -> Recipe:
    """Distillation, all weights, ZeRO-2: a student of 1M learns the fine-tuned model's distributions over 250 answers.

    With so little data, answers alone teach it less than half as much; with thousands there is no difference.
    """
    few = replace(full(size).data, max_examples=250)
    student = replace(full(size), model=STUDENT, data=few, learning_rate=3e-3, max_steps=560)
    return variants.distill(student, Distill(teacher=TINY_TEACHER, temperature=2.0), deepspeed="zero2.json")


if __name__ == "__main__":
    launch(__file__)
