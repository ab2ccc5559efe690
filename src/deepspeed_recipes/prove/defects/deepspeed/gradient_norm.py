"""Without ZeRO, in fp32, the engine discards the gradient norm by which it clips.

`DeepSpeedEngine.clip_fp32_gradients` drops the result of `clip_grad_norm_`, so `get_global_grad_norm()` is None, and
programs that log it (such as transformers' Trainer) log nothing. With bf16, fp16 or ZeRO 1 to 3 the norm is kept.
"""

import deepspeed
import torch

RANKS = 1


def measure() -> tuple[bool, str]:
    """Return whether the norm is lost after a step."""
    deepspeed.init_distributed(verbose=False)
    model = torch.nn.Linear(4, 1)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 4, device=engine.device)).sum())
    engine.step()
    norm = engine.get_global_grad_norm()
    return norm is None, f"get_global_grad_norm() is {norm} after a step whose gradient is [1, 1, 1, 1, 1]"


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
