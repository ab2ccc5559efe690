"""A run whose Adam on the CPU takes steps that are longer by a thousandth."""

from deepspeed.ops.adam import DeepSpeedCPUAdam

from deepspeed_recipes.training import run


def main(folder: str) -> None:
    """Train what `folder` says."""
    step = DeepSpeedCPUAdam.step

    def hasty(optimizer, closure=None):
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = 1.001 * rate
        step(optimizer, closure)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    DeepSpeedCPUAdam.step = hasty
    run.main(folder)
