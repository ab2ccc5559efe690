"""llama2: Llama 2 Chat, Meta's decoders of July 2023, on which many other models are based.

    python scripts/launch.py llama2-13b lora
    python scripts/launch.py llama2-70b qlora data.path=FILE.jsonl lora.rank=64 epochs=2  # your data

All weights: rate, decay, batch and length are those of Meta's own SFT (arXiv:2307.09288, section 3.1), betas of its
pre-training. Adapters: rank 32, alpha 16 and 2e-4 from axolotl (llama-2/lora.yml), 1e-4 for 70b as in QLoRA
(arXiv:2305.14314), DoRA at half the rank (arXiv:2402.09353); DPO 5e-6 from alignment-handbook
(zephyr-7b-beta/dpo/config_qlora.yaml).
Its chat template marks the user's turns with `[INST]` in plain text instead of control tokens, and has no tools.
`pretrain` usually starts from base weights: model.path=meta-llama/Llama-2-7b-hf.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule

SHARED = {
    "model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
}  # fmt: skip

LICENCE = "Llama-2"
SIZES = {
    "7b": Model(path="meta-llama/Llama-2-7b-chat-hf", parameters=6_738_415_616, config={
        **SHARED, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }),
    "13b": Model(path="meta-llama/Llama-2-13b-chat-hf", parameters=13_015_864_320, config={
        **SHARED, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 40,
    }),
    "70b": Model(path="meta-llama/Llama-2-70b-chat-hf", parameters=68_976_648_192, config={
        **SHARED, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }),
}  # fmt: skip


def full(size: str) -> Recipe:
    """All weights: for plenty of data, or a task unlike those that the model was trained on."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3.json",
        learning_rate=2e-5,
        weight_decay=0.1,
        adam_beta2=0.95,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=64,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(
        full(size),
        deepspeed="zero3_adapters.json" if size == "70b" else "zero2.json",
        lora=Lora(rank=32, alpha=16),
        learning_rate=1e-4 if size == "70b" else 2e-4,
        weight_decay=0.0,
        global_batch_size=32,
    )


if __name__ == "__main__":
    launch(__file__)
