"""Draws report.png: four curves of a run."""

from pathlib import Path

from ..recipe.run_folder import RunFolder, read_jsonl

CURVES = {
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second, all ranks",
}


def draw(run: RunFolder, title: str, loss: str) -> Path | None:
    """Draw the four curves over the steps and return the file, or None if nothing was logged.

    Args:
        run: its records are drawn.
        title: printed above the curves.
        loss: name of the loss, with its unit.
    """
    records = read_jsonl(run.metrics)
    if not records:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot  # takes most of a second, and is needed once

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained", sharex=True)
    for axis, (key, label) in zip(axes.flat, ({"loss": loss} | CURVES).items(), strict=True):
        points = [(record["step"], record[key]) for record in records if record[key] is not None]
        axis.plot(*zip(*points, strict=True), label="training") if points else axis.text(0.4, 0.5, "not reported")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    held_out = [(row["step"], row["loss"]) for row in read_jsonl(run.evaluations) if "loss" in row]
    if held_out:
        axes[0, 0].plot(*zip(*held_out, strict=True), "o--", label="held out")
        axes[0, 0].legend()
    for axis in axes[1]:
        axis.set_xlabel("optimizer step")
    figure.suptitle(title)
    figure.savefig(run.report, dpi=120)
    pyplot.close(figure)
    return run.report
