"""gpt_oss: OpenAI's reasoning models with open weights, mixtures of experts with attention sinks.

    python scripts/launch.py gpt_oss-20b lora
    python scripts/launch.py gpt_oss-120b lora data.path=FILE model.path=MODEL     # change anything

Rates: full 2e-5 (axolotl, examples/gpt-oss/gpt-oss-20b-fft-deepspeed-zero3.yaml), half of it at 120b; adapters 2e-4 at
2,048 tokens (OpenAI cookbook, articles/gpt-oss/fine-tune-transfomers.ipynb; huggingface/gpt-oss-recipes,
configs/sft_lora.yaml), half at 120b; DPO 5e-6 (alignment-handbook, recipes/zephyr-7b-beta/dpo/config_qlora.yaml).
Special: the published experts are in MXFP4. They are dequantised to bf16 as they are loaded, one tensor at a time,
and sharded by ZeRO-3 as a bf16 copy is; the export is in bf16.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

YARN = {
    "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip

LICENCE = "Apache-2.0"
SIZES = {
    # Eager attention, since SDPA has no sinks and transformers refuses it.
    "20b": Model(path="openai/gpt-oss-20b", parameters=20_914_757_184, attention="eager", config={
        "model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "attention_bias": True, "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.9, "max_position_embeddings": 131_072, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "rope_parameters": YARN, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }),
    "120b": Model(path="openai/gpt-oss-120b", parameters=116_829_156_672, attention="eager", config={
        "model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.9, "max_position_embeddings": 131_072, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "rope_parameters": YARN, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }),
}  # fmt: skip


def full(size: str) -> Recipe:
    """All weights, ZeRO-3: for much data; 16 bytes per parameter are 335 GB for 20b and 1.9 TB for 120b."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3_moe.json",
        learning_rate=2e-5 if size == "20b" else 1e-5,
        global_batch_size=64,
        # Eager attention holds every score: 0.5 GB per copy of one layer's, 8.6 GB at 8,192; so no long_context here.
        sequence_length=2048,
        packing=False,  # transformers builds the mask without position ids: documents would attend to each other
        schedule=Schedule("cosine", warmup=0.03),
    )


def lora(size: str) -> Recipe:
    """Adapters on attention and every expert, ZeRO-2 for 20b, ZeRO-3 for 120b: the usual start."""
    return replace(
        full(size),
        deepspeed="zero2.json" if size == "20b" else "zero3_moe.json",
        # The experts' biases stay frozen, like the router.
        lora=Lora(rank=16, alpha=32, target_modules=variants.ATTENTION, target_parameters=variants.EXPERTS),
        learning_rate=2e-4 if size == "20b" else 1e-4,
    )


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT, with model.path=RUN_FOLDER/export."""
    return variants.dpo(lora(size), learning_rate=5e-6)


if __name__ == "__main__":
    launch(__file__)
