"""On CPUs an all-reduce for inference ignores its group, and sums over all ranks.

`deepspeed.comm.inference_all_reduce`, which tensor parallelism uses in its forward pass, uses a shared-memory kernel
that always spans the whole world. If tensor parallelism is smaller than the world, ranks also get the sum of other
models' activations, or hang.
"""

import os

import deepspeed
import torch
from deepspeed import comm
from torch import distributed

RANKS = 4
ONLY = "cpu"


def measure() -> tuple[bool, str]:
    """Return whether a sum over two ranks of four includes all ranks."""
    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]  # as DeepSpeed's launcher sets it
    deepspeed.init_distributed(verbose=False)
    groups = [comm.new_group([0, 1]), comm.new_group([2, 3])]
    value = torch.ones(4)
    comm.inference_all_reduce(value, group=groups[distributed.get_rank() // 2])
    return value[0].item() != 2, f"1 summed over a group of two ranks is {value[0].item():g}, in a world of four"


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
