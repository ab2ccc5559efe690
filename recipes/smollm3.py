"""smollm3: Hugging Face's SmolLM3, 3B, with and without reasoning.

    python scripts/launch.py smollm3 full
    python scripts/launch.py smollm3 full data.path=FILE learning_rate=1e-5 epochs=2 global_batch_size=64

Rates of `full`: alignment-handbook recipes/smollm3/sft/sft.yaml (2e-5, cosine, 3 % warm-up, clipped at 0.2).
Adapters: TRL trl/scripts/sft.py (rank 32, alpha 16, 2e-4) and dpo.py (5e-6); QLoRA (arXiv:2305.14314, 2e-4).
`long_context` and `pretrain`: smollm text/pretraining/smollm3/long_context_4k_to_32k.yaml (2e-5, weight decay 0.1).

The chat template begins with a system block with today's date and a reasoning mode. For answers without reasoning, put
/no_think in the system message: the template then puts an empty think block before them.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

LICENCE = "Apache-2.0"
SIZES = {
    "3b": Model(path="HuggingFaceTB/SmolLM3-3B", parameters=3_075_098_624, config={
        "model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0},
        "no_rope_layer_interval": 4, "use_sliding_window": False, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": True, "eos_token_id": 128012, "pad_token_id": 128004,
    }),
}  # fmt: skip


def full(size: str) -> Recipe:
    """All weights: for new behaviour and large data sets; 16 bytes per parameter over the GPUs."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json",
        learning_rate=2e-5,
        max_grad_norm=0.2,
        global_batch_size=32,
        sequence_length=8192,
        schedule=Schedule("cosine", warmup=0.03),
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(full(size), lora=Lora(rank=32, alpha=16), learning_rate=2e-4)


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens: for long documents, conversations and reasoning."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=8)


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT.

    From the base model: add model.path=HuggingFaceTB/SmolLM3-3B-Base.
    """
    return variants.pretrain(full(size), weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0)


if __name__ == "__main__":
    launch(__file__)
