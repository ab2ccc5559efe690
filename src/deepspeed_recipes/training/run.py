"""One run, from a run folder's recipe.json to its export. Each rank executes this file; the launcher starts it.

deepspeed --no_local_rank --num_gpus 2 --module deepspeed_recipes.training.run RUN_FOLDER
"""

import signal

if __name__ == "__main__":  # the imports take up to a minute, and Ctrl-C would print hundreds of lines of them
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from . import peft_without_bitsandbytes  # noqa: F401  # first: before anything imports PEFT

# isort: split
import gc
import os
import shlex
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from ..machine.system import gathered_bytes
from ..recipe import deepspeed_file, limits, quantization
from ..recipe.deepspeed_file import DeepSpeedFile
from ..recipe.errors import UserError, counted, first_line, lasting, passing, printable, redact
from ..recipe.files import Json
from ..recipe.layout import gradient_accumulation_steps
from ..recipe.methods import Distill
from ..recipe.own_code import is_own
from ..recipe.project import command, display
from ..recipe.recipe import Recipe, names
from ..recipe.run_folder import (
    REWIND,
    UNREADABLE,
    RunFolder,
    accept_recipe,
    checkpoint_bytes,
    newest_checkpoint,
    read_json,
    starting_recipe,
    step_of,
    write_json,
    write_requested,
)
from ..recipe.samples import TINY_TEACHER
from . import console, distributed, export, own_code, rendezvous, summary, upstream, without_launcher
from .arguments import common_arguments, gather_layers
from .callbacks.evaluation import Evaluation
from .callbacks.layer_stats import LayerStats
from .callbacks.loss_guard import LossGuard, Rewind
from .callbacks.metrics import Metrics, training_flops
from .callbacks.profiler import Phases, Profiler
from .callbacks.stopping import StopOnSignal, Watchdog
from .callbacks.system_log import SystemLog
from .checkpoint import fingerprint, save
from .checkpoint.save import Checkpoints
from .console import leave_out_noise, say
from .data import chat_templates, updates
from .data import load as load_data
from .data.load import Datasets
from .methods import method
from .methods.distillation import teacher
from .model import draft, generate, heads, load, output_head, probe, transforms
from .model_folder import base_model, expected
from .parallel import holdings, implementation, sequence
from .tracking.trackers import Trackers
from .trainer import Parts, RunContext

LOST = 5
"""Seconds that a rank which has lost another waits, so that the launchers, which poll every second, see the other's
exit status first."""


def main(folder: str) -> None:
    """Train the recipe in `folder`, from its newest complete checkpoint if there is one."""
    run = RunFolder(Path(folder))
    trackers = Trackers(run)
    try:
        rendezvous.complete(os.environ)
        with without_launcher.kept(run):
            console.keep_log(run)
            leave_out_noise()
            upstream.compile_ops_once(run.ranks / f"rank-{os.environ['RANK']}.stack")
            distributed.start()
            save.load_only_data()
            upstream.leave_out_step_of_zeros()
            upstream.link_weights_in_their_order()
            execute(starting_recipe(run), run, trackers)
            distributed.stop()
    except UserError as error:
        fail(error, 2, trackers)
    except Rewind as error:
        fail(error, REWIND, trackers)
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not os.path.exists(folder):
            gone = f"{folder}: this folder was removed or renamed while the run wrote to it"
            fail(f"{gone}; if it is elsewhere, continue there with --resume --output-dir.", 2, trackers)
        if refused := lasting(error, run.path):
            fail(refused, 2, trackers)
        if lost := without_launcher.lost_peer(error):
            if rendezvous.is_watched(os.environ):
                console.keep_from_screen(error)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(LOST)  # the launcher prints why the other rank has ended, and ends this process
            else:
                print(lost, file=sys.stderr, flush=True)
                trackers.failed(lost, 1)
            os._exit(1)  # the group of ranks would wait for the lost rank
        if unreadable := passing(error):
            console.keep_from_screen(error)
            fail(unreadable, UNREADABLE, trackers)
        raise


def execute(recipe: Recipe, run: RunFolder, trackers: Trackers) -> None:
    """Prepare, train, measure, export."""
    file = deepspeed_file.read(recipe.deepspeed)
    if recipe.numa_binding and (cores := distributed.keep_near_gpu()):
        say(f"NUMA: each rank keeps to the cores near its GPU, rank 0 to {len(cores)} of {os.cpu_count()}")
    for line in own_code.check(recipe):
        say(line)
    if recipe.draft.enabled:
        distill = recipe.method
        if isinstance(distill, Distill) and not distill.served and not Path(str(distill.teacher)).exists():
            recipe = replace(recipe, method=replace(distill, teacher=TINY_TEACHER))  # instead of one on the Hub
        if distributed.is_first() and not run.draft_model.exists():
            draft.write(recipe, run.draft_model, load.DTYPES[recipe.precision])
        dist.barrier()
        recipe = replace(recipe, model=replace(recipe.model, path=str(run.draft_model)))
    distributed.check_on_first(lambda: base_model.check_reachable(recipe.model.path))
    checkpoint = newest_checkpoint(run)
    began = fingerprint.began(checkpoint)
    upstream.date_chats(began)
    tokenizer = chat_templates.load_tokenizer(recipe)
    recipe = checked(recipe, file, tokenizer)
    methods, parallel = method(recipe.method.name), implementation(recipe.layout)
    # The arguments precede the model: they activate zero.Init, so that ZeRO-3 shards the model while it loads.
    common = common_arguments(recipe, run, file, dist.get_world_size(), distributed.on_gpu())
    arguments = methods.arguments(common, recipe)
    with arguments.main_process_first(desc="data"):  # the other ranks find rank 0's cache
        datasets = methods.datasets(recipe, tokenizer)
    recipe = updates.in_steps(recipe, datasets.size)
    arguments.set_save(strategy="steps" if recipe.save_steps else "no", steps=int(recipe.save_steps) or 1)
    mark = fingerprint.of_run(recipe, tokenizer, datasets, began)
    fingerprint.check(mark, checkpoint, recipe.data.changed)
    too_few = say_updates(recipe, datasets.size, dist.get_world_size(), checkpoint)
    if distributed.is_first():
        skipped = {"skipped": load_data.SKIPPED} if load_data.SKIPPED else {}
        write_requested(run.data, {**datasets.described(tokenizer), **skipped, "save_steps": recipe.save_steps})
    model = parallel.load(recipe, datasets.labels)
    generate.stop_at(model, *chat_templates.ends_of_turn(recipe, tokenizer))
    gather_layers(arguments, model, file)
    upstream.tell_whether_packed(model, recipe.packs)
    outline = parallel.outline(recipe, model)
    context = prepare(recipe, run, file, datasets, outline, checkpoint, mark, trackers)
    trainer = methods.trainer(context, Parts(model, arguments, datasets.training, tokenizer))
    distributed.check_on_first(lambda: export.rehearse(trainer, outline))
    gc.freeze()  # no import is ever freed: collections then take 0.2% of the time of `tiny full` on a CPU, else 0.7%
    with save.refusing_code(checkpoint):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    conclude(trainer, datasets, too_few, outline)


def say_updates(recipe: Recipe, size: updates.Size | None, world_size: int, checkpoint: Path | None) -> str | None:
    """Print the number of updates, and where a resumed run continues, maybe on another schedule.

    If there are too few updates, print and return settings that give more. `size` is None for a stream.
    """
    advice, steps = None, recipe.max_steps
    if size is None:
        say("\n".join([f"{steps} steps in all, from a stream", *updates.unreached(recipe, steps or 0)]))
    else:
        say("\n".join([*updates.table(recipe, size), *updates.left_out(recipe, size)]))
        steps = updates.in_all(recipe, size.sequences)
        if advice := updates.advice(recipe, size, world_size):
            say(advice)
    if checkpoint is None:
        return advice
    before, kind = read_json(checkpoint / "trainer_state.json")["max_steps"], recipe.schedule.kind
    done = step_of(checkpoint)
    if steps is not None and done >= steps:
        more = f", and {done - steps} more" if done > steps else ""
        say(f"all {steps} steps are trained{more}: only measuring and exporting")
        return advice
    say(f"resuming from step {done + 1} of {steps}")
    if steps != before and not kind.startswith(("constant", "inverse_sqrt")):
        say(f"the run had {before} steps: from here on the learning rate follows the {kind} schedule of {steps}")
    return advice


def checked(recipe: Recipe, file: DeepSpeedFile, tokenizer: PreTrainedTokenizerBase) -> Recipe:
    """Return the recipe with its attention and its way of computing the loss, or refuse to train another model."""
    # The launcher may not have had the dimensions of a model on the Hub.
    config = load.load_config(recipe).to_dict()
    limits.check(replace(recipe, model=replace(recipe.model, config=config)), dist.get_world_size(), file)
    distributed.check_installed(recipe, file)
    transforms.check(recipe, file, distributed.on_gpu())
    attention = probe.check_packing(recipe, tokenizer, distributed.on_gpu(), say)
    if recipe.model.attention == "auto" and attention == "eager":
        say(f"model.attention=eager: transformers has no SDPA for {config['model_type']}")
    recipe = replace(recipe, model=replace(recipe.model, attention=attention))
    implementation(recipe.layout).check(recipe, tokenizer)
    if recipe.layout.sequence > 1:
        sequence.check(recipe, tokenizer)
    if isinstance(recipe.method, Distill) and not recipe.method.served:
        teacher.check_model(recipe, tokenizer)
    return output_head.check(recipe, tokenizer, say)


def prepare(
    recipe: Recipe,
    run: RunFolder,
    file: DeepSpeedFile,
    datasets: Datasets,
    model: PreTrainedModel,
    checkpoint: Path | None,
    mark: Json,
    trackers: Trackers,
) -> RunContext:
    """Return the trainer's context; `model` is used to count parameters and operations, checkpoints record `mark`."""
    total, trainable = load.parameter_counts(model)
    on = "; of one rank, which has a part of each matrix" if recipe.layout.tensor > 1 else ""
    say(f"model: {total:,} parameters, {trainable:,} of them trained{on}; attention: {recipe.model.attention}")
    sizes = (total, trainable, load.DTYPES[recipe.precision].itemsize)
    parallel = implementation(recipe.layout)
    watchdog = Watchdog(run, recipe.hang_minutes)
    evaluation = None
    if datasets.held_out is not None:
        own = method(recipe.method.name)
        # The stages of a pipeline cannot generate, and exact_match stores its own.
        alone = recipe.data.metrics == ["loss"] and recipe.metric == "loss"
        asks = alone and recipe.layout.pipeline == 1 and recipe.data.sample_answers != 0
        answer = getattr(own, "answer", None) if asks else None
        evaluation = Evaluation(recipe, run, datasets, parallel, own.metric, trackers.record, answer, mark["held_out"])
    elif recipe.picks:
        raise UserError(
            "early_stopping and keep_best need held-out examples, and there are too few to hold out any; add "
            "data.validation=FILE or data.validation_share=0.2."
        )
    elif any(map(is_own, names(recipe.data.metric))):
        say(f"data.metric={recipe.data.metric}: not measured, since no examples are held out (data.validation=FILE)")
    system = SystemLog(run, distributed.gpu_uuid())
    counts = distributed.place(recipe.layout).is_first_reader
    metrics = Metrics(run, trackers.record, counts, training_flops(model), system.utilization)
    phases = Phases()
    if recipe.profile.steps:
        phases = Profiler(recipe, run, described(recipe, file, total, trainable), metrics.leave_out)
    return RunContext(
        recipe=recipe,
        run=run,
        file=file,
        parallel=parallel,
        checkpoint=checkpoint,
        trackers=trackers,
        metrics=metrics,
        guard=LossGuard(recipe, run),
        checkpoints=Checkpoints(recipe, run, mark, checkpoint_bytes(*sizes), gathered_bytes(*sizes, file.stage)),
        stop=StopOnSignal(watchdog.write_stack),
        watchdog=watchdog,
        evaluation=evaluation,
        phases=phases,
        system=system,
        layer_stats=LayerStats(recipe) if measures_layers(recipe, file) else None,
    )


def measures_layers(recipe: Recipe, file: DeepSpeedFile) -> bool:
    """Return whether gradients and weights are measured by layer."""
    known = recipe.layout.tensor == 1 or file.stage < 2  # otherwise the numbers would differ from plain PyTorch's
    return known and file.offload_optimizer == "none" if recipe.layer_stats is None else recipe.layer_stats


def described(recipe: Recipe, file: DeepSpeedFile, total: int, trainable: int) -> Json:
    """Return the facts about the run that the verdict on recorded steps needs."""
    return {
        "total": total,
        "trained": trainable,
        "weight_bytes": load.DTYPES[recipe.precision].itemsize,
        "offload_optimizer": file.offload_optimizer,
        "stage": file.stage,
        "partition_size": file.partition_size,
        "kept_weights": file.kept_weights,
        "layout": asdict(recipe.layout),
        "micro_batches": gradient_accumulation_steps(recipe, dist.get_world_size()),
    }


def conclude(trainer: Trainer, datasets: Datasets, too_few: str | None, outline: PreTrainedModel) -> None:
    """Evaluate and export the trained model and print the last screen; after a stop, print how to resume."""
    context = trainer.context
    recipe, run, evaluation = context.recipe, context.run, context.evaluation
    distributed.check_on_first(context.checkpoints.lock.check)
    if context.stop.stopped:
        summary.stopped(run, trainer.state.global_step, context.trackers)
        return
    if not run.metrics.exists():  # all steps were trained at an earlier start
        raise UserError(
            f"{run.metrics}: missing, so the run's end cannot be described; restore it, or export the newest "
            f"checkpoint: {command('export')} {shlex.quote(display(run.path))} --output FOLDER."
        )
    check_moved(trainer)
    try:  # for the report
        layers = holdings.layer_bytes(trainer.deepspeed)
        write_json(run.ranks / f"rank-{dist.get_rank()}.json", {"rank": dist.get_rank(), "layers": layers})
    except Exception as error:
        say(f"the report will lack the memory of each rank: {type(error).__name__}: {first_line(error)}")
    best = trainer.load_best() if recipe.keep_best else None
    after = failed = None
    try:
        if evaluation:
            exported = best if best != trainer.state.global_step else None
            after = evaluation.measure(trainer, with_metric=True, exported=exported)[evaluation.metric]
    except own_code.Failed as error:
        failed = error  # the export loses nothing by it
    export.save(trainer, run.unverified, outline)
    dtype = load.DTYPES[recipe.precision]
    images = trainer.data_collator.alone(datasets.shown) if datasets.shown else {}  # a vision-language model's inputs
    beside = {
        name: value.to(distributed.device(), dtype if value.is_floating_point() else None)
        for name, value in images.items()
    }
    difference = export.verify(
        lambda tokens: context.parallel.logits(trainer, tokens, **beside),
        dtype,
        run.unverified,
        datasets.sample,
        beside,
    )
    if heads.trained_by(recipe) in ("vocabulary", "vision"):  # which writes text
        expected.write_of(trainer, lambda tokens: context.parallel.logits(trainer, tokens), dtype, run.unverified)
    if distributed.is_first():
        accept_recipe(run)  # which the record in the export holds; here if all steps were trained before
    results = {"after": after, "logit_difference": difference}
    if published := quantization.title(load.load_config(recipe).to_dict()):
        results["dequantized"] = published
    export.describe(run, results | (evaluation.described() if evaluation else {}), best)
    step, planned = trainer.state.global_step, trainer.state.max_steps
    asked = f"callbacks={recipe.callbacks} asked for it" if recipe.callbacks else None
    if step < planned and (reason := evaluation.ended if evaluation and evaluation.ended else asked):
        results["stopped_early"] = f"after step {step} of {planned}: {reason}"
    if best is not None:
        results["exported_step"] = best
    if distributed.is_first():
        export.move(run.unverified, run.export)
    dist.barrier()
    if failed:
        raise failed
    image = None
    if datasets.shown and (pictures := datasets.shown["images"]):
        image = "FILE.png" if pictures[0]["bytes"] else display(Path(pictures[0]["path"]))
    summary.finished(recipe, run, context.trackers, evaluation, results, too_few, image)


def check_moved(trainer: Trainer) -> None:
    """Refuse to report success for a run that has learned nothing; a collective.

    No sampled weight of any rank has changed, or all gradients were 0 and the weights only decayed. A resumed run is
    not checked: its weights changed before.
    """
    recipe, steps = trainer.context.recipe, trainer.state.global_step
    sampled, moved = distributed.total(len(trainer.start), holdings.moved(trainer.start, trainer.model))
    norms = [row["grad_norm"] for row in trainer.state.log_history if row.get("grad_norm") is not None]
    decayed = bool(norms) and not any(norms) and recipe.weight_decay > 0
    if sampled and (decayed or not moved) and not trainer.context.checkpoint:
        why = ", as where all answers to a prompt get the same reward" if recipe.method.name == "grpo" else ""
        raise UserError(
            f"the trained weights have {'only decayed' if moved else 'not changed'} after {counted(steps, 'step')}, so "
            "there is nothing to export: "
            f"all gradients are 0{why} ({trainer.context.run.metrics} has their norms), every update was skipped, or "
            f"learning_rate={recipe.learning_rate} is too small for {recipe.precision}."
        )


def fail(error: Exception | str, status: int, trackers: Trackers) -> NoReturn:
    """Print an error that every rank may have found, once, pass it to the trackers, and exit with `status`."""
    if os.environ.get("RANK", "0") != "0":
        # If every rank found the same mistake, the launcher ends this rank before it repeats the message of rank 0,
        # which may have to pass it to trackers.
        time.sleep(15 if trackers.run.tracking.exists() else 5)
    print(printable(redact(str(error))), file=sys.stderr, flush=True)
    try:
        trackers.failed(str(error), status)
    finally:  # what cannot be read or written is the reason already
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
