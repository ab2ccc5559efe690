"""Runs with one mistake each, which a test must notice; executed on every rank."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import Init

from deepspeed_recipes.recipe.recipe import Layout
from deepspeed_recipes.training import run, trainer
from deepspeed_recipes.training.callbacks import layer_stats
from deepspeed_recipes.training.data.collate import IGNORED
from deepspeed_recipes.training.methods import classify, embed
from deepspeed_recipes.training.model import lora, processor, transforms
from deepspeed_recipes.training.parallel import holdings, pipeline, sequence, tensor


def trains(mistake: Callable[[], None]) -> Callable[[str], None]:
    """Make a function that changes something one that then trains what `folder`/recipe.json says."""

    @wraps(mistake)
    def train(folder: str) -> None:
        mistake()
        run.main(folder)

    return train


def fail(folder: str) -> None:
    """Do not train."""
    raise ValueError(f"no training in {folder[-3:]}")


@trains
def untrained() -> None:
    """Leave out the check that training has changed the weights, whose learning rate is lost in rounding."""
    run.check_moved = lambda trainer: None


@trains
def blind_ranks() -> None:
    """Look at nothing where a rank's batch has no picture."""
    processor.always_see = lambda *_: None


@trains
def stale_copies() -> None:
    """Never bring the second copies of the parameters, ZeRO++'s hpZ, up to date."""
    partition = Init._partition_param_sec
    Init._partition_param_sec = lambda self, param, buffer=None, has_been_updated=False: partition(self, param, buffer)


@trains
def doubled_gradients() -> None:
    """Compute a right loss, and gradients twice as large."""
    backward = DeepSpeedEngine.backward
    DeepSpeedEngine.backward = lambda self, loss, **options: backward(self, 2 * loss, **options)


@trains
def long_adam_steps() -> None:
    """Take steps of Adam on the CPU that are longer by a thousandth."""
    step = DeepSpeedCPUAdam.step

    def hasty(optimizer, closure=None):
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = 1.001 * rate
        step(optimizer, closure)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    DeepSpeedCPUAdam.step = hasty


# The numbers of the layers.


@trains
def after_clipping() -> None:
    """Say the norms as the optimizer has them."""
    numbers = layer_stats.numbers
    layer_stats.numbers = lambda sums, unclipped: numbers(sums, 1.0)


@trains
def counted_on_every_rank() -> None:
    """Add up what every tensor-parallel rank holds, as if each had its own."""
    place = holdings.distributed.place
    holdings.distributed.place = lambda layout: replace(place(layout), tensor=0)


@trains
def without_decay() -> None:
    """Forget that AdamW decays weights."""
    sums = layer_stats._sums
    layer_stats._sums = lambda weight, optimizer, group, one: sums(
        weight, optimizer, {**group, "weight_decay": 0.0}, one
    )


# Fused adapters.


@trains
def unscaled_gradients() -> None:
    """Leave the gradients of the adapters unscaled."""
    lora._scaled_product = lambda left, right, scale: left @ right


@trains
def unscaled_outputs() -> None:
    """Leave the adapters' outputs unscaled."""
    forward = lora.UpProjection.forward

    def unscaled(ctx, output, reduced, up, scaling):
        summed = forward(ctx, output, reduced, up, 1.0)
        ctx.scaling = scaling
        return summed

    lora.UpProjection.forward = staticmethod(unscaled)


@trains
def overwritten_gradients() -> None:
    """Put the adapter's share of the input's gradient in the place of the base layer's."""
    backward = lora.DownProjection.backward

    def without_the_base(ctx, of_inputs, of_reduced):
        return backward(ctx, torch.zeros_like(of_inputs), of_reduced)

    lora.DownProjection.backward = staticmethod(without_the_base)


# Tiles.


@trains
def mean_of_tiles() -> None:
    """Weigh every tile's loss, here every micro-batch's, the same, however many tokens it has."""
    add = transforms.add_fused_lm_head

    def add_one_that_averages(model: torch.nn.Module) -> None:
        add(model)
        fused = model.forward
        model.forward = lambda *arguments, num_items_in_batch=None, **inputs: fused(*arguments, **inputs)

    transforms.add_fused_lm_head = add_one_that_averages


@trains
def a_tile_forgotten() -> None:
    """Leave the last tile of every feed-forward layer as it came."""
    in_tiles = transforms._in_tiles

    def forgetful(forward, tiles: int, hidden: torch.Tensor) -> torch.Tensor:
        computed = in_tiles(forward, tiles, hidden)
        kept = hidden.shape[1] - hidden.shape[1] // tiles
        return torch.cat([computed[:, :kept], hidden[:, kept:]], dim=1)

    transforms._in_tiles = forgetful


# Losses of other methods.


@trains
def loss_of_transformers() -> None:
    """Train a classifier with the loss that transformers' model and Trainer compute."""

    def __init__(self: Any, context: Any, *, class_weights: Any, **options: Any) -> None:
        super(classify.RunClassificationTrainer, self).__init__(context, **options)

    classify.RunClassificationTrainer.__init__ = __init__


@trains
def constant_texts() -> None:
    """Train embeddings with a gather through which no gradient flows back to the other ranks."""
    own = staticmethod(lambda ctx, *gradients: gradients[0].chunk(dist.get_world_size())[dist.get_rank()])
    embed.Gathered.backward = own


# Pipelines.


@trains
def every_stage_counted() -> None:
    """Treat the tokens that the Trainer counts on every stage as additional tokens."""
    step = pipeline.step

    def counted(trainer, ordinary, inputs, items):
        layout = trainer.context.recipe.layout
        return step(trainer, ordinary, inputs, layout.pipeline * layout.tensor * items)

    pipeline.step = counted


@trains
def tied_weights_apart() -> None:
    """Leave out the sum of the tied weight's two gradients."""
    PipelineModule.get_tied_weights_and_groups = lambda self: []


@trains
def norm_of_the_first_stage() -> None:
    """Leave it to DeepSpeed which parameters count in the norm."""
    pipeline._count_once = lambda module: None


@trains
def own_heads_only() -> None:
    """Leave the gradients of weights that several tensor ranks use for their own heads as they are."""
    tensor._summed_over = lambda group: lambda gradient: gradient


@trains
def every_copy_reads_the_first_ones_share() -> None:
    """Give all data-parallel copies the same sequences."""
    prepare = trainer.prepare_data_loader
    trainer.prepare_data_loader = lambda *given, **options: prepare(*given, **options | {"process_index": 0})


# Sequence parallelism, without the probe that notices most of these before the run.


def unprobed() -> None:
    """Accept what a shrunken model computes in parts."""
    run.sequence.check = lambda recipe, tokenizer: None


@trains
def gradients_times_size() -> None:
    """Scale as the Trainer's own sequence parallelism does below ZeRO-3: a right loss, gradients times the size."""
    doubled_gradients.__wrapped__()
    unprobed()


@trains
def masks_of_parts() -> None:
    """Make masks from the position ids of this rank's part alone."""
    sequence._whole = lambda part, group: torch.cat([part] * dist.get_world_size(group), dim=1)
    unprobed()


@trains
def shifted_after_the_cut() -> None:
    """Lose the label of each part's last token."""
    cut = sequence.cut

    def late(batch: dict, place: object, layout: Layout) -> dict:
        part = cut(batch, place, layout)
        part["shift_labels"] = torch.nn.functional.pad(part["labels"][:, 1:], (0, 1), value=IGNORED)
        return part

    sequence.cut = late
    unprobed()


@trains
def positions_from_zero() -> None:
    """Count positions from the start of each part."""
    cut = sequence.cut

    def again(batch: dict, place: object, layout: Layout) -> dict:
        part = cut(batch, place, layout)
        return part | {"position_ids": part["position_ids"] - part["position_ids"][:, :1]}

    sequence.cut = again
    unprobed()


@trains
def heads_of_one() -> None:
    """Leave out the repetition of key/value heads: give each rank the first of them."""
    attention = sequence._attention

    def first(group, name, module, query, key, value, mask, **options):
        key, value = (part[:, :1].expand_as(part) for part in (key, value))
        return attention(group, name, module, query, key, value, mask, **options)

    sequence._attention = first
    unprobed()
