"""What the ranks of each pipeline stage hold of a model."""

from dataclasses import dataclass

from recipes.planning import activations
from recipes.planning.anatomy import Anatomy, Kind
from recipes.planning.setup import Setup
from recipes.planning.states import held_parameters
from recipes.spec.layout import balanced


@dataclass(frozen=True)
class Part:
    """One rank's part of a model, before ZeRO shards it."""

    hidden: int
    layers: tuple[Kind, ...]
    parameters: float
    """Tensor parallel ranks hold their share of each matrix; all experts count."""
    routed: float
    """Of the parameters, those in experts."""
    linears: float
    """Of the parameters, those in the layers' linear ones: what is quantised."""
    adapters: float
    after: float
    """Parameters that come after the last layer: 0 on every stage but the last."""
    largest: float
    """Parameters of the module that has the most of its own."""
    in_flight: int
    """Micro-batches whose activations wait: one forward, one backward, so as many as there are stages from here on."""
    last: bool


def parts(anatomy: Anatomy, setup: Setup) -> list[Part]:
    """Return what each pipeline stage holds, balanced by parameters; one part without a pipeline."""
    layers, layout = anatomy.layers, setup.layout
    matrix = anatomy.vocabulary * anatomy.hidden
    head = anatomy.head + (matrix if anatomy.tied else 0)
    sizes = [layer.parameters for layer in layers]
    costs = list(sizes)
    costs[0] += anatomy.embedding
    costs[-1] += head
    stages = balanced(costs, layout.pipeline)
    # Of a tied head a pipeline's last stage has a copy of its own.
    after = head if layout.pipeline > 1 else anatomy.head
    split = [layer.split for layer in layers]
    held = held_parameters(sizes, split, anatomy.embedding, after, layout.tensor, stages)
    return [
        Part(
            hidden=anatomy.hidden,
            layers=own,
            parameters=held[index],
            routed=sum(layer.routed for layer in own),
            linears=sum(inputs * outputs for layer in own for inputs, outputs in layer.linears),
            adapters=activations.adapter_parameters(own, setup),
            after=head if last else 0,
            largest=max(*(layer.largest for layer in own), matrix if last or not index else 0),
            in_flight=min(layout.pipeline - index, setup.accumulation),
            last=last,
        )
        for index, stage in enumerate(stages)
        for own, last in [(tuple(layers[number] for number in stage), index == layout.pipeline - 1)]
    ]
