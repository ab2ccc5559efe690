"""glm4_5: Z.ai's GLM-4.5, MoE models that reason first or answer directly; 4.6 and 4.7 have the same dimensions.

    python scripts/launch.py glm4_5-air lora
    python scripts/launch.py glm4_5-355b lora model.path=zai-org/GLM-4.7 data.path=FILE.jsonl epochs=2

All weights: 1e-5 from NVIDIA-NeMo/Automodel (llm_finetune/glm/glm_4.7_te_deepep.yaml). Adapters: rank 16, alpha 8 and
2e-4 from axolotl (glm45/glm-45-air-qlora.yaml), 1e-4 at 355b as QLoRA (arXiv:2305.14314); DPO 5e-6 from
alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
The checkpoints include a layer that predicts a second token: it is unchanged in the export unless
model.train_mtp=true trains it. DeepSpeed has no preset for these experts: the project sets AutoEP's routing, and checks
it on a draft.
`pretrain` usually starts from base weights: model.path=zai-org/GLM-4.5-Air-Base.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

SHARED = {
    "model_type": "glm4_moe", "vocab_size": 151552, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": 128, "attention_bias": True, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": False,
}  # fmt: skip

LICENCE = "MIT"
SIZES = {
    "air": Model(path="zai-org/GLM-4.5-Air", parameters=106_852_245_504, config={
        **SHARED, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 46, "n_routed_experts": 128, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    }),
    "355b": Model(path="zai-org/GLM-4.5", parameters=352_797_814_784, config={
        **SHARED, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 92, "n_routed_experts": 160, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    }),
}  # fmt: skip

WITHOUT = variants.NO_HEADS


def full(size: str) -> Recipe:
    """All weights, routers included: for plenty of data; the model states are 1.7 TB (355b: 5.6 TB)."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3_moe.json",
        learning_rate=1e-5,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=64,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on attention and on every expert: try this first; a small file to ship."""
    return replace(
        full(size),
        lora=Lora(rank=16, alpha=8, target_modules=variants.ATTENTION, target_parameters=variants.EXPERTS),
        learning_rate=1e-4 if size == "355b" else 2e-4,
        global_batch_size=32,
    )


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens: for long documents, tools and long reasoning."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=64)


if __name__ == "__main__":
    launch(__file__)
