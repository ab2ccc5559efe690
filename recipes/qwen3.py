"""qwen3: Qwen3, Alibaba's dense decoders of April 2025, one model for answers with and without reasoning.

    size  layers  hidden  heads  parameters  context  licence     weights
    0.6b  28      1024    16     596.05M     40,960   Apache-2.0  Qwen/Qwen3-0.6B
    1.7b  28      2048    16     1.72B       40,960   Apache-2.0  Qwen/Qwen3-1.7B
    4b    36      2560    32     4.02B       40,960   Apache-2.0  Qwen/Qwen3-4B
    8b    36      4096    32     8.19B       40,960   Apache-2.0  Qwen/Qwen3-8B
    14b   40      5120    40     14.77B      40,960   Apache-2.0  Qwen/Qwen3-14B
    32b   64      5120    64     32.76B      40,960   Apache-2.0  Qwen/Qwen3-32B

    variant       method    trains                 DeepSpeed                        measured peak
    full          SFT       all weights            ZeRO-2 (0.6b, 1.7b, 4b), ZeRO-3  -
    lora          SFT       adapters               ZeRO-2, ZeRO-3 (32b)             -
    qlora         SFT       adapters on NF4        ZeRO-2                           -
    dora          SFT       adapters               ZeRO-2, ZeRO-3 (32b)             -
    full_offload  SFT       all weights            ZeRO-2 (0.6b, 1.7b, 4b), ZeRO-3  -
    long_context  SFT       all weights            ZeRO-3                           -
    dpo_lora      DPO       adapters               ZeRO-2, ZeRO-3 (32b)             -
    pretrain      raw text  all weights            ZeRO-2 (0.6b, 1.7b, 4b), ZeRO-3  -
    tensor        SFT       all weights            ZeRO-1; matrices over 8 GPUs     -
    sequence      SFT       all weights            ZeRO-3; rows over 8 GPUs         -

    predicted     0.6b    1.7b    4b      8b      14b     32b      GPUs x GiB: the fewest H100 80GB that it fits on
    full          1 x 14  1 x 38  2 x 50  2 x 71  4 x 66  8 x 71
    lora          1 x 5   1 x 8   1 x 13  1 x 22  1 x 36  1 x 74
    qlora         1 x 5   1 x 6   1 x 8   1 x 12  1 x 17  1 x 27
    dora          1 x 5   1 x 8   1 x 13  1 x 22  1 x 35  1 x 72
    full_offload  1 x 5   1 x 8   1 x 12  1 x 22  1 x 36  1 x 70
    long_context  1 x 33  1 x 52  2 x 60  4 x 65  8 x 66  32 x 61
    dpo_lora      1 x 10  1 x 13  1 x 18  1 x 27  1 x 41  2 x 49
    pretrain      1 x 14  1 x 38  2 x 50  2 x 71  4 x 66  8 x 71
    tensor        8 x 8   8 x 13  8 x 20  8 x 48  8 x 71  16 x 66
    sequence      8 x 8   8 x 10  8 x 15  8 x 24  8 x 38  8 x 74

    python scripts/launch.py qwen3-8b lora
    python scripts/launch.py qwen3-8b lora data.path=FILE.jsonl data.validation=HELD_OUT.jsonl epochs=3  # your data

All weights: 1e-5 from NVIDIA-NeMo/Automodel (qwen3_4b_cp1_te_fusedadam.yaml; qwen3_32b_tulu3.yaml, which also has 64
sequences of 2048 for 32b), decay and beta2 from THUDM/slime (run-qwen3-4B-base-sft.sh), 2e-5 for the two smallest from
TRL's sft.py, warm-up and the rate for raw text from ms-swift (megatron/dense/qwen3_32b.sh, train/pretrain/train.sh).
Adapters: rank 32 and 2e-4 from axolotl (qwen3/8b-lora-fused-attn.yaml), 1e-4 at 32b as in QLoRA (arXiv:2305.14314),
DoRA at half the rank (arXiv:2402.09353); DPO 5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
The template for training writes a think block into every answer: data without reasoning teaches an empty one, so mix
in examples with reasoning where the model shall keep it. Up to 4b the output layer and the embedding are one weight.
"""

from dataclasses import replace

from recipes.spec.recipe import Layout, Lora, Model, Recipe, Schedule
from recipes.spec.samples import CHAT, PREFERENCES, TEXT

SHARED = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}

SIZES = {
    "0.6b": Model(
        path="Qwen/Qwen3-0.6B",
        parameters=596_049_920,
        config={
            **SHARED,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "1.7b": Model(
        path="Qwen/Qwen3-1.7B",
        parameters=1_720_574_976,
        config={
            **SHARED,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "4b": Model(
        path="Qwen/Qwen3-4B",
        parameters=4_022_468_096,
        config={
            **SHARED,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": True,
        },
    ),
    "8b": Model(
        path="Qwen/Qwen3-8B",
        parameters=8_190_735_360,
        config={
            **SHARED,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
    ),
    "14b": Model(
        path="Qwen/Qwen3-14B",
        parameters=14_768_307_200,
        config={
            **SHARED,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "tie_word_embeddings": False,
        },
    ),
    "32b": Model(
        path="Qwen/Qwen3-32B",
        parameters=32_762_123_264,
        config={
            **SHARED,
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "tie_word_embeddings": False,
        },
    ),
}

WHOLE = ("0.6b", "1.7b", "4b")
"""Sizes whose parameters stay whole on every GPU (ZeRO-2) when all of them are trained."""


def full(size: str) -> Recipe:
    """SFT of all weights, the place to start with much data or a task far from what the model knows."""
    return Recipe(
        family="qwen3",
        size=size,
        variant="full",
        method="sft",
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json" if size in WHOLE else "zero3.json",
        learning_rate=2e-5 if size in ("0.6b", "1.7b") else 1e-5,
        weight_decay=0.1,
        adam_beta2=0.95,
        schedule=Schedule("cosine", warmup=0.05),
        global_batch_size=64,
        micro_batch_size=1,
        sequence_length=2048 if size == "32b" else 4096,
    )


def lora(size: str) -> Recipe:
    """SFT of adapters on every linear layer: a fraction of the memory, and a small file per task."""
    return replace(
        full(size),
        variant="lora",
        deepspeed="zero3_adapters.json" if size == "32b" else "zero2.json",
        lora=Lora(rank=32, alpha=64),
        learning_rate=1e-4 if size == "32b" else 2e-4,
        weight_decay=0.0,
        global_batch_size=32,
    )


def qlora(size: str) -> Recipe:
    """As lora on weights in 4 bits: for the largest model that a GPU can hold; slower per step."""
    return replace(
        lora(size),
        variant="qlora",
        model=replace(SIZES[size], quantization="nf4"),
        deepspeed="zero2.json",
    )


def dora(size: str) -> Recipe:
    """As lora with the weights' magnitudes trained too, at half the rank: when lora stays behind full; slower."""
    return replace(lora(size), variant="dora", lora=Lora(rank=16, alpha=32, dora=True))


def full_offload(size: str) -> Recipe:
    """As full with the optimizer's states and step in host memory: when the GPUs are few or small."""
    return replace(
        full(size),
        variant="full_offload",
        deepspeed="zero2_offload.json" if size in WHOLE else "zero3_offload.json",
    )


def long_context(size: str) -> Recipe:
    """SFT of all weights on rows of 32,768 tokens: for long documents and long reasoning."""
    return replace(
        full(size),
        variant="long_context",
        tiled_loss=True,
        deepspeed="zero3.json",
        sequence_length=32768,
        global_batch_size=16 if size == "32b" else 8,
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

    Usually from base weights: model.path=Qwen/Qwen3-8B-Base (there are such up to 14b).
    """
    return replace(
        full(size),
        variant="pretrain",
        method="pretrain",
        data=TEXT,
    )


def tensor(size: str) -> Recipe:
    """SFT of all weights, every matrix over the GPUs of a node: short steps, where ZeRO-3 waits for its weights.

    The 32b on 2 nodes of 8 H100 80GB: 4.1B parameters per GPU at 4 + 12/2 bytes (ZeRO-1 over 2 copies) are 41 GB.
    """
    return replace(full(size), variant="tensor", deepspeed="zero1.json", layout=Layout(tensor=8))


def sequence(size: str) -> Recipe:
    """SFT of all weights on rows of 40,960 tokens, each GPU of a node with an eighth of them.

    The 32b on one node of 8 H200: 32.8B parameters at 16/8 bytes are 66 GB, and 5,120 tokens of activations.
    """
    return replace(long_context(size), variant="sequence", layout=Layout(sequence=8), sequence_length=40960)
