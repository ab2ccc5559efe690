"""seed_oss: ByteDance's Seed-OSS, one dense decoder for long contexts whose reasoning has a budget.

    size  layers  hidden  heads  parameters  context  licence     weights
    36b   64      5120    80     36.15B      524,288  Apache-2.0  ByteDance-Seed/Seed-OSS-36B-Instruct

    variant       method    trains           DeepSpeed
    full          SFT       all weights      ZeRO-3
    lora          SFT       adapters         ZeRO-3
    qlora         SFT       adapters on NF4  ZeRO-2
    dora          SFT       adapters         ZeRO-3
    full_offload  SFT       all weights      ZeRO-3
    long_context  SFT       all weights      ZeRO-3
    dpo_lora      DPO       adapters         ZeRO-3
    kto_lora      KTO       adapters         ZeRO-3
    orpo_lora     ORPO      adapters         ZeRO-3
    simpo_lora    SimPO     adapters         ZeRO-3
    dpo_full      DPO       all weights      ZeRO-3
    reward        reward    all weights      ZeRO-3
    classify      classes   all weights      ZeRO-3
    embed         pairs     all weights      ZeRO-3
    grpo          GRPO      all weights      ZeRO-3
    pretrain      raw text  all weights      ZeRO-3

    python scripts/launch.py seed_oss-36b lora
    python scripts/launch.py seed_oss-36b qlora data.path=FILE.jsonl lora.rank=64 epochs=2  # your data

All weights: 1e-5 at batch 128 from NVIDIA-NeMo/Automodel (llm_finetune/seed/seed_oss_36B_hellaswag.yaml). Adapters:
rank 32 and alpha 16 from axolotl (seed-oss/seed-oss-36b-qlora.yaml), which takes 2e-4; here 1e-4, as QLoRA does at this
size (arXiv:2305.14314), DoRA at half the rank (arXiv:2402.09353); DPO 5e-6 from alignment-handbook
(zephyr-7b-beta/dpo/config_qlora.yaml).
Its configuration trains with dropout of 0.1 in attention and after each block, unlike those of most decoders.
"""

from dataclasses import replace

from deepspeed_recipes import launch
from deepspeed_recipes.recipe import CHAT, Lora, Model, Recipe, Schedule, variants

SIZES = {
    "36b": Model(
        path="ByteDance-Seed/Seed-OSS-36B-Instruct",
        parameters=36_151_104_512,
        config={
            "model_type": "seed_oss",
            "vocab_size": 155136,
            "max_position_embeddings": 524288,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0},
            "attention_bias": True,
            "attention_out_bias": False,
            "attention_dropout": 0.1,
            "residual_dropout": 0.1,
            "tie_word_embeddings": False,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
}


def full(size: str) -> Recipe:
    """All weights: for plenty of data, or a task far from what the model knows."""
    return Recipe(
        method="sft",
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero3.json",
        learning_rate=1e-5,
        schedule=Schedule("cosine", warmup=0.03),
        global_batch_size=128,
        sequence_length=4096,
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(
        full(size),
        deepspeed="zero3_adapters.json",
        lora=Lora(rank=32, alpha=16),
        learning_rate=1e-4,
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
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=16)


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT, with model.path=RUN_FOLDER/export."""
    return variants.dpo(lora(size), learning_rate=5e-6, schedule=Schedule("cosine", warmup=0.1))


kto_lora, orpo_lora, simpo_lora = variants.feedback(lora)
dpo_full = variants.dpo_full_of(full)
reward, classify, embed = variants.heads(full)
grpo = variants.grpo_of(full)


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT."""
    return variants.pretrain(full(size))


if __name__ == "__main__":
    launch(__file__)
