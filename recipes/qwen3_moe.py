"""qwen3_moe: Qwen3's mixtures of experts in the Instruct-2507 versions, which answer without a reasoning block.

    size       layers  hidden  heads  parameters  context  licence     weights
    30b-a3b    48      2048    32     30.53B      262,144  Apache-2.0  Qwen/Qwen3-30B-A3B-Instruct-2507
    235b-a22b  94      4096    64     235.09B     262,144  Apache-2.0  Qwen/Qwen3-235B-A22B-Instruct-2507

    variant       method    trains                             DeepSpeed
    full          SFT       all weights                        ZeRO-3
    lora          SFT       adapters on attention and experts  ZeRO-3
    full_offload  SFT       all weights                        ZeRO-3
    long_context  SFT       all weights                        ZeRO-3
    dpo_lora      DPO       adapters on attention and experts  ZeRO-3
    kto_lora      KTO       adapters on attention and experts  ZeRO-3
    orpo_lora     ORPO      adapters on attention and experts  ZeRO-3
    simpo_lora    SimPO     adapters on attention and experts  ZeRO-3
    dpo_full      DPO       all weights                        ZeRO-3
    reward        reward    all weights                        ZeRO-3
    classify      classes   all weights                        ZeRO-3
    embed         pairs     all weights                        ZeRO-3
    grpo          GRPO      all weights                        ZeRO-3
    pretrain      raw text  all weights                        ZeRO-3
    expert        SFT       all weights, spread                ZeRO-1

    python scripts/launch.py qwen3_moe-30b-a3b lora
    python scripts/launch.py qwen3_moe-30b-a3b lora data.path=FILE.jsonl data.validation=HELD_OUT.jsonl  # your data

All weights: 1e-5, decay and beta2 from THUDM/slime (run-qwen3-235B-A22B-sft.sh); NVIDIA-NeMo/Automodel has 1e-5 for 30b
too (qwen3_moe_30b_ep8_te_fusedadam.yaml). Adapters: rank 8, alpha 32, 1e-4 and the warm-up from ms-swift
(train/moe/qwen3_moe.sh, megatron/lora/qwen3_235b.sh, which counts 64 GPUs of 80 GB for all weights of 235b);
DPO 5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
128 experts per layer, 8 for a token: each has an adapter of its own, so even a small rank is many weights. The
routers stay frozen under adapters; the loss that balances them is off in the checkpoints (output_router_logits).
"""

from dataclasses import replace

from deepspeed_recipes import launch
from deepspeed_recipes.recipe import CHAT, Layout, Lora, Model, Recipe, Schedule, variants

SHARED = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
}

SIZES = {
    "30b-a3b": Model(
        path="Qwen/Qwen3-30B-A3B-Instruct-2507",
        parameters=30_532_122_624,
        config={
            **SHARED,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0},
        },
    ),
    "235b-a22b": Model(
        path="Qwen/Qwen3-235B-A22B-Instruct-2507",
        parameters=235_093_634_560,
        config={
            **SHARED,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0},
        },
    ),
}


def full(size: str) -> Recipe:
    """All weights, routers included: for plenty of data; the model states are 489 GB (235b-a22b: 3.8 TB)."""
    return Recipe(
        method="sft",
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


def full_offload(size: str) -> Recipe:
    """All weights, the optimizer in host memory: when `full` does not fit the GPUs and host memory is plentiful."""
    return variants.full_offload(full(size))


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens: for long documents and conversations with tools."""
    batch = 64 if size == "235b-a22b" else 8  # at least one sequence per GPU
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=batch)


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT, with model.path=RUN_FOLDER/export."""
    return variants.dpo(lora(size), learning_rate=5e-6, schedule=Schedule("cosine", warmup=0.1))


kto_lora, orpo_lora, simpo_lora = variants.feedback(lora)
dpo_full = variants.dpo_full_of(full)
reward, classify, embed = variants.heads(full)
grpo = variants.grpo_of(full)


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT.

    For 30b-a3b usually from base weights: model.path=Qwen/Qwen3-30B-A3B-Base (its context is 32,768 tokens).
    """
    return variants.pretrain(full(size))


def expert(size: str) -> Recipe:
    """All weights with each layer's experts spread over 8 GPUs (AutoEP): tokens travel instead of weights.

    Two all-to-alls per layer instead of gathering every expert; needs a multiple of layout.expert ranks.
    """
    return replace(full(size), deepspeed="expert_parallel.json", layout=Layout(expert=8))


if __name__ == "__main__":
    launch(__file__)
