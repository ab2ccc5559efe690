"""lfm2: Liquid AI's LFM2, small hybrids for devices: most layers are short convolutions, the others attention.

    size  layers  hidden  heads  parameters  context  licence  weights
    350m  16      1024    16     354.48M     128,000  LFM1.0   LiquidAI/LFM2-350M
    700m  16      1536    24     742.49M     128,000  LFM1.0   LiquidAI/LFM2-700M
    1.2b  16      2048    32     1.17B       128,000  LFM1.0   LiquidAI/LFM2-1.2B
    2.6b  30      2048    32     2.57B       128,000  LFM1.0   LiquidAI/LFM2-2.6B

    variant       method    trains           DeepSpeed
    full          SFT       all weights      ZeRO-2
    lora          SFT       adapters         ZeRO-2
    qlora         SFT       adapters on NF4  ZeRO-2
    dora          SFT       adapters         ZeRO-2
    full_offload  SFT       all weights      ZeRO-2
    long_context  SFT       all weights      ZeRO-3
    dpo_lora      DPO       adapters         ZeRO-2
    kto_lora      KTO       adapters         ZeRO-2
    orpo_lora     ORPO      adapters         ZeRO-2
    simpo_lora    SimPO     adapters         ZeRO-2
    dpo_full      DPO       all weights      ZeRO-2
    grpo          GRPO      all weights      ZeRO-2
    pretrain      raw text  all weights      ZeRO-2

    python scripts/launch.py lfm2-1.2b lora
    python scripts/launch.py lfm2-1.2b lora model.path=LiquidAI/LFM2.5-1.2B-Instruct data.path=FILE.jsonl epochs=2

All weights: 5e-5, batch and warm-up from axolotl (LiquidAI/lfm2-350m-fft.yaml). Adapters: rank 32 and alpha 16 from
axolotl (LiquidAI/lfm2-8b-a1b-lora.yaml), 2e-4 as QLoRA at this size (arXiv:2305.14314), DoRA at half the rank
(arXiv:2402.09353); DPO 5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
No variant packs documents: convolutions read the two tokens before each, across the border of two documents.
"""

from dataclasses import replace

from deepspeed_recipes import launch
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

SMALL = [("full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv") for layer in range(16)]
LARGE = [("full_attention" if layer in (2, 5, 9, 13, 17, 21, 24, 27) else "conv") for layer in range(30)]
"""The kinds of the layers of 350m to 1.2b, and of 2.6b."""

SHARED = {
    "model_type": "lfm2",
    "vocab_size": 65536,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "conv_L_cache": 3,
    "conv_bias": False,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000.0,
    },
}

SIZES = {
    "350m": Model(
        path="LiquidAI/LFM2-350M",
        parameters=354_483_968,
        config={
            **SHARED,
            "hidden_size": 1024,
            "intermediate_size": 6656,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "layer_types": SMALL,
        },
    ),
    "700m": Model(
        path="LiquidAI/LFM2-700M",
        parameters=742_489_344,
        config={
            **SHARED,
            "hidden_size": 1536,
            "intermediate_size": 10240,
            "num_hidden_layers": 16,
            "num_attention_heads": 24,
            "layer_types": SMALL,
        },
    ),
    "1.2b": Model(
        path="LiquidAI/LFM2-1.2B",
        parameters=1_170_340_608,
        config={
            **SHARED,
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "layer_types": SMALL,
        },
    ),
    "2.6b": Model(
        path="LiquidAI/LFM2-2.6B",
        parameters=2_569_272_320,
        config={
            **SHARED,
            "hidden_size": 2048,
            "intermediate_size": 10752,
            "block_auto_adjust_ff_dim": False,
            "num_hidden_layers": 30,
            "num_attention_heads": 32,
            "layer_types": LARGE,
        },
    ),
}


def full(size: str) -> Recipe:
    """All weights: for plenty of data, or a task far from what the model knows."""
    return Recipe(
        method="sft",
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json",
        learning_rate=5e-5,
        schedule=Schedule("cosine", warmup=0.1),
        global_batch_size=32,
        sequence_length=4096,
        # Convolutions read the tokens before, whichever document they belong to.
        packing=False,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(
        full(size),
        deepspeed="zero2.json",
        lora=Lora(rank=32, alpha=16),
        learning_rate=2e-4,
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
    """All weights on sequences of 32,768 tokens: for long documents and conversations with tools."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=16)


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
