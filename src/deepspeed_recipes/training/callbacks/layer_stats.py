"""Measures gradients and weights by layer, at the logged steps, to find layers that vanish, explode or stop learning.

A hook of the optimizer measures every gradient and every weight once, in fp32, on the rank that updates it. Between
logs the hook returns at once; at a log one collective adds up a few numbers per layer. `Routing` measures how the
routers of an MoE model distribute the tokens: each expert's load, and the routers' certainty.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...recipe.files import Json, JsonView
from ...recipe.recipe import Recipe
from .. import distributed
from ..console import say
from ..parallel import holdings
from ..upstream import TokenChoiceTopKRouter

PIECE = 2**24
"""Elements per piece: each of about five temporary tensors takes 64 MiB, at a time when no activations are held."""
VANISHING, EXPLODING = 1e-3, 1e2
"""Size of a layer's gradient, as a multiple of the median layer's; in a healthy model layers differ by about 10."""
GROWN = 10.0
"""The same multiple, of the largest gradient in the last `EARLIER` logs, once there are `ENOUGH`. Gradients are largest
at the start of training, and jump by more than this when the loss is near zero."""
EARLIER, ENOUGH = 50, 5
FIELDS = 6
"""Sums per layer: squares, zeros and number of gradients; squares of updates and of weights, and number of weights."""


class LayerStats(TrainerCallback):
    """Adds `layers` to the logs: by layer the norm of its gradient, its update as a share of its weights, and more.

    `grad_norm` is measured before clipping; the squares of all layers add up to the square of the logged norm.
    `update_ratio` is the norm of the update divided by that of the weights before it; only under Adam, and for weights
    that are not all zero. `dead` is the share of weights with a gradient of exactly zero: of units that are off or
    saturated for every token, of tokens that do not occur, of experts that get no tokens. `verdict` is `vanishing` or
    `exploding` where that applies.
    """

    engine: DeepSpeedEngine
    """Set by `watch`."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.names: list[str] = []
        self.places: dict[int, list[holdings.Fragment]] = {}
        self.looks = self.stepped = False
        self.found: list[tuple[str, torch.Tensor]] = []
        self.earlier: dict[str, deque[float]] = {}
        self.said: set[tuple[str, str]] = set()

    def watch(self, engine: DeepSpeedEngine) -> None:
        """Measure at the optimizer steps of an engine; a collective."""
        self.engine = engine
        self.names = holdings.layers(engine)
        others = (engine.basic_optimizer, getattr(engine.optimizer, "backup_optimizer", None))
        for optimizer in others:  # the second steps on the GPU the weights that are not offloaded
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_post_hook(self._look)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Determine whether this step will be logged."""
        step, recipe = state.global_step + 1, self.recipe
        saves = recipe.save_steps and step % int(args.save_steps) == 0
        self.looks = bool(step % recipe.logging_steps == 0 or step in (1, state.max_steps) or saves)
        self.stepped, self.found = False, []

    @torch.no_grad()
    def _look(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Measure the weights that the optimizer has just updated: all of them, or one of ZeRO's groups."""
        if not self.looks:
            return
        self.stepped = True
        self.places = self.places or holdings.by_tensor(self.engine, self.recipe.layout)
        for group in optimizer.param_groups:
            if group.get("use_muon"):
                continue  # its gradients are no longer those of the loss
            for weight in group["params"]:
                for one in self.places.get(id(weight), []) if weight.grad is not None else []:
                    self.found += [(one.layer, sums) for sums in _sums(weight, optimizer, group, one)]

    def on_log(self, args: object, state: TrainerState, control: TrainerControl, logs: Json, **_: object) -> None:
        """Add the numbers to a training log, for the callbacks that follow; called on every rank."""
        if not self.stepped or "loss" not in (logs or {}):
            return  # DeepSpeed has refused the update, or nothing was trained since the last log
        device = distributed.device()
        table = torch.zeros(len(self.names), FIELDS, dtype=torch.float64, device=device)
        if self.found:
            at = torch.tensor([self.names.index(name) for name, _ in self.found])
            table.index_add_(0, at.to(device), torch.stack([sums for _, sums in self.found]).to(device))
        self.stepped, self.found = False, []
        dist.all_reduce(table)
        table /= holdings.copies(self.engine, self.recipe.layout)  # each element counts once
        norm, most = self.engine.get_global_grad_norm(), self.engine.gradient_clipping()
        unclipped = max(1.0, (float(norm) + 1e-6) / most) if norm is not None and most else 1.0
        measured = numbers(dict(zip(self.names, table.tolist(), strict=True)), unclipped)
        sizes = {name: one["grad_norm"] for name, one in measured.items()}
        if not measured or not all(map(math.isfinite, sizes.values())):
            return  # the loss guard reports the details
        usual = usual_size(sizes)
        context = f" ({usual:.2g} in the median layer)" if usual else ""
        for name, verdict in verdicts(sizes, self.earlier).items():
            measured[name]["verdict"] = verdict
            if (verdict, name) not in self.said:
                self.said.add((verdict, name))
                norm = f"{verdict} gradient in {name}: its norm is {sizes[name]:.2g}{context}"
                fix = "lower learning_rate or max_grad_norm" if verdict == "exploding" else "it learns next to nothing"
                say(f"step {state.global_step}: {norm}; {fix}")
        for name, size in sizes.items():
            self.earlier.setdefault(name, deque(maxlen=EARLIER)).append(size)
        logs["layers"] = measured


def numbers(sums: Mapping[str, list[float]], unclipped: float) -> dict[str, Json]:
    """Return `grad_norm`, `update_ratio` and `dead` of each updated layer from its sums.

    Gradients were `unclipped` times as large before DeepSpeed clipped them.
    """
    found: dict[str, Json] = {}
    for name, (gradients, zeros, count, updates, weights, updated) in sums.items():
        if count:
            found[name] = {"grad_norm": _short(unclipped * math.sqrt(gradients))}
            if updated == count and weights:
                found[name]["update_ratio"] = _short(math.sqrt(updates / weights))
            found[name]["dead"] = _short(zeros / count)
    return found


def verdicts(sizes: Mapping[str, float], earlier: JsonView) -> dict[str, str]:
    """Return the layers whose gradients vanish or explode compared with the median layer or with earlier steps.

    Only numbered layers are similar enough to be compared with each other.
    """
    found: dict[str, str] = {}
    usual = usual_size(sizes)
    for name, size in sizes.items():
        before, alike = earlier.get(name, ()), usual and _numbered(name)
        grown = len(before) >= ENOUGH and size > GROWN * max(before) > 0
        if grown or (alike and size > EXPLODING * usual):
            found[name] = "exploding"
        elif alike and size < VANISHING * usual:
            found[name] = "vanishing"
    return found


def usual_size(sizes: Mapping[str, float]) -> float:
    """Return the median over the numbered layers, or 0 if there are too few to compare."""
    alike = [size for name, size in sizes.items() if _numbered(name)]
    return statistics.median(alike) if len(alike) > 2 else 0.0


def _numbered(name: str) -> bool:
    return name.rpartition(".")[2].isdigit()


def _sums(
    weight: torch.Tensor, optimizer: torch.optim.Optimizer, group: JsonView, one: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Yield `FIELDS` numbers of each piece of a fragment, in fp64, on the weight's device."""
    assert weight.grad is not None
    state = optimizer.state.get(weight, {})
    moments = [state.get(key) for key in ("exp_avg", "exp_avg_sq")]
    is_adam = all(torch.is_tensor(each) and each.shape == weight.shape for each in moments) and (
        group.get("decoupled_weight_decay") or getattr(optimizer, "adam_w_mode", False)
    )
    for start in range(one.start, one.start + one.numel, PIECE):
        size = min(PIECE, one.start + one.numel - start)
        held = (weight.grad, weight, *(moments if is_adam else ()))
        gradient, after, *states = (each.detach().reshape(-1).narrow(0, start, size).float() for each in held)
        zeros = size - torch.count_nonzero(gradient)
        sums = [_square(gradient), zeros.double(), torch.full_like(zeros, size, dtype=torch.float64)]
        if is_adam:
            mean, square = states
            steps = state.get("step", group.get("step"))  # left on its device
            steps = steps.double() if torch.is_tensor(steps) else steps  # 1 - 0.999**1 needs more digits than fp32 has
            (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
            moved = mean * (rate / (1 - beta1**steps)) / (square.sqrt() / (1 - beta2**steps) ** 0.5 + group["eps"])
            # From the states after the update: a copy of the weights before it would take their memory, in fp32.
            before = (after + moved) / (1 - rate * decay)
            sums += [_square(before * (-rate * decay) - moved), _square(before), sums[2]]
        else:
            sums += [torch.zeros_like(sums[2])] * 3
        yield torch.stack(sums)


def _square(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor).double() ** 2


def _short(number: float) -> float:
    """Return a number rounded to the digits of fp32, since every log writes a record."""
    return float(f"{number:.7g}")


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

    def on_train_begin(
        self, args: object, state: TrainerState, control: TrainerControl, model: torch.nn.Module, **_: object
    ) -> None:
        """Attach hooks to every router of the model, whose layers are final at this point."""
        # Named alike in transformers (`MixtralTopKRouter`, `DeepseekV3TopkRouter`) and in DeepSpeed.
        routers = [one for one in model.modules() if type(one).__name__.lower().endswith("topkrouter")]
        for index, router in enumerate(routers):
            device = next(router.parameters()).device
            self.counts.append(torch.zeros(router.num_experts, dtype=torch.int64, device=device))
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
            loads, sums = torch.stack(self.counts).double(), torch.stack(self.entropies)
            dist.all_reduce(loads)
            dist.all_reduce(sums)
            loads = loads / loads.mean(-1, keepdim=True)
            shown = torch.stack([loads.max(), loads.min(), (sums[:, 0] / sums[:, 1]).mean()]).tolist()
            logs |= dict(zip(("expert_load_max", "expert_load_min", "router_entropy"), shown, strict=True))
            for tensor in (*self.counts, *self.entropies):
                tensor.zero_()
