"""After an evaluation, ZeRO-3 permanently gathers all weights twice in every training step.

For each module and position DeepSpeed decides once which weights stay gathered between the forward and the backward
pass, and caches the decision. An evaluation has no backward pass, so its decision is to keep none, and the training
steps after it use that decision: they communicate twice as much as without the evaluation.
"""

import deepspeed
import torch

RANKS = 2


def gathers(evaluations: int) -> int:
    """Return the number of gathers in a training step after `evaluations` evaluations."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(6)])
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    inputs = torch.ones(1, 64, device=engine.device)
    with torch.no_grad():
        engine.eval()
        for _ in range(evaluations):
            engine(inputs)
        engine.train()
    for _ in range(5):
        with torch.profiler.profile(acc_events=True) as trace:
            engine.backward(engine(inputs).square().mean())
            engine.step()
    return sum(event.name == "c10d::_allgather_base_" for event in trace.events())


def measure() -> tuple[bool, str]:
    """Return whether an evaluation before the first step changes the communication of a later step."""
    deepspeed.init_distributed(verbose=False)
    usual, afterwards = gathers(evaluations=0), gathers(evaluations=4)
    return afterwards > usual, f"{usual} gathers in a training step, {afterwards} after an evaluation"


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
