"""mistral: the dense text models of Mistral AI, 7B v0.3 and Small 3 (24B), instruct versions.

    python scripts/launch.py mistral-7b lora
    python scripts/launch.py mistral-24b lora data.path=FILE.jsonl lora.rank=32 learning_rate=2e-4  # your own data

full: 1e-5 at batch 64, cosine (NVIDIA-NeMo/Automodel mistral_7b_squad.yaml); Zephyr took 2e-5 from the base model
(arXiv:2310.16944), axolotl's mistral/config.yml 5e-6. Weight decay 0.1: mistralai/mistral-finetune. 24b: half of 1e-5.
lora: 2e-4, rank 16 (alignment-handbook zephyr-7b-beta/sft/config_qlora.yaml); qlora: 2e-4 to 13B, 1e-4 above
(arXiv:2305.14314), and lora the same. dpo_lora: 5e-6 (alignment-handbook zephyr-7b-beta/dpo/config_qlora.yaml).
pretrain: 2e-5 as Code Llama's long-context stage (arXiv:2308.12950), betas 0.9 and 0.95 as Llama 2 (arXiv:2307.09288).

24b is 2501. Of Small 3.1 and 3.2, which have a vision tower, the text part is trained: model.path=MODEL; the export has
the tower unchanged.
Its chat template adds a system prompt with the current date to conversations without one: give each a system turn.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

LICENCE = "Apache-2.0"
SIZES = {
    "7b": Model(path="mistralai/Mistral-7B-Instruct-v0.3", parameters=7_248_023_552, config={
        "model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "sliding_window": None,
        "tie_word_embeddings": False,
    }),
    "24b": Model(path="mistralai/Mistral-Small-24B-Instruct-2501", parameters=23_572_403_200, config={
        "model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000_000.0}, "sliding_window": None,
        "tie_word_embeddings": False,
    }),
}  # fmt: skip

FULL_RATE = {"7b": 1e-5, "24b": 5e-6}
LORA_RATE = {"7b": 2e-4, "24b": 1e-4}


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
    """Adapters on every linear layer, ZeRO-2: the usual start; the frozen weights fit one 80 GB GPU."""
    return replace(
        full(size),
        deepspeed="zero2.json",
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
