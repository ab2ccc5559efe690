"""glm4: the dense GLM-4-0414 chat models of Z.ai, 9B and 32B, for Chinese and English.

    python scripts/launch.py glm4-9b lora
    python scripts/launch.py glm4-32b qlora data.path=FILE.jsonl lora.rank=32 learning_rate=2e-4  # your own data

full: 1e-5 at batch 64 (NVIDIA-NeMo/Automodel glm_4_9b_chat_hf_squad.yaml); THUDM/GLM-4 finetune/configs/sft.yaml has
5e-5 at batch 1 per GPU. 32b: half of 1e-5. lora and qlora: 2e-4 to 13B, 1e-4 above (QLoRA, arXiv:2305.14314), rank 16
and alpha 32 as axolotl's glm4/qlora-32b.yaml, which takes 2e-4. dpo_lora: 5e-6 (alignment-handbook zephyr-7b-beta/dpo).
pretrain: 2e-5 as Code Llama's long-context stage (arXiv:2308.12950), betas 0.9 and 0.95 as Llama 2 (arXiv:2307.09288).

An assistant's turn has no end token of its own: the next role's token ends it (`<|user|>`, also in generation).
gate and up are one matrix, `gate_up_proj`; only 9b has biases in q, k and v.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

LICENCE = "MIT"
SIZES = {
    "9b": Model(path="zai-org/GLM-4-9B-0414", parameters=9_400_279_040, config={
        "model_type": "glm4", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        "attention_bias": True, "tie_word_embeddings": False,
    }),
    "32b": Model(path="zai-org/GLM-4-32B-0414", parameters=32_566_081_536, config={
        "model_type": "glm4", "vocab_size": 151552, "hidden_size": 6144, "intermediate_size": 23040,
        "num_hidden_layers": 61, "num_attention_heads": 48, "num_key_value_heads": 2, "head_dim": 128,
        "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        "attention_bias": False, "tie_word_embeddings": False,
    }),
}  # fmt: skip

FULL_RATE = {"9b": 1e-5, "32b": 5e-6}
LORA_RATE = {"9b": 2e-4, "32b": 1e-4}


def full(size: str) -> Recipe:
    """All weights, ZeRO-3: the most that fine-tuning can change; for many examples and several GPUs."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3.json",
        learning_rate=FULL_RATE[size],
        weight_decay=0.1,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=64,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer, ZeRO-2, or ZeRO-3 where the frozen weights nearly fill a GPU (32b)."""
    return replace(
        full(size),
        deepspeed="zero3_adapters.json" if size == "32b" else "zero2.json",
        lora=Lora(rank=16, alpha=32),
        learning_rate=LORA_RATE[size],
        weight_decay=0.0,
    )


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens, the most the family takes: for long documents and conversations."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=8)


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT."""
    return variants.pretrain(full(size), learning_rate=2 * FULL_RATE[size], adam_beta2=0.95, global_batch_size=128)


if __name__ == "__main__":
    launch(__file__)
