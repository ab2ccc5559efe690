"""mixtral: Mistral AI's MoE models of eight experts, two of them per token, instruct versions.

    python scripts/launch.py mixtral-8x7b lora
    python scripts/launch.py mixtral-8x22b lora data.path=FILE.jsonl lora.rank=8 epochs=2  # your own data

full: 1e-5 at batch 64, cosine (NVIDIA-NeMo/Automodel mixtral-8x7b-v0-1_squad.yaml); 8x22b: 5e-6, as
alignment-handbook's zephyr-141b-A35b/orpo/config_full.yaml trained it. lora, 8x7b: 2e-4 (axolotl mixtral/mixtral.yml,
the same for 8x22b); 8x22b: half of it. dpo_lora: 5e-6 (alignment-handbook zephyr-7b-beta/dpo/config_qlora.yaml).
pretrain: 2e-5 as Code Llama's long-context stage (arXiv:2308.12950), betas 0.9 and 0.95 as Llama 2 (arXiv:2307.09288).

`full` needs 16 bytes per parameter over all GPUs before activations: 747 GB (8x7b), 2,250 GB (8x22b).
Adapters leave the router unchanged; its balancing loss only counts with router_aux_loss_coef, whatever config.json has.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

LICENCE = "Apache-2.0"
SIZES = {
    "8x7b": Model(path="mistralai/Mixtral-8x7B-Instruct-v0.1", parameters=46_702_792_704, config={
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False,
    }),
    "8x22b": Model(path="mistralai/Mixtral-8x22B-Instruct-v0.1", parameters=140_630_071_296, config={
        "model_type": "mixtral", "vocab_size": 32768, "hidden_size": 6144, "intermediate_size": 16384,
        "num_hidden_layers": 56, "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "hidden_act": "silu", "max_position_embeddings": 65536, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False,
    }),
}  # fmt: skip

FULL_RATE = {"8x7b": 1e-5, "8x22b": 5e-6}
LORA_RATE = {"8x7b": 2e-4, "8x22b": 1e-4}


def full(size: str) -> Recipe:
    """All weights, ZeRO-3: the most that fine-tuning can change; for many examples and several nodes."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3_moe.json",
        learning_rate=FULL_RATE[size],
        weight_decay=0.1,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=64,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on attention and on every expert, ZeRO-3: the usual start; the frozen weights are sharded."""
    return replace(
        full(size),
        lora=Lora(rank=16, alpha=32, target_modules=variants.ATTENTION, target_parameters=variants.EXPERTS),
        learning_rate=LORA_RATE[size],
        weight_decay=0.0,
    )


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens (8x7b's maximum; 8x22b takes 65,536): for long documents."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=8)


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT."""
    return variants.pretrain(full(size), learning_rate=2 * FULL_RATE[size], adam_beta2=0.95, global_batch_size=128)


if __name__ == "__main__":
    launch(__file__)
