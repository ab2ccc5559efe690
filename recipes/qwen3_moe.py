"""qwen3_moe: Qwen3's mixtures of experts in the Instruct-2507 versions, which answer without a reasoning block.

    python scripts/launch.py qwen3_moe-30b-a3b lora
    python scripts/launch.py qwen3_moe-30b-a3b lora data.path=FILE.jsonl data.validation=HELD_OUT.jsonl  # your data

All weights: 1e-5, decay and beta2 from THUDM/slime (run-qwen3-235B-A22B-sft.sh); NVIDIA-NeMo/Automodel has 1e-5 for 30b
too (qwen3_moe_30b_ep8_te_fusedadam.yaml). Adapters: rank 8, alpha 32, 1e-4 and the warm-up from ms-swift
(train/moe/qwen3_moe.sh, megatron/lora/qwen3_235b.sh, which counts 64 GPUs of 80 GB for all weights of 235b);
DPO 5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
128 experts per layer, 8 per token: each has its own adapter, so even a small rank means many weights. The routers
stay frozen under adapters; the balancing loss is off in the checkpoints (output_router_logits).
`pretrain` of 30b-a3b usually starts from base weights: model.path=Qwen/Qwen3-30B-A3B-Base (its context is 32,768
tokens).
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

SHARED = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001, "output_router_logits": False, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip

LICENCE = "Apache-2.0"
SIZES = {
    "30b-a3b": Model(path="Qwen/Qwen3-30B-A3B-Instruct-2507", parameters=30_532_122_624, config={
        **SHARED, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0},
    }),
    "235b-a22b": Model(path="Qwen/Qwen3-235B-A22B-Instruct-2507", parameters=235_093_634_560, config={
        **SHARED, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 94, "num_attention_heads": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0},
    }),
}  # fmt: skip


def full(size: str) -> Recipe:
    """All weights, routers included: for plenty of data; the model states are 489 GB (235b-a22b: 3.8 TB)."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3_moe.json",
        learning_rate=1e-5,
        weight_decay=0.1,
        adam_beta2=0.98,
        schedule=Schedule("cosine", warmup=0.05),
        global_batch_size=64,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on attention and on every expert: try this first; about an eighth of the memory of `full`."""
    return replace(
        full(size),
        lora=Lora(rank=8, alpha=32, target_modules=variants.ATTENTION, target_parameters=variants.EXPERTS),
        learning_rate=1e-4,
        weight_decay=0.0,
        global_batch_size=32,
    )


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens: for long documents and conversations with tools."""
    batch = 64 if size == "235b-a22b" else 8  # at least one sequence per GPU
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=batch)


if __name__ == "__main__":
    launch(__file__)
