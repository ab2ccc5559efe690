"""deepseek: DeepSeek's mixtures of experts with multi-head latent attention (MLA), V2-Lite and V3.

    python scripts/launch.py deepseek-v2-lite lora
    python scripts/launch.py deepseek-v2-lite lora data.path=FILE sequence_length=8192     # change anything

Rates: full 5e-6 at v3 (DeepSeek-V3 report, arXiv:2412.19437), 1e-5 at v2-lite (deepseek-ai/ESFT, configs/base.yaml);
adapters 1e-4 (LLaMA-Factory, examples/ktransformers/train_lora/deepseek_v2_lora_sft_kt.yaml and deepseek_v3_...);
DPO 5e-6 (alignment-handbook, recipes/zephyr-7b-beta/dpo/config_qlora.yaml); raw text at v3: the report's last rate.
Special: V3 is published in FP8 (model.path=deepseek-ai/DeepSeek-V3-0324), which is dequantised on loading; this is a
bf16 copy. The layer that predicts a second token is unchanged in the export unless model.train_mtp=true trains it. TRL
cannot mark the chat template: SFT needs one with {% generation %} marks, model.chat_template=FILE.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Layout, Lora, Model, Recipe, Schedule, variants

LICENCE = {"v2-lite": "DeepSeek", "v3": "MIT"}
SIZES = {
    # V2-Lite is the base model: it learns ChatML, whatever its tokenizer carries.
    "v2-lite": Model(path="deepseek-ai/DeepSeek-V2-Lite", parameters=15_706_484_224, chat_template="chatml", config={
        "model_type": "deepseek_v2", "vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "first_k_dense_replace": 1, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "max_position_embeddings": 163_840,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }),
    "v3": Model(path="unsloth/DeepSeek-V3-0324-BF16", parameters=671_026_404_352, config={
        "model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "first_k_dense_replace": 3, "num_attention_heads": 128,
        "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "max_position_embeddings": 163_840,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }),
}  # fmt: skip

MLA = "q_proj,q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"
"""V2-Lite has q_proj, V3 q_a_proj and q_b_proj. Not gate_proj, up_proj, down_proj: PEFT takes them for the experts'."""


def full(size: str) -> Recipe:
    """All weights, ZeRO-3: v2-lite on one node of 8 GPUs; v3 has 10.7 TB of states, 42 GB on each of 256 GPUs."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3_moe.json",
        learning_rate=1e-5 if size == "v2-lite" else 5e-6,
        weight_decay=0.1,
        adam_beta2=0.95,
        global_batch_size=64 if size == "v2-lite" else 256,  # at least one sequence per GPU
        sequence_length=4096,
        schedule=Schedule("cosine", warmup=0.03),
    )


def lora(size: str) -> Recipe:
    """Adapters on attention, at v2-lite on every routed expert too, ZeRO-2, ZeRO-3 at v3: the usual start.

    PEFT adds an adapter to a layer's whole stack of experts at every pass: 22.5 GB at v3, in addition to the stack.
    """
    experts = variants.EXPERTS if size == "v2-lite" else None
    return replace(
        full(size),
        deepspeed="zero2.json" if size == "v2-lite" else "zero3_moe.json",
        lora=Lora(rank=16, alpha=32, target_modules=MLA, target_parameters=experts),
        learning_rate=1e-4,
        weight_decay=0.0,
        global_batch_size=64,
    )


def long_context(size: str) -> Recipe:
    """All weights on sequences of 16,384 tokens: for documents and conversations longer than `full` takes."""
    return variants.long_context(full(size), sequence_length=16_384, global_batch_size=16 if size == "v2-lite" else 256)


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT, with model.path=RUN_FOLDER/export."""
    return variants.dpo(lora(size), learning_rate=5e-6)


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT."""
    return variants.pretrain(full(size), learning_rate=2e-5 if size == "v2-lite" else 7.3e-6)


def expert(size: str) -> Recipe:
    """All weights with each layer's experts spread over 8 GPUs, at v3 over 256 (AutoEP): sends tokens, not weights.

    Two all-to-alls per layer instead of gathering every expert. The v2-lite is predicted to fit on one node of 8 H100.
    The v3 is predicted to fit on 32 nodes of 8 B200.
    """
    return replace(full(size), deepspeed="expert_parallel.json", layout=Layout(expert=8 if size == "v2-lite" else 256))


if __name__ == "__main__":
    launch(__file__)
