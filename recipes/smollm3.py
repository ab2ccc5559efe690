"""smollm3: Hugging Face's SmolLM3, 3B, with and without reasoning.

    size  layers  hidden  heads  parameters  context  licence     weights
    3b    36      2048    16     3.08B       65,536   Apache-2.0  HuggingFaceTB/SmolLM3-3B

    variant       method    trains       DeepSpeed                     measured peak
    full          SFT       all weights  ZeRO-2                        -
    lora          SFT       adapters     ZeRO-2                        -
    qlora         SFT       adapters     ZeRO-2                        -
    dora          SFT       adapters     ZeRO-2                        -
    full_offload  SFT       all weights  ZeRO-2; optimizer on the CPU  -
    long_context  SFT       all weights  ZeRO-3                        -
    dpo_lora      DPO       adapters     ZeRO-2                        -
    pretrain      raw text  all weights  ZeRO-2                        -

    predicted     3b      GPUs x GiB: the fewest H100 80GB that it fits on
    full          1 x 67
    lora          1 x 14
    qlora         1 x 10
    dora          1 x 13
    full_offload  1 x 13
    long_context  1 x 72
    dpo_lora      1 x 15
    pretrain      1 x 67

    python scripts/launch.py smollm3 full
    python scripts/launch.py smollm3 full data.path=FILE learning_rate=1e-5 epochs=2 global_batch_size=64

Rates of `full`: alignment-handbook recipes/smollm3/sft/sft.yaml (2e-5, cosine, 3 % warm-up, clipped at 0.2).
Adapters: TRL trl/scripts/sft.py (rank 32, alpha 16, 2e-4) and dpo.py (5e-6); QLoRA (arXiv:2305.14314, 2e-4).
`long_context` and `pretrain`: smollm text/pretraining/smollm3/long_context_4k_to_32k.yaml (2e-5, weight decay 0.1).

The chat template opens with a system block that holds today's date and a reasoning mode. Answers without reasoning
belong under /no_think in the system message: then it puts an empty think block before them.
"""

from dataclasses import replace

from recipes.spec.recipe import Lora, Model, Recipe, Schedule
from recipes.spec.samples import CHAT, PREFERENCES, TEXT

SIZES = {
    "3b": Model(
        path="HuggingFaceTB/SmolLM3-3B",
        parameters=3_075_098_624,
        config={
            "model_type": "smollm3",
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0},
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "eos_token_id": 128012,
            "pad_token_id": 128004,
        },
    ),
}


def full(size: str) -> Recipe:
    """All weights: for new behaviour and large data sets; 16 bytes per parameter over the GPUs."""
    return Recipe(
        family="smollm3",
        size=size,
        variant="full",
        method="sft",
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json",
        learning_rate=2e-5,
        max_grad_norm=0.2,
        global_batch_size=32,
        micro_batch_size=1,
        sequence_length=8192,
        schedule=Schedule("cosine", warmup=0.03),
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: the first thing to try; little memory, and a small file to ship."""
    return replace(full(size), variant="lora", lora=Lora(rank=32, alpha=16), learning_rate=2e-4)


def qlora(size: str) -> Recipe:
    """Adapters on frozen weights in 4 bits: for one GPU with little memory."""
    return replace(lora(size), variant="qlora", model=replace(SIZES[size], quantization="nf4"))


def dora(size: str) -> Recipe:
    """Adapters and magnitudes at half the rank: when `lora` falls short of `full`; slower per step."""
    return replace(lora(size), variant="dora", lora=Lora(rank=16, alpha=8, dora=True))


def full_offload(size: str) -> Recipe:
    """All weights with the optimizer in host memory: when `full` is short of GPU memory and host memory is not."""
    return replace(full(size), variant="full_offload", deepspeed="zero2_offload.json")


def long_context(size: str) -> Recipe:
    """All weights at 32,768 tokens per row: for long documents, long conversations and long reasoning."""
    return replace(
        full(size),
        variant="long_context",
        tiled_loss=True,
        deepspeed="zero3.json",
        global_batch_size=8,
        sequence_length=32768,
    )


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT, or straight on the instruct model."""
    return replace(
        lora(size),
        variant="dpo_lora",
        method="dpo",
        data=PREFERENCES,
        learning_rate=5e-6,
        sequence_length=2048,
        packing=False,
        schedule=Schedule("cosine", warmup=0.1),
    )


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: a new domain or language before SFT.

    From the base model: add model.path=HuggingFaceTB/SmolLM3-3B-Base.
    """
    return replace(
        full(size),
        variant="pretrain",
        method="pretrain",
        data=TEXT,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
    )
