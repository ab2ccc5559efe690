"""One run, from a run folder's recipe.json to its export. Each rank executes this file; `scripts/launch.py` starts it.

deepspeed --no_local_rank --num_gpus 2 --module recipes.training.run RUN_FOLDER
"""

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Trainer

from recipes.spec.errors import UserError
from recipes.spec.recipe import Recipe
from recipes.spec.run_folder import (
    RunFolder,
    newest_checkpoint,
    read_jsonl,
    read_recipe,
    write_json,
)
from recipes.training import data, draft, evaluation, export, model, packing, report, tracking, world
from recipes.training.arguments import DTYPE_BYTES, training_arguments
from recipes.training.checkpoints import Checkpoints, StopOnSignal
from recipes.training.console import Progress, duration, say, shown
from recipes.training.environment import describe
from recipes.training.preflight import checkpoint_bytes
from recipes.training.trainer import EngineReady, build, report_grad_norm, resolved_config


def main(folder: str) -> None:
    """Train what `folder`/recipe.json says, from its newest whole checkpoint if there is one."""
    run = RunFolder(Path(folder))
    world.start()
    try:
        execute(read_recipe(run), run)
    except UserError as error:
        fail(error)
    world.stop()


def execute(recipe: Recipe, run: RunFolder) -> None:
    """Prepare, train, measure, export."""
    recipe = with_draft(recipe, run)
    tokenizer = model.load_tokenizer(recipe)
    packing.check(recipe, tokenizer)
    # The arguments come before the model: they make zero.Init live, so that ZeRO-3 shards while it loads.
    arguments = training_arguments(recipe, run, dist.get_world_size(), world.on_gpu())
    material = load_material(recipe, tokenizer, arguments)
    trained = model.load_model(recipe)
    total, trainable = model.parameter_counts(trained)
    say(f"model: {total:,} parameters, {trainable:,} of them trained")

    tracker = tracking.Tracker(recipe, run)
    metrics = tracking.Metrics(run, tracker.record)
    stop = StopOnSignal()
    held_out = None
    if recipe.data.validation:
        raw, rows = material.held_out_raw, material.held_out_rows
        held_out = evaluation.Evaluation(recipe, run, tokenizer, raw, rows, tracker.record)

    def engine_ready() -> None:
        report_grad_norm(trainer.deepspeed)
        config = resolved_config(trainer.deepspeed)
        if world.is_first():
            write_json(run.deepspeed, config)
            write_json(run.environment, describe())
        tracker.begin(config)

    room = checkpoint_bytes(total, trainable, DTYPE_BYTES[recipe.precision])
    # Metrics stand before the evaluation: a window of training is closed before the held-out data is read.
    callbacks = [EngineReady(engine_ready), Checkpoints(run, room), Progress(), stop, metrics, held_out]
    trainer = build(recipe.method, trained, arguments, material.rows, tokenizer, [one for one in callbacks if one])
    metrics.watch(trainer)
    if held_out:
        held_out.trainer = trainer

    checkpoint = newest_checkpoint(run)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if stop.stopped:
        finish_early(run, trainer, tracker)
        return
    after = held_out.measure(trainer.state.global_step, whole=True) if held_out else None
    export.save(trainer, run.export)
    difference = export.verify(trainer, run.export, material.sample)
    if world.is_first():
        finish(recipe, run, tracker, held_out, {"after": after, "logit_difference": difference})


def with_draft(recipe: Recipe, run: RunFolder) -> Recipe:
    """Return the recipe, pointed at its draft model if it asks for one."""
    if not recipe.draft.enabled:
        return recipe
    if world.is_first() and not run.draft_model.exists():
        draft.write(recipe, run.draft_model, model.DTYPES[recipe.precision])
    dist.barrier()
    return replace(recipe, model=replace(recipe.model, path=str(run.draft_model)))


@dataclass(frozen=True)
class Material:
    """The data of a run."""

    rows: Dataset
    """What training sees."""
    held_out_raw: Dataset | None
    """The held-out examples as read."""
    held_out_rows: Dataset | None
    """The same, tokenised; None for preference pairs, which TRL tokenises."""
    sample: list[int]
    """A row of tokens to compare the export on."""


def load_material(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, arguments: Any) -> Material:
    """Read, tokenise and pack; rank 0 first, so that the others find its cache."""
    with arguments.main_process_first(desc="data"):
        held_out = data.read(recipe.data.validation) if recipe.data.validation else None
        if recipe.method == "dpo":
            pairs = data.read(recipe.data.path)
            text = tokenizer.apply_chat_template(pairs[0]["prompt"], return_dict=True)
            say(f"training: {len(pairs)} pairs")
            return Material(pairs, held_out, None, text["input_ids"])
        rows, counted = data.prepare(recipe.data.path, recipe, tokenizer)
        say("\n".join(counted.lines("training", recipe.sequence_length)))
        held_out_rows = None
        if recipe.data.validation:
            # One document per row: then the loss of each counts the same whatever stands beside it.
            alone = replace(recipe, packing=False)
            held_out_rows, counted = data.prepare(recipe.data.validation, alone, tokenizer)
            say("\n".join(counted.lines("held out", recipe.sequence_length)))
        return Material(rows, held_out, held_out_rows, rows[0]["input_ids"][: rows[0]["seq_lengths"][0]])


def finish_early(run: RunFolder, trainer: Trainer, tracker: tracking.Tracker) -> None:
    """Leave a stopped run so that `--resume` goes on with it."""
    if world.is_first():
        step = trainer.state.global_step
        tracker.end({"stopped": True})
        write_json(run.summary, {"stopped": True, "steps": step})
        say(f"stopped after step {step}; go on with the same command and --resume --output-dir {run.path}")


def finish(
    recipe: Recipe,
    run: RunFolder,
    tracker: tracking.Tracker,
    held_out: evaluation.Evaluation | None,
    results: dict[str, Any],
) -> None:
    """Write summary and report, and print the last screen; rank 0 only."""
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
        "metric": recipe.data.metric,
        "before": held_out.before() if held_out else None,
        **results,
        **tracking.memory(),
    }
    write_json(run.summary, summary)
    report.draw(run, recipe.name)
    where = tracker.end(summary)
    merge = " --merge" if recipe.lora else ""
    lines = [
        "",
        f"trained      {last['step']} steps in {duration(last['seconds'])}, "
        f"{summary['tokens_per_second']:,.0f} tokens/s",
        f"model        {shown(run.export)}  (reloaded with plain transformers: the same logits)",
        f"report       {shown(run.report)}",
        f"W&B          {where}" if where else None,
        f'talk to it   python scripts/generate.py {shown(run.export)} "your question"',
        f"export it    python scripts/export.py {shown(run.path)} --output my-model{merge}",
        held_out.last_line(summary["after"])
        if held_out
        else f"training loss: {records[0]['loss']:.4f} -> {last['loss']:.4f}",
    ]
    say("\n".join(line for line in lines if line is not None))


def fail(error: UserError) -> None:
    """Print a user's mistake once and end this rank with status 2."""
    if not world.is_first():
        # Where every rank found the same mistake, the launcher ends this one before it repeats rank 0's message.
        time.sleep(5)
    print(error, file=sys.stderr, flush=True)
    os._exit(2)


if __name__ == "__main__":
    main(sys.argv[1])
