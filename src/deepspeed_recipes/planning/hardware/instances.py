"""Nodes that clouds rent out and makers sell, by the names under which they are ordered."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Instance:
    """One node."""

    gpu: str
    """A name in `gpus.GPUS`."""
    gpus: int
    host_memory_gib: float
    nvme_gib: float
    """Capacity of the local drives; 0 if there are none, or only on request."""
    network_gbits: float
    """Bandwidth to other nodes, in Gbit/s per direction, all cards together."""
    cores: int
    """CPU cores as the vendor counts them; in clouds, virtual cores."""


def _gib(gigabytes: float) -> float:
    return gigabytes * 1e9 / 2**30


# https://aws.amazon.com/ec2/instance-types/ (accelerated computing)
_AWS = {
    "p3.2xlarge": Instance("V100 16GB", 1, 61, 0, 10, 8),
    "p3.8xlarge": Instance("V100 16GB", 4, 244, 0, 10, 32),
    "p3.16xlarge": Instance("V100 16GB", 8, 488, 0, 25, 64),
    "p3dn.24xlarge": Instance("V100 32GB", 8, 768, _gib(1800), 100, 96),
    "p4d.24xlarge": Instance("A100 40GB", 8, 1152, _gib(8000), 400, 96),
    "p4de.24xlarge": Instance("A100 80GB", 8, 1152, _gib(8000), 400, 96),
    "p5.4xlarge": Instance("H100", 1, 256, _gib(3840), 100, 16),
    "p5.48xlarge": Instance("H100", 8, 2048, _gib(30720), 3200, 192),
    "p5e.48xlarge": Instance("H200", 8, 2048, _gib(30720), 3200, 192),
    "p5en.48xlarge": Instance("H200", 8, 2048, _gib(30720), 3200, 192),
    "p6-b200.48xlarge": Instance("B200", 8, 2048, _gib(30720), 3200, 192),
    "p6-b300.48xlarge": Instance("B300", 8, 4096, _gib(30720), 6400, 192),
    "g4dn.xlarge": Instance("T4", 1, 16, _gib(125), 25, 4),
    "g4dn.12xlarge": Instance("T4", 4, 192, _gib(900), 50, 48),
    "g5.xlarge": Instance("A10G", 1, 16, _gib(250), 10, 4),
    "g5.2xlarge": Instance("A10G", 1, 32, _gib(450), 10, 8),
    "g5.4xlarge": Instance("A10G", 1, 64, _gib(600), 25, 16),
    "g5.8xlarge": Instance("A10G", 1, 128, _gib(900), 25, 32),
    "g5.16xlarge": Instance("A10G", 1, 256, _gib(1900), 25, 64),
    "g5.12xlarge": Instance("A10G", 4, 192, _gib(3800), 40, 48),
    "g5.24xlarge": Instance("A10G", 4, 384, _gib(3800), 50, 96),
    "g5.48xlarge": Instance("A10G", 8, 768, _gib(7600), 100, 192),
    "g6.xlarge": Instance("L4", 1, 16, _gib(250), 10, 4),
    "g6.12xlarge": Instance("L4", 4, 192, _gib(3760), 40, 48),
    "g6.48xlarge": Instance("L4", 8, 768, _gib(7520), 100, 192),
    "g6e.xlarge": Instance("L40S", 1, 32, _gib(250), 20, 4),
    "g6e.12xlarge": Instance("L40S", 4, 384, _gib(3800), 100, 48),
    "g6e.24xlarge": Instance("L40S", 4, 768, _gib(3800), 200, 96),
    "g6e.48xlarge": Instance("L40S", 8, 1536, _gib(7600), 400, 192),
    "g7e.2xlarge": Instance("RTX PRO 6000", 1, 64, _gib(1900), 50, 8),
    "g7e.12xlarge": Instance("RTX PRO 6000", 2, 512, _gib(3800), 400, 48),
    "g7e.24xlarge": Instance("RTX PRO 6000", 4, 1024, _gib(7600), 800, 96),
    "g7e.48xlarge": Instance("RTX PRO 6000", 8, 2048, _gib(15200), 1600, 192),
}

# https://cloud.google.com/compute/docs/gpus (accelerator-optimized machines; a2-highgpu has local SSDs on request)
_GOOGLE = {
    "a2-highgpu-1g": Instance("A100 40GB", 1, _gib(85), 0, 24, 12),
    "a2-highgpu-2g": Instance("A100 40GB", 2, _gib(170), 0, 32, 24),
    "a2-highgpu-4g": Instance("A100 40GB", 4, _gib(340), 0, 50, 48),
    "a2-highgpu-8g": Instance("A100 40GB", 8, _gib(680), 0, 100, 96),
    "a2-megagpu-16g": Instance("A100 40GB", 16, _gib(1360), 0, 100, 96),
    "a2-ultragpu-1g": Instance("A100 80GB", 1, _gib(170), 375, 24, 12),
    "a2-ultragpu-2g": Instance("A100 80GB", 2, _gib(340), 750, 32, 24),
    "a2-ultragpu-4g": Instance("A100 80GB", 4, _gib(680), 1500, 50, 48),
    "a2-ultragpu-8g": Instance("A100 80GB", 8, _gib(1360), 3000, 100, 96),
    "a3-highgpu-8g": Instance("H100", 8, _gib(1872), 6000, 1000, 208),
    "a3-megagpu-8g": Instance("H100", 8, _gib(1872), 6000, 1800, 208),
    "a3-ultragpu-8g": Instance("H200", 8, _gib(2952), 12000, 3600, 224),
    "a4-highgpu-8g": Instance("B200", 8, _gib(3968), 12000, 3600, 224),
    "a4x-highgpu-4g": Instance("GB200", 4, _gib(884), 12000, 2000, 140),
}

# https://learn.microsoft.com/azure/virtual-machines/sizes/overview (GPU accelerated)
_AZURE = {
    "ND40rs_v2": Instance("V100 32GB", 8, 672, 2948, 100, 40),
    "ND96asr_v4": Instance("A100 40GB", 8, 900, 6000, 1600, 96),
    "ND96amsr_A100_v4": Instance("A100 80GB", 8, 1900, 6000, 1600, 96),
    "ND96isr_H100_v5": Instance("H100", 8, 1900, 28000, 3200, 96),
    "ND96isr_H200_v5": Instance("H200", 8, 1850, 28000, 3200, 96),
    "ND96isr_MI300X_v5": Instance("MI300X", 8, 1850, 28000, 3200, 96),
    "NC24ads_A100_v4": Instance("A100 80GB PCIe", 1, 220, 960, 20, 24),
    "NC48ads_A100_v4": Instance("A100 80GB PCIe", 2, 440, 1920, 40, 48),
    "NC96ads_A100_v4": Instance("A100 80GB PCIe", 4, 880, 3840, 80, 96),
}

# NVIDIA's datasheets
_DGX = {
    "DGX-A100": Instance("A100 80GB", 8, _gib(2048), _gib(30720), 1600, 128),
    "DGX-H100": Instance("H100", 8, _gib(2048), _gib(30720), 3200, 112),
    "DGX-H200": Instance("H200", 8, _gib(2048), _gib(30720), 3200, 112),
    "DGX-B200": Instance("B200", 8, _gib(2048), _gib(30720), 3200, 112),
}

INSTANCES = {**_AWS, **_GOOGLE, **_AZURE, **_DGX}
