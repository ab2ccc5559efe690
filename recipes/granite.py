"""granite: IBM's dense Granite 4.2, reasoning and instruct models post-trained on the Granite 4.1 base models.

    python scripts/launch.py granite-8b lora
    python scripts/launch.py granite-3b full data.path=FILE.jsonl learning_rate=2e-5 epochs=2  # your own data

full: 1e-5 at batch 64 (NVIDIA-NeMo/Automodel granite_3_3_2b_instruct_squad.yaml); 30b: half of it.
lora and qlora: 2e-4 to 13B, 1e-4 above (QLoRA, arXiv:2305.14314); rank 16 as alignment-handbook's
zephyr-7b-beta/sft/config_qlora.yaml. dpo_lora: 5e-6 (the same, dpo/config_qlora.yaml).
pretrain: 2e-5 as Code Llama's long-context stage (arXiv:2308.12950), betas 0.9 and 0.95 as Llama 2 (arXiv:2307.09288).

Attention scores are scaled by 1 / head size, not by its root. 4.1 differs: three more multipliers, tied embeddings.
4.2 reasons between <think> tags before it answers: examples without reasoning teach it to answer at once.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

LICENCE = "Apache-2.0"
SIZES = {
    "3b": Model(path="ibm-granite/granite-4.2-3b", parameters=3_659_737_600, config={
        "model_type": "granite", "vocab_size": 100352, "hidden_size": 2560, "intermediate_size": 8192,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0}, "attention_bias": False,
        "mlp_bias": False, "attention_multiplier": 0.015625, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
        "logits_scaling": 1.0, "tie_word_embeddings": False,
    }),
    "8b": Model(path="ibm-granite/granite-4.2-8b", parameters=8_791_592_960, config={
        "model_type": "granite", "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 12800,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0}, "attention_bias": False,
        "mlp_bias": False, "attention_multiplier": 0.0078125, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
        "logits_scaling": 1.0, "tie_word_embeddings": False,
    }),
    "30b": Model(path="ibm-granite/granite-4.2-30b", parameters=29_276_770_304, config={
        "model_type": "granite", "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 32768,
        "num_hidden_layers": 64, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000_000.0}, "attention_bias": False,
        "mlp_bias": False, "attention_multiplier": 0.0078125, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
        "logits_scaling": 1.0, "tie_word_embeddings": False,
    }),
}  # fmt: skip

FULL_RATE = {"3b": 1e-5, "8b": 1e-5, "30b": 5e-6}
LORA_RATE = {"3b": 2e-4, "8b": 2e-4, "30b": 1e-4}

WITHOUT = variants.NO_HEADS


def full(size: str) -> Recipe:
    """All weights, ZeRO-2 or ZeRO-3: the most that fine-tuning can change; for many examples and several GPUs."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json" if size == "3b" else "zero3.json",
        learning_rate=FULL_RATE[size],
        weight_decay=0.1,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=64,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer, ZeRO-2, or ZeRO-3 where the frozen weights nearly fill a GPU (30b)."""
    return replace(
        full(size),
        deepspeed="zero3_adapters.json" if size == "30b" else "zero2.json",
        lora=Lora(rank=16, alpha=32),
        learning_rate=LORA_RATE[size],
        weight_decay=0.0,
    )


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens: for long documents and conversations."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=8)


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT."""
    return variants.pretrain(full(size), learning_rate=2 * FULL_RATE[size], adam_beta2=0.95, global_batch_size=128)


if __name__ == "__main__":
    launch(__file__)
