"""Resume from a universal checkpoint and print the optimizer's groups, before and after the workaround."""

import torch

from recipes.training import run, upstream


def main(folder: str) -> None:
    """Run `folder`; executed on every rank."""
    mend = upstream.restore_parameter_groups

    def watched(engine, checkpoint):
        print("loaded:", groups(engine), flush=True)
        mend(engine, checkpoint)
        print("mended:", groups(engine), flush=True)

    upstream.restore_parameter_groups = watched
    run.main(folder)


def groups(engine) -> str:
    """Return the groups' weight decays, and how many tensors count the steps of how many states."""
    optimizer = engine.optimizer.optimizer
    steps = [state["step"] for state in optimizer.state.values()]
    assert all(torch.is_tensor(step) for step in steps)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    return f"decays {decays}, {len(set(map(id, steps)))} counters for {len(steps)} states"
