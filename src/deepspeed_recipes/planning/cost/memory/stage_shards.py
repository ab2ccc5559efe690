"""Stage shards: the layers and parameters on a rank of each pipeline stage, before ZeRO shards them."""

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
    """The layers and parameters on one rank of a pipeline stage, before ZeRO shards them."""

    hidden_size: int
    layers: tuple[LayerProfile, ...]
    layer_counts: tuple[tuple[LayerProfile, int], ...]
    """The kinds of layers, each with its number of layers."""
    parameters: float
    """All parameters, those of all experts included. Tensor-parallel ranks hold their share of each split matrix."""
    expert_parameters: float
    """The part of the parameters that is in routed experts."""
    linear_parameters: float
    """The part of the parameters that is in the layers' linear layers, which quantisation applies to."""
    adapter_parameters: float
    head_parameters: float
    """Parameters after the last layer: 0 on every stage but the last."""
    largest_module: float
    """Parameters of the module with the most parameters of its own."""
    micro_batches_in_flight: int
    """Micro-batches whose activations wait for the backward pass. With one forward, one backward (1F1B), as many as
    there are stages from this one to the last."""
    is_last: bool

    def trained(self, setup: TrainingSetup) -> float:
        """Return the number of trained parameters: the adapters', all, or some."""
        return self.adapter_parameters if setup.lora else setup.trained_share * self.parameters


def stage_shards(profile: ModelProfile, setup: TrainingSetup) -> list[StageShard]:
    """Return the shard of each pipeline stage, balanced by parameters; a single shard without a pipeline."""
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
                adapter_parameters=sum(count * activations.adapter_parameters(kind, setup) for kind, count in counts)
                + setup.saved_parameters,
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

    Stages are balanced by parameters: the embedding counts as part of the first layer, the norm and the output matrix
    as part of the last.
    """
    costs = [layer.parameters for layer in profile.layers]
    costs[0] += profile.embedding_parameters
    costs[-1] += _head_of_a_stage(profile)
    return _balanced(tuple(costs), count)


def _head_of_a_stage(profile: ModelProfile) -> int:
    """Return the parameters after the layers on a separate last stage, which has a copy of a tied output matrix."""
    return profile.head_parameters + (profile.vocab_size * profile.hidden_size if profile.tied_embeddings else 0)


@lru_cache(maxsize=4096)
def _balanced(costs: tuple[int, ...], count: int) -> tuple[range, ...]:
    return tuple(balanced(costs, count))
