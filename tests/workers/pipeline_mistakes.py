"""Pipelines with a mistake in them, which the gate must notice; executed on every rank."""

from deepspeed.pipe import PipelineModule

from deepspeed_recipes.training import run, trainer
from deepspeed_recipes.training.parallel import pipeline, sequence, tensor


def main(folder: str, mistake: str) -> None:
    """Train with one thing wrong."""
    MISTAKES[mistake]()
    run.main(folder)


def every_stage_counted() -> None:
    """Treat the tokens that the Trainer counts on every stage as additional tokens."""
    step = pipeline.step

    def counted(trainer, ordinary, inputs, items):
        layout = trainer.context.recipe.layout
        return step(trainer, ordinary, inputs, layout.pipeline * layout.tensor * items)

    pipeline.step = counted


def tied_weights_apart() -> None:
    """Leave out the sum of the tied weight's two gradients."""
    PipelineModule.get_tied_weights_and_groups = lambda self: []


def norm_of_the_first_stage() -> None:
    """Leave it to DeepSpeed which parameters count in the norm."""
    pipeline._count_once = lambda module: None


def own_heads_only() -> None:
    """Leave the gradients of weights that several tensor ranks use for their own heads as they are."""
    tensor._summed_over = lambda group: lambda gradient: gradient


def every_copy_reads_the_first_ones_share() -> None:
    """Give all data-parallel copies the same sequences."""
    prepare = trainer.prepare_data_loader
    trainer.prepare_data_loader = lambda *given, **options: prepare(*given, **options | {"process_index": 0})


def parts_at_position_zero() -> None:
    """Count positions from the start of each sequence-parallel part."""
    cut = sequence.cut

    def again(batch, place, layout):
        part = cut(batch, place, layout)
        return part | {"position_ids": part["position_ids"] - part["position_ids"][:, :1]}

    sequence.cut = again
    run.sequence.check = lambda recipe, tokenizer: None  # the probe that would notice it before the run


MISTAKES = {
    "every_copy_reads_the_first_ones_share": every_copy_reads_the_first_ones_share,
    "parts_at_position_zero": parts_at_position_zero,
    "every_stage_counted": every_stage_counted,
    "tied_weights_apart": tied_weights_apart,
    "norm_of_the_first_stage": norm_of_the_first_stage,
    "own_heads_only": own_heads_only,
}
