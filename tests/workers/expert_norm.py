"""What DeepSpeed's `clip_grad_norm_` makes of two experts' gradients, 3 and 4 long, on two ranks."""

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import clip_grad_norm_

from deepspeed_recipes.training import distributed


def main() -> None:
    """Say the norm of both gradients together, and DeepSpeed's."""
    distributed.start()
    expert = torch.nn.Parameter(torch.zeros(1))
    expert.grad = torch.tensor([3.0 + dist.get_rank()])
    expert.allreduce = False  # DeepSpeed's mark: each rank has another one
    whole = distributed.total(expert.grad.item() ** 2)[0] ** 0.5
    print(f"the whole {whole:.1f}, DeepSpeed {clip_grad_norm_([expert], max_norm=10.0).item():.1f}", flush=True)
    distributed.stop()
