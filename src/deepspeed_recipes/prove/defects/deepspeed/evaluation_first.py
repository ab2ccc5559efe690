"""After an evaluation, ZeRO-3 gathers all weights twice in every training step, for good.

Which weights stay gathered between the forward and the backward pass is decided once for each module and position, and
kept in a cache. An evaluation has no backward pass, so its decision is to keep none, and the training steps that follow
find it in the cache: they communicate twice as much as they would without the evaluation.
"""

import deepspeed
import torch

RANKS = 2


def gathers(evaluations: int) -> int:
    """Return how often a training step gathers weights, after so many evaluations."""
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
    """Return whether an evaluation before the first step changes what a later step communicates."""
    deepspeed.init_distributed(verbose=False)
    usual, afterwards = gathers(evaluations=0), gathers(evaluations=4)
    return afterwards > usual, f"{usual} gathers in a training step, {afterwards} after an evaluation"


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
