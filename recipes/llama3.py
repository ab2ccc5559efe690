"""llama3: Meta's Llama 3.1 (8b, 405b), 3.2 (1b, 3b) and 3.3 (70b), text only, the instruct models.

    python scripts/launch.py llama3-8b lora
    python scripts/launch.py llama3-8b lora data.path=FILE learning_rate=2e-4 lora.rank=32 lora.alpha=64 epochs=2

Rates of `full`: torchtune recipes/configs/llama3_2/1B_full.yaml (1b, 3b: 2e-5), LLaMA-Factory llama3_full_sft.yaml
(8b: 1e-5), Tulu 3 in open-instruct docs/tulu3.md (70b: 2e-6; linear, 3 % warm-up, 4,096 tokens; 405b as 70b, which have
one rate in its DPO). Adapters: axolotl examples/llama-3/lora-1b.yml (rank 16, alpha 32, 2e-4), LLaMA-Factory
llama3_lora_sft.yaml (1e-4) and llama3_lora_dpo.yaml (5e-6, 10 % warm-up), QLoRA (arXiv:2305.14314: 2e-4 up to 13B, 1e-4
above). `pretrain`: smollm finemath-4plus.yaml, which continues Llama 3.2 3B (5e-5, beta2 0.95, weight decay 0.01); the
larger ones scaled as in `full`.

The weights are gated: accept the licence on the Hub first. The chat template opens every conversation with a system
block that contains a date; for 1b and 3b it is the day of the run, so the same data tokenizes differently tomorrow.
"""

from dataclasses import replace

from deepspeed_recipes import launch  # not found? Run `make install`, then .venv/bin/python
from deepspeed_recipes.recipe import CHAT, Layout, Lora, Model, Recipe, Schedule, variants

COMMON = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

LICENCE = {"1b": "Llama-3.2", "3b": "Llama-3.2", "8b": "Llama-3.1", "70b": "Llama-3.3", "405b": "Llama-3.1"}
SIZES = {
    "1b": Model(path="meta-llama/Llama-3.2-1B-Instruct", parameters=1_235_814_400, config=COMMON | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "rope_parameters": ROPE | {"factor": 32.0}, "tie_word_embeddings": True,
    }),
    "3b": Model(path="meta-llama/Llama-3.2-3B-Instruct", parameters=3_212_749_824, config=COMMON | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "head_dim": 128, "rope_parameters": ROPE | {"factor": 32.0}, "tie_word_embeddings": True,
    }),
    "8b": Model(path="meta-llama/Llama-3.1-8B-Instruct", parameters=8_030_261_248, config=COMMON | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "head_dim": 128, "rope_parameters": ROPE | {"factor": 8.0}, "tie_word_embeddings": False,
    }),
    "70b": Model(path="meta-llama/Llama-3.3-70B-Instruct", parameters=70_553_706_496, config=COMMON | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "head_dim": 128, "rope_parameters": ROPE | {"factor": 8.0}, "tie_word_embeddings": False,
    }),
    "405b": Model(path="meta-llama/Llama-3.1-405B-Instruct", parameters=405_853_388_800, config=COMMON | {
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
        "head_dim": 128, "rope_parameters": ROPE | {"factor": 8.0}, "tie_word_embeddings": False,
    }),
}  # fmt: skip

SMALL = ("1b", "3b")
RATES = {"1b": 2e-5, "3b": 2e-5, "8b": 1e-5, "70b": 2e-6, "405b": 2e-6}
LARGE = ("70b", "405b")


def full(size: str) -> Recipe:
    """All weights: for large data sets and new behaviour, with enough GPUs to hold 16 bytes per parameter."""
    return Recipe(
        model=SIZES[size],
        data=CHAT,
        deepspeed="zero2.json" if size in SMALL else "zero3.json",
        learning_rate=RATES[size],
        global_batch_size=64,
        sequence_length=4096,
        schedule=Schedule("linear", warmup=0.03),
    )


def lora(size: str) -> Recipe:
    """Adapters on every linear layer: try this first; little memory, and a small file to ship."""
    return replace(
        full(size),
        deepspeed="zero3_adapters.json" if size in LARGE else "zero2.json",
        lora=Lora(rank=16, alpha=32),
        learning_rate=2e-4 if size in SMALL else 1e-4,
        schedule=Schedule("cosine", warmup=0.03),
    )


def qlora(size: str) -> Recipe:
    """Adapters on frozen 4-bit weights: where the bf16 weights do not fit, such as the 70b on one 80 GB GPU."""
    return variants.qlora(lora(size), learning_rate=1e-4 if size in LARGE else 2e-4)


def qlora_zero3(size: str) -> Recipe:
    """Adapters on 4-bit weights that the GPUs share: if `qlora` loads on a GPU but cannot train, as 70b on 40 GB."""
    return variants.qlora_zero3(lora(size), learning_rate=1e-4 if size in LARGE else 2e-4)


def long_context(size: str) -> Recipe:
    """All weights on sequences of 32,768 tokens: for long documents and conversations."""
    return variants.long_context(full(size), sequence_length=32768, global_batch_size=8)


def dpo_lora(size: str) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT (model.path=RUN_FOLDER/export), or straight away."""
    return variants.dpo(lora(size), learning_rate=5e-6, global_batch_size=32, schedule=Schedule("cosine", warmup=0.1))


def pretrain(size: str) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT.

    To start from the base model, add model.path=meta-llama/Llama-3.1-8B, or that of your size (70b: Llama-3.1-70B).
    """
    return variants.pretrain(full(size), learning_rate=2.5 * RATES[size], weight_decay=0.01, adam_beta2=0.95)


def tensor(size: str) -> Recipe:
    """All weights, every matrix split over the GPUs of a node: shorter steps where ZeRO-3 waits for its weights.

    The 70b is predicted to fit on 4 nodes of 8 H200.
    """
    return replace(full(size), deepspeed="zero1.json", layout=Layout(tensor=8))


def sequence(size: str) -> Recipe:
    """All weights on sequences of 131,072 tokens, an eighth on each GPU of a node: for sequences too long for one GPU.

    The 8b is predicted to fit on one node of 8 H100.
    """
    return replace(long_context(size), layout=Layout(sequence=8), global_batch_size=8, sequence_length=131072)


def pipeline(size: str) -> Recipe:
    """All weights, the layers over several GPUs: for many nodes with a slow network between them.

    The 70b is predicted to fit on 8 nodes of 8 H200. With 64 micro-batches per step and copy, the stages are idle for
    the time of 15 (19 %).
    """
    large = size in LARGE
    return replace(
        full(size),
        deepspeed="pipeline.json",
        layout=Layout(pipeline=16 if large else 4),
        global_batch_size=256 if large else 64,
    )


def three_d(size: str) -> Recipe:
    """All weights, matrices split inside a node and layers over nodes: the most GPUs with the least waiting.

    The 70b is predicted to fit on 8 nodes of 8 H100; the stages are idle for the time of 3 micro-batches in 35 (9 %).
    """
    return replace(full(size), deepspeed="pipeline.json", layout=Layout(tensor=8, pipeline=4))


if __name__ == "__main__":
    launch(__file__)
