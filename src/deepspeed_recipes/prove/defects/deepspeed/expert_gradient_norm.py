"""DeepSpeed's clip_grad_norm_ averages the norms of different experts instead of adding them up.

With experts on different ranks, and without ZeRO, each rank has gradients of its own experts. Their common norm is the
root of the sum of squares; DeepSpeed takes the mean over the ranks, and clips at that.
"""

import os

import deepspeed
import torch
from deepspeed.runtime.utils import clip_grad_norm_

RANKS = 2


def measure() -> tuple[bool, str]:
    """Return whether the norm of two experts' gradients, 3 and 4, differs from 5."""
    deepspeed.init_distributed(verbose=False)
    device = deepspeed.accelerator.get_accelerator().device_name(int(os.environ["LOCAL_RANK"]))
    expert = torch.nn.Parameter(torch.zeros(1, device=device))
    expert.grad = torch.tensor([3.0 + torch.distributed.get_rank()], device=device)
    expert.allreduce = False  # DeepSpeed's mark of a weight that only this rank has
    norm = float(clip_grad_norm_([expert], max_norm=10.0))
    return abs(norm - 5) > 0.01, f"the gradients of two experts are 3 and 4; DeepSpeed reports the norm {norm:.2f}"


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
