"""Measures how an MoE model's routers distribute the tokens: each expert's load, and the routers' certainty."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState

from ...recipe.files import Json
from ..upstream import TokenChoiceTopKRouter


class Routing(TrainerCallback):
    """Adds three numbers to every log of an MoE model's training, over all ranks and all tokens since the last log.

    `expert_load_max` and `expert_load_min`: the tokens of the most and of the least loaded expert of any layer, as a
    multiple of its layer's mean; both are 1 when all experts get the same number, and min is 0 when one gets nothing.
    `router_entropy`: of the softmax of the routers' logits, in nats, the mean over tokens and layers; at most
    log(experts), where all experts are equally likely. Padding is routed like any token, and counts.
    Between two logs nothing waits for the GPU.
    """

    def __init__(self) -> None:
        self.counts: list[torch.Tensor] = []
        self.entropies: list[torch.Tensor] = []

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Attach hooks to every router of the model, whose layers are final at this point."""
        for index, router in enumerate(routers(kwargs["model"])):
            experts = router.num_experts
            device = next(router.parameters()).device
            self.counts.append(torch.zeros(experts, dtype=torch.int64, device=device))
            self.entropies.append(torch.zeros(2, dtype=torch.float64, device=device))
            self._listen(router, index)

    def _listen(self, router: torch.nn.Module, index: int) -> None:
        """Take logits and choice from transformers' routers, or from the two modules that have them in AutoEP."""

        def entropy(logits: torch.Tensor) -> None:
            if router.training:
                log_probabilities = logits.float().log_softmax(-1)
                self.entropies[index][0] -= (log_probabilities.exp() * log_probabilities).sum().double()
                self.entropies[index][1] += len(logits)

        def count(chosen: torch.Tensor) -> None:
            if router.training:
                chosen = chosen.flatten()
                self.counts[index].scatter_add_(0, chosen, torch.ones_like(chosen))

        if isinstance(router, TokenChoiceTopKRouter):
            router.gate.register_forward_hook(lambda _, inputs, logits: entropy(logits.detach()))
            router.register_forward_hook(lambda _, inputs, output: count(output[1]))
        else:
            router.register_forward_hook(lambda _, inputs, output: entropy(output[0].detach()))
            router.register_forward_hook(lambda _, inputs, output: count(output[2]))

    def on_log(self, args: object, state: TrainerState, control: TrainerControl, logs: Json, **_: object) -> None:
        """Add the numbers to a training log, for the callbacks that follow; called on every rank."""
        if self.counts and "loss" in (logs or {}):
            logs |= summary(self.counts, self.entropies)
            for tensor in (*self.counts, *self.entropies):
                tensor.zero_()


def routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the routers of an MoE model in the order of its layers; empty for a dense model.

    transformers gives them similar names (`MixtralTopKRouter`, `DeepseekV3TopkRouter`), and so does DeepSpeed; those of
    transformers return logits, weights and choice.
    """
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def summary(counts: Sequence[torch.Tensor], entropies: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return the three numbers over all ranks; a collective.

    Args:
        counts: per layer, tokens per expert, [experts].
        entropies: per layer, the sum over tokens in nats, and the number of tokens, [2].
    """
    loads, sums = torch.stack(list(counts)).double(), torch.stack(list(entropies))
    dist.all_reduce(loads)
    dist.all_reduce(sums)
    loads = loads / loads.mean(-1, keepdim=True)
    numbers = torch.stack([loads.max(), loads.min(), (sums[:, 0] / sums[:, 1]).mean()]).tolist()
    return dict(zip(("expert_load_max", "expert_load_min", "router_entropy"), numbers, strict=True))
