"""qwen3_moe: Qwen3's mixtures of experts in the Instruct-2507 versions, which answer without a reasoning block.

    size       layers  hidden  heads  parameters  context  licence     weights
    30b-a3b    48      2048    32     30.53B      262,144  Apache-2.0  Qwen/Qwen3-30B-A3B-Instruct-2507
    235b-a22b  94      4096    64     235.09B     262,144  Apache-2.0  Qwen/Qwen3-235B-A22B-Instruct-2507

    variant       method    trains                             DeepSpeed  measured peak
    full          SFT       all weights                        ZeRO-3     -
    lora          SFT       adapters on attention and experts  ZeRO-3     -
    full_offload  SFT       all weights                        ZeRO-3     -
    long_context  SFT       all weights                        ZeRO-3     -
    dpo_lora      DPO       adapters on attention and experts  ZeRO-3     -
    pretrain      raw text  all weights                        ZeRO-3     -
    expert        SFT       all weights, spread                ZeRO-1     -

    predicted     30b-a3b  235b-a22b  GPUs x GiB: the fewest H100 80GB that it fits on
    full          8 x 67   64 x 74
    lora          1 x 71   16 x 51
    full_offload  1 x 66   8 x 74
    long_context  16 x 60  256 x 66
    dpo_lora      2 x 45   16 x 51
    pretrain      8 x 67   64 x 74
    expert        16 x 50  -

    python scripts/launch.py qwen3_moe-30b-a3b lora
    python scripts/launch.py qwen3_moe-30b-a3b lora data.path=FILE.jsonl data.validation=HELD_OUT.jsonl  # your data

All weights: 1e-5, decay and beta2 from THUDM/slime (run-qwen3-235B-A22B-sft.sh); NVIDIA-NeMo/Automodel has 1e-5 for 30b
too (qwen3_moe_30b_ep8_te_fusedadam.yaml). Adapters: rank 8, alpha 32, 1e-4 and the warm-up from ms-swift
(train/moe/qwen3_moe.sh, megatron/lora/qwen3_235b.sh, which counts 64 GPUs of 80 GB for all weights of 235b);
DPO 5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
128 experts per layer, 8 for a token: each has an adapter of its own, so a small rank is many weights already. The
routers stay frozen under adapters; the loss that balances them is off in the checkpoints (output_router_logits).
"""

from dataclasses import replace

from recipes.spec.recipe import Layout, Lora, Model, Recipe, Schedule
from recipes.spec.samples import CHAT, PREFERENCES, TEXT

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
    """SFT of all weights, routers included: for much data, with 489 GB of model states (235b-a22b: 3.8 TB)."""
    return Recipe(
        family="qwen3_moe",
        size=size,
        variant="full",
        method="sft",
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3_moe.json",
        learning_rate=1e-5,
        weight_decay=0.1,
        adam_beta2=0.98,
        schedule=Schedule("cosine", warmup=0.05),
        global_batch_size=64,
        micro_batch_size=1,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """SFT of adapters on attention and on every expert, about an eighth of the memory of full: the place to start."""
    return replace(
        full(size),
        variant="lora",
        lora=Lora(
            rank=8,
            alpha=32,
            target_modules="q_proj,k_proj,v_proj,o_proj",
            target_parameters="mlp.experts.gate_up_proj,mlp.experts.down_proj",  # fused: 3-D, no linear layers
        ),
        learning_rate=1e-4,
        weight_decay=0.0,
        global_batch_size=32,
    )


def full_offload(size: str) -> Recipe:
    """As full with the optimizer's states and step in host memory: when the GPUs are few or small."""
    return replace(full(size), variant="full_offload", deepspeed="zero3_offload.json")


def long_context(size: str) -> Recipe:
    """SFT of all weights on rows of 32,768 tokens: for long documents and conversations with tools."""
    return replace(
        full(size),
        variant="long_context",
        tiled_loss=True,
        sequence_length=32768,
        global_batch_size=64 if size == "235b-a22b" else 8,  # at least one row per GPU
    )


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: prefer one answer to another, best after full or lora.

    Start from a run's result with model.path=RUN_FOLDER/export.
    """
    return replace(
        lora(size),
        variant="dpo_lora",
        method="dpo",
        data=PREFERENCES,
        learning_rate=5e-6,
        schedule=Schedule("cosine", warmup=0.1),
        sequence_length=2048,
        packing=False,
    )


def pretrain(size: str) -> Recipe:
    """Continued pre-training of all weights on raw text: to teach a domain or a language before SFT.

    For 30b-a3b usually from base weights: model.path=Qwen/Qwen3-30B-A3B-Base (its context is 32,768 tokens).
    """
    return replace(
        full(size),
        variant="pretrain",
        method="pretrain",
        data=TEXT,
    )


def expert(size: str) -> Recipe:
    """All weights with each layer's experts spread over 8 GPUs (AutoEP): tokens travel instead of weights.

    Two all-to-alls per layer instead of gathering every expert; needs a multiple of layout.expert ranks.
    """
    return replace(full(size), variant="expert", deepspeed="expert_parallel.json", layout=Layout(expert=8))
