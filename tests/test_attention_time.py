"""The time of attention: each implementation takes its GPU's kernel, which is as fast as others have measured."""

from dataclasses import replace

import pytest

from deepspeed_recipes.planning.cost.compute_time import Job, attention_seconds, implementation, kernel
from deepspeed_recipes.planning.cost.constants import COUNTS, constants
from deepspeed_recipes.planning.cost.step_time import step_time
from deepspeed_recipes.planning.cost.training_setup import TrainingSetup
from deepspeed_recipes.planning.hardware.cluster import Cluster
from deepspeed_recipes.planning.hardware.gpus import find
from deepspeed_recipes.recipe.recipe import Layout
from tests.profiles import llama

KIND = llama().layer_kinds[0]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MEASURED = {
    ("flash_attention_2", "forward"): (191, 260, 298, 319, 333, 335),
    ("flash_attention_3", "forward"): (292, 423, 521, 579, 602, 616),
    ("sdpa", "forward"): (315, 410, 484, 518, 529, 539),
    ("flash_attention_2", "backward"): (214, 260, 291, 310, 318, 322),
    ("flash_attention_3", "backward"): (316, 424, 501, 542, 559, 561),
    ("sdpa", "backward"): (305, 408, 465, 499, 518, 516),
}
"""TFLOP/s on an H100 by length, heads 128 wide: arXiv:2407.08608, figures 5 and 6; forward with a causal mask, backward
without one; `sdpa` is cuDNN's."""


def seconds(attention: str, length: int, gpu: str = "H100", packing: bool = False, kind=KIND) -> tuple[float, float]:
    batch = 16384 / length
    setup = TrainingSetup(1, sequence_length=length, attention=attention, packing=packing, micro_batch_size=batch)
    return attention_seconds(Job(llama(), setup, Cluster(find(gpu)), constants(gpu)), kind)


def speeds(attention: str, direction: str) -> list[float]:
    found = []
    for length in LENGTHS:
        operations = 4 * KIND.attention_width * 16384 * length / 2
        forward, backward = seconds(attention, length)
        found.append((operations / forward if direction == "forward" else 2.5 * operations / backward) / 1e12)
    return found


def worst(attention: str, direction: str) -> float:
    measured = MEASURED[attention, direction]
    return max(abs(one / other - 1) for one, other in zip(speeds(attention, direction), measured, strict=True))


@pytest.mark.parametrize(("attention", "direction"), MEASURED)
def test_each_kernel_is_as_fast_as_published_at_every_length(attention, direction, monkeypatch):
    assert worst(attention, direction) < 0.25
    monkeypatch.setattr(COUNTS, "half_speed", 0)
    assert worst(attention, direction) > 0.3


def test_a_kernel_has_half_of_its_speed_at_a_length_of_380():
    at_full_speed = 4 * KIND.attention_width * 16384 * 380 / 2 / (find("H100").bf16_tflops * 1e12)
    share = constants("H100").kernels["flash_2"][0]
    assert seconds("flash_attention_2", 380)[0] == pytest.approx(2 * at_full_speed / share)


def test_the_kernel_is_the_one_that_the_gpu_has():
    ampere, hopper, blackwell = (constants(name).kernels for name in ("A100 80GB", "H100", "B200"))
    assert kernel("flash_attention_3", False, hopper) == "flash_3"
    assert kernel("flash_attention_3", False, ampere) == kernel("flash_attention_3", False, blackwell) == "flash_2"
    assert kernel("sdpa", False, hopper) == kernel("sdpa", True, blackwell) == "cudnn"
    assert (kernel("sdpa", False, ampere), kernel("sdpa", True, ampere)) == ("flash_2", "efficient")
    assert {kernel(name, False, hopper) for name in ("varlen", "flash_attention_2")} == {"flash_2"}
    assert kernel("flex_attention", False, ampere) == "flex"


@pytest.mark.parametrize("name", ["A100 80GB", "H100", "H200", "B200", "RTX 3090", "RTX 4090", "RTX 5090", "T4", "L4"])
def test_every_gpu_has_every_kernel_that_it_can_be_asked_for(name):
    for attention in ("auto", "sdpa", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention", "eager"):
        for packing in (False, True):
            forward, backward = seconds(attention, 4096, name, packing)
            assert 0 < forward < backward


def test_auto_is_what_training_decides():
    setup = TrainingSetup(4, attention="auto")
    assert implementation(setup) == "varlen"
    for other in ({"packing": False}, {"packing": False}, {"layout": Layout(pipeline=2)}):
        assert implementation(replace(setup, **other)) == "sdpa"
    assert implementation(replace(setup, attention="eager")) == "eager"


def test_gpus_before_ampere_have_no_flash_kernel():
    assert constants("T4").kernels["flash_2"] == constants("A100 80GB").kernels["efficient"]
    assert constants("RTX 2080 Ti").kernels == constants("V100").kernels == constants("T4").kernels
    assert not constants("T4").measured


def test_a_mask_of_all_pairs_costs_more_than_twice_what_boundaries_cost():
    assert sum(seconds("sdpa", 8192, "A100 80GB", packing=True)) > 2 * sum(seconds("varlen", 8192, "A100 80GB"))
    assert seconds("varlen", 8192, "A100 80GB", packing=True) == seconds("varlen", 8192, "A100 80GB")


def test_long_sequences_gain_what_the_kernel_gains():
    def speed(attention: str) -> float:
        setup = TrainingSetup(1, zero_stage=0, sequence_length=131072, attention=attention)
        return step_time(llama(), setup, Cluster(find("H200"))).tokens_per_second_per_gpu

    assert 1.3 < speed("flash_attention_3") / speed("flash_attention_2") < 640 / 335
    assert speed("eager") < speed("flash_attention_2")


def test_windows_and_causal_masks_halve_what_is_attended():
    kind = llama(window=1024).layer_kinds[0]
    assert seconds("varlen", 1024, kind=kind) == seconds("varlen", 1024)
    # Exactly: the first 1024 tokens see half as many on average, all others 1024; without a window it is 2048.
    share = pytest.approx((1024 * 512 + 3072 * 1024) / 4096 / 2048)
    assert sum(seconds("varlen", 4096, kind=kind)) / sum(seconds("varlen", 4096)) == share


def test_packed_documents_attend_only_to_themselves():
    """Kernels for documents skip what lies between them; SDPA computes what its mask hides."""

    def sum_of(attention: str, document: float | None = None, packing: bool = True) -> float:
        setup = TrainingSetup(1, sequence_length=16384, attention=attention, packing=packing, document_length=document)
        return sum(attention_seconds(Job(llama(), setup, Cluster(find("A100 80GB")), constants("A100 80GB")), KIND))

    assert 8 < sum_of("varlen") / sum_of("varlen", 1024) < 16, "a sixteenth, with kernels that are slower when short"
    assert sum_of("varlen", 10**6) == sum_of("varlen")
    assert sum_of("sdpa", 1024) == sum_of("sdpa")
    assert sum_of("varlen", 1024, packing=False) == sum_of("varlen", packing=False)
