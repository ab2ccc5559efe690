"""Rules about tensor, sequence, pipeline and expert parallelism, DeepCompile and universal checkpoints."""

from collections.abc import Iterator
from importlib import metadata

from .. import schema
from ..model import dimension
from ..rule import FAILS_LATER, WRONG, Config, Edit, Facts, Hit, Rule

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


def _sequence_stage(config: Config, facts: Facts) -> Iterator[Hit]:
    size = _sequence(config, facts)
    if size > 1 and config.stage in (0, 1, 2):
        what = f"with {size} sequence ranks, every gradient at stage {config.stage} is {size} times too large"
        yield Hit(("zero_optimization", "stage"), config.stage, what, "set the stage to 3")


def _sequence_scatter(config: Config, facts: Facts) -> Iterator[Hit]:
    path = ("zero_optimization", "reduce_scatter")
    if _sequence(config, facts) > 1 and config.stage == 3 and not config.on(*path, default=True):
        what = f"gradients are up to {_sequence(config, facts)} times too large"
        yield Hit(path, False, what, "remove it", (Edit("remove", path),))


def _sequence_alone(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.has(*_SEQUENCE) and not config.has("data_parallel_size"):
        what = "without `data_parallel_size` DeepSpeed creates no sequence groups and only counts the batch differently"
        fix = "use the Trainer's ParallelismConfig, pass `mpu` to initialize, or add `data_parallel_size`"
        yield Hit(_SEQUENCE, config.get(*_SEQUENCE), what, fix)


def _tensor_lora(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.lora and _tensor(config) > 1:
        what = "AutoTP replaces the adapters' layers, which breaks them"
        fix = f"remove `tensor_parallel`; ds-recipes launch also splits adapters, with layout.tensor={_tensor(config)}"
        yield Hit(_TENSOR, _tensor(config), what, fix)


def _tensor_stage(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer == "hf" and _tensor(config) > 1 and config.stage == 3:
        what = "from_pretrained cannot load most checkpoints into tensor-parallel ZeRO-3 shards"
        yield Hit(_TENSOR, _tensor(config), what, "set the stage to 1 or 2")


def _tensor_preset(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("tensor_parallel", "preset_model")
    presets = schema.load()["tensor_presets"]
    if name is not None and name != "auto" and name.lower() not in presets:
        what = f"AutoTP has no preset `{name}` and skips it"
        yield Hit(("tensor_parallel", "preset_model"), name, what, f"write {', '.join(presets)}, or remove it")


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


def _pipeline(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.pipeline_stages > 1 and config.stage in (2, 3):
        what = f"the pipeline engine rejects ZeRO stage {config.stage}"
        yield Hit(("zero_optimization", "stage"), config.stage, what, "set the stage to 1")


def _pipeline_tensor(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.pipeline_stages > 1 and _tensor(config) > 1:
        what = "in a pipeline, AutoTP broadcasts over the wrong groups"
        fix = "remove `tensor_parallel`, and shard the layers over the pipeline grid's slice-parallel group"
        yield Hit(_TENSOR, _tensor(config), what, fix)


def _expert_preset(config: Config, facts: Facts) -> Iterator[Hit]:
    presets = schema.load()["expert_presets"]
    name = config.get("expert_parallel", "preset_model")
    if _expert(config) and name is not None and name not in presets:
        what = f"AutoEP has no preset {name!r}"
        yield Hit(("expert_parallel", "preset_model"), name, what, f"write {', '.join(presets)}")


def _expert_optimizer(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer == "hf" and _expert(config) and not config.section("optimizer"):
        what = "the Trainer's own optimizer does not separate expert parameters"
        fix = 'add "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}'
        yield Hit(("optimizer",), None, what, fix)


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


def _deepcompile(config: Config, facts: Facts) -> Iterator[Hit]:
    passes = config.get("compile", "passes")
    if config.on("compile", "deepcompile") and config.stage == 0 and not passes:
        what = "DeepCompile has passes only for ZeRO stages 1, 2 and 3; at stage 0 it is plain torch.compile"
        yield Hit(("compile", "deepcompile"), True, what, "set the stage to 1, 2 or 3")


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


def _universal(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.get("checkpoint", "load_universal") and config.stage == 3:
        what = "loading a universal checkpoint gives every parameter group the settings of the first"
        fix = "set the groups' weight decay again after loading"
        yield Hit(("checkpoint", "load_universal"), True, what, fix)


RULES = (
    Rule(
        "sequence-parallel-below-stage-3",
        "error",
        WRONG,
        "grad_norm is too large by a factor of the sequence ranks, so gradients are clipped too much",
        "The Trainer's loss sums gradients over the sequence ranks, and stages 0 to 2 do not divide by their number.",
        "Use stage 3.",
        _sequence_stage,
    ),
    Rule(
        "sequence-parallel-without-scatter",
        "error",
        WRONG,
        "grad_norm is too large, by up to a factor of the sequence ranks",
        "Stage 3 divides by the world size only if it uses reduce-scatter.",
        "Remove `reduce_scatter`; the default is true.",
        _sequence_scatter,
    ),
    Rule(
        "sequence-parallel-alone",
        "warning",
        WRONG,
        "every rank gets whole sequences; the batch sizes do not add up",
        "`sequence_parallel_size` creates groups only together with `data_parallel_size`.",
        "Use accelerate's ParallelismConfig.",
        _sequence_alone,
    ),
    Rule(
        "tensor-parallel-with-lora",
        "error",
        FAILS_LATER,
        '"KeyError: Parameter containing:", "loss must be a scalar tensor", '
        "\"'Parameter' object has no attribute 'partition_numel'\"",
        "AutoTP replaces every linear layer that it supports, including lora_A and lora_B.",
        "Remove the block; ZeRO-3 shards a model that is too large for one GPU. This project's launcher also splits "
        "adapters, with `layout.tensor=2`.",
        _tensor_lora,
    ),
    Rule(
        "tensor-parallel-at-stage-3",
        "warning",
        FAILS_LATER,
        '"NotImplementedError: Weight conversions (e.g., MoE expert fusion) with DeepSpeed Tensor Parallelism are not '
        'yet implemented"',
        "transformers' ZeRO-3 loader converts weights while it shards them, which it cannot do with tensor "
        "parallelism. A model that is built from its config does train.",
        "Use stage 1 or 2 with tensor parallelism.",
        _tensor_stage,
    ),
    Rule(
        "unknown-tensor-preset",
        "warning",
        WRONG,
        "the model is split by heuristics, or not at all",
        "AutoTP skips an unknown preset without a message.",
        "Remove it; Hugging Face models bring their own plan.",
        _tensor_preset,
    ),
    Rule(
        "ranks-not-divisible",
        "error",
        FAILS_LATER,
        '"world size ... is not divisible by ..."',
        "Ranks are divided into groups of equal size.",
        "Choose a size that divides the number of ranks.",
        _divides,
    ),
    Rule(
        "heads-not-divisible",
        "error",
        FAILS_LATER,
        '"num_attention_heads ... is not divisible by ..."',
        "Tensor and sequence parallelism divide whole attention heads between ranks.",
        "Choose a size that divides the number of heads.",
        _heads,
    ),
    Rule(
        "pipeline-with-stage-2-or-3",
        "error",
        FAILS_LATER,
        '"ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"',
        "The pipeline accumulates gradients over its micro-batches, which sharded gradients do not allow.",
        "Use stage 1.",
        _pipeline,
    ),
    Rule(
        "pipeline-with-autotp",
        "error",
        WRONG,
        "the loss differs from that of a data-parallel run; or the run hangs",
        "AutoTP creates its groups without regard to the pipeline's.",
        "Shard the layers before deepspeed.initialize.",
        _pipeline_tensor,
    ),
    Rule(
        "unknown-expert-preset",
        "error",
        FAILS_LATER,
        "\"Unknown preset_model '...'. Available presets: [...]\"",
        "A preset names the layers of a model family that AutoEP supports.",
        "Use an existing preset.",
        _expert_preset,
    ),
    Rule(
        "expert-parallel-without-optimizer",
        "error",
        FAILS_LATER,
        '"None of the param groups are marked as MoE"',
        "Only an optimizer that DeepSpeed builds has parameter groups of its own for experts.",
        "Add an `optimizer` block; weight decay then also applies to norms and biases.",
        _expert_optimizer,
    ),
    Rule(
        "known-bad-versions",
        "error",
        FAILS_LATER,
        '"TypeError: _CanRecordRegistry.get() takes 2 positional arguments but 3 were given"',
        "transformers 5.23 changed a registry that DeepSpeed 0.19.8's AutoEP reads.",
        "Install transformers 5.22.",
        _expert_version,
    ),
    Rule(
        "deepcompile-at-stage-0",
        "warning",
        WRONG,
        "no speed-up",
        "DeepCompile's passes schedule the communication of ZeRO.",
        "Set the stage to 1, 2 or 3.",
        _deepcompile,
    ),
    Rule(
        "compiled-pass-without-effect",
        "error",
        WRONG,
        '"Falling back to the torch compiler" in the log, and as much memory as without',
        "DeepCompile's passes autosp and autotp each need a stage or a size, without which DeepSpeed leaves them out.",
        "Set the stage to 0 or 1 for autosp, or tensor_parallel.autotp_size for autotp.",
        _compiled_pass,
    ),
    Rule(
        "universal-at-stage-3",
        "warning",
        WRONG,
        "after resuming, weight decay also applies to norms and biases",
        "While loading a universal checkpoint, stage 3 copies the hyperparameters of group 0 to all groups.",
        "Set them again after loading.",
        _universal,
    ),
)
