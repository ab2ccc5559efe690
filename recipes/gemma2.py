"""gemma2: Google's Gemma 2, instruction-tuned; every other layer attends to the last 4,096 tokens only.

    python scripts/launch.py gemma2-9b lora
    python scripts/launch.py gemma2-27b qlora data.path=FILE.jsonl lora.rank=64 epochs=2  # your data

All weights: 2e-5 for 2b from torchtune (gemma2/2B_full.yaml), 1e-5 at batch 64 for 9b from NVIDIA-NeMo/Automodel
(llm_finetune/gemma/gemma_2_9b_it_squad.yaml), half of it at 27b. Adapters: rank 32, alpha 16 and 2e-4 from axolotl
(gemma2/qlora.yml), 1e-4 at 27b as in QLoRA (arXiv:2305.14314), DoRA at half the rank (arXiv:2402.09353); DPO 5e-6 from
alignment-handbook (zephyr-7b-beta/dpo/config_qlora.yaml).
Attention caps its scores, which SDPA does not support: attention is eager, and its memory grows with the square of the
length. If flash-attn is installed, add model.attention=flash_attention_2. The chat template refuses system turns.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule

SHARED = {
    "model_type": "gemma2", "vocab_size": 256000, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": True,
}  # fmt: skip

LICENCE = "Gemma"
SIZES = {
    # Eager attention, since SDPA has no soft caps.
    "2b": Model(path="google/gemma-2-2b-it", parameters=2_614_341_888, attention="eager", config={
        **SHARED, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
    }),
    "9b": Model(path="google/gemma-2-9b-it", parameters=9_241_705_984, attention="eager", config={
        **SHARED, "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256,
    }),
    "27b": Model(path="google/gemma-2-27b-it", parameters=27_227_128_320, attention="eager", config={
        **SHARED, "hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144,
    }),
}  # fmt: skip

WHOLE = ("2b",)
"""Sizes whose parameters stay whole on every GPU (ZeRO-2) when all of them are trained."""


def full(size: str) -> Recipe:
    """All weights: for plenty of data, or a task unlike those that the model was trained on."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json" if size in WHOLE else "zero3.json",
        learning_rate={"2b": 2e-5, "9b": 1e-5, "27b": 5e-6}[size],
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
        learning_rate=1e-4 if size == "27b" else 2e-4,
        global_batch_size=32,
    )


if __name__ == "__main__":
    launch(__file__)
