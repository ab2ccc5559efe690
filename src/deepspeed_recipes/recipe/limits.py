"""Refuses combinations of layout, model, method and ZeRO stage that cannot run, with the reason and an alternative.

Only this module decides it: the launcher calls it before it starts anything, and the table in configs/README.md is
generated from its results. `FAMILIES` lists the architectures that a technique trains incorrectly.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from .deepspeed_file import DeepSpeedFile
from .errors import UserError
from .layout import gradient_accumulation_steps
from .methods import Distill
from .optimization import combinations
from .recipe import Layout, Recipe, changed, names

NODE = 8
"""GPUs per node, if no instance type gives their number."""
FAMILIES: Mapping[str, Mapping[str, str]] = {
    "tensor": {
        **dict.fromkeys(("bloom", "gpt2"), "its queries, keys and values are one matrix, not cut by heads"),
        **dict.fromkeys(
            (
                "deepseek_v2",
                "deepseek_v3",
                "glm4_moe",
                "gpt_oss",
                "minimax_m2",
                "mixtral",
                "nemotron_h",
                "olmoe",
                "qwen3_5_moe",
                "qwen3_5_moe_text",
                "qwen3_moe",
            ),
            "its experts, which hold most of its weights, are not split",
        ),
    },
    "sequence": {
        "bloom": "its ALiBi attention would measure distances only within a rank's part of a sequence",
        "lfm2": "its convolutions read the tokens before a rank's part of a sequence, which another rank holds",
        **dict.fromkeys(
            ("falcon_h1", "nemotron_h"),
            "its Mamba layers carry a state along the sequence, of which each rank holds only a part",
        ),
        **dict.fromkeys(
            ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
            "its linear attention carries a state along the sequence, of which each rank holds only a part",
        ),
    },
    "pipeline": {},
    "expert": {
        "ernie4_5_moe": "DeepSpeed's AutoEP fails on the shape of its routers' corrections",
        "gpt_oss": "its experts have biases, and those of DeepSpeed's AutoEP have none",
        "nemotron_h": "its experts have no gate projection, and those of DeepSpeed's AutoEP have one",
    },
}
"""Why a kind of parallelism does not train an architecture correctly, by the layout's field and `model_type`."""

TENSOR_PARALLEL_TYPES = (
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt_neox",
    "granite",
    "llama",
    "ministral3",
    "mistral",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5_text",
    "seed_oss",
    "smollm3",
)
"""Model types that transformers' plan splits correctly (`tests/test_tensor.py` checks this against every recipe). For
other types `training/parallel/tensor_plan.py` determines which layers can be split, or refuses the run."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names in config.json for the number of experts per layer."""
EXPERT_PARALLEL_TYPES = ("deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe")
"""Model types for which DeepSpeed has a preset with which expert parallelism trains like plain PyTorch
(`tests/parity/test_expert.py`). For other types `training/parallel/expert.py` makes one, or refuses the run."""

ENDS = frozenset(("embed_tokens", "wte", "embed_in", "word_embeddings", "lm_head", "embed_out", "output"))
"""Names of embeddings and heads, on which adapters do not train in a pipeline: DeepSpeed copies a
tied weight between stages by its name, and the export joins only weights that every stage has."""

NO_CLASSIFIER = (
    "falcon_h1",
    "glm4_moe",
    "granite",
    "lfm2",
    "minimax_m2",
    "nemotron_h",
    "olmoe",
    "qwen3_5_moe_text",
)
"""Model types of the pages for which transformers has no sequence classifier (checked by `tests/test_reward.py`)."""


def check(recipe: Recipe, world_size: int, file: DeepSpeedFile) -> None:
    """Refuse a recipe that cannot run.

    Args:
        recipe: the recipe; dimensions that are missing in its `model.config` are not checked.
        world_size: number of ranks over all nodes.
        file: the recipe's DeepSpeed file.

    Raises:
        UserError: names the layout's sizes, the first reason, and the nearest sizes that run; or the sequence length.
    """
    _check_length(recipe)
    _check_head(recipe)
    combinations.check(recipe, file)
    _check_teacher(recipe)
    why = limit(recipe, world_size, file)
    if why:
        use = " or ".join(suggestions(recipe, world_size, file))
        raise UserError(f"{as_overrides(recipe.layout)}: {why}; use {use}.")
    gradient_accumulation_steps(recipe, world_size)


def check_blocks(recipe: Recipe, file: DeepSpeedFile) -> None:
    """Refuse a file whose parallel blocks contradict the layout, or that lacks the block which the layout needs.

    Raises:
        UserError: names the file and the key to add, or another file if the recipe cannot run with that key.
    """
    layout = recipe.layout
    if layout.expert > 1 and not file.has_expert_block:
        raise UserError(
            f"layout.expert={layout.expert}: {file.name} has no expert_parallel block; use "
            "deepspeed=expert_parallel.json."
        )
    for field, what, rule in (
        ("tensor", "layers", _tensor),
        ("expert", "experts", _expert),
        ("sequence", "sequences", _sequence),
    ):
        size = getattr(file, f"{field}_size")
        if size > 1 and getattr(layout, field) == 1:
            added = changed(recipe, layout=replace(layout, **{field: size}))
            why = "this recipe cannot" if added is None else next(rule(added, size, file), None)
            use = f"add layout.{field}={size}" if why is None else f"{why}; use deepspeed=zero{file.stage}.json"
            raise UserError(f"deepspeed={file.name} splits {what} over {size} ranks; {use}.")
    for key, value in file.content.get("tensor_parallel", {}).items():
        if key == "autotp_size" or (key, value) == ("vocab_parallel_lm_head", False):  # a run's own file has these
            continue
        raise UserError(
            f"deepspeed={file.name}: tensor_parallel.{key} is for DeepSpeed's AutoTP, and a run splits layers by the "
            "model's own plan; remove it."
        )


def check_micro_batch(recipe: Recipe) -> None:
    """Refuse fewer sequences on a rank than the method compares.

    Raises:
        UserError: names the size and the smallest possible size.
    """
    least = recipe.method.least_micro_batch
    if recipe.micro_batch_size < least:
        raise UserError(
            f"micro_batch_size={recipe.micro_batch_size}: {recipe.method.title} compares the answers of a micro-batch; "
            f"use micro_batch_size={least} or more."
        )


def other_sizes(recipe: Recipe, file: DeepSpeedFile) -> Iterator[str]:
    """Yield a line for each size in a file that the layout overrides."""
    for field, key in (
        ("tensor", "tensor_parallel.autotp_size"),
        ("expert", "expert_parallel.autoep_size"),
        ("sequence", "sequence_parallel_size"),
    ):
        size, asked = getattr(file, f"{field}_size"), getattr(recipe.layout, field)
        if 1 < size != asked:
            yield f"layout.{field}={asked}: the run uses this size instead of {key}={size} in {file.name}."


def _check_length(recipe: Recipe) -> None:
    most = positions(_config(recipe))
    if recipe.sequence_length > most:
        raise UserError(
            f"sequence_length={recipe.sequence_length}: the model has {most:,} positions; set sequence_length={most}."
        )


def _check_head(recipe: Recipe) -> None:
    if recipe.method.scores and _kind(recipe) in NO_CLASSIFIER:
        raise UserError(
            f"method={recipe.method.name}: {recipe.method.title} needs a classification model, which transformers does "
            f"not have for the type {_kind(recipe)}; use another family (ds-recipes launch --list)."
        )


def _check_teacher(recipe: Recipe) -> None:
    if not isinstance(recipe.method, Distill):
        return
    if not recipe.method.teacher:
        raise UserError("distill.teacher is not set: give a model folder or a Hub id.")
    wanted, vocabulary = recipe.method.top_k, _size(recipe, "vocab_size")
    if wanted and vocabulary and wanted > vocabulary:
        raise UserError(f"distill.top_k={wanted}: the vocabulary has {vocabulary:,} tokens; use fewer, such as 64.")


def positions(config: Mapping[str, Any]) -> float:
    """Return a model's number of positions, or infinity if its config does not limit it."""
    return config.get("max_position_embeddings") or config.get("n_positions") or math.inf


def limit(recipe: Recipe, world_size: int, file: DeepSpeedFile) -> str | None:
    """Return the first reason why `recipe` cannot run, as a clause, or None if it can."""
    rules = (_optimizer, _world, _selective, _expert, _tensor, _sequence, _pipeline)
    return next((why for rule in rules for why in rule(recipe, world_size, file)), None)


def suggestions(recipe: Recipe, world_size: int, file: DeepSpeedFile) -> list[str]:
    """Return the smallest changes with which `recipe` can run, as typed by the user; each one is sufficient.

    The first changes the layout; another number of ranks and the pipeline's DeepSpeed file follow if they help.
    """
    near = nearest(recipe, world_size, file)
    found = [as_overrides(near, recipe.layout)]
    sizes = ((near.tensor, file.tensor_size), (near.expert, file.expert_size), (near.sequence, file.sequence_size))
    if any(size == 1 < asked for size, asked in sizes):  # `check_blocks` would refuse it
        found[0] += f" deepspeed=zero{file.stage}.json"
    multiple = math.lcm(_model_parallel_size(recipe.layout), recipe.layout.expert)
    below = max(1, world_size // multiple) * multiple
    world_sizes = {below, (world_size // multiple + 1) * multiple} - {world_size}
    found += [_gpus(size) for size in sorted(world_sizes) if _runs(recipe, size, file)]
    if recipe.layout.pipeline > 1 and limit(recipe, world_size, DeepSpeedFile(stage=1)) is None:
        found.append("deepspeed=pipeline.json")
    return found


def _runs(recipe: Recipe, world_size: int, file: DeepSpeedFile) -> bool:
    """Return True if `check` accepts a recipe's layout and its global batch can be divided."""
    if limit(recipe, world_size, file) is not None:
        return False
    try:
        gradient_accumulation_steps(recipe, world_size)
    except UserError:
        return False
    return True


def _gpus(count: int) -> str:
    """Return the options for a number of GPUs: `--gpus` per node, and `--nodes` if one node is not enough."""
    return f"--gpus {count}" if count < 2 * NODE or count % NODE else f"--gpus {NODE} --nodes {count // NODE}"


def nearest(recipe: Recipe, world_size: int, file: DeepSpeedFile) -> Layout:
    """Return the layout that can run and is closest to the recipe's, counted in doublings of its sizes.

    There always is one, since data parallelism alone can always run. Layouts that divide the global batch come first.
    """
    wanted = asdict(recipe.layout).values()

    def distance(layout: Layout) -> tuple[float, int]:
        sizes = asdict(layout).values()
        doublings = sum(abs(math.log2(size / asked)) for size, asked in zip(sizes, wanted, strict=True))
        return round(doublings, 9), -math.prod(sizes)

    layouts = sorted(_layouts(world_size), key=distance)
    recipes = [one for layout in layouts if (one := changed(recipe, layout=layout)) is not None]
    possible = (one for one in recipes if limit(one, world_size, file) is None)
    runs = next((one for one in recipes if _runs(one, world_size, file)), None)
    found = runs or next(possible, None)
    assert found is not None, "data parallelism alone is always possible"
    return found.layout


def _layouts(world_size: int) -> Iterator[Layout]:
    for tensor in divisors(world_size):
        for pipeline in divisors(world_size // tensor):
            for sequence in divisors(world_size // tensor // pipeline):
                for expert in divisors(world_size // tensor // pipeline // sequence):
                    yield Layout(tensor, pipeline, sequence, expert)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def as_overrides(layout: Layout, before: Layout | None = None) -> str:
    """Return the sizes as `key=value` words: those above 1, or those that differ from `before`."""
    old = asdict(before or Layout())
    return " ".join(f"layout.{name}={size}" for name, size in asdict(layout).items() if size != old[name])


def _model_parallel_size(layout: Layout) -> int:
    """Return the number of ranks that share one copy of the model."""
    return layout.tensor * layout.pipeline * layout.sequence


def _config(recipe: Recipe) -> Mapping[str, Any]:
    config: Mapping[str, Any] = recipe.model.config
    return config.get("text_config") or config


def _size(recipe: Recipe, *keys: str) -> int | None:
    """Return a dimension of the model from the first of `keys` that its configuration has, or None."""
    config = _config(recipe)
    return next((config[key] for key in keys if config.get(key)), None)


def _heads(recipe: Recipe) -> int | None:
    return _size(recipe, "num_attention_heads", "n_head")


def _kind(recipe: Recipe) -> str | None:
    return _config(recipe).get("model_type")


def _family(recipe: Recipe, technique: str) -> Iterator[str]:
    kind = _kind(recipe)
    if kind and (why := FAMILIES[technique].get(kind)):
        yield f"{technique} parallelism does not support {kind}: {why}"


def _method(recipe: Recipe, technique: str) -> Iterator[str]:
    if why := recipe.method.excludes.get(technique):
        yield why
    yield from combinations.excluded(recipe, technique)


def _optimizer(recipe: Recipe, _: int, file: DeepSpeedFile) -> Iterator[str]:
    yield from (why for why, _ in combinations.refused(recipe, file))


def _world(recipe: Recipe, world_size: int, file: DeepSpeedFile) -> Iterator[str]:
    size, expert = _model_parallel_size(recipe.layout), recipe.layout.expert
    if world_size % size:
        yield f"{world_size} ranks are not divisible by {size} (tensor x pipeline x sequence)"
    elif world_size // size % expert:
        yield f"{world_size // size} data-parallel ranks are not divisible by {expert} (expert)"
    if file.partition_size > 1 and recipe.layout != Layout():
        yield f"zero_hpz_partition_size={file.partition_size} works with data parallelism only"


def _selective(recipe: Recipe, _: int, file: DeepSpeedFile) -> Iterator[str]:
    if recipe.gradient_checkpointing != "selective":
        return
    if recipe.layout.tensor > 1:  # the second sum would start from the first, and gradients would be too large
        yield "gradient_checkpointing=selective keeps the products that tensor parallelism sums in place"
    if recipe.layout.expert > 1:
        yield "gradient_checkpointing=selective is not tested with experts on several ranks"


def _tensor(recipe: Recipe, _: int, file: DeepSpeedFile) -> Iterator[str]:
    size = recipe.layout.tensor
    if size == 1:
        return
    yield from _family(recipe, "tensor")
    heads = _heads(recipe)
    shared = _size(recipe, "num_key_value_heads")
    if heads and heads % size:
        yield f"the model's {heads} attention heads are not divisible by {size}"
    if shared and shared % size:
        yield f"the model's {shared} key/value heads are not divisible by {size}"
    if recipe.model.quantization != "none":
        yield "packed 4-bit weights cannot be split by rows or columns"
    elif recipe.lora is not None and recipe.lora.dora:
        yield "DoRA needs the norm of each whole matrix"
    yield from _method(recipe, "tensor")


def _sequence(recipe: Recipe, _: int, file: DeepSpeedFile) -> Iterator[str]:
    size = recipe.layout.sequence
    if size == 1:
        return
    yield from _family(recipe, "sequence")
    heads = _heads(recipe)
    sharing = size * recipe.layout.tensor
    if heads and heads % sharing:
        factors = " (sequence x tensor)" if recipe.layout.tensor > 1 else ""
        yield f"the model's {heads} attention heads are not divisible by {sharing}{factors}"
    yield from _method(recipe, "sequence")
    if recipe.router_aux_loss_coef:
        yield "the load-balancing loss covers whole sequences, and each rank has the routing of only a part"


def _pipeline(recipe: Recipe, _: int, file: DeepSpeedFile) -> Iterator[str]:
    stages = recipe.layout.pipeline
    if stages == 1:
        return
    yield from _family(recipe, "pipeline")
    layers = _size(recipe, "num_hidden_layers", "n_layer")
    if layers and layers < stages:
        yield f"every stage needs at least one layer, and the model has {layers}"
    yield from _method(recipe, "pipeline")
    if recipe.model.quantization != "none":
        yield "4-bit weights are packed on a rank that holds the whole model, and a stage holds only a part"
    ends = {name.rpartition(".")[2]: name for name in names(recipe.lora.target_modules)} if recipe.lora else {}
    if outside := [ends[name] for name in ENDS.intersection(ends)]:
        yield f"its first and its last stage would have different adapters ({', '.join(sorted(outside))})"
    if recipe.router_aux_loss_coef:
        yield "the load-balancing loss covers all routers, and a stage has only its own layers' routers"
    if file.stage > 1:
        yield "DeepSpeed's pipeline supports ZeRO 0 and 1 only"


def _expert(recipe: Recipe, _: int, file: DeepSpeedFile) -> Iterator[str]:
    size = recipe.layout.expert
    if size == 1:
        return
    yield from _family(recipe, "expert")
    kind = _kind(recipe)
    experts = _size(recipe, *EXPERT_COUNTS)
    if kind and not experts:
        yield f"{kind} has no experts"
    if experts and experts % size:
        yield f"the model's {experts} experts are not divisible by {size}"
    # AutoEP finds no experts in a pipeline's stages: `test_deepspeed_distributes_no_experts_in_a_pipeline`.
    if _model_parallel_size(recipe.layout) > 1:
        yield "expert parallelism cannot be combined with tensor, pipeline or sequence parallelism"
    if recipe.lora is not None:
        yield "DeepSpeed's AutoEP replaces the expert layers together with their adapters"
    yield from _method(recipe, "expert")
    if file.stage == 0:
        yield "without ZeRO, DeepSpeed computes a wrong gradient norm under expert parallelism"
