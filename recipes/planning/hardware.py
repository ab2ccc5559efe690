"""The GPUs, nodes and networks that people have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One accelerator, by its maker's datasheet."""

    name: str
    memory_gib: float
    """What a program can allocate, before the driver's own."""
    bf16_tflops: float
    """Dense matrix products, without sparsity (fp16 where it has no bf16)."""
    memory_gbs: float
    """Memory bandwidth in GB/s."""
    link_gbs: float
    """To the other GPUs of a node, in GB/s and one direction: NVLink or Infinity Fabric; 0: only PCIe."""
    pcie_gbs: float
    """To the host, in GB/s and one direction."""
    source: str


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    gpu: Gpu
    gpus_per_node: int = 1
    nodes: int = 1
    host_memory_gib: float = 0.0
    """Of one node; 0: unknown, so nothing is refused for it."""
    nvme_gib: float = 0.0
    """Of one node; 0: none."""
    nvme_gbs: float = 3.0
    """Reading or writing, one node's drives together."""
    network_gbs: float = 0.0
    """Of one node to the others, in GB/s and one direction, all cards together."""
    cores: int = 0
    """Of one node's CPUs; 0: unknown."""

    @property
    def gpus(self) -> int:
        """Over all nodes."""
        return self.gpus_per_node * self.nodes
