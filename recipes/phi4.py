"""phi4: Microsoft's dense Phi-4 (14B) and Phi-4-mini (3.8B), both of the architecture `phi3`.

    python scripts/launch.py phi4-mini lora
    python scripts/launch.py phi4-14b qlora data.path=FILE.jsonl lora.rank=32 epochs=3  # your own data

full: 1e-5 as Phi-4-reasoning's SFT (arXiv:2504.21318) and NVIDIA-NeMo/Automodel phi_4_squad.yaml; torchtune's
phi4/14B_full.yaml takes 5e-6. mini: the same rate; axolotl's phi/phi3-ft-fsdp.yml has 3e-6, weight decay 0.1.
lora, mini: 2e-4 (axolotl phi/lora-3.5.yaml); 14b: 1e-4, the QLoRA paper's rate above 13B (arXiv:2305.14314), where
torchtune's phi4/14B_lora.yaml has 3e-4 at rank 8. dpo_lora: 5e-6 (alignment-handbook zephyr-7b-beta/dpo).
pretrain: 2e-5 as Code Llama's long-context stage (arXiv:2308.12950), betas 0.9 and 0.95 as Llama 2 (arXiv:2307.09288).

q, k and v are one matrix, gate and up another: adapters are on `qkv_proj` and `gate_up_proj`, not on `q_proj`.
mini (LongRoPE): a document over 4,096 tokens changes the rotary factors of its whole batch; train with the lengths that
you will use.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

LONG_FACTORS = """
1 1.118320672 1.250641126 1.398617824 1.564103225 1.74916897 1.956131817 2.187582649 2.446418898 2.735880826 3.059592084
3.421605075 3.826451687 4.279200023 4.785517845 5.351743533 5.984965424 6.693110555 7.485043894 8.370679318 9.36110372
10.4687158 11.70738129 13.09260651 14.64173252 16.37415215 18.31155283 20.47818807 22.90118105 25.61086418 28.64115884
32.03 32.1 32.13 32.23 32.6 32.61 32.64 32.66 32.7 32.71 32.93 32.97 33.28 33.49 33.5 44.16 47.77
"""

LICENCE = "MIT"
SIZES = {
    "14b": Model(path="microsoft/phi-4", parameters=14_659_507_200, config={
        "model_type": "phi3", "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "hidden_act": "silu",
        "max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0, "partial_rotary_factor": 1.0},
        "sliding_window": None, "tie_word_embeddings": False,
    }),
    "mini": Model(path="microsoft/Phi-4-mini-instruct", parameters=3_836_021_760, config={
        "model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "hidden_act": "silu",
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096, "short_factor": [1.0] * 48,
            "long_factor": [float(factor) for factor in LONG_FACTORS.split()],
        },
        "sliding_window": 262144, "tie_word_embeddings": True,
    }),
}  # fmt: skip

LORA_RATE = {"14b": 1e-4, "mini": 2e-4}


def full(size: str) -> Recipe:
    """All weights, ZeRO-2 or ZeRO-3: the most that fine-tuning can change; for many examples and several GPUs."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json" if size == "mini" else "zero3.json",
        learning_rate=1e-5,
        weight_decay=0.1,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=64,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer, ZeRO-2: the usual start; the frozen weights fit one 80 GB GPU."""
    return replace(
        full(size),
        deepspeed="zero2.json",
        lora=Lora(rank=16, alpha=32),
        learning_rate=LORA_RATE[size],
        weight_decay=0.0,
    )


def long_context(size: str) -> Recipe:
    """All weights on sequences of 16,384 tokens (14b, its maximum) or 32,768 (mini): for long documents."""
    length = {"14b": 16384, "mini": 32768}[size]
    # As many tokens per step as `full`.
    return variants.long_context(full(size), sequence_length=length, global_batch_size=64 * 4096 // length)


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT."""
    return variants.pretrain(full(size), learning_rate=2e-5, adam_beta2=0.95, global_batch_size=128)


if __name__ == "__main__":
    launch(__file__)
