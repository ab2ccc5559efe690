"""GPUs and nodes by the names that people use; impossible values are refused in a line or two."""

import sys
import types

import pytest

from deepspeed_recipes.planning.hardware import cluster as hardware
from deepspeed_recipes.planning.hardware import gpus
from deepspeed_recipes.planning.hardware.cluster import Cluster, cluster, this_machine
from deepspeed_recipes.planning.hardware.gpus import GPUS, find
from deepspeed_recipes.planning.hardware.instances import INSTANCES
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.gpus import BF16_TFLOPS, peak_flops


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("a100-80g", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("h100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("A800", "A800"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA RTX A6000", "A6000"),
        ("2080ti", "RTX 2080 Ti"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("rtx3060", "RTX 3060"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("AMD Instinct MI325X", "MI325X"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("AMD Instinct MI300X", "MI300X"),
        ("h100 nvl", "H100 NVL"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("4080", "RTX 4080"),
        ("4060 ti", "RTX 4060 Ti 16GB"),
        ("3090ti", "RTX 3090 Ti"),
        ("3090", "RTX 3090"),
        ("4060", "RTX 4060"),
        ("a5000", "A5000"),
        ("NVIDIA L40", "L40"),
    ],
)
def test_a_gpu_has_many_names(name, found):
    assert find(name).name == found


def test_every_gpu_is_found_by_its_own_name_and_has_whole_figures():
    assert len(GPUS) == 41
    for gpu in GPUS:
        assert find(gpu.name) is gpu
        assert gpu.bf16_tflops == peak_flops(gpu.name) / 1e12
        assert min(gpu.memory_gib, gpu.memory_gbs, gpu.pcie_gbs, gpu.units, gpu.network_gbs) > 0
        assert gpu.link_gbs == 0 or gpu.link_gbs >= 150
    assert {peak * 1e12 for peak in BF16_TFLOPS.values()} == {gpu.bf16_tflops * 1e12 for gpu in GPUS}


def test_every_instance_has_gpus_that_are_known():
    assert len(INSTANCES) == 73
    for name, instance in INSTANCES.items():
        node = cluster(name)
        assert node.gpu is find(instance.gpu)
        assert (node.gpus_per_node, node.nodes) == (instance.gpus, 1)
        assert node.node_network_gbs == node.network_gbs == instance.network_gbits / 8 > 0
        assert node.host_memory_gib > 0


def test_flags_name_a_cluster():
    assert cluster("H100", gpus=8, nodes=4).gpus == 32
    assert cluster("standard_nd96isr_h100_v5").gpu.name == "H100"
    two = cluster("p5.48xlarge", nodes=2, host_memory=100, nvme=0)
    assert (two.gpus, two.host_memory_gib, two.nvme_gib, two.cores) == (16, 100, 0, 192)
    assert cluster("p5.48xlarge", gpus=4).gpus_per_node == 4


def test_the_default_network_is_the_usual_one():
    assert cluster("H100", gpus=8, nodes=2).node_network_gbs == 400  # 8 cards of 400 Gbit/s
    assert Cluster(find("H100"), 8, 2, network_gbs=12.5).node_network_gbs == 12.5


@pytest.mark.parametrize(
    ("gib", "like"),
    [(8, "RTX 4060"), (16, "RTX 4060 Ti 16GB"), (24, "RTX 3090"), (48, "A6000"), (80, "A100 80GB"), (141, "H200")],
)
def test_only_the_memory_is_known(gib, like):
    gpu = cluster(gpu_memory=gib).gpu
    assert (gpu.memory_gib, gpu.like, gpu.bf16) == (gib, like, True)
    assert gpu.name == f"GPU with {gib} GiB", "it has no other GPU's name"
    assert gpu.bf16_tflops == find(like).bf16_tflops


def test_a_datasheets_rates_are_copied_as_they_are():
    """Dense, without sparsity, of the makers' datasheets; a GPU without bf16 has that of fp16."""
    copied = {"V100": 125, "T4": 65, "A100": 312, "H100": 989.4, "L40S": 362, "RTX 4090": 165.2, "MI300X": 1307.4}
    copied |= {"A5000": 111.1, "A6000": 154.8, "RTX 6000 Ada": 364.2}
    assert {name: BF16_TFLOPS[name] for name in copied} == copied


def test_bf16_begins_with_ampere():
    assert {gpu.name for gpu in GPUS if not gpu.bf16} == {"T4", "V100 16GB", "V100 32GB", "RTX 2080 Ti"}


@pytest.mark.parametrize(
    "name", ["RTX 3060 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 D", "RTX 4090 48GB", "RTX 4060 Ti 8GB"]
)
def test_another_model_of_the_same_number_is_another_gpu(name):
    with pytest.raises(UserError, match=r"unknown; (did you mean|a laptop's .* here) RTX"):
        find(name)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"gpu": "H1000"}, "did you mean H100"),
        ({"gpu": "4080 super"}, "did you mean RTX 4080"),
        ({"gpu": "3080ti"}, "did you mean RTX 3080"),
        ({"gpu": "h100-94gb"}, "did you mean H100, H100 PCIe, H100 NVL?\nFor any other GPU"),
        ({"gpu": "p5.48xlarg"}, "did you mean p5.48xlarge"),
        ({"gpu": "abacus"}, "known GPUs are RTX 2080 Ti"),
        ({"gpu": "H900"}, "did you mean H800, H200, H100?\nFor any other GPU"),
        ({"gpu": "RTX 4060 Laptop"}, "a laptop's GPU is slower than the desktop's, here RTX 4060, RTX 4060 Ti 16GB"),
        ({"gpu": "8xH100"}, "--gpu 8xH100: give the number as a separate option: --gpu H100 --gpus 8."),
        ({"gpu": "8 x A100 80GB"}, "--gpu A100-80GB --gpus 8."),
        ({"gpu": "gpu_8x_l40s"}, "--gpu l40s --gpus 8."),
        ({"gpu": "h100x8"}, "--gpu h100 --gpus 8."),
        ({"gpu": "Quux 48GB"}, "known GPUs are RTX 2080 Ti"),
        ({"gpu": "V100"}, "which one? V100-16GB, V100-32GB"),
        ({"gpu": ""}, "known GPUs are"),
        ({"gpu": "A100"}, "which one? A100-40GB, A100-80GB"),
        ({"gpu": "rtx 6000"}, "which one? RTX-6000-Ada, RTX-PRO-6000"),
        ({"gpu": "H100", "gpu_memory": 80}, "give one of them"),
        ({"gpu": "p5.48xlarge", "gpus": 16}, "--gpus 16: p5.48xlarge has 8 per node; add --nodes"),
        ({"gpu": "H100", "gpus": 0}, "--gpus 0: must be above 0"),
        ({"gpu": "H100", "nodes": -1}, "--nodes -1"),
        ({"gpu_memory": 0}, "--gpu-memory 0"),
        ({"gpu": "H100", "host_memory": -1}, "--host-memory -1"),
        ({"gpu": "H100", "nvme": -5}, "--nvme -5"),
    ],
)
def test_invalid_clusters_are_refused(flags, said):
    with pytest.raises(UserError) as error:
        cluster(**flags)
    assert said in str(error.value)
    assert str(error.value).count("\n") <= 2


def fake_torch(name, gib, count):
    properties = types.SimpleNamespace(name=name, total_memory=int(gib * 2**30))
    cuda = types.SimpleNamespace(
        is_available=lambda: count > 0, device_count=lambda: count, get_device_properties=lambda index: properties
    )
    return types.SimpleNamespace(cuda=cuda)


def test_this_machine_is_described_by_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch("NVIDIA H100 80GB HBM3", 79.1, 8))
    here = cluster()
    assert (here.gpu.name, here.gpus_per_node) == ("H100", 8)
    assert here.gpu.memory_gib == pytest.approx(79.1)
    assert here.host_memory_gib > 0 and here.cores > 0
    assert cluster(gpus=2).gpus == 2


def test_an_unknown_gpu_is_described_by_its_memory(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch("NVIDIA RTX A5000 Ada", 47.5, 1))
    here = this_machine()
    assert here.gpu.memory_gib == pytest.approx(47.5)
    assert here.gpu.name == "NVIDIA RTX A5000 Ada" and here.gpu.like


@pytest.mark.parametrize("torch", [None, fake_torch("", 0, 0)])
def test_a_machine_without_a_gpu_asks_for_one(monkeypatch, torch):
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert this_machine() is None
    with pytest.raises(UserError, match="no GPU: give --gpu NAME or --gpu-memory GIB"):
        cluster()


def test_torch_is_only_imported_to_look_at_this_machine():
    assert "torch" not in vars(hardware) and "torch" not in vars(gpus)
