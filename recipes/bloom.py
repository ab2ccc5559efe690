"""bloom: BigScience's BLOOM, base models of 46 languages and 13 programming languages, 560M to 176B.

    python scripts/launch.py bloom-560m full
    python scripts/launch.py bloom-7b1 lora data.path=FILE model.path=bigscience/bloomz-7b1 epochs=3

Rates: `full` as BLOOMZ was trained, bigscience-workshop/bigscience train/tr13-mtf/*xp3capmixnewcodelonglossseq.slurm
(2e-5 for every size, constant, beta2 0.95, weight decay 1e-4; the warm-up is ours). Adapters: QLoRA (arXiv:2305.14314,
2e-4 up to 13B, 1e-4 above), TRL trl/scripts/dpo.py (5e-6). `pretrain`: the last rate of each pre-training, train/
tr11-176B-ml/tr11-176B-ml.slurm (6e-6) and smaller_models/*.slurm there (1e-5).

Positions are ALiBi biases, trained on 2,048 tokens, and transformers has BLOOM with eager attention only; packed
documents would attend to each other, so nothing is packed. The logits of 2,048 tokens are 2 GB in fp32.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Layout, Lora, Model, Recipe, Schedule, variants

COMMON = {
    "model_type": "bloom", "vocab_size": 250880, "layer_norm_epsilon": 1e-5,
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip

LICENCE = "bigscience-bloom-rail-1.0"
SIZES = {
    "560m": Model(path="bigscience/bloom-560m", parameters=559_214_592, attention="eager", config=COMMON | {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    }),
    "1b1": Model(path="bigscience/bloom-1b1", parameters=1_065_314_304, attention="eager", config=COMMON | {
        "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 16,
    }),
    "3b": Model(path="bigscience/bloom-3b", parameters=3_002_557_440, attention="eager", config=COMMON | {
        "hidden_size": 2560, "num_hidden_layers": 30, "num_attention_heads": 32,
    }),
    "7b1": Model(path="bigscience/bloom-7b1", parameters=7_069_016_064, attention="eager", config=COMMON | {
        "hidden_size": 4096, "num_hidden_layers": 30, "num_attention_heads": 32,
    }),
    "176b": Model(path="bigscience/bloom", parameters=176_247_271_424, attention="eager", config=COMMON | {
        "hidden_size": 14336, "num_hidden_layers": 70, "num_attention_heads": 112,
    }),
}  # fmt: skip

SMALL = ("560m", "1b1", "3b")

WITHOUT = variants.BASE_MODEL


def full(size: str) -> Recipe:
    """All weights: teaches a base model to answer, with enough GPUs to hold 16 bytes per parameter."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json" if size in SMALL else "zero3.json",
        learning_rate=2e-5,
        weight_decay=1e-4,
        adam_beta2=0.95,
        global_batch_size=128,
        sequence_length=2048,
        packing=False,
        schedule=Schedule("constant_with_warmup", warmup=0.03),
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(
        full(size),
        deepspeed="zero3_adapters.json" if size == "176b" else "zero2.json",
        lora=Lora(rank=16, alpha=32),
        learning_rate=1e-4 if size == "176b" else 2e-4,
        weight_decay=0.0,
    )


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT, with model.path=RUN_FOLDER/export."""
    return variants.dpo(lora(size), learning_rate=5e-6, global_batch_size=32, schedule=Schedule("cosine", warmup=0.1))


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT.

    Each text becomes one sequence: join short texts into texts of about 2,048 tokens.
    """
    return variants.pretrain(full(size), learning_rate=6e-6 if size == "176b" else 1e-5, weight_decay=0.1)


def pipeline(size: str) -> Recipe:
    """All weights, the layers over several GPUs: for many nodes with a slow network between them.

    The 176b is predicted to fit on 36 nodes of 8 H200. A GPU holds two layers or, at either end, one layer and the
    embedding of 3.6B. With 144 micro-batches per step and copy, the stages are idle for the time of 35 (20 %).
    """
    large = size == "176b"
    return replace(
        full(size),
        deepspeed="pipeline.json",
        layout=Layout(pipeline=36 if large else 2),
        global_batch_size=1152 if large else full(size).global_batch_size,
    )


if __name__ == "__main__":
    launch(__file__)
