"""The Trainer of a run: every override of transformers' Trainer, in one class, in the order in which they apply.

`RunHooks` goes before transformers' or TRL's class: `class RunTrainer(RunHooks, Trainer)`. Nothing else in the project
changes a trainer (`upstream.py` works around defects of the engine).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from peft import PeftModel
from torch import distributed as dist
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from transformers.trainer_utils import seed_worker

from ..recipe.deepspeed_file import DeepSpeedFile
from ..recipe.errors import UserError
from ..recipe.files import Json, finite
from ..recipe.layout import data_parallel_size
from ..recipe.recipe import Recipe
from ..recipe.run_folder import RunFolder, write_requested
from . import distributed, optimizer, own_code, upstream
from .callbacks.evaluation import Evaluation
from .callbacks.layer_stats import LayerStats, Routing
from .callbacks.loss_guard import LossGuard
from .callbacks.metrics import Metrics, Progress
from .callbacks.profiler import Phases, Profiler
from .callbacks.stopping import Agreement, StopOnSignal, Watchdog
from .callbacks.system_log import SystemLog
from .checkpoint import digests, save, universal
from .checkpoint.save import Checkpoints
from .data import collate
from .data.collate import Batch
from .distributed import describe_environment
from .model.noise import Noise
from .optimizer import rate_schedule
from .parallel import Holding, expert, holdings
from .tracking.trackers import Trackers

if TYPE_CHECKING:
    Hooked: TypeAlias = Trainer  # the class that the hooks precede, for the type checker
else:
    Hooked = object


@dataclass(frozen=True)
class RunContext:
    """The parts of a run that its trainer needs."""

    recipe: Recipe
    run: RunFolder
    file: DeepSpeedFile
    parallel: Holding
    """The ranks' way of holding the model."""
    checkpoint: Path | None
    """The checkpoint to resume from, or None for a new run."""
    trackers: Trackers
    metrics: Metrics
    guard: LossGuard
    checkpoints: Checkpoints
    stop: StopOnSignal
    watchdog: Watchdog
    evaluation: Evaluation | None
    """None without held-out data."""
    phases: Phases
    """Records steps with `--profile`."""
    system: SystemLog
    layer_stats: LayerStats | None


@dataclass(frozen=True)
class Parts:
    """The parts from which a method makes its trainer, in addition to the run's context."""

    model: PreTrainedModel
    arguments: TrainingArguments
    dataset: Dataset
    tokenizer: PreTrainedTokenizerBase


class OnTrainBegin(TrainerCallback):
    """Calls `action` when the engine exists, before the first step."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Call `action`."""
        self.action()


class FirstEvaluation(TrainerCallback):
    """Measures the model of a new run before its first step."""

    def __init__(self, trainer: "RunHooks", evaluation: Evaluation) -> None:
        self.trainer, self.evaluation = trainer, evaluation

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Measure, unless the run was resumed."""
        if state.global_step == 0:
            self.evaluation.measure(self.trainer, with_metric=True)


class RunHooks(Hooked):
    """The run's overrides of transformers' Trainer; must precede the trainer's own class."""

    control: TrainerControl
    lr_scheduler: LRScheduler
    optimizer: torch.optim.Optimizer

    def __init__(self, context: RunContext, **options: object) -> None:
        """`options` are passed to the trainer's own class."""
        self.context = context
        self.micro_batches: list[Batch] = []  # collected by a pipeline until its step is complete
        self.start: holdings.Sample = {}
        """Some of the trained weights before the first step."""
        self.asked: list[Json] = []
        """The recipe's update settings of each parameter group."""
        self.filler = False
        """True if the micro-batch has no effect (`collate.EvenBatches`)."""
        if context.recipe.callbacks:  # before the run's own, which read what they add to a log
            options["callbacks"] = own_code.callbacks(context.recipe, context.run, context.metrics.also)
        if context.recipe.loss:
            options["compute_loss_func"] = own_code.Loss(
                context.recipe, context.run, lambda: self.state.global_step + 1
            )
        super().__init__(**options)
        self.noise: Noise | None = None
        if context.recipe.neftune_alpha:
            data_rank = distributed.place(context.recipe.layout).data
            self.noise = Noise(self.model, context.recipe.neftune_alpha, context.recipe.seed, data_rank)
        self.remove_callback(PrinterCallback)
        # In the order in which each event reaches them.
        for callback in (
            OnTrainBegin(self.on_engine_ready),
            context.phases if isinstance(context.phases, Profiler) else None,  # ends a step before others take time
            Agreement() if context.recipe.callbacks else None,  # after the user's, before what reads their requests
            context.guard,  # reads a log before Metrics writes it
            context.checkpoints,
            Progress(),
            context.stop,
            Routing() if context.recipe.layout.pipeline == 1 else None,  # adds to the record that Metrics writes
            context.layer_stats,  # adds to the same record
            context.metrics,
            FirstEvaluation(self, context.evaluation) if context.evaluation else None,
            context.evaluation,
            context.system,
            context.watchdog,  # its clock starts after everything else
        ):
            if callback is not None:
                self.add_callback(callback)

    @classmethod
    def of(cls, context: RunContext, parts: Parts, **options: object) -> "RunHooks":
        """Return the trainer; `options` are passed to its own class."""
        given = {"args": parts.arguments, "train_dataset": parts.dataset, "processing_class": parts.tokenizer}
        return cls(context, model=parts.model, **given, **options)

    # Before the first step

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader that gives all ranks of a model replica the same sequences.

        The Trainer's own loader, prepared by accelerate, treats every rank as data-parallel.
        """
        arguments, accelerator, layout = self.args, self.accelerator, self.context.recipe.layout
        ranks = data_parallel_size(layout, dist.get_world_size())
        dataset = collate.numbered(self.train_dataset, self.context.run)
        options: Json = {"batch_size": self.sequences_per_load()}
        if not isinstance(dataset, IterableDataset):
            sampler = self._get_train_sampler(dataset)
            assert sampler, "every dataset with a length has one"
            options = {"batch_sampler": collate.EvenBatches(sampler, self.sequences_per_load(), ranks)}
        loader = DataLoader(
            dataset,
            collate_fn=collate.WithNumbers(self.data_collator),
            num_workers=arguments.dataloader_num_workers,
            pin_memory=arguments.dataloader_pin_memory,
            worker_init_fn=partial(
                seed_worker, num_workers=arguments.dataloader_num_workers, rank=arguments.process_index
            ),
            **options,
        )
        return prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=ranks,
            process_index=distributed.place(layout).data,
            put_on_device=True,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=False,  # `EvenBatches` has made them so
            use_seedable_sampler=accelerator.use_seedable_sampler,
            non_blocking=accelerator.non_blocking,
        )

    def sequences_per_load(self) -> int:
        """Return how many sequences a rank reads at once: a micro-batch."""
        return self._train_batch_size

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the recipe's optimizer, with expert-parallel weights in their own parameter group."""
        recipe, trained = self.context.recipe, self.model if model is None else model
        if self.optimizer is None and optimizer.needed(recipe):
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, trained)
            self.optimizer = optimizer.make(recipe, trained, kind, self.get_decay_parameter_names(trained), options)
        created = super().create_optimizer(model)
        if recipe.layout.expert > 1:
            # As DeepSpeed expects; the engine takes over the groups when it replaces the layers. An optimizer that it
            # builds from its own configuration has such a group too, but decays norms and biases like matrices.
            routed = {weight for name, weight in self.model.named_parameters() if ".experts." in name}
            group = next(one for one in created.param_groups if not routed.isdisjoint(one["params"]))
            spread = [weight for weight in group["params"] if weight in routed]
            group["params"] = [weight for weight in group["params"] if weight not in routed]
            created.add_param_group({**group, "params": spread, "moe": True, "name": f"ep_size_{recipe.layout.expert}"})
        return created

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """Return the recipe's schedule."""
        if self.lr_scheduler is None:
            shape = rate_schedule(self.context.recipe, num_training_steps)
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, shape)
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        # The engine exists, and no checkpoint has been loaded into it.
        groups = (optimizer or self.optimizer).param_groups
        self.asked = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        return scheduler

    def on_engine_ready(self) -> None:
        """Work around the engine's defects, and record its configuration and environment."""
        engine, context, file = self.deepspeed, self.context, self.context.file
        if file.deepcompile and not engine.is_deepcompile_active():
            raise UserError(
                f"deepspeed={file.name}: DeepSpeed has not activated DeepCompile, and would train as plain "
                f"ZeRO-{file.stage}; its log has the reason. Use zero{file.stage}.json, or correct the compile block."
            )
        upstream.remember_gradient_norm(engine)
        upstream.sum_tied_gradients(engine)
        upstream.forget_kept_weights(engine)
        if context.checkpoint:
            upstream.take_intervals(self.state, self.args)
            upstream.take_update_settings(self.optimizer, self.lr_scheduler, self.asked)
            upstream.separate_step_counters(engine)
            upstream.reshard_small_parameters(engine)
        if expert.layers(self.model):
            upstream.route_as_transformers(self.model, expert.mixture(context.recipe).routes_in_fp32)
        context.guard.watch(engine)
        if context.layer_stats:
            context.layer_stats.watch(engine)
        if isinstance(context.phases, Profiler):
            upstream.mark_phases(engine, context.phases.phase)
        self.start = holdings.sample(self.model)
        config = finite(engine._config._param_dict)
        if distributed.is_first():
            write_requested(context.run.deepspeed, config)
            write_requested(context.run.environment, describe_environment())
        context.trackers.begin(context.recipe, config)

    def _run_epoch(self, **options: object) -> None:
        """Run an epoch, unless the run has completed its steps or stopped early, and was resumed only to finish.

        The Trainer checks the number of steps only after a step. `test_resume_layouts.py` passes without this once it
        can be removed.
        """
        if evaluation := self.context.evaluation:
            evaluation.decide(self.state.global_step)
        if self.state.global_step >= self.state.max_steps or (evaluation and evaluation.ended):
            self.control.should_training_stop = True
            return
        super()._run_epoch(**options)

    def create_model_card(self, *arguments: object, **options: object) -> None:
        """Write none: the export has its own card, and TRL's needs a W&B address, which offline runs lack."""

    # In a step

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[Batch], object]:
        """Return a step's micro-batches and their number of tokens in the loss, counted and timed for the metrics."""
        metrics = self.context.metrics
        self.context.phases.begin(self.state.global_step + 1)
        with metrics.waiting(), self.context.phases.phase("data"):
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            batches, items = self.prepare_step(batches, items)
        metrics.count(batches)
        return batches, items

    def prepare_step(self, batches: list[Batch], items: object) -> tuple[list[Batch], object]:
        """Return a step's micro-batches and their number of tokens in the loss; overridden to change them."""
        return batches, items

    def training_step(self, model: torch.nn.Module, inputs: Batch, num_items_in_batch: object = None) -> torch.Tensor:
        """Return the loss of a micro-batch, computed by `context.parallel` and checked by the guard."""
        numbers, self.filler = inputs.pop(collate.KEY), inputs.pop(collate.FILLER, False)
        ordinary = partial(super().training_step, model)
        loss = self.context.parallel.step(self, ordinary, inputs, num_items_in_batch)
        return self.context.guard.keep(self.state.global_step + 1, numbers, loss)

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *arguments: TrainingArguments, **options: object
    ) -> Any:
        """Return the loss, with the routers' load-balancing loss where the recipe has it (`whole.load` scales it)."""
        lengths = inputs.pop("document_lengths", None)
        if self.context.recipe.router_aux_loss_coef:
            inputs = {**inputs, "output_router_logits": True, "document_lengths": lengths}
        if self.noise:
            self.noise.begin(self.state.global_step, lengths)
        with self.context.phases.phase("forward"):
            loss = super().compute_loss(model, inputs, *arguments, **options)
        return loss * 0 if self.filler else loss  # its labels are excluded, but routers balance its tokens

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor | float | None:
        """Return the engine's gradient norm, still on the device; the engine clips by itself.

        The Trainer and accelerate read the norm at every step. A read blocks until the device has caught up, and the
        device then idles until the next kernel launch. `test_levers.py` passes without this once it can be removed.
        """
        return self.deepspeed.get_global_grad_norm()

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: object = None) -> torch.Tensor | float | None:
        """Return the same tensor, which is read only when it is logged."""
        return self.deepspeed.get_global_grad_norm()

    # Between steps, and at the end

    def evaluate(self, *arguments: TrainingArguments, **options: object) -> dict[str, float]:
        """Measure the held-out data with `Evaluation` instead of the Trainer's loop."""
        if self.context.evaluation is None:
            raise UserError(
                f"callbacks={self.context.recipe.callbacks}: control.should_evaluate is set after step "
                f"{self.state.global_step}, and no examples are held out; add data.validation=FILE or "
                "data.validation_share=0.05."
            )
        measured = self.context.evaluation.measure(self, with_metric=False)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, measured)
        return measured

    def load_best(self) -> int:
        """Load the weights of the best evaluation unless the model has them, and return its step; a collective."""
        context, step = self.context, self.state.global_step
        assert context.evaluation, "refused without held-out data"
        best = context.evaluation.decide(step)
        if best is None or best == step:
            return step
        checkpoint = context.run.checkpoints / f"checkpoint-{best}"
        if bad := distributed.of_first(lambda: digests.damaged(checkpoint)):
            raise UserError(
                f"{checkpoint / bad} is damaged ({digests.harm(checkpoint, bad)}), and its weights are the best; "
                "--resume keep_best=false exports the last step's."
            )
        converted = universal.is_needed(context.recipe.layout, context.run, dist.get_world_size(), checkpoint)
        upstream.load_universal(self.deepspeed, converted)
        with save.refusing_code(checkpoint):
            deepspeed_load_checkpoint(
                self.model_wrapped, str(checkpoint), load_module_strict=not isinstance(self.model, PeftModel)
            )
        upstream.reshard_small_parameters(self.deepspeed)
        return best

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write an ordinary Hugging Face folder, unless the DeepSpeed file turns that off; a collective.

        The Trainer's own method stores tied weights twice below ZeRO-3, stores only one rank's part of a split model,
        and without `stage3_gather_16bit_weights_on_model_save` writes DeepSpeed's checkpoint a second time. With that
        key set to false, ZeRO-3's checkpoints hold only DeepSpeed's own weights.
        """
        if self.context.file.gathers_weights:
            self.context.parallel.save(self, Path(output_dir or self.args.output_dir))


class RunTrainer(RunHooks, Trainer):
    """transformers' Trainer with the run's hooks."""
