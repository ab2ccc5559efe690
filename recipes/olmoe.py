"""olmoe: Ai2's OLMoE, a small and fully open mixture of experts: 1.3B of 6.9B active, data and code published.

    python scripts/launch.py olmoe-1b-7b lora
    python scripts/launch.py olmoe-1b-7b full data.path=FILE.jsonl data.validation=HELD_OUT.jsonl epochs=2

All weights: 2e-5 at batch 128 and length 4,096, and DPO 5e-7, as Ai2 trained it (allenai/OLMoE, README.md).
Adapters: rank 16, alpha 32 and 2e-4 as QLoRA at this size (arXiv:2305.14314); DPO with adapters 5e-6 from
alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
64 experts per layer, 8 per token. DeepSpeed has no preset for them: the project configures AutoEP's routing, and checks
it on a draft before a run. The balancing loss is off; pre-training used router_aux_loss_coef=0.01.
`pretrain` usually starts from base weights: model.path=allenai/OLMoE-1B-7B-0924.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

LICENCE = "Apache-2.0"
SIZES = {
    "1b-7b": Model(path="allenai/OLMoE-1B-7B-0125-Instruct", parameters=6_919_161_856, config={
        "model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01, "output_router_logits": False,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "clip_qkv": None, "attention_bias": False,
        "tie_word_embeddings": False,
    }),
}  # fmt: skip

WITHOUT = variants.NO_HEADS


def full(size: str) -> Recipe:
    """All weights, routers included: for plenty of data, or a task unlike those that the model was trained on."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3_moe.json",
        learning_rate=2e-5,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=128,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on attention and on every expert: try this first; a small file to ship."""
    return replace(
        full(size),
        lora=Lora(rank=16, alpha=32, target_modules=variants.ATTENTION, target_parameters=variants.EXPERTS),
        learning_rate=2e-4,
        global_batch_size=32,
    )


if __name__ == "__main__":
    launch(__file__)
