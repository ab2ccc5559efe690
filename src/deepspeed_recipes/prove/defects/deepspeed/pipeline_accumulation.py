"""Gradients of a pipeline's earlier stages are divided by the accumulation steps once per stage.

With `gradient_accumulation_steps` of 2 and two stages, the first stage's gradients are half of the correct size; with
three stages, a quarter. Adam hides the size, but not the stages' shares in the gradient norm that clipping uses. The
loss looks normal. Fixed in DeepSpeed 0.19.3.
"""

import os

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

RANKS = 2
RIGHT_SINCE = "0.19.3"
ACCUMULATION = 2


def layers() -> list[torch.nn.Module]:
    """Return the same layers each time."""
    torch.manual_seed(0)
    return [torch.nn.Linear(4, 4) for _ in range(2)]


def measure() -> tuple[bool, str]:
    """Return whether the first step changes the first stage's weights differently than plain PyTorch does."""
    deepspeed.init_distributed(verbose=False)
    device = deepspeed.accelerator.get_accelerator().device_name(int(os.environ["LOCAL_RANK"]))
    batches = [(torch.full((1, 4), 1.0 + at, device=device), torch.zeros(1, 4, device=device)) for at in range(2)]
    plain = torch.nn.Sequential(*layers()).to(device)
    sum(torch.nn.functional.mse_loss(plain(inputs), targets) / ACCUMULATION for inputs, targets in batches).backward()
    expected = plain[0].weight.grad.norm()
    staged = PipelineModule(layers(), num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    before = [weight.detach().clone().to(device) for weight in staged.parameters()]
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1e9,  # the default clips at 1
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    optimizer = torch.optim.SGD(staged.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=staged, optimizer=optimizer, config=config)
    engine.train_batch(iter(batches))
    moved = (before[0] - next(engine.module.parameters())).norm().reshape(1)
    torch.distributed.broadcast(moved, 0)
    share = (moved / expected).item()
    return abs(share - 1) > 0.01, f"the first of two stages moves by {share:.2f} of its gradient"


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
