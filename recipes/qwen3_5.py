"""qwen3_5: the language models of Qwen3.5, dense, three layers of linear attention for one of full attention.

    size  layers  hidden  heads  parameters  context  licence     weights
    0.8b  24      1024    8      752.39M     262,144  Apache-2.0  Qwen/Qwen3.5-0.8B
    2b    24      2048    8      1.88B       262,144  Apache-2.0  Qwen/Qwen3.5-2B
    4b    32      2560    16     4.21B       262,144  Apache-2.0  Qwen/Qwen3.5-4B
    9b    32      4096    16     8.95B       262,144  Apache-2.0  Qwen/Qwen3.5-9B
    27b   64      5120    24     26.90B      262,144  Apache-2.0  Qwen/Qwen3.5-27B

    variant       method    trains                 DeepSpeed                      measured peak
    full          SFT       all weights            ZeRO-2 (0.8b, 2b, 4b), ZeRO-3  -
    lora          SFT       adapters               ZeRO-2                         -
    qlora         SFT       adapters on NF4        ZeRO-2                         -
    dora          SFT       adapters               ZeRO-2                         -
    full_offload  SFT       all weights            ZeRO-2 (0.8b, 2b, 4b), ZeRO-3  -
    long_context  SFT       all weights            ZeRO-3                         -
    dpo_lora      DPO       adapters               ZeRO-2                         -
    pretrain      raw text  all weights            ZeRO-2 (0.8b, 2b, 4b), ZeRO-3  -

    predicted     0.8b    2b      4b      9b      27b      GPUs x GiB: the fewest H100 80GB that it fits on
    full          1 x 17  1 x 42  2 x 52  4 x 45  8 x 64
    lora          1 x 7   1 x 10  1 x 15  1 x 25  1 x 62
    qlora         1 x 6   1 x 8   1 x 10  1 x 15  1 x 27
    dora          1 x 7   1 x 10  1 x 14  1 x 24  1 x 62
    full_offload  1 x 7   1 x 9   1 x 14  1 x 26  1 x 63
    long_context  1 x 47  1 x 67  2 x 74  8 x 62  32 x 71
    dpo_lora      1 x 15  1 x 18  1 x 23  1 x 32  1 x 70
    pretrain      1 x 17  1 x 42  2 x 52  4 x 45  8 x 64

    python scripts/launch.py qwen3_5-9b lora
    python scripts/launch.py qwen3_5-9b lora data.path=FILE.jsonl data.validation=HELD_OUT.jsonl epochs=3  # your data
    python scripts/launch.py qwen3_5-27b lora model.path=Qwen/Qwen3.8-27B  # and Qwen3.6-27B: the same dimensions

All weights: 1e-5, decay and beta2 from NVIDIA-NeMo/Automodel (qwen3_5_4b.yaml, qwen3_5_9b.yaml, qwen3_8_27b.yaml),
2e-5 for the two smallest from TRL's sft.py, raw text at the same rate as in ms-swift (train/pretrain/train.sh).
Adapters: rank 16, alpha 32 and 2e-4 from axolotl (qwen3.5/27b-qlora.yaml), 1e-4 at 27b from Automodel
(qwen3_8_27b_lora.yaml), warm-up from ms-swift (Qwen3_8-Best-Practice.md), DoRA at half the rank (arXiv:2402.09353);
DPO 5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
The checkpoints hold a vision tower and a layer that predicts a second token too: neither is loaded, counted or
exported. No variant packs documents. Install flash-linear-attention and causal-conv1d: without them it is slow.
"""

from dataclasses import replace

from recipes.spec.recipe import Lora, Model, Recipe, Schedule
from recipes.spec.samples import CHAT, PREFERENCES, TEXT

SHARED = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}

SIZES = {
    "0.8b": Model(
        path="Qwen/Qwen3.5-0.8B",
        parameters=752_393_024,
        config={
            **SHARED,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "2b": Model(
        path="Qwen/Qwen3.5-2B",
        parameters=1_881_825_088,
        config={
            **SHARED,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "4b": Model(
        path="Qwen/Qwen3.5-4B",
        parameters=4_205_751_296,
        config={
            **SHARED,
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 32,
            "tie_word_embeddings": True,
        },
    ),
    "9b": Model(
        path="Qwen/Qwen3.5-9B",
        parameters=8_953_803_264,
        config={
            **SHARED,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 32,
            "tie_word_embeddings": False,
        },
    ),
    "27b": Model(
        path="Qwen/Qwen3.5-27B",
        parameters=26_895_998_464,
        config={
            **SHARED,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
            "tie_word_embeddings": False,
        },
    ),
}

WHOLE = ("0.8b", "2b", "4b")
"""Sizes whose parameters stay whole on every GPU (ZeRO-2) when all of them are trained."""


def full(size: str) -> Recipe:
    """SFT of all weights, the place to start with much data or a task far from what the model knows."""
    return Recipe(
        family="qwen3_5",
        size=size,
        variant="full",
        method="sft",
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json" if size in WHOLE else "zero3.json",
        learning_rate=2e-5 if size in ("0.8b", "2b") else 1e-5,
        weight_decay=0.1,
        adam_beta2=0.95,
        schedule=Schedule("cosine", warmup=0.05),
        global_batch_size=64,
        micro_batch_size=1,
        sequence_length=4096,
        # Linear attention reads no position ids, so its state would run on from one packed document into the next.
        packing=False,
    )


def lora(size: str) -> Recipe:
    """SFT of adapters on every linear layer: a fraction of the memory, and a small file per task."""
    return replace(
        full(size),
        variant="lora",
        deepspeed="zero2.json",
        lora=Lora(rank=16, alpha=32),
        learning_rate=1e-4 if size == "27b" else 2e-4,
        weight_decay=0.0,
        global_batch_size=32,
    )


def qlora(size: str) -> Recipe:
    """As lora on weights in 4 bits: for the largest model that a GPU can hold; slower per step."""
    return replace(lora(size), variant="qlora", model=replace(SIZES[size], quantization="nf4"))


def dora(size: str) -> Recipe:
    """As lora with the weights' magnitudes trained too, at half the rank: when lora stays behind full; slower."""
    return replace(lora(size), variant="dora", lora=Lora(rank=8, alpha=16, dora=True))


def full_offload(size: str) -> Recipe:
    """As full with the optimizer's states and step in host memory: when the GPUs are few or small."""
    return replace(
        full(size),
        variant="full_offload",
        deepspeed="zero2_offload.json" if size in WHOLE else "zero3_offload.json",
    )


def long_context(size: str) -> Recipe:
    """SFT of all weights on conversations of up to 32,768 tokens: for long documents and long reasoning."""
    return replace(
        full(size),
        variant="long_context",
        tiled_loss=True,
        deepspeed="zero3.json",
        sequence_length=32768,
        global_batch_size=8,
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

    Usually from base weights: model.path=Qwen/Qwen3.5-9B-Base (there are such up to 9b).
    """
    return replace(
        full(size),
        variant="pretrain",
        method="pretrain",
        data=TEXT,
    )
