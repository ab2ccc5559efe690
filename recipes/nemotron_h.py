"""nemotron_h: NVIDIA's Nemotron 3 Nano, a hybrid of Mamba-2 layers, mixtures of experts and six layers of attention.

    python scripts/launch.py nemotron_h-30b-a3b lora
    python scripts/launch.py nemotron_h-30b-a3b lora data.path=FILE.jsonl data.validation=HELD_OUT.jsonl

All weights: 1e-5 from NVIDIA-NeMo/Automodel (llm_finetune/nemotron/nemotron_nano_v3_hellaswag.yaml). Adapters: rank 16,
alpha 32 and 2e-4 from axolotl (nemotron-h/nano-30b-a3b-qlora.yaml); DPO 5e-6 from alignment-handbook
(zephyr-7b-beta/dpo/config_qlora.yaml).
No variant packs documents: a Mamba layer carries its state from one document into the next. Install mamba-ssm and
causal-conv1d: without them training is slow. DeepSpeed's AutoEP cannot distribute the experts, which lack a gate.
The licence's full name is NVIDIA Nemotron Open Model License (`nvidia-nemotron-open-model-license` on the Hub).
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
"""The kinds of the layers, one letter each, as the Hub's configuration writes them."""

LICENCE = "Nemotron-Open"
SIZES = {
    "30b-a3b": Model(path="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", parameters=31_577_940_288, config={
        "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856,
        "layer_types": [KINDS[letter] for letter in PATTERN], "num_hidden_layers": 52, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128,
        "n_groups": 8, "conv_kernel": 4, "chunk_size": 128, "n_routed_experts": 128, "num_experts_per_tok": 6,
        "n_shared_experts": 1, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "max_position_embeddings": 262144,
        "layer_norm_epsilon": 1e-05, "tie_word_embeddings": False,
    }),
}  # fmt: skip

WITHOUT = variants.NO_HEADS


def full(size: str) -> Recipe:
    """All weights, routers included: for plenty of data; the model states are 505 GB."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3_moe.json",
        learning_rate=1e-5,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=64,
        sequence_length=4096,
        # Mamba reads no position ids: its state would carry over from one packed document into the next.
        packing=False,
    )


def lora(size: str) -> Recipe:
    """Adapters on attention and on the inputs of the Mamba-2 layers: try this first; the experts stay frozen."""
    return replace(
        full(size),
        lora=Lora(rank=16, alpha=32, target_modules=f"{variants.ATTENTION},in_proj"),
        learning_rate=2e-4,
        global_batch_size=32,
    )


if __name__ == "__main__":
    launch(__file__)
