"""Outside transformers, "auto" in a DeepSpeed configuration silently becomes a default: no ZeRO, fp32.

DeepSpeed drops every value that is "auto" before it validates a section. A configuration written for the Trainer loads
in `deepspeed.initialize`, and trains without ZeRO and in another precision. A key that is misspelled at the top level
is ignored in the same way.
"""

import deepspeed
import torch

RANKS = 1


def measure() -> tuple[bool, str]:
    """Return whether an engine silently accepts such a configuration."""
    deepspeed.init_distributed(verbose=False)
    model = torch.nn.Linear(4, 1)
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": "auto"},
        "gradient_cliping": 0.1,
    }  # fmt: skip
    try:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
        )
    except Exception as error:
        return False, f"refused: {type(error).__name__}: {error}"[:200]
    found = f"stage {engine.zero_optimization_stage()}, bf16 {bool(engine.bfloat16_enabled())}"
    return (
        True,
        f'stage "auto", bf16 "auto" and gradient_cliping 0.1 became {found}, clipping {engine.gradient_clipping()}',
    )


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
