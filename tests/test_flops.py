"""MFU's arithmetic against torch's own counter of floating-point operations."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, TrainerState

from deepspeed_recipes.recipe.gpus import BF16_TFLOPS, peak_flops
from deepspeed_recipes.recipe.recipe import Lora
from deepspeed_recipes.recipe.run_folder import RunFolder, read_jsonl
from deepspeed_recipes.training.callbacks.metrics import Metrics, TrainingFlops, training_flops
from deepspeed_recipes.training.model.load import parameter_counts
from deepspeed_recipes.training.model.lora import add as add_adapters
from deepspeed_recipes.training.parallel import holdings

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
}
LENGTH = 48
MLA = {"head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 16}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("adapters", [False, True])
def test_flops_are_what_torch_counts(tied: bool, adapters: bool):
    config = AutoConfig.for_model("qwen3", tie_word_embeddings=tied, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if adapters:
        model.enable_input_require_grads()
        model = add_adapters(model, Lora(rank=8))
    tokens = torch.randint(0, 512, (2, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    work = training_flops(model)
    # Eager attention computes the half above the diagonal too.
    expected = work.of(2 * LENGTH, 2 * 2 * LENGTH**2)
    # torch also counts rotary tables; and adapters need no gradient of what goes into the first layer.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01 if not adapters else 0.03)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
        ("deepseek_v3", {"num_key_value_heads": 4, "first_k_dense_replace": 3} | MLA),
    ],
)
def test_only_attention_grows_with_the_square_of_the_length(family, changes):
    config = AutoConfig.for_model(family, **SIZES | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    counted = []
    for length in (LENGTH, 2 * LENGTH):
        with FlopCounterMode(display=False) as counter:
            model(input_ids=torch.ones(1, length, dtype=torch.long)).logits.sum().backward()
        counted.append(counter.get_total_flops())
    # Eager attention computes the half above the diagonal too.
    squared = counted[1] - 2 * counted[0]
    assert squared == pytest.approx(training_flops(model).of(0, 2 * (4 - 2) * LENGTH**2), rel=0.02)


def test_a_token_uses_some_of_the_experts():
    config = AutoConfig.for_model(
        "qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96, **SIZES, decoder_sparse_step=1
    )
    model = AutoModelForCausalLM.from_config(config)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    config.num_experts_per_tok = 8
    assert training_flops(model).per_token - 6 * experts * 6 / 8 == pytest.approx(
        flops_with_experts(model, config, 2).per_token, rel=1e-6
    )


def test_a_model_without_attention_is_counted_by_its_weights():
    config = AutoConfig.for_model("mamba", vocab_size=512, hidden_size=64, num_hidden_layers=2)
    work = training_flops(AutoModelForCausalLM.from_config(config))
    assert work.of(LENGTH, LENGTH**2) == work.of(LENGTH, 0) > 0


def test_4_bit_weights_are_counted_unpacked(tmp_path):
    config = AutoConfig.for_model("qwen3", **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = []
    for options in ({}, {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")}):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **options).requires_grad_(False)
        found.append((parameter_counts(model), training_flops(model)))
    assert any(weight.dtype == torch.uint8 for weight in model.parameters()) and found[0] == found[1]


def flops_with_experts(model, config, used):
    config.num_experts_per_tok = used
    return training_flops(model)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("GeForce GTX 1080", None),
    ],
)
def test_a_gpu_is_recognised_by_its_device_name(device: str, name: str | None):
    assert peak_flops(device) == (BF16_TFLOPS[name] * 1e12 if name else None)


@pytest.mark.parametrize("counts", [True, False])
def test_every_log_counts_the_tokens_since_the_one_before(alone, tmp_path, counts):
    run = RunFolder(tmp_path)
    metrics = Metrics(run, lambda record: None, counts, TrainingFlops(1.0, 1.0))
    padded = {"attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    for step in (1, 2):
        metrics.count([{"tokens": 7, "squared_lengths": 25}, dict(padded)])
        metrics.on_log(None, TrainerState(global_step=step, max_steps=2), None, {"loss": 1.0, "learning_rate": 0.1})
    assert [record["tokens"] for record in read_jsonl(run.metrics)] == [12 * counts, 24 * counts]
    assert (metrics.new_tokens, metrics.new_squares, metrics.waited) == (0, 0, 0.0)
    assert TrainingFlops(3.0, 2.0).of(10, 50) == 130


@pytest.mark.parametrize(("place", "held"), [(None, [4]), ("cpu", [4]), ("nvme", [])])
def test_a_rank_holds_its_part_of_a_weight_unless_that_is_on_nvme(place, held):
    weight = torch.nn.Parameter(torch.zeros(0))
    assert [part.numel() for part in holdings._parts(weight)] == [0]
    weight.ds_numel, weight.ds_tensor = 8, torch.zeros(4)  # as ZeRO-3 leaves it between steps
    weight.ds_tensor.final_location = place
    assert [part.numel() for part in holdings._parts(weight)] == held
