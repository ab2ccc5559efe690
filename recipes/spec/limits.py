"""Which combinations of layout, model, method and ZeRO stage are possible; of the others: why not, and what is.

The one place for it: the launcher asks before anything starts, and the table in configs/README.md is made of the
answers. What a technique gets wrong for one family stands in `FAMILIES`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from recipes.spec.errors import UserError
from recipes.spec.layout import gradient_accumulation_steps
from recipes.spec.recipe import Layout, Recipe

FAMILIES: Mapping[str, Mapping[str, str]] = {
    "tensor": {},
    "sequence": {
        "bloom": "its attention adds ALiBi's distances for the part of a row that a rank has",
        "qwen3_5_text": "its linear attention carries a state along the row, of which each rank has a part",
        "qwen3_5": "its linear attention carries a state along the row, of which each rank has a part",
    },
    "pipeline": {},
    "expert": {},
}
"""By the layout's field and `model_type`: why that kind of parallelism does not train that architecture right."""

SPLIT = (
    "gemma3_text",
    "glm4",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "olmo3",
    "phi3",
    "qwen3",
    "qwen3_5_text",
    "smollm3",
)
"""Model types whose matrices are split rightly; `tests/test_tensor.py` holds it against the whole catalogue."""
SPREAD = ("deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe")
"""Model types whose spread experts train what plain PyTorch trains: `tests/parity/test_expert.py`."""


@dataclass(frozen=True)
class Sharding:
    """What a DeepSpeed file says that a layout has to go with."""

    stage: int = 0
    """Of ZeRO."""
    partition_size: int = 1
    """`zero_hpz_partition_size`: ranks that hold a second copy of the parameters between them."""


def check(recipe: Recipe, world_size: int, sharding: Sharding) -> None:
    """Refuse what cannot run.

    Args:
        recipe: `model.config` holds the architecture's dimensions; what it does not hold is not judged.
        world_size: ranks, over all nodes.
        sharding: of the recipe's DeepSpeed file.

    Raises:
        UserError: the layout's sizes, the one reason why not, and the nearest that run; or rows that are too long.
    """
    check_length(recipe)
    why = limit(recipe, world_size, sharding)
    if why:
        raise UserError(f"{written(recipe.layout)}: {why}; use {' or '.join(ways_out(recipe, world_size, sharding))}.")
    gradient_accumulation_steps(recipe, world_size)


def check_length(recipe: Recipe) -> None:
    """Refuse rows that are longer than what the model has positions for.

    Raises:
        UserError: names the length and the most there is.
    """
    most = positions(recipe.model.config)
    if recipe.sequence_length > most:
        raise UserError(
            f"sequence_length={recipe.sequence_length}: the model has {most:,} positions; set sequence_length={most}."
        )


def positions(config: Mapping[str, Any]) -> float:
    """Return how many tokens of a row a model can tell apart; infinity where its config does not say."""
    return config.get("max_position_embeddings") or config.get("n_positions") or math.inf


def limit(recipe: Recipe, world_size: int, sharding: Sharding) -> str | None:
    """Return the first reason why `recipe` cannot run in this way, as a part of a sentence; None where it can."""
    rules = (_world, _expert, _tensor, _sequence, _pipeline)
    return next((why for rule in rules for why in rule(recipe, world_size, sharding)), None)


def ways_out(recipe: Recipe, world_size: int, sharding: Sharding) -> list[str]:
    """Return the nearest changes with which `recipe` can run, each by itself and as it is typed.

    Sizes of the layout always; another number of ranks, or the pipeline's DeepSpeed file, where that is enough.
    """
    ways = [written(nearest(recipe, world_size, sharding), recipe.layout)]
    each = math.lcm(math.prod(_copy(recipe.layout)), recipe.layout.expert)
    worlds = {max(1, world_size // each) * each, (world_size // each + 1) * each} - {world_size}
    ways += [f"--gpus {world}" for world in sorted(worlds) if limit(recipe, world, sharding) is None]
    if recipe.layout.pipeline > 1 and limit(recipe, world_size, Sharding(stage=1)) is None:
        ways.append("deepspeed=pipeline.json")
    return ways


def nearest(recipe: Recipe, world_size: int, sharding: Sharding) -> Layout:
    """Return the layout that can run and changes the sizes of the recipe's least, counted in doublings.

    The layout without any parallelism of the model always can.
    """
    wanted = asdict(recipe.layout).values()

    def distance(layout: Layout) -> tuple[float, int]:
        sizes = asdict(layout).values()
        doublings = sum(abs(math.log2(size / asked)) for size, asked in zip(sizes, wanted, strict=True))
        return round(doublings, 9), -math.prod(sizes)

    for layout in sorted(_layouts(world_size), key=distance):
        if limit(replace(recipe, layout=layout), world_size, sharding) is None:
            return layout
    raise AssertionError("data parallelism alone is always possible")


def _layouts(world_size: int) -> Iterator[Layout]:
    for tensor in divisors(world_size):
        for pipeline in divisors(world_size // tensor):
            for sequence in divisors(world_size // tensor // pipeline):
                for expert in divisors(world_size // tensor // pipeline // sequence):
                    yield Layout(tensor, pipeline, sequence, expert)


def divisors(number: int) -> list[int]:
    """Return the numbers that divide it, from 1."""
    return [size for size in range(1, number + 1) if number % size == 0]


def written(layout: Layout, before: Layout | None = None) -> str:
    """Return the sizes as they are typed: those above 1, or those that are not as they were `before`."""
    old = asdict(before or Layout())
    return " ".join(f"layout.{name}={size}" for name, size in asdict(layout).items() if size != old[name])


def _copy(layout: Layout) -> tuple[int, int, int]:
    return layout.tensor, layout.pipeline, layout.sequence


def _config(recipe: Recipe) -> Mapping[str, Any]:
    config: Mapping[str, Any] = recipe.model.config
    return config.get("text_config") or config


def _size(recipe: Recipe, *keys: str) -> int | None:
    """Return a dimension of the model by the first of its names that the configuration has."""
    config = _config(recipe)
    return next((config[key] for key in keys if config.get(key)), None)


def _heads(recipe: Recipe) -> int | None:
    return _size(recipe, "num_attention_heads", "n_head")


def _kind(recipe: Recipe) -> str | None:
    return _config(recipe).get("model_type")


def _family(recipe: Recipe, technique: str) -> Iterator[str]:
    kind = _kind(recipe)
    if kind in FAMILIES[technique]:
        yield f"not for {kind}: {FAMILIES[technique][kind]}"


def _world(recipe: Recipe, world_size: int, sharding: Sharding) -> Iterator[str]:
    copy = math.prod(_copy(recipe.layout))
    if world_size % copy:
        yield f"a copy of the model takes {copy} ranks (tensor x pipeline x sequence), and {world_size} is no multiple"
    elif world_size // copy % recipe.layout.expert:
        yield f"the experts are spread over data-parallel ranks, and {world_size // copy} is no multiple"
    if sharding.partition_size > 1 and recipe.layout != Layout():
        yield f"zero_hpz_partition_size={sharding.partition_size} goes with data parallelism only"


def _tensor(recipe: Recipe, _: int, sharding: Sharding) -> Iterator[str]:
    size = recipe.layout.tensor
    if size == 1:
        return
    yield from _family(recipe, "tensor")
    kind = _kind(recipe)
    if kind and kind not in SPLIT:
        yield f"matrices are split for {', '.join(SPLIT)}, not for {kind}"
    heads = _heads(recipe)
    shared = _size(recipe, "num_key_value_heads")
    if heads and heads % size:
        yield f"tensor parallelism shares out attention heads, and the model has {heads}"
    if shared and shared % size:
        yield f"tensor parallelism shares out key/value heads too, and the model has {shared}"
    if recipe.model.quantization != "none":
        yield "packed 4-bit weights cannot be cut into the parts of a matrix"
    elif recipe.lora is not None and recipe.lora.dora:
        yield "DoRA needs the norms of whole matrices"
    if recipe.method == "dpo":
        yield "TRL's DPO reads the output head whole"


def _sequence(recipe: Recipe, _: int, sharding: Sharding) -> Iterator[str]:
    size = recipe.layout.sequence
    if size == 1:
        return
    yield from _family(recipe, "sequence")
    heads = _heads(recipe)
    if heads and heads % (size * recipe.layout.tensor):
        yield (
            "attention over parts of a row shares out heads"
            + (" (to sequence x tensor ranks)" if recipe.layout.tensor > 1 else "")
            + f", and the model has {heads}"
        )
    if recipe.method == "dpo":
        yield "DPO compares whole answers, and each rank has the loss of a part of the tokens"
    if recipe.router_aux_loss_coef:
        yield "the load-balancing loss is one of whole rows, and each rank has the routers' choices for a part"


def _pipeline(recipe: Recipe, _: int, sharding: Sharding) -> Iterator[str]:
    stages = recipe.layout.pipeline
    if stages == 1:
        return
    yield from _family(recipe, "pipeline")
    layers = _size(recipe, "num_hidden_layers", "n_layer")
    if layers and layers < stages:
        yield f"every stage needs a layer, and the model has {layers}"
    if recipe.method == "dpo":
        yield "DPO needs two models' outputs at once, and a pipeline returns one model's loss"
    if recipe.model.quantization != "none":
        yield "4-bit weights are packed on a rank that holds the whole model, and a stage is a part"
    if recipe.router_aux_loss_coef:
        yield "the load-balancing loss is one of all routers, and a stage has those of its own layers"
    if sharding.stage > 1:
        yield "DeepSpeed's pipeline goes with ZeRO 0 and 1 only"


def _expert(recipe: Recipe, _: int, sharding: Sharding) -> Iterator[str]:
    size = recipe.layout.expert
    if size == 1:
        return
    yield from _family(recipe, "expert")
    kind = _kind(recipe)
    experts = _size(recipe, "num_experts", "num_local_experts", "n_routed_experts")
    if kind and not experts:
        yield f"{kind} has no experts to spread"
    elif kind and kind not in SPREAD:
        yield f"experts are spread for {', '.join(SPREAD)}, not for {kind}"
    if experts and experts % size:
        yield f"each rank holds as many experts as the next, and the model has {experts}"
    # In a pipeline AutoEP finds nothing to spread: `test_deepspeed_spreads_no_experts_in_a_pipeline`.
    if math.prod(_copy(recipe.layout)) > 1:
        yield "experts are spread over data-parallel ranks only, with no other parallelism of the model"
    if recipe.lora is not None:
        yield "DeepSpeed's AutoEP replaces the layers of experts, adapters and all"
    if recipe.method == "dpo":
        yield "DeepSpeed's AutoEP spreads one model, and DPO has a second"
    if sharding.stage == 0:
        yield "without ZeRO, DeepSpeed takes the wrong gradient norm of experts that are spread"
