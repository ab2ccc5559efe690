"""falcon_h1: TII's Falcon-H1, hybrids whose every layer has attention and a Mamba-2 mixer side by side.

    size  layers  hidden  heads  parameters  context  licence             weights
    3b    32      2560    10     3.15B       131,072  Falcon-LLM-License  tiiuae/Falcon-H1-3B-Instruct
    7b    44      3072    12     7.59B       262,144  Falcon-LLM-License  tiiuae/Falcon-H1-7B-Instruct
    34b   72      5120    20     33.64B      262,144  Falcon-LLM-License  tiiuae/Falcon-H1-34B-Instruct

    variant       method    trains           DeepSpeed
    full          SFT       all weights      ZeRO-2 (3b), ZeRO-3
    lora          SFT       adapters         ZeRO-3 (34b), ZeRO-2
    qlora         SFT       adapters on NF4  ZeRO-2
    dora          SFT       adapters         ZeRO-3 (34b), ZeRO-2
    full_offload  SFT       all weights      ZeRO-2 (3b), ZeRO-3
    dpo_lora      DPO       adapters         ZeRO-3 (34b), ZeRO-2
    kto_lora      KTO       adapters         ZeRO-3 (34b), ZeRO-2
    orpo_lora     ORPO      adapters         ZeRO-3 (34b), ZeRO-2
    simpo_lora    SimPO     adapters         ZeRO-3 (34b), ZeRO-2
    dpo_full      DPO       all weights      ZeRO-2 (3b), ZeRO-3
    grpo          GRPO      all weights      ZeRO-2 (3b), ZeRO-3
    pretrain      raw text  all weights      ZeRO-2 (3b), ZeRO-3

    python scripts/launch.py falcon_h1-7b lora
    python scripts/launch.py falcon_h1-34b qlora data.path=FILE.jsonl lora.rank=64 epochs=2  # your data

All weights: 1e-5 at batch 64 from NVIDIA-NeMo/Automodel (llm_finetune/falcon/falcon_h1_7b_instruct_squad.yaml).
Adapters: rank 32, alpha 16 and 2e-4 from axolotl (falcon-h1/falcon-h1-7b-qlora.yaml), 1e-4 at 34b as QLoRA
(arXiv:2305.14314), DoRA at half the rank (arXiv:2402.09353); DPO 5e-6 from alignment-handbook
(zephyr-7b-beta/dpo/config_qlora.yaml).
No variant packs documents: a mixer carries its state from one into the next. Install mamba-ssm and causal-conv1d:
without them it is slow.
"""

from dataclasses import replace

from deepspeed_recipes import launch
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

SHARED = {
    "model_type": "falcon_h1",
    "rms_norm_eps": 1e-05,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_norm_before_gate": False,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100000000000.0,
    },
}

SIZES = {
    "3b": Model(
        path="tiiuae/Falcon-H1-3B-Instruct",
        parameters=3_149_256_192,
        config={
            **SHARED,
            "vocab_size": 65536,
            "hidden_size": 2560,
            "intermediate_size": 6144,
            "num_hidden_layers": 32,
            "num_attention_heads": 10,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 4096,
            "mamba_n_heads": 32,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_chunk_size": 128,
            "max_position_embeddings": 131072,
        },
    ),
    "7b": Model(
        path="tiiuae/Falcon-H1-7B-Instruct",
        parameters=7_585_648_736,
        config={
            **SHARED,
            "vocab_size": 130048,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 44,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_rms_norm": True,
            "mamba_chunk_size": 256,
            "max_position_embeddings": 262144,
        },
    ),
    "34b": Model(
        path="tiiuae/Falcon-H1-34B-Instruct",
        parameters=33_642_516_224,
        config={
            **SHARED,
            "vocab_size": 261120,
            "hidden_size": 5120,
            "intermediate_size": 21504,
            "num_hidden_layers": 72,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "mamba_d_ssm": 4096,
            "mamba_n_heads": 32,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_chunk_size": 128,
            "max_position_embeddings": 262144,
        },
    ),
}

WHOLE = ("3b",)
"""Sizes whose parameters stay whole on every GPU (ZeRO-2) when all of them are trained."""

LINEAR = f"{variants.ATTENTION},in_proj,gate_proj,up_proj,down_proj"
"""The linear layers but `out_proj`: the fused Mamba kernels pass adapters on it by, so PEFT refuses them."""


def full(size: str) -> Recipe:
    """All weights: for plenty of data, or a task far from what the model knows."""
    return Recipe(
        method="sft",
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


def qlora(size: str) -> Recipe:
    """Adapters on frozen 4-bit weights: for GPUs that cannot hold the bf16 weights; slower than `lora`."""
    return variants.qlora(lora(size))


def dora(size: str) -> Recipe:
    """Adapters that train each weight's magnitude too, at half the rank: when `lora` falls short of `full`; slower."""
    return variants.dora(lora(size))


def full_offload(size: str) -> Recipe:
    """All weights, the optimizer in host memory: when `full` does not fit the GPUs and host memory is plentiful."""
    return variants.full_offload(full(size))


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT, with model.path=RUN_FOLDER/export."""
    return variants.dpo(lora(size), learning_rate=5e-6, schedule=Schedule("cosine", warmup=0.1))


kto_lora, orpo_lora, simpo_lora = variants.feedback(lora)
dpo_full = variants.dpo_full_of(full)
grpo = variants.grpo_of(full)


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT."""
    return variants.pretrain(full(size))


if __name__ == "__main__":
    launch(__file__)
