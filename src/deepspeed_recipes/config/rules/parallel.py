"""Rules about tensor, sequence, pipeline and expert parallelism, DeepCompile and universal checkpoints."""

import math
from collections.abc import Iterator
from importlib import metadata

from .. import schema
from ..rule import COSTS, FAILS_LATER, WRONG, Config, Edit, Facts, Hit, dimension, rule

_TENSOR = ("tensor_parallel", "autotp_size")
_SEQUENCE = ("sequence_parallel_size",)
_EXPERT = ("expert_parallel", "autoep_size")
_TESTED_DEEPSPEED = "0.19.8"


def _sequence(config: Config, facts: Facts) -> int:
    return max(facts.sequence_parallel_size, int(config.number(*_SEQUENCE) or 1))


def _tensor(config: Config) -> int:
    return int(config.number(*_TENSOR) or 0)


def _expert(config: Config) -> int:
    return int(config.number(*_EXPERT) or 1) if config.get("expert_parallel", "enabled") else 0


@rule("sequence-parallel-below-stage-3", "error", WRONG)
def _sequence_stage(config: Config, facts: Facts) -> Iterator[Hit]:
    size = _sequence(config, facts)
    if size > 1 and config.stage in (0, 1, 2):
        what = f"with {size} sequence ranks, every gradient at stage {config.stage} is {size} times too large"
        yield Hit(("zero_optimization", "stage"), config.stage, what, "set the stage to 3")


@rule("sequence-parallel-without-scatter", "error", WRONG)
def _sequence_scatter(config: Config, facts: Facts) -> Iterator[Hit]:
    path = ("zero_optimization", "reduce_scatter")
    if _sequence(config, facts) > 1 and config.stage == 3 and not config.on(*path, default=True):
        what = f"gradients are up to {_sequence(config, facts)} times too large"
        yield Hit(path, False, what, "remove it", (Edit("remove", path),))


@rule("sequence-parallel-alone", "warning", WRONG)
def _sequence_alone(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.has(*_SEQUENCE) and not config.has("data_parallel_size"):
        what = "without `data_parallel_size` DeepSpeed creates no sequence groups and only counts the batch differently"
        fix = "use the Trainer's ParallelismConfig, pass `mpu` to initialize, or add `data_parallel_size`"
        yield Hit(_SEQUENCE, config.get(*_SEQUENCE), what, fix)


@rule("tensor-parallel-with-lora", "error", FAILS_LATER)
def _tensor_lora(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.lora and _tensor(config) > 1:
        what = "AutoTP replaces the adapters' layers, which breaks them"
        fix = f"remove `tensor_parallel`; ds-recipes launch also splits adapters, with layout.tensor={_tensor(config)}"
        yield Hit(_TENSOR, _tensor(config), what, fix)


@rule("tensor-parallel-at-stage-3", "warning", FAILS_LATER)
def _tensor_stage(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer == "hf" and _tensor(config) > 1 and config.stage == 3:
        what = "from_pretrained cannot load most checkpoints into tensor-parallel ZeRO-3 shards"
        yield Hit(_TENSOR, _tensor(config), what, "set the stage to 1 or 2")


@rule("tensor-parallel-across-nodes", "warning", COSTS)
def _tensor_nodes(config: Config, facts: Facts) -> Iterator[Hit]:
    size, each = _tensor(config), facts.gpus_per_node
    if each and size > 1 and (facts.world_size or each + 1) > each and each % size:
        what = f"groups of {size} ranks span nodes of {each}, so several all-reduces per layer cross the network"
        within = math.gcd(size, each) if math.gcd(size, each) > 1 else each
        yield Hit(_TENSOR, size, what, f"set it to {within}" if within > 1 else "remove `tensor_parallel`")


@rule("unknown-tensor-preset", "warning", WRONG)
def _tensor_preset(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("tensor_parallel", "preset_model")
    presets = schema.load()["tensor_presets"]
    if name is not None and name != "auto" and name.lower() not in presets:
        what = f"AutoTP has no preset `{name}` and skips it"
        yield Hit(("tensor_parallel", "preset_model"), name, what, f"write {', '.join(presets)}, or remove it")


@rule("ranks-not-divisible", "error", FAILS_LATER)
def _divides(config: Config, facts: Facts) -> Iterator[Hit]:
    world = facts.world_size
    if world is None:
        return
    hpz = min(world, int(config.number("zero_optimization", "zero_hpz_partition_size") or 1))  # as DeepSpeed does
    sizes = (
        (_TENSOR, _tensor(config)),
        (_EXPERT, _expert(config)),
        (_SEQUENCE, int(config.number(*_SEQUENCE) or 1)),
        (("zero_optimization", "zero_hpz_partition_size"), hpz if config.stage == 3 else 1),
    )
    for path, size in sizes:
        if size > 1 and world % size:
            yield Hit(path, size, f"{world} ranks are not divisible by {size}")


@rule("heads-not-divisible", "error", FAILS_LATER)
def _heads(config: Config, facts: Facts) -> Iterator[Hit]:
    size = _tensor(config)
    heads = dimension(facts.text_model, "num_attention_heads")
    shared = dimension(facts.text_model, "num_key_value_heads") or heads
    if size > 1 and heads is not None and heads % size:
        yield Hit(_TENSOR, size, f"the model's {heads} attention heads are not divisible by {size}", "choose a divisor")
    elif size > 1 and shared is not None and shared < size:
        what = f"the model has only {shared} key/value heads, so some ranks get none"
        yield Hit(_TENSOR, size, what, f"use at most {shared}", severity="warning")
    size = _sequence(config, facts)
    if size > 1 and heads is not None and heads % size:
        what = f"the model's {heads} attention heads are not divisible by {size} sequence ranks"
        yield Hit(_SEQUENCE, size, what, "choose a divisor")


@rule("pipeline-with-stage-2-or-3", "error", FAILS_LATER)
def _pipeline(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.pipeline_stages > 1 and config.stage in (2, 3):
        what = f"the pipeline engine rejects ZeRO stage {config.stage}"
        yield Hit(("zero_optimization", "stage"), config.stage, what, "set the stage to 1")


@rule("pipeline-with-autotp", "error", WRONG)
def _pipeline_tensor(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.pipeline_stages > 1 and _tensor(config) > 1:
        what = "in a pipeline, AutoTP broadcasts over the wrong groups"
        fix = "remove `tensor_parallel`, and shard the layers over the pipeline grid's slice-parallel group"
        yield Hit(_TENSOR, _tensor(config), what, fix)


@rule("unknown-expert-preset", "error", FAILS_LATER)
def _expert_preset(config: Config, facts: Facts) -> Iterator[Hit]:
    presets = schema.load()["expert_presets"]
    name = config.get("expert_parallel", "preset_model")
    if _expert(config) and name is not None and name not in presets:
        what = f"AutoEP has no preset {name!r}"
        yield Hit(("expert_parallel", "preset_model"), name, what, f"write {', '.join(presets)}")


@rule("expert-parallel-without-optimizer", "error", FAILS_LATER)
def _expert_optimizer(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer == "hf" and _expert(config) and not config.section("optimizer"):
        what = "the Trainer's own optimizer does not separate expert parameters"
        fix = 'add "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}'
        yield Hit(("optimizer",), None, what, fix)


@rule("known-bad-versions", "error", FAILS_LATER)
def _expert_version(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer != "hf" or not _expert(config):
        return
    try:
        version = metadata.version("transformers")
        recent = tuple(int(part) for part in version.split(".")[:2]) >= (5, 23)
    except (metadata.PackageNotFoundError, ValueError):
        return
    if recent and schema.installed_version() == _TESTED_DEEPSPEED:
        text = ".".join(version.split(".")[:2])
        what = f"DeepSpeed {_TESTED_DEEPSPEED} cannot replace the experts of transformers {text}"
        yield Hit(_EXPERT, _expert(config), what, "install transformers 5.22")


@rule("deepcompile-at-stage-0", "warning", WRONG)
def _deepcompile(config: Config, facts: Facts) -> Iterator[Hit]:
    passes = config.get("compile", "passes")
    if config.on("compile", "deepcompile") and config.stage == 0 and not passes:
        what = "DeepCompile has passes only for ZeRO stages 1, 2 and 3; at stage 0 it is plain torch.compile"
        yield Hit(("compile", "deepcompile"), True, what, "set the stage to 1, 2 or 3")


@rule("compiled-pass-without-effect", "error", WRONG)
def _compiled_pass(config: Config, facts: Facts) -> Iterator[Hit]:
    passes = config.get("compile", "passes")
    if not config.on("compile", "deepcompile") or not isinstance(passes, list):
        return
    size = config.number("tensor_parallel", "autotp_size") or 1
    if "autosp" in passes and config.stage in (2, 3):
        what = f"AutoSP does not work with stage {config.stage}: it is plain torch.compile, and no sequence is split"
        yield Hit(("compile", "passes"), passes, what, "set the stage to 0 or 1")
    if "autotp" in passes and "autosp" not in passes and size <= 1:
        what = "without tensor_parallel.autotp_size above 1 it is plain torch.compile, and no matrix is split"
        yield Hit(("compile", "passes"), passes, what, "add tensor_parallel.autotp_size, or remove the pass")


@rule("universal-at-stage-3", "warning", WRONG)
def _universal(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.get("checkpoint", "load_universal") and config.stage == 3:
        what = "loading a universal checkpoint gives every parameter group the settings of the first"
        fix = "set the groups' weight decay again after loading"
        yield Hit(("checkpoint", "load_universal"), True, what, fix)
