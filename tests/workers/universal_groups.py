"""Resume from a universal checkpoint and print the optimizer's groups, before and after the workaround."""

import torch

from deepspeed_recipes.training import run, upstream


def main(folder: str) -> None:
    """Run `folder`; executed on every rank."""
    take, separate = upstream.take_update_settings, upstream.separate_step_counters

    def watched(optimizer, scheduler, asked):
        print("loaded:", groups(optimizer), flush=True)
        take(optimizer, scheduler, asked)

    def separated(engine):
        separate(engine)
        print("mended:", groups(engine.optimizer.optimizer), flush=True)

    upstream.take_update_settings, upstream.separate_step_counters = watched, separated
    run.main(folder)


def groups(optimizer) -> str:
    """Return the groups' weight decays, and how many tensors count the steps of how many states."""
    steps = [state["step"] for state in optimizer.state.values()]
    assert all(torch.is_tensor(step) for step in steps)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    return f"decays {decays}, {len(set(map(id, steps)))} counters for {len(steps)} states"
