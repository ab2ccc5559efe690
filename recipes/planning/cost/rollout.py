"""Memory of the model's own answers while it writes them: keys and values of every token, and whole weights."""

from ..model_profile.profile import LayerProfile, ModelProfile
from .stage_shards import StageShard
from .states import WIDTH
from .training_setup import TrainingSetup


def cache_bytes(profile: ModelProfile, shard: StageShard, setup: TrainingSetup) -> float:
    """Return what the keys and values of all answers of a step take on a rank, each as long as a sequence may be.

    Linear attention keeps a state instead, which is small.
    """
    tokens = setup.rollout_answers * setup.sequence_length
    shared = profile.key_value_heads / profile.attention_heads
    return sum(count * tokens * _per_token(kind, shared) for kind, count in shard.layer_counts) * WIDTH[setup.precision]


def _per_token(kind: LayerProfile, shared: float) -> float:
    return 2 * kind.attention_width * shared


def gathered_bytes(shard: StageShard, setup: TrainingSetup) -> float:
    """Return what the whole weights take beyond a rank's shards, where ZeRO-3 gathers them for the rollout."""
    if setup.zero_stage < 3 or not setup.rollout_gathers:
        return 0.0
    return WIDTH[setup.precision] * shard.parameters * (1 - 1 / setup.zero_ranks)
