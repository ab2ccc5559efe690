"""One run, from a run folder's recipe.json to its export. Each rank executes this file; `scripts/launch.py` starts it.

deepspeed --no_local_rank --num_gpus 2 --module recipes.training.run RUN_FOLDER
"""

from recipes.training import lean_peft  # noqa: F401, I001  # first: before anything imports PEFT

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer

from recipes.spec import limits
from recipes.spec.errors import UserError
from recipes.spec.layout import data_parallel_size
from recipes.spec.recipe import Recipe
from recipes.spec.run_folder import (
    REWIND,
    RunFolder,
    checkpoint_bytes,
    newest_checkpoint,
    read_json,
    read_jsonl,
    read_recipe,
    write_json,
)
from recipes.training import (
    attention,
    draft,
    evaluation,
    experts,
    export,
    guard,
    model,
    packing,
    pipeline,
    pipeline_engine,
    rank_log,
    report,
    routing,
    sequence,
    sequence_check,
    tensor,
    tracking,
    world,
)
from recipes.training.arguments import DTYPE_BYTES, training_arguments
from recipes.training.checkpoints import Checkpoints, StopOnSignal, restore_groups
from recipes.training.console import Progress, duration, say, shown
from recipes.training.environment import describe
from recipes.training.flops import work_of
from recipes.training.material import load_material
from recipes.training.preflight import gathered_bytes
from recipes.training.trainer import (
    EngineReady,
    as_never_loaded,
    build,
    read_norms_when_logging,
    report_grad_norm,
    resolved_config,
    share_rows,
)
from recipes.training.watchdog import Watchdog


def main(folder: str) -> None:
    """Train what `folder`/recipe.json says, from its newest whole checkpoint if there is one."""
    run = RunFolder(Path(folder))
    rank_log.keep(run)
    world.start()
    try:
        execute(read_recipe(run), run)
    except UserError as error:
        fail(error, 2)
    except guard.Rewind as error:
        fail(error, REWIND)
    world.stop()


def execute(recipe: Recipe, run: RunFolder) -> None:
    """Prepare, train, measure, export."""
    recipe = with_draft(recipe, run)
    check_layout(recipe)
    tokenizer = model.load_tokenizer(recipe)
    chosen = packing.check(recipe, tokenizer, world.on_gpu())
    recipe = replace(recipe, model=replace(recipe.model, attention=chosen))
    staged = recipe.layout.pipeline > 1
    if staged:
        pipeline.check(recipe, tokenizer)
    if recipe.layout.sequence > 1:
        sequence_check.check(recipe, tokenizer)
    sharing = sequence.start(recipe.layout)
    # The arguments come before the model: they make zero.Init live, so that ZeRO-3 shards while it loads.
    arguments = training_arguments(recipe, run, dist.get_world_size(), world.on_gpu())
    material = load_material(recipe, tokenizer, arguments)
    with tensor.unseen():
        trained = pipeline_engine.build(recipe) if staged else model.load_model(recipe)
        if recipe.layout.tensor > 1 and not staged:
            tensor.shard_where_autotp_cannot(trained, recipe.layout.tensor)
    whole = pipeline.skeleton(recipe) if staged else trained
    attention.tell_whether_packed(trained, recipe.packing and recipe.method != "dpo")
    total, trainable = model.parameter_counts(whole)
    say(f"model: {total:,} parameters, {trainable:,} of them trained; attention: {chosen}")

    checkpoint = newest_checkpoint(run)
    tracker = tracking.Tracker(recipe, run)
    metrics = tracking.Metrics(run, tracker.record, world.place(recipe.layout).counts)
    watchdog = Watchdog(run, recipe.hang_minutes)
    stop = StopOnSignal(watchdog.write_stack)
    guarded = guard.Guard(recipe, run)
    held_out = None
    if material.held_out_raw is not None:
        raw, rows = material.held_out_raw, material.held_out_rows
        held_out = evaluation.Evaluation(recipe, run, tokenizer, raw, rows, tracker.record)

    def engine_ready() -> None:
        report_grad_norm(trainer.deepspeed)
        read_norms_when_logging(trainer)
        if checkpoint:
            restore_groups(trainer.deepspeed, checkpoint)
            as_never_loaded(trainer.deepspeed)
        if experts.layers(trainer.model):
            experts.route_as_transformers(trainer.model)
        config = resolved_config(trainer.deepspeed)
        if world.is_first():
            write_json(run.deepspeed, config)
            write_json(run.environment, describe())
        tracker.begin(config)

    sizes = (total, trainable, DTYPE_BYTES[recipe.precision])
    saving = Checkpoints(run, checkpoint_bytes(*sizes), gathered_bytes(*sizes, stage_of(recipe)))
    # Routing adds to what Metrics writes; Metrics close a window of training before the held-out data is read.
    routes = routing.Routing() if recipe.layout.pipeline == 1 else None
    # The guard reads a log before Metrics writes it; the watchdog's clock starts again after everything else.
    callbacks = [EngineReady(engine_ready), guarded, saving, Progress(), stop]
    callbacks += [routes, metrics, held_out, watchdog]
    trainer = build(recipe.method, trained, arguments, material.rows, tokenizer, [one for one in callbacks if one])
    share_rows(trainer, recipe.layout)
    if sharing:
        sequence.share(trainer, recipe.layout, sharing)
    if recipe.layout.expert > 1:
        experts.group_parameters(trainer, recipe.layout.expert)
    if recipe.router_aux_loss_coef:
        routing.balance(trainer, recipe.router_aux_loss_coef, data_parallel_size(recipe.layout, dist.get_world_size()))
    export.save_with_checkpoints(trainer)
    metrics.watch(trainer, work_of(whole))
    if staged:
        pipeline_engine.drive(trainer, recipe.layout)
    if held_out:
        held_out.trainer = trainer
    guarded.watch(trainer)

    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if stop.stopped:
        finish_early(run, trainer, tracker)
        return
    after = held_out.measure(trainer.state.global_step, whole=True) if held_out else None
    export.save(trainer, run.export)

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        if staged:
            return pipeline_engine.logits(trainer.deepspeed, tokens, whole.config.get_text_config().vocab_size)
        return trainer.model.eval()(input_ids=tokens).logits

    difference = export.verify(forward, model.DTYPES[recipe.precision], run.export, material.sample)
    if world.is_first():
        finish(recipe, run, tracker, held_out, {"after": after, "logit_difference": difference})


def check_layout(recipe: Recipe) -> None:
    """Refuse what `limits` refuses, of models on the Hub too, whose dimensions the launcher may not have known."""
    config = model.load_config(recipe).to_dict()
    known = replace(recipe, model=replace(recipe.model, config=config))
    limits.check(known, dist.get_world_size(), limits.Sharding(stage=stage_of(recipe)))


def stage_of(recipe: Recipe) -> int:
    """Return the ZeRO stage of the recipe's DeepSpeed file."""
    return read_json(Path(recipe.deepspeed)).get("zero_optimization", {}).get("stage", 0)


def with_draft(recipe: Recipe, run: RunFolder) -> Recipe:
    """Return the recipe, pointed at its draft model if it asks for one."""
    if not recipe.draft.enabled:
        return recipe
    if world.is_first() and not run.draft_model.exists():
        draft.write(recipe, run.draft_model, model.DTYPES[recipe.precision])
    dist.barrier()
    return replace(recipe, model=replace(recipe.model, path=str(run.draft_model)))


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


def fail(error: Exception, status: int) -> None:
    """Print once what every rank has found, and end this rank with `status`."""
    if not world.is_first():
        # Where every rank found the same mistake, the launcher ends this one before it repeats rank 0's message.
        time.sleep(5)
    print(error, file=sys.stderr, flush=True)
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
