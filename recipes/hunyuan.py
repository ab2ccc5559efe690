"""hunyuan: Tencent's dense Hunyuan models, 1.8B to 7B, which think slowly or answer at once.

    size  layers  hidden  heads  parameters  context  licence          weights
    1.8b  32      2048    16     1.79B       262,144  Tencent-Hunyuan  tencent/Hunyuan-1.8B-Instruct
    4b    36      3072    32     4.22B       262,144  Tencent-Hunyuan  tencent/Hunyuan-4B-Instruct
    7b    32      4096    32     7.50B       262,144  Tencent-Hunyuan  tencent/Hunyuan-7B-Instruct

    variant       method    trains           DeepSpeed
    full          SFT       all weights      ZeRO-2 (1.8b, 4b), ZeRO-3
    lora          SFT       adapters         ZeRO-2
    qlora         SFT       adapters on NF4  ZeRO-2
    dora          SFT       adapters         ZeRO-2
    full_offload  SFT       all weights      ZeRO-2 (1.8b, 4b), ZeRO-3
    long_context  SFT       all weights      ZeRO-3
    dpo_lora      DPO       adapters         ZeRO-2
    kto_lora      KTO       adapters         ZeRO-2
    orpo_lora     ORPO      adapters         ZeRO-2
    simpo_lora    SimPO     adapters         ZeRO-2
    dpo_full      DPO       all weights      ZeRO-2 (1.8b, 4b), ZeRO-3
    reward        reward    all weights      ZeRO-2 (1.8b, 4b), ZeRO-3
    classify      classes   all weights      ZeRO-2 (1.8b, 4b), ZeRO-3
    embed         pairs     all weights      ZeRO-2 (1.8b, 4b), ZeRO-3
    grpo          GRPO      all weights      ZeRO-2 (1.8b, 4b), ZeRO-3
    pretrain      raw text  all weights      ZeRO-2 (1.8b, 4b), ZeRO-3

    python scripts/launch.py hunyuan-7b lora
    python scripts/launch.py hunyuan-4b qlora data.path=FILE.jsonl lora.rank=64 epochs=2  # your data

All weights: 1e-5 as NVIDIA-NeMo/Automodel takes for Tencent's Hy-MT2 (llm_finetune/hy_mt2/hy_mt2_30b_a3b_sft.yaml).
Adapters: rank 32, alpha 16 and 2e-4 from axolotl (hunyuan/hunyuan-v1-dense-qlora.yaml), DoRA at half the rank
(arXiv:2402.09353); DPO 5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
Its answers are `<think>...</think><answer>...</answer>`, with an empty think block where the prompt starts with
`/no_think`: write your examples' answers like that. The licence excludes the EU, the UK and South Korea.
"""

from dataclasses import replace

from deepspeed_recipes import launch
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

SHARED = {
    "model_type": "hunyuan_v1_dense",
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-05,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "alpha": 1000.0,
        "factor": 1.0,
    },
}

SIZES = {
    "1.8b": Model(
        path="tencent/Hunyuan-1.8B-Instruct",
        parameters=1_791_080_448,
        config={
            **SHARED,
            "vocab_size": 120818,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
    ),
    "4b": Model(
        path="tencent/Hunyuan-4B-Instruct",
        parameters=4_221_757_440,
        config={
            **SHARED,
            "vocab_size": 120818,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "7b": Model(
        path="tencent/Hunyuan-7B-Instruct",
        parameters=7_504_568_320,
        config={
            **SHARED,
            "vocab_size": 128167,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
}

WHOLE = ("1.8b", "4b")
"""Sizes whose parameters stay whole on every GPU (ZeRO-2) when all of them are trained."""


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
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(
        full(size),
        deepspeed="zero2.json",
        lora=Lora(rank=32, alpha=16),
        learning_rate=2e-4,
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


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens: for long documents and long reasoning."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=16)


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT, with model.path=RUN_FOLDER/export."""
    return variants.dpo(lora(size), learning_rate=5e-6, schedule=Schedule("cosine", warmup=0.1))


kto_lora, orpo_lora, simpo_lora = variants.feedback(lora)
dpo_full = variants.dpo_full_of(full)
reward, classify, embed = variants.heads(full)
grpo = variants.grpo_of(full)


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT.

    Usually from base weights: model.path=tencent/Hunyuan-7B-Pretrain.
    """
    return variants.pretrain(full(size))


if __name__ == "__main__":
    launch(__file__)
