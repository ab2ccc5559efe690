"""The end of a run: summary.json, the curves in report.png, and the last screen."""

import shlex
from pathlib import Path

from ..recipe.files import Json
from ..recipe.methods.method import title
from ..recipe.project import command, display
from ..recipe.recipe import Recipe
from ..recipe.run_folder import RunFolder, accept_recipe, has_ended, read_jsonl, write_json
from ..report.page import duration
from . import distributed
from .callbacks.evaluation import Evaluation
from .callbacks.metrics import memory
from .console import say
from .data.load import SKIPPED
from .model import stored
from .tracking.trackers import Trackers


def stopped(run: RunFolder, step: int, trackers: Trackers) -> None:
    """Close a stopped run and print how to resume it."""
    if distributed.is_first():
        trackers.end({"stopped": True})
        if not has_ended(run):  # no step was recorded after an earlier end
            write_json(run.summary, {"stopped": True, "steps": step})
        where = shlex.quote(str(run.path))
        say(f"stopped after step {step}; resume with the same command and --resume --output-dir {where}")


def finished(
    recipe: Recipe,
    run: RunFolder,
    trackers: Trackers,
    evaluation: Evaluation | None,
    results: Json,
    few: str | None,
    image: str | None = None,
) -> None:
    """Write summary and report, print the last screen, and close the trackers; on rank 0.

    `evaluation` is None without held-out data. `results` are `after`, the metric at the end, the export's
    `logit_difference`, and where they apply `stopped_early`, the reason, and `exported_step`. `few` warns that the run
    had too few updates, and `image` is a file to ask a vision-language model about.
    """
    if not distributed.is_first():
        return
    records = read_jsonl(run.metrics)
    last = records[-1]
    summary = {
        "recipe": recipe.name,
        "stopped": False,
        "steps": last["step"],
        "loss": last["loss"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "tokens_per_second": last["tokens"] / last["seconds"],
        "metric": evaluation.metric if evaluation else recipe.metric,
        "before": evaluation.before() if evaluation else None,
        **results,
        **({"warning": few} if few else {}),
        **memory(),
    }
    if not_loaded := stored.NOT_LOADED.get(recipe.model.path):
        summary["not_loaded"] = not_loaded
    if SKIPPED:
        summary["skipped"] = SKIPPED
    accept_recipe(run)  # here if all steps were trained before
    write_json(run.summary, summary)
    draw_curves(run, recipe.name, recipe.method.curve)
    tracked = trackers.end(summary)
    merge = " --merge" if recipe.lora else ""
    shown = f"--image {shlex.quote(image)} " if image else ""
    lines = [
        "",
        f"trained      {last['step']} step{'' if last['step'] == 1 else 's'} in {duration(last['seconds'])}, "
        f"{summary['tokens_per_second']:,.0f} tokens/s",
        f"model        {display(run.export)}  (reloaded with plain transformers: the same logits)",
        f"report       {display(run.report_page)}",
        *tracked,
        f"left out     {sum(one['count'] for one in SKIPPED.values()):,} bad examples (data.bad=skip), in the report"
        if SKIPPED
        else None,
        f"ended        {summary['stopped_early']}" if "stopped_early" in summary else None,
        f"exported     step {best}, the best by {title(summary['metric'])}"
        if (best := summary.get("exported_step"))
        else None,
        None
        if recipe.method.headless
        else f'talk to it   {command("generate")} {shlex.quote(display(run.export))} {shown}"your question"',
        f"export it    {command('export')} {shlex.quote(display(run.path))} --output my-model{merge}",
        few,
        evaluation.warning(summary["after"]) if evaluation else None,
        evaluation.last_line(summary["after"])
        if evaluation
        else f"training loss: {records[0]['loss']:.4f} -> {last['loss']:.4f}"
        if len(records) > 1
        else f"training loss: {last['loss']:.4f}, before the only update",
    ]
    say("\n".join(line for line in lines if line is not None))


CURVES = {
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second, all ranks",
}


def draw_curves(run: RunFolder, name: str, loss: str) -> Path | None:
    """Draw the four curves over the steps and return the file, or None if nothing was logged.

    `name` is printed above the curves; `loss` is the loss's name, with its unit.
    """
    records = read_jsonl(run.metrics)
    if not records:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot  # takes most of a second, and is needed once

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True)
    figure.subplots_adjust(left=0.09, right=0.98, bottom=0.07, top=0.92, wspace=0.24)  # a layout engine draws it twice
    for axis, (key, label) in zip(axes.flat, ({"loss": loss} | CURVES).items(), strict=True):
        points = [(record["step"], record[key]) for record in records if record[key] is not None]
        axis.plot(*zip(*points, strict=True), label="training") if points else axis.text(0.4, 0.5, "not reported")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    held_out = sorted((row["step"], row["loss"]) for row in read_jsonl(run.evaluations) if "loss" in row)
    if held_out:
        axes[0, 0].plot(*zip(*held_out, strict=True), "o--", label="held out")
        axes[0, 0].legend()
    for axis in axes[1]:
        axis.set_xlabel("optimizer step")
    figure.suptitle(name)
    figure.savefig(run.report, dpi=90)
    pyplot.close(figure)
    return run.report
