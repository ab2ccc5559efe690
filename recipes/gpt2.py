"""gpt2: OpenAI's GPT-2, small to XL: old, small and open, and therefore good for learning fine-tuning.

    python scripts/launch.py gpt2-124m full
    python scripts/launch.py gpt2-124m full data.path=FILE learning_rate=3e-5 epochs=3     # change anything

A course in seven runs (1 and 2 on two or more GPUs). Before each, guess its effect on memory, speed and loss.

    python scripts/launch.py gpt2-124m full deepspeed=zero0.json          # 1. plain data parallelism
    python scripts/launch.py gpt2-124m full deepspeed=zero3.json          # 2. everything sharded: the same loss
    python scripts/launch.py gpt2-124m full gradient_checkpointing=false  # 3. activations kept, not recomputed
    python scripts/launch.py gpt2-124m full learning_rate=5e-3            # 4. a hundred times the rate
    python scripts/launch.py gpt2-124m lora                               # 5. adapters: 2 % of the weights train
    python scripts/launch.py gpt2-1.5b full_offload                       # 6. 12.5 times the size, optimizer on the CPU
    python scripts/launch.py gpt2-124m dpo_lora model.path=RUN_FOLDER/export  # 7. preferences, after run 1

Memory. Adam in mixed precision holds 16 bytes per trained weight: 2 for it and 2 for its gradient in bf16, 12 for an
fp32 copy and two moments in fp32. That is 1.99 GB for 124m and 24.92 GB for 1.5b, before activations. Over n GPUs
ZeRO-1 shards the 12, ZeRO-2 the gradient's 2 as well, ZeRO-3 all 16 (configs/README.md): for 1.5b on eight GPUs
5.84 GB each with ZeRO-2, 3.12 GB with ZeRO-3. A frozen weight costs 2 bytes: `lora` on 124m trains 2.36M weights, and
holds 0.29 GB. Activations grow with micro_batch_size x sequence_length; recomputing them trades time for memory.

The learning rate matters most: adapters need several times the rate of full training, DPO far less, and large models
less than small ones. The batch is global_batch_size x sequence_length tokens per step, on one GPU as on eight: if it
does not fit at once, gradients are accumulated. Packing fills every sequence with several short documents that never
attend to each other; the position ids, which restart at each document, keep them apart.

Rates: `full` is the Trainer's default (5e-5, linear) for 124m and 355m, and nanoGPT config/finetune_shakespeare.py
(3e-5, 32 sequences of 1,024 tokens) for the larger two; `pretrain` is nanoGPT's throughout, constant, with train.py's
beta2 0.95 and weight decay 0.1. Adapters: the LoRA paper's GPT-2 (arXiv:2106.09685, microsoft/LoRA examples/NLG: 2e-4,
alpha 32, linear, weight decay 0.01; rank 4 on attention only); TRL trl/scripts/dpo.py (5e-6).

A base model without a chat format: it continues text until `full` teaches it to answer. Positions are a learned table
of 1,024 entries, so no sequence can be longer. Linear layers are Conv1D modules (transposed weights), which PEFT
supports. Dropout (0.1) is on during training.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

# Hugging Face's config.json calls these n_embd, n_layer, n_head and n_positions; transformers takes both names.
COMMON = {
    "model_type": "gpt2", "vocab_size": 50257, "max_position_embeddings": 1024, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "tie_word_embeddings": True,
}  # fmt: skip

LICENCE = "MIT"
SIZES = {
    "124m": Model(path="openai-community/gpt2", parameters=124_439_808, config=COMMON | {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    }),
    "355m": Model(path="openai-community/gpt2-medium", parameters=354_823_168, config=COMMON | {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    }),
    "774m": Model(path="openai-community/gpt2-large", parameters=774_030_080, config=COMMON | {
        "hidden_size": 1280, "num_hidden_layers": 36, "num_attention_heads": 20,
    }),
    "1.5b": Model(path="openai-community/gpt2-xl", parameters=1_557_611_200, config=COMMON | {
        "hidden_size": 1600, "num_hidden_layers": 48, "num_attention_heads": 25,
    }),
}  # fmt: skip

WITHOUT = variants.BASE_MODEL | {
    "qlora": "its linear layers are Conv1D modules, which bitsandbytes does not pack in 4 bits; take lora"
}


def full(size: str) -> Recipe:
    """All weights: teaches the base model to answer. The place to start."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json",
        learning_rate=5e-5 if size in ("124m", "355m") else 3e-5,
        weight_decay=0.01,
        global_batch_size=32,
        micro_batch_size=2,
        sequence_length=1024,
        schedule=Schedule("linear", warmup=0.03),
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: the same task with 1 to 2 % of the trained weights."""
    return replace(full(size), lora=Lora(rank=16, alpha=32), learning_rate=2e-4)


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT, with model.path=RUN_FOLDER/export."""
    return variants.dpo(lora(size), learning_rate=5e-6, schedule=Schedule("linear", warmup=0.1))


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: a new domain or style; what GPT-2 was made for."""
    return variants.pretrain(
        full(size), learning_rate=3e-5, weight_decay=0.1, adam_beta2=0.95, schedule=Schedule("constant")
    )


if __name__ == "__main__":
    launch(__file__)
