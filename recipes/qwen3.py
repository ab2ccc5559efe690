"""qwen3: Qwen3, Alibaba's dense decoders of April 2025, one model for answers with and without reasoning.

    python scripts/launch.py qwen3-8b lora
    python scripts/launch.py qwen3-8b lora data.path=FILE.jsonl data.validation=HELD_OUT.jsonl epochs=3  # your data

All weights: 1e-5 from NVIDIA-NeMo/Automodel (qwen3_4b_cp1_te_fusedadam.yaml; qwen3_32b_tulu3.yaml, which also has 64
sequences of 2048 for 32b), decay and beta2 from THUDM/slime (run-qwen3-4B-base-sft.sh), 2e-5 for the two smallest from
TRL's sft.py, warm-up and the rate for raw text from ms-swift (megatron/dense/qwen3_32b.sh, train/pretrain/train.sh).
Adapters: rank 32 and 2e-4 from axolotl (qwen3/8b-lora-fused-attn.yaml), 1e-4 at 32b as in QLoRA (arXiv:2305.14314),
DoRA at half the rank (arXiv:2402.09353); DPO 5e-6 from alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
The training template writes a think block into every answer. Data without reasoning teaches an empty block, so mix in
examples with reasoning if the model should keep reasoning. Up to 4b the output layer and the embedding are one weight.
`pretrain` usually starts from base weights: model.path=Qwen/Qwen3-8B-Base (there is one for each size up to 14b).
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Layout, Lora, Model, Recipe, Schedule, variants

SHARED = {
    "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "rms_norm_eps": 1e-6, "attention_bias": False,
}  # fmt: skip

LICENCE = "Apache-2.0"
SIZES = {
    "0.6b": Model(path="Qwen/Qwen3-0.6B", parameters=596_049_920, config={
        **SHARED, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    }),
    "1.7b": Model(path="Qwen/Qwen3-1.7B", parameters=1_720_574_976, config={
        **SHARED, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    }),
    "4b": Model(path="Qwen/Qwen3-4B", parameters=4_022_468_096, config={
        **SHARED, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": True,
    }),
    "8b": Model(path="Qwen/Qwen3-8B", parameters=8_190_735_360, config={
        **SHARED, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    }),
    "14b": Model(path="Qwen/Qwen3-14B", parameters=14_768_307_200, config={
        **SHARED, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
        "tie_word_embeddings": False,
    }),
    "32b": Model(path="Qwen/Qwen3-32B", parameters=32_762_123_264, config={
        **SHARED, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "tie_word_embeddings": False,
    }),
}  # fmt: skip

WHOLE = ("0.6b", "1.7b", "4b")
"""Sizes whose parameters stay whole on every GPU (ZeRO-2) when all of them are trained."""


def full(size: str) -> Recipe:
    """All weights: for plenty of data, or a task unlike those that the model was trained on."""
    return Recipe(
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


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens: for long documents and long reasoning."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=16 if size == "32b" else 8)


def tensor(size: str) -> Recipe:
    """All weights, every matrix split over the GPUs of a node: shorter steps where ZeRO-3 waits for its weights.

    The 32b is predicted to fit on 2 nodes of 8 H200.
    """
    return replace(full(size), deepspeed="zero1.json", layout=Layout(tensor=8))


def sequence(size: str) -> Recipe:
    """All weights on sequences of 40,960 tokens, an eighth on each GPU of a node: for sequences too long for one GPU.

    The 32b is predicted to fit on one node of 8 H200.
    """
    return replace(long_context(size), layout=Layout(sequence=8), sequence_length=40960)


if __name__ == "__main__":
    launch(__file__)
