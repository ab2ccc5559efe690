"""Costs that others measured and the planner once missed: each test names its source."""

import json
from dataclasses import replace

import pytest

from deepspeed_recipes.planning.cost.memory import peak_memory
from deepspeed_recipes.planning.cost.step_time import step_time
from deepspeed_recipes.planning.cost.training_setup import Software, TrainingSetup
from deepspeed_recipes.planning.hardware.cluster import cluster
from deepspeed_recipes.planning.hardware.gpus import find
from deepspeed_recipes.planning.model_profile.lookup import profile_of
from deepspeed_recipes.planning.search.model_recipe import find as recipe_for
from deepspeed_recipes.planning.search.strategies import evaluate, plan_request
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.recipe import Lora

PEERS = Software(logit_bytes=14)


def config(kind, hidden, layers, heads, shared, inner, vocabulary, **more):
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    } | more


QWEN_1_8B = config("qwen2", 2048, 24, 16, 16, 5504, 151936)
QWEN_3B = config("qwen2", 2048, 36, 16, 2, 11008, 151936, tie_word_embeddings=True)
QWEN_72B = config("qwen2", 8192, 80, 64, 8, 29568, 152064)
QWEN_57B_A14B = config(
    "qwen2_moe", 3584, 28, 28, 4, 18944, 151936, moe_intermediate_size=2560, shared_expert_intermediate_size=20480,
    num_experts=64, num_experts_per_tok=8,
)  # fmt: skip
LLAMA_7B = config("llama", 4096, 32, 32, 32, 11008, 32000)
LLAMA_65B = config("llama", 8192, 80, 64, 64, 22016, 32000)


@pytest.mark.parametrize(
    ("model", "gpu", "rank", "micro_batch_size", "slower"),
    [
        # github.com/huggingface/peft/pull/1474, peterjc123 on 2024-02-29: 2.7 s per step with LoRA, 4.5 s with DoRA.
        (QWEN_1_8B, "RTX 3080", 64, 2, 4.5 / 2.7),
        # The same, nbasyl (DoRA's author) on 2024-02-29: around 20 % slower for LLaMA-7B, on a 3090 to an A100.
        (LLAMA_7B, "A100 80GB", 16, 16, 1.2),
    ],
)
def test_dora_takes_longer_than_lora(model, gpu, rank, micro_batch_size, slower):
    def seconds(dora):
        lora = Lora(rank=rank, dora=dora)
        setup = TrainingSetup(1, zero_stage=0, micro_batch_size=micro_batch_size, sequence_length=512, lora=lora)
        return step_time(profile_of(model, lora), replace(setup, packing=False, software=PEERS), cluster(gpu)).seconds

    assert seconds(True) / seconds(False) == pytest.approx(slower, rel=0.25)


def test_doras_norms_need_memory():
    """peft, lora/dora.py: a unit matrix as wide as the input, and three copies of the weight in the model's dtype."""

    def peak(dora):
        lora = Lora(dora=dora)
        setup = TrainingSetup(1, zero_stage=0, sequence_length=512, lora=lora)
        moments = peak_memory(profile_of(LLAMA_7B, lora), setup, cluster("A100 80GB")).moments
        return moments["loss"]["live_parameters"]

    assert peak(True) - peak(False) == 2 * 11008 * (11008 + 3 * 4096)


def test_a10_and_a10g_have_peaks_of_their_own():
    """NVIDIA's A10 datasheet: 125 TFLOPS in bf16, 250 with sparsity; AWS on g5: an A10G has 70."""
    assert find("A10").bf16_tflops == 125 and find("A10G").bf16_tflops == 70


def test_adam_on_the_host_is_as_slow_as_measured():
    # github.com/deepspeedai/DeepSpeed/issues/6834: about 10 s of Qwen2 72B's step on four nodes of A100s.
    setup = TrainingSetup(32, zero_stage=3, sequence_length=4096, offload_optimizer="cpu", offload_parameters="cpu")
    time = step_time(profile_of(QWEN_72B), setup, cluster("A100-80GB", 8, 4))
    assert time.components["optimizer"] == pytest.approx(10, rel=0.1)
    # Its pull request 7474: 2,383 ms per step of Qwen2.5 3B on two A100-40GB with cores bound to ranks, as here.
    setup = TrainingSetup(2, zero_stage=2, micro_batch_size=4, sequence_length=512, offload_optimizer="cpu")
    setup = replace(setup, gradient_checkpointing=False, packing=False)
    assert step_time(profile_of(QWEN_3B), setup, cluster("A100-40GB", 2)).seconds == pytest.approx(2.383, rel=0.1)


def test_grpo_keeps_the_answers_logits_only():
    """TRL's GRPOTrainer passes `logits_to_keep`, the answer's tokens and one more (grpo_trainer.py)."""
    recipe = recipe_for("qwen3-8b", "grpo")
    request = plan_request(recipe, cluster("H100"))
    short, whole = (
        evaluate(request, replace(recipe, method=replace(recipe.method, max_new_tokens=length)))
        for length in (256, 2048)
    )
    moments = [each.memory.moments["loss"] for each in (short, whole)]
    head = 2 * 151936 * 4096  # its gradient is the least
    assert head <= moments[0]["logits"] < 0.35 * moments[1]["logits"]
    assert short.time.components["logits"] == pytest.approx(257 / 2049 * whole.time.components["logits"], rel=0.15)


def test_an_8_bit_optimizer_can_be_asked_for(answer):
    """Both moments in 8 bits instead of fp32: 6 bytes less per weight (arXiv:2110.02861)."""
    words = ("llama3-8b", "--gpu", "H200", "deepspeed=zero1.json", "micro_batch_size=1", "gradient_checkpointing=true")
    full, small = (answer(*words, *more)["plans"][0] for more in ((), ("optimizer=adamw_8bit",)))
    saved = full["gpu_breakdown_gib"]["optimizer"] - small["gpu_breakdown_gib"]["optimizer"]
    assert saved == pytest.approx(8.03e9 * 6 / 2**30, rel=0.02)


def test_a_full_gpu_is_less_fragmented():
    """QLoRA's paper fine-tuned 65B on one GPU with 48 GB (arXiv:2305.14314: rank 64 on all layers, 8-bit Adam)."""
    lora = Lora(rank=64, dropout=0.05)
    setup = TrainingSetup(1, zero_stage=0, sequence_length=512, lora=lora, quantized=True, optimizer="adamw_8bit")
    profile = profile_of(LLAMA_65B, lora)
    assert peak_memory(profile, replace(setup, packing=False), cluster("A6000")).gpu < 47.43 * 2**30
    large = peak_memory(profile, replace(setup, packing=False), cluster("A100 80GB"))
    assert large.components["fragmentation"] / (large.gpu - large.components["runtime"]) > 0.06


def test_the_vision_tower_of_a_model_without_a_page_counts(tmp_path, answer):
    """Qwen2.5-VL-7B has 8,292,166,656 parameters (the metadata of its safetensors), its decoder 7,615,616,512."""
    model = pages.page("qwen2_5_vl").SIZES["7b"]
    about = dict(model.config) | {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(about))
    found = answer(str(tmp_path), "lora", "--gpu", "A100-80GB")
    assert found["model"]["parameters"] == 8_292_166_656
    assert found["plans"][0]["gpu_breakdown_gib"]["vision_tower"] == pytest.approx(2 * 676_550_144 / 2**30, rel=1e-3)


def test_a_server_of_answers_is_planned(printed_by):
    """VLLM takes 90 % of its GPU (`gpu_memory_utilization`, vLLM's engine arguments)."""
    said = " ".join(printed_by("plan", "qwen3-8b", "grpo", "--gpu", "H100", "grpo.vllm=http://host:8000").split())
    assert "on a server with one such GPU. The server needs" in said and "vLLM takes 90 % of it" in said
    assert "Writing the answers takes at least" in printed_by("plan", "qwen3-8b", "grpo", "--gpu", "H100")


def test_experts_that_are_modules_are_slow_under_zero3():
    """github.com/QwenLM/Qwen3/issues/736: on 8 H100, Qwen2-57B-A14B took 2,714 s and Qwen2-72B 484 s."""
    lora = Lora(rank=64)

    def seconds(model, software):
        setup = TrainingSetup(8, sequence_length=512, gradient_accumulation_steps=8, lora=lora, packing=False)
        return step_time(profile_of(model, lora), replace(setup, software=software), cluster("H100", 8)).seconds

    dense = seconds(QWEN_72B, PEERS)
    assert 4 < seconds(QWEN_57B_A14B, replace(PEERS, grouped_experts=False)) / dense < 8
    assert seconds(QWEN_57B_A14B, PEERS) < dense, "with experts in one tensor, as here, it is the faster model"
