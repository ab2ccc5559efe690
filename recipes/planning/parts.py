"""What the ranks of each pipeline stage hold of a model."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

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
    counts: tuple[tuple[Kind, int], ...]
    """The same, each kind once and how many there are of it."""
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
    matrix, head = anatomy.vocabulary * anatomy.hidden, _after(anatomy)
    sizes = [layer.parameters for layer in layers]
    ranges = stages(anatomy, layout.pipeline)
    # Of a tied head a pipeline's last stage has a copy of its own.
    after = head if layout.pipeline > 1 else anatomy.head
    split = [layer.split for layer in layers]
    held = held_parameters(sizes, split, anatomy.embedding, after, layout.tensor, ranges)
    found = []
    for index, stage in enumerate(ranges):
        last = index == layout.pipeline - 1
        order = anatomy.order[stage.start : stage.stop]
        counts = tuple((anatomy.kinds[kind], number) for kind, number in Counter(order).items())
        found.append(
            Part(
                hidden=anatomy.hidden,
                layers=tuple(anatomy.kinds[kind] for kind in order),
                counts=counts,
                parameters=held[index],
                routed=sum(number * kind.routed for kind, number in counts),
                linears=sum(number * inputs * outputs for kind, number in counts for inputs, outputs in kind.linears),
                adapters=sum(number * activations.adapter_parameters(kind, setup) for kind, number in counts),
                after=head if last else 0,
                largest=max(*(kind.largest for kind, _ in counts), matrix if last or not index else 0),
                in_flight=min(layout.pipeline - index, setup.accumulation),
                last=last,
            )
        )
    return found


def stages(anatomy: Anatomy, count: int) -> tuple[range, ...]:
    """Return the layers of each of `count` pipeline stages, as `training.pipeline` spreads them.

    Balanced by parameters; the embedding counts with the first layer, the norm and the output matrix with the last.
    """
    costs = [layer.parameters for layer in anatomy.layers]
    costs[0] += anatomy.embedding
    costs[-1] += _after(anatomy)
    return _balanced(tuple(costs), count)


def _after(anatomy: Anatomy) -> int:
    """Return the parameters that a last stage of its own has after its layers: a tied matrix is there once more."""
    return anatomy.head + (anatomy.vocabulary * anatomy.hidden if anatomy.tied else 0)


@lru_cache(maxsize=4096)
def _balanced(costs: tuple[int, ...], count: int) -> tuple[range, ...]:
    return tuple(balanced(costs, count))
