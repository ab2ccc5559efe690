"""gpt_neox: EleutherAI's GPT-NeoX-20B, an English base model trained on the Pile.

    python scripts/launch.py gpt_neox lora
    python scripts/launch.py gpt_neox lora data.path=FILE learning_rate=2e-4 lora.rank=8 epochs=3

Rates of `full`: Dolly train_dolly.py (5e-6, on Pythia models of this architecture up to 12B); OpenChatKit
training/finetune_GPT-NeoXT-Chat-Base-20B.sh trains this model at 1e-6. Adapters: QLoRA (arXiv:2305.14314, 1e-4 above
13B), TRL trl/scripts/dpo.py (5e-6). `pretrain`: gpt-neox configs/20B.yml, the last rate of its pre-training (0.97e-5);
betas and weight decay are from there too.

The base model has no chat format. Queries, keys and values are one fused layer (query_key_value), so an adapter on it
adapts all three; attention and feed-forward run in parallel on the same residual.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

LICENCE = "Apache-2.0"
SIZES = {
    "20b": Model(path="EleutherAI/gpt-neox-20b", parameters=20_554_567_680, config={
        "model_type": "gpt_neox", "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576,
        "num_hidden_layers": 44, "num_attention_heads": 64, "max_position_embeddings": 2048, "hidden_act": "gelu_fast",
        "layer_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "use_parallel_residual": True, "attention_bias": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    }),
}  # fmt: skip

WITHOUT = variants.BASE_MODEL


def full(size: str) -> Recipe:
    """All weights: teaches the base model to answer, with enough GPUs to hold 16 bytes per parameter."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3.json",
        learning_rate=5e-6,
        weight_decay=0.01,
        adam_beta2=0.95,
        global_batch_size=64,
        sequence_length=2048,
        schedule=Schedule("cosine", warmup=0.03),
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; the frozen bf16 weights take 41 GB of each GPU."""
    return replace(
        full(size),
        deepspeed="zero2.json",
        lora=Lora(rank=16, alpha=32),
        learning_rate=1e-4,
        weight_decay=0.0,
    )


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT, with model.path=RUN_FOLDER/export."""
    return variants.dpo(lora(size), learning_rate=5e-6, global_batch_size=32, schedule=Schedule("cosine", warmup=0.1))


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT."""
    return variants.pretrain(full(size), learning_rate=9.7e-6)


if __name__ == "__main__":
    launch(__file__)
