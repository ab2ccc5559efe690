"""falcon_h1: TII's Falcon-H1, hybrids whose every layer has attention and a Mamba-2 mixer side by side.

    python scripts/launch.py falcon_h1-7b lora
    python scripts/launch.py falcon_h1-34b qlora data.path=FILE.jsonl lora.rank=64 epochs=2  # your data

All weights: 1e-5 at batch 64 from NVIDIA-NeMo/Automodel (llm_finetune/falcon/falcon_h1_7b_instruct_squad.yaml).
Adapters: rank 32, alpha 16 and 2e-4 from axolotl (falcon-h1/falcon-h1-7b-qlora.yaml), 1e-4 at 34b as QLoRA
(arXiv:2305.14314), DoRA at half the rank (arXiv:2402.09353); DPO 5e-6 from alignment-handbook
(zephyr-7b-beta/dpo/config_qlora.yaml).
No variant packs documents: a mixer carries its state from one document into the next. Install mamba-ssm and
causal-conv1d: without them training is slow.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

SHARED = {
    "model_type": "falcon_h1", "rms_norm_eps": 1e-05, "mamba_n_groups": 1, "mamba_d_conv": 4,
    "mamba_norm_before_gate": False, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000000000.0},
}  # fmt: skip

LICENCE = "Falcon-LLM-License"
SIZES = {
    "3b": Model(path="tiiuae/Falcon-H1-3B-Instruct", parameters=3_149_256_192, config={
        **SHARED, "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 6144, "num_hidden_layers": 32,
        "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 128, "mamba_d_ssm": 4096, "mamba_n_heads": 32,
        "mamba_d_head": 128, "mamba_d_state": 256, "mamba_chunk_size": 128, "max_position_embeddings": 131072,
    }),
    "7b": Model(path="tiiuae/Falcon-H1-7B-Instruct", parameters=7_585_648_736, config={
        **SHARED, "vocab_size": 130048, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 44,
        "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 24,
        "mamba_d_head": 128, "mamba_d_state": 256, "mamba_rms_norm": True, "mamba_chunk_size": 256,
        "max_position_embeddings": 262144,
    }),
    "34b": Model(path="tiiuae/Falcon-H1-34B-Instruct", parameters=33_642_516_224, config={
        **SHARED, "vocab_size": 261120, "hidden_size": 5120, "intermediate_size": 21504, "num_hidden_layers": 72,
        "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128, "mamba_d_ssm": 4096, "mamba_n_heads": 32,
        "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 2, "mamba_rms_norm": True, "mamba_chunk_size": 128,
        "max_position_embeddings": 262144,
    }),
}  # fmt: skip

WHOLE = ("3b",)
"""Sizes whose parameters stay whole on every GPU (ZeRO-2) when all of them are trained."""

LINEAR = f"{variants.ATTENTION},in_proj,gate_proj,up_proj,down_proj"
"""The linear layers except `out_proj`: fused Mamba kernels bypass adapters on it, so PEFT refuses them."""

WITHOUT = variants.NO_HEADS


def full(size: str) -> Recipe:
    """All weights: for plenty of data, or a task unlike those that the model was trained on."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json" if size in WHOLE else "zero3.json",
        learning_rate=1e-5,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=64,
        sequence_length=4096,
        # Mamba reads no position ids: its state would carry over from one packed document into the next.
        packing=False,
    )


def lora(size: str) -> Recipe:
    """Adapters on nearly every linear layer: try this first; little memory, and a small file to ship."""
    return replace(
        full(size),
        deepspeed="zero3_adapters.json" if size == "34b" else "zero2.json",
        lora=Lora(rank=32, alpha=16, target_modules=LINEAR),
        learning_rate=1e-4 if size == "34b" else 2e-4,
        global_batch_size=32,
    )


if __name__ == "__main__":
    launch(__file__)
