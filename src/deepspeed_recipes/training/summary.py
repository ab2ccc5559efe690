"""The end of a run: summary.json and the last screen."""

import shlex

from ..recipe.files import Json
from ..recipe.project import command, display
from ..recipe.recipe import Recipe
from ..recipe.run_folder import RunFolder, has_ended, read_jsonl, write_json
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
        "metric": recipe.metric,
        "before": evaluation.before() if evaluation else None,
        **results,
        **({"warning": few} if few else {}),
        **memory(),
    }
    if not_loaded := stored.NOT_LOADED.get(recipe.model.path):
        summary["not_loaded"] = not_loaded
    if SKIPPED:
        summary["skipped"] = SKIPPED
    write_json(run.summary, summary)
    tracked = trackers.end(summary)
    merge = " --merge" if recipe.lora else ""
    shown = f"--image {shlex.quote(image)} " if image else ""
    shown += f"--system {shlex.quote(recipe.data.system)} " if recipe.data.system else ""
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
        f"exported     step {best}, the best by {recipe.judged_by}" if (best := summary.get("exported_step")) else None,
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
