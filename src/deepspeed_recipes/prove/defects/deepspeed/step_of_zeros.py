"""Without ZeRO, in bf16 and fp16, the optimizer makes a step before the first one.

To allocate the optimizer's states, `initialize_optimizer_states` in fp16/unfused_optimizer.py and in
fp16/fused_optimizer.py calls `optimizer.step()` with gradients of zero. Adam counts that step: its first updates are
0.74, 0.86, 0.91, ... of their correct size, and AdamW decays the weights once more. In fp32 and with ZeRO 1 to 3 there
is no such step.
"""

import deepspeed
import torch

RANKS = 1


def measure() -> tuple[bool, str]:
    """Return whether AdamW's first update differs from the learning rate, which it equals for any gradient."""
    deepspeed.init_distributed(verbose=False)
    model = torch.nn.Linear(4, 1, bias=False).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    master = optimizer.param_groups[0]["params"][0]
    before = master.detach().clone()
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16, device=engine.device)).sum())
    engine.step()
    update = (before - master).mean().item()
    return update < 0.09, f"learning rate 0.1: AdamW's first update is {update:.3f} instead of 0.100"


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
