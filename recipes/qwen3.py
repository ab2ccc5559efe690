"""qwen3: Qwen3, Alibaba's dense decoders of April 2025, one model for answers with and without reasoning.

    size  layers  hidden  heads  parameters  context  licence     weights
    0.6b  28      1024    16     596.05M     40,960   Apache-2.0  Qwen/Qwen3-0.6B
    1.7b  28      2048    16     1.72B       40,960   Apache-2.0  Qwen/Qwen3-1.7B
    4b    36      2560    32     4.02B       40,960   Apache-2.0  Qwen/Qwen3-4B
    8b    36      4096    32     8.19B       40,960   Apache-2.0  Qwen/Qwen3-8B
    14b   40      5120    40     14.77B      40,960   Apache-2.0  Qwen/Qwen3-14B
    32b   64      5120    64     32.76B      40,960   Apache-2.0  Qwen/Qwen3-32B

    variant       method    trains                 DeepSpeed
    full          SFT       all weights            ZeRO-2 (0.6b, 1.7b, 4b), ZeRO-3
    lora          SFT       adapters               ZeRO-2, ZeRO-3 (32b)
    qlora         SFT       adapters on NF4        ZeRO-2
    dora          SFT       adapters               ZeRO-2, ZeRO-3 (32b)
    full_offload  SFT       all weights            ZeRO-2 (0.6b, 1.7b, 4b), ZeRO-3
    long_context  SFT       all weights            ZeRO-3
    dpo_lora      DPO       adapters               ZeRO-2, ZeRO-3 (32b)
    kto_lora      KTO       adapters               ZeRO-2, ZeRO-3 (32b)
    orpo_lora     ORPO      adapters               ZeRO-2, ZeRO-3 (32b)
    simpo_lora    SimPO     adapters               ZeRO-2, ZeRO-3 (32b)
    dpo_full      DPO       all weights            ZeRO-2 (0.6b, 1.7b, 4b), ZeRO-3
    reward        reward    all weights            ZeRO-2 (0.6b, 1.7b, 4b), ZeRO-3
    classify      classes   all weights            ZeRO-2 (0.6b, 1.7b, 4b), ZeRO-3
    embed         pairs     all weights            ZeRO-2 (0.6b, 1.7b, 4b), ZeRO-3
    grpo          GRPO      all weights            ZeRO-2 (0.6b, 1.7b, 4b), ZeRO-3
    pretrain      raw text  all weights            ZeRO-2 (0.6b, 1.7b, 4b), ZeRO-3
    tensor        SFT       all weights            ZeRO-1; matrices over 8 GPUs
    sequence      SFT       all weights            ZeRO-3; sequences over 8 GPUs

    python scripts/launch.py qwen3-8b lora
    python scripts/launch.py qwen3-8b lora data.path=FILE.jsonl data.validation=HELD_OUT.jsonl epochs=3  # your data

All weights: 1e-5 from NVIDIA-NeMo/Automodel (qwen3_4b_cp1_te_fusedadam.yaml; qwen3_32b_tulu3.yaml, which also has 64
sequences of 2048 for 32b), decay and beta2 from THUDM/slime (run-qwen3-4B-base-sft.sh), 2e-5 for the two smallest from
TRL's sft.py, warm-up and the rate for raw text from ms-swift (megatron/dense/qwen3_32b.sh, train/pretrain/train.sh).
Adapters: rank 32 and 2e-4 from axolotl (qwen3/8b-lora-fused-attn.yaml), 1e-4 at 32b as in QLoRA (arXiv:2305.14314),
DoRA at half the rank (arXiv:2402.09353); DPO 5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
The template for training writes a think block into every answer: data without reasoning teaches an empty one, so mix
in examples with reasoning if the model should keep it. Up to 4b the output layer and the embedding are one weight.
"""

from dataclasses import replace

from deepspeed_recipes import launch
from deepspeed_recipes.recipe import CHAT, Layout, Lora, Model, Recipe, Schedule, variants

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
    """All weights: for plenty of data, or a task far from what the model knows."""
    return Recipe(
        method="sft",
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json" if size in WHOLE else "zero3.json",
        learning_rate=2e-5 if size in ("0.6b", "1.7b") else 1e-5,
        weight_decay=0.1,
        adam_beta2=0.95,
        schedule=Schedule("cosine", warmup=0.05),
        global_batch_size=64,
        sequence_length=2048 if size == "32b" else 4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(
        full(size),
        deepspeed="zero3_adapters.json" if size == "32b" else "zero2.json",
        lora=Lora(rank=32, alpha=64),
        learning_rate=1e-4 if size == "32b" else 2e-4,
        weight_decay=0.0,
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
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=16 if size == "32b" else 8)


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT, with model.path=RUN_FOLDER/export."""
    return variants.dpo(lora(size), learning_rate=5e-6, schedule=Schedule("cosine", warmup=0.1))


kto_lora, orpo_lora, simpo_lora = variants.feedback(lora)
dpo_full = variants.dpo_full_of(full)
reward, classify, embed = variants.heads(full)
grpo = variants.grpo_of(full)


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT.

    Usually from base weights: model.path=Qwen/Qwen3-8B-Base (there is one for each size up to 14b).
    """
    return variants.pretrain(full(size))


def tensor(size: str) -> Recipe:
    """All weights, every matrix split over the GPUs of a node: shorter steps where ZeRO-3 waits for its weights.

    The 32b on 2 nodes of 8 H100 80GB: 4.1B parameters per GPU at 4 + 12/2 bytes (ZeRO-1 over 2 copies) are 41 GB.
    """
    return replace(full(size), deepspeed="zero1.json", layout=Layout(tensor=8))


def sequence(size: str) -> Recipe:
    """All weights on sequences of 40,960 tokens, an eighth on each GPU of a node: for what no GPU holds alone.

    The 32b on one node of 8 H200: 32.8B parameters at 16/8 bytes are 66 GB, and 5,120 tokens of activations.
    """
    return replace(long_context(size), layout=Layout(sequence=8), sequence_length=40960)


if __name__ == "__main__":
    launch(__file__)
