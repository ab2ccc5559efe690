"""Stage shards: the layers and parameters that a rank of each pipeline stage holds, before ZeRO shards them."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from ....recipe.layout import balanced
from ...model_profile.profile import LayerProfile, ModelProfile
from ..training_setup import TrainingSetup
from . import activations
from .states import held_parameters


@dataclass(frozen=True)
class StageShard:
    """What one rank of a pipeline stage holds, before ZeRO shards it."""

    hidden_size: int
    layers: tuple[LayerProfile, ...]
    layer_counts: tuple[tuple[LayerProfile, int], ...]
    """The same layers: each kind once, with how many there are of it."""
    parameters: float
    """Tensor-parallel ranks hold their share of each matrix; all experts count."""
    expert_parameters: float
    """Of the parameters, those in routed experts."""
    linear_parameters: float
    """Of the parameters, those in the layers' linear layers: what is quantised."""
    adapter_parameters: float
    head_parameters: float
    """After the last layer: 0 on every stage but the last."""
    largest_module: float
    """Parameters of the module that has the most of its own."""
    micro_batches_in_flight: int
    """Whose activations wait for their backward pass: one forward, one backward (1F1B) leaves as many as there are
    stages from here on."""
    is_last: bool

    def trained(self, setup: TrainingSetup) -> float:
        """Return the parameters that are trained: of its adapters, or all."""
        return self.adapter_parameters if setup.lora else self.parameters


def stage_shards(profile: ModelProfile, setup: TrainingSetup) -> list[StageShard]:
    """Return what each pipeline stage holds, balanced by parameters; one shard without a pipeline."""
    layers, stages = profile.layers, setup.layout.pipeline
    output_matrix, head = profile.vocab_size * profile.hidden_size, _head_of_a_stage(profile)
    ranges = stage_ranges(profile, stages)
    held = held_parameters(
        [layer.parameters for layer in layers],
        [layer.tensor_split for layer in layers],
        profile.embedding_parameters,
        head if stages > 1 else profile.head_parameters,
        setup.layout.tensor,
        ranges,
    )
    found = []
    for index, span in enumerate(ranges):
        is_last = index == stages - 1
        order = profile.layer_order[span.start : span.stop]
        counts = tuple((profile.layer_kinds[kind], count) for kind, count in Counter(order).items())
        found.append(
            StageShard(
                hidden_size=profile.hidden_size,
                layers=tuple(profile.layer_kinds[kind] for kind in order),
                layer_counts=counts,
                parameters=held[index],
                expert_parameters=sum(count * kind.expert_parameters for kind, count in counts),
                linear_parameters=sum(
                    count * inputs * outputs for kind, count in counts for inputs, outputs in kind.linears
                ),
                adapter_parameters=sum(count * activations.adapter_parameters(kind, setup) for kind, count in counts),
                head_parameters=head if is_last else 0,
                largest_module=max(
                    *(kind.largest_module for kind, _ in counts), output_matrix if is_last or not index else 0
                ),
                micro_batches_in_flight=min(stages - index, setup.gradient_accumulation_steps),
                is_last=is_last,
            )
        )
    return found


def stage_ranges(profile: ModelProfile, count: int) -> tuple[range, ...]:
    """Return the layers of each of `count` pipeline stages, distributed as in training (`recipe.layout.balanced`).

    Balanced by parameters; the embedding counts with the first layer, the norm and the output matrix with the last.
    """
    costs = [layer.parameters for layer in profile.layers]
    costs[0] += profile.embedding_parameters
    costs[-1] += _head_of_a_stage(profile)
    return _balanced(tuple(costs), count)


def _head_of_a_stage(profile: ModelProfile) -> int:
    """Return the parameters after the layers on a last stage of its own, which has a copy of a tied output matrix."""
    return profile.head_parameters + (profile.vocab_size * profile.hidden_size if profile.tied_embeddings else 0)


@lru_cache(maxsize=4096)
def _balanced(costs: tuple[int, ...], count: int) -> tuple[range, ...]:
    return tuple(balanced(costs, count))
