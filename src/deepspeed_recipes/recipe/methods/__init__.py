"""The training methods: one type each, with its settings, its traits and its checks; standard library only."""

from collections.abc import Mapping

from .grpo import Grpo
from .method import Examples, Method
from .preferences import Dpo, Kto, Orpo, Reward, Simpo
from .texts import Classify, Distill, Embed, Pretrain, Sft

METHODS: Mapping[str, type[Method]] = {
    kind.name: kind for kind in (Sft, Dpo, Pretrain, Reward, Kto, Orpo, Simpo, Classify, Embed, Distill, Grpo)
}
"""Every method by its name, in the order of their sections in `--help`."""


def reading(examples: Examples) -> list[str]:
    """Return the names of the methods that read examples of a kind."""
    return [name for name, kind in METHODS.items() if kind.examples == examples]
