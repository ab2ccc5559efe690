"""qwen3_5_moe: the MoE models of Qwen3.5, three layers of linear attention for one of full attention, for text.

    python scripts/launch.py qwen3_5_moe-35b-a3b lora
    python scripts/launch.py qwen3_5_moe-35b-a3b lora model.path=Qwen/Qwen3.6-35B-A3B data.path=FILE.jsonl epochs=2

All weights: 5e-6, decay and beta2 from NVIDIA-NeMo/Automodel (vlm_finetune/qwen3_5_moe/qwen3_6_35b.yaml). Adapters:
rank 16, alpha 32 and 2e-4 from axolotl (qwen3.5/35b-a3b-moe-qlora.yaml), 1e-4 above as QLoRA (arXiv:2305.14314); DPO
5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
The checkpoints include a vision tower and a layer that predicts a second token: neither is trained or counted,
and the export has both unchanged.
No variant packs documents. Install flash-linear-attention and causal-conv1d: without them training is slow.
`pretrain` usually starts from base weights: model.path=Qwen/Qwen3.5-35B-A3B-Base.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

SHARED = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "num_key_value_heads": 2, "head_dim": 256,
    "layer_types": None, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "max_position_embeddings": 262144, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip

LICENCE = "Apache-2.0"
SIZES = {
    "35b-a3b": Model(path="Qwen/Qwen3.5-35B-A3B", parameters=34_660_610_688, config={
        **SHARED, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "linear_num_value_heads": 32,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256,
        "num_experts_per_tok": 8,
    }),
    "122b-a10b": Model(path="Qwen/Qwen3.5-122B-A10B", parameters=122_111_526_912, config={
        **SHARED, "hidden_size": 3072, "num_hidden_layers": 48, "num_attention_heads": 32, "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "num_experts": 256,
        "num_experts_per_tok": 8,
    }),
    "397b-a17b": Model(path="Qwen/Qwen3.5-397B-A17B", parameters=396_346_350_336, config={
        **SHARED, "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32, "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "num_experts": 512,
        "num_experts_per_tok": 10,
    }),
}  # fmt: skip

LINEAR = f"{variants.ATTENTION},in_proj_qkv,in_proj_z,out_proj"
"""The large projections of both kinds of attention."""

WITHOUT = variants.NO_HEADS


def full(size: str) -> Recipe:
    """All weights, routers included: for plenty of data; the model states are 555 GB (397b-a17b: 6.3 TB)."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3_moe.json",
        learning_rate=5e-6,
        weight_decay=0.1,
        adam_beta2=0.95,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=64,
        sequence_length=4096,
        # Linear attention reads no position ids: its state would carry over from one packed document into the next.
        packing=False,
    )


def lora(size: str) -> Recipe:
    """Adapters on attention and on every expert: try this first; a small file to ship."""
    return replace(
        full(size),
        lora=Lora(rank=16, alpha=32, target_modules=LINEAR, target_parameters=variants.EXPERTS),
        learning_rate=2e-4 if size == "35b-a3b" else 1e-4,
        weight_decay=0.0,
        global_batch_size=32,
    )


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens: for long documents and long reasoning."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=64)


if __name__ == "__main__":
    launch(__file__)
