"""olmo3: Ai2's Olmo 3, with open data and code; three layers of sliding-window attention for one of full attention.

    python scripts/launch.py olmo3-7b lora
    python scripts/launch.py olmo3-7b lora data.path=FILE.jsonl data.validation=HELD_OUT.jsonl epochs=3  # your data
    python scripts/launch.py olmo3-7b long_context learning_rate=8e-5 global_batch_size=32  # Ai2's, from base weights

All weights: linear schedule, warm-up and beta2 from allenai/OLMo-core (train/sft/Olmo-3-7B-SFT.py), 8e-5 at a million
tokens per step from allenai/open-instruct (olmo3/7b_instruct_sft.sh, the third command); here a quarter of the tokens
and of the rate, half that rate at 32b. Raw text: decay from OLMo-core (OLMo3/OLMo-3-1025-7B-long-context.py).
Adapters: rank 32, alpha 16 and 2e-4 from axolotl (olmo3/olmo3-7b-qlora.yaml), 1e-4 at 32b as in QLoRA
(arXiv:2305.14314), DoRA at half the rank (arXiv:2402.09353); DPO 5e-6 from alignment-handbook
(zephyr-7b-beta/dpo/config_qlora.yaml).
Olmo's own template does not mark the assistant's tokens and adds a system turn about functions: chat_template=chatml
writes the same turns without it. YaRN stretches the full-attention layers only.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

SHARED = {
    "model_type": "olmo3", "vocab_size": 100278, "max_position_embeddings": 65536, "sliding_window": 4096,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
        },
    },
    "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip

LICENCE = "Apache-2.0"
SIZES = {
    "7b": Model(path="allenai/Olmo-3-7B-Instruct", parameters=7_298_011_136, chat_template="chatml", config={
        **SHARED, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "layer_types": 8 * (3 * ["sliding_attention"] + ["full_attention"]),
    }),
    "32b": Model(path="allenai/Olmo-3.1-32B-Instruct", parameters=32_233_522_176, chat_template="chatml", config={
        **SHARED, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8, "layer_types": 16 * (3 * ["sliding_attention"] + ["full_attention"]),
    }),
}  # fmt: skip


def full(size: str) -> Recipe:
    """All weights: for plenty of data, or a task unlike those that the model was trained on."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3.json",
        learning_rate=1e-5 if size == "32b" else 2e-5,
        adam_beta2=0.95,
        schedule=Schedule("linear", warmup=0.03),
        global_batch_size=64,
        sequence_length=2048 if size == "32b" else 4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(
        full(size),
        deepspeed="zero3_adapters.json" if size == "32b" else "zero2.json",
        lora=Lora(rank=32, alpha=16),
        learning_rate=1e-4 if size == "32b" else 2e-4,
        global_batch_size=32,
    )


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens, the length that Ai2 used: for long documents and long reasoning.

    Ai2 starts from base weights: model.path=allenai/Olmo-3-1025-7B.
    """
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=16 if size == "32b" else 8)


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT, with model.path=RUN_FOLDER/export."""
    return variants.dpo(lora(size), learning_rate=5e-6, schedule=Schedule("linear", warmup=0.1))


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT.

    Usually from base weights: model.path=allenai/Olmo-3-1025-7B, or allenai/Olmo-3-1125-32B.
    """
    return variants.pretrain(full(size), weight_decay=0.1)


if __name__ == "__main__":
    launch(__file__)
