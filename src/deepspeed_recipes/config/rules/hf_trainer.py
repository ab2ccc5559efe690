"""Rules about configs that the Hugging Face Trainer reads."""

import math
import re
from collections.abc import Iterator

from .. import schema
from ..read import Key
from ..rule import COSTS, FAILS_LATER, WRONG, Config, Edit, Facts, Hit, hidden_size, rule, shown


@rule("clipping-missing", "warning", WRONG)
def _clipping(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer == "hf" and not config.has("gradient_clipping"):
        what = "gradients are clipped at DeepSpeed's default of 1.0, whatever max_grad_norm is"
        edits = (Edit("set", ("gradient_clipping",), "auto"),)
        yield Hit(("gradient_clipping",), None, what, 'add "gradient_clipping": "auto"', edits)


_DEFAULTS = {
    "adam_beta1": ("betas", 0.9),
    "adam_beta2": ("betas", 0.999),
    "adam_epsilon": ("eps", 1e-8),
    "weight_decay": ("weight_decay", 0.0),
}
"""The parameter of an optimizer that the Trainer fills from an argument, and DeepSpeed's default for it."""


@rule("optimizer-block", "warning", WRONG)
def _optimizer(config: Config, facts: Facts) -> Iterator[Hit]:
    # ZenFlow and AutoEP need an optimizer that DeepSpeed builds.
    needed = isinstance(config.get("zero_optimization", "zenflow"), dict) or config.get("expert_parallel", "enabled")
    if facts.trainer == "hf" and config.section("optimizer") and not needed:
        what = "replaces TrainingArguments.optim, and weight decay also applies to norms and biases"
        yield Hit(("optimizer",), config.get("optimizer"), what, "remove the block")
    if facts.trainer == "hf" and config.text("optimizer", "type"):
        given, known = config.section("optimizer", "params"), facts.arguments or {}
        for argument, (parameter, default) in _DEFAULTS.items():
            if parameter not in given and known.get(argument, default) != default:
                path = ("optimizer", "params", parameter)
                what = f"DeepSpeed's default of {shown(default)} replaces {argument}={shown(known[argument])}"
                yield Hit(path, None, what, f'add "{parameter}": "auto"')


_SCHEDULED = (("warmup_num_steps", "warmup_steps", "1000 steps"), ("warmup_max_lr", "learning_rate", "0.001"))
"""Parameters of a schedule that the Trainer fills from an argument, and DeepSpeed's defaults."""


@rule("scheduler-block", "warning", WRONG)
def _scheduler(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer == "hf" and config.section("scheduler"):
        never = config.text("scheduler", "type") == "WarmupLR"
        more = "; WarmupLR never decays" if never else ""
        what = f"replaces lr_scheduler_type{more}"
        yield Hit(("scheduler",), config.get("scheduler"), what, "remove the block")
        parameters = schema.load()["schedulers"].get(config.text("scheduler", "type"), ())
        for name, argument, default in _SCHEDULED:
            path = ("scheduler", "params", name)
            # Without a highest rate, WarmupLR rises to the optimizer's.
            if name in parameters and not config.has(*path) and not (never and name == "warmup_max_lr"):
                what = f"DeepSpeed's default of {default} counts, whatever {argument} is"
                yield Hit(path, None, what, f'add "{name}": "auto"')


@rule("zero-block-missing", "error", FAILS_LATER)
def _zero_missing(config: Config, facts: Facts) -> Iterator[Hit]:
    tuned = config.get("autotuning", "enabled")  # the autotuner writes the block itself
    if facts.trainer == "hf" and not config.has("zero_optimization") and not tuned:
        edits = (Edit("set", ("zero_optimization",), {"stage": 0}),)
        what = "accelerate requires the block, even for stage 0"
        yield Hit(("zero_optimization",), None, what, 'add "zero_optimization": {"stage": 0}', edits)


@rule("autotuning-ends-the-run", "warning", FAILS_LATER)
def _tuned(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.on("autotuning", "enabled"):
        what = "DeepSpeed ends the run after the profiled steps"
        yield Hit(("autotuning", "enabled"), True, what, "remove it; it is for `deepspeed --autotuning`")


@rule("unmanaged-accumulation", "error", FAILS_LATER)
def _managed(config: Config, facts: Facts) -> Iterator[Hit]:
    path = ("managed_gradient_accumulation",)
    if facts.trainer == "hf" and config.has(*path) and not config.get(*path):
        what = "accelerate sets the accumulation boundary itself, which the engine then rejects"
        yield Hit(path, config.get(*path), what, "remove it", (Edit("remove", path),))


@rule("no-hidden-size", "error", FAILS_LATER)
def _hidden_size(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer != "hf" or facts.model is None:
        return
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    autos = [name for name in names if config.get("zero_optimization", name) == "auto"]
    if hidden_size(facts.model, nested=False) is not None:
        return
    for name in autos:
        if hidden_size(facts.model) is not None:
            what = "the hidden size is in text_config, where the Trainer finds it but a bare Accelerator does not"
            yield Hit(("zero_optimization", name), "auto", what, "write a number", severity="warning")
        else:
            what = "the model's config has no hidden_size to compute this from"
            yield Hit(("zero_optimization", name), "auto", what, "write a number")


_COMPARED = {
    ("train_micro_batch_size_per_gpu",): "per_device_train_batch_size",
    ("gradient_accumulation_steps",): "gradient_accumulation_steps",
    ("train_batch_size",): "ranks x per_device_train_batch_size x gradient_accumulation_steps",
    ("gradient_clipping",): "max_grad_norm",
    ("fp16", "enabled"): "fp16 or fp16_full_eval",
    ("bf16", "enabled"): "bf16 or bf16_full_eval",
    ("optimizer", "params", "lr"): "learning_rate",
    ("optimizer", "params", "betas"): "[adam_beta1, adam_beta2]",
    ("optimizer", "params", "eps"): "adam_epsilon",
    ("optimizer", "params", "weight_decay"): "weight_decay",
    ("scheduler", "params", "warmup_max_lr"): "learning_rate",
    ("scheduler", "params", "warmup_num_steps"): "warmup_steps",
    ("scheduler", "params", "total_num_steps"): "max_steps",
}
"""Keys whose fixed values the Trainer compares with arguments (transformers 5.22.2, `HfTrainerDeepSpeedConfig`)."""
ARGUMENTS = tuple(sorted({word for names in _COMPARED.values() for word in re.findall(r"\w+_\w+|[bf][pf]?16", names)}))
"""The TrainingArguments that are compared."""
EXCLUSIVE = (
    ("fp16", "bf16"),
    ("fp16_full_eval", "bf16_full_eval"),
    ("deepspeed", "fsdp"),
    ("save_only_model", "load_best_model_at_end"),
)
"""TrainingArguments with which transformers stops if both are set, the last two with DeepSpeed."""
_WARNED_ELSEWHERE = (("train_batch_size",), ("fp16", "enabled"), ("bf16", "enabled"))
"""Keys that cause no warning while the arguments are unknown: most configs fix their precision."""


def _expected(facts: Facts) -> dict[Key, object]:
    known = facts.arguments or {}
    expected: dict[Key, object] = {path: known[name] for path, name in _COMPARED.items() if name in known}
    names = _COMPARED[("train_batch_size",)].split(" x ")[1:]
    sizes = [size for size in (facts.world_size, *map(known.get, names)) if isinstance(size, int)]
    if len(sizes) == 1 + len(names):
        expected[("train_batch_size",)] = math.prod(sizes)
    switches = {kind: [known.get(f"{kind}{use}") for use in ("", "_full_eval")] for kind in ("fp16", "bf16")}
    for kind, other in (("fp16", "bf16"), ("bf16", "fp16")):
        # The Trainer refuses both at once, so if one is on the other is off; hardly anyone sets `bf16_full_eval`.
        if any(switches[kind]) or any(switches[other]) or switches[kind][0] is not None:
            expected[(kind, "enabled")] = any(switches[kind])
    if "adam_beta1" in known and "adam_beta2" in known:
        expected[("optimizer", "params", "betas")] = [known["adam_beta1"], known["adam_beta2"]]
    steps, warmup = expected.pop(("scheduler", "params", "total_num_steps"), None), known.get("warmup_steps")
    if isinstance(steps, int) and steps > 0:  # otherwise the number of steps follows from the data
        expected[("scheduler", "params", "total_num_steps")] = steps
    # The Trainer replaces a warm-up of 0 steps, which DeepSpeed refuses, by 1.
    path = ("scheduler", "params", "warmup_num_steps")
    if isinstance(warmup, (int, float)) and 0 < warmup < 1:
        expected.pop(path)
        if isinstance(steps, int) and steps > 0:
            expected[path] = max(1, math.ceil(steps * warmup))
    elif isinstance(warmup, (int, float)):
        expected[path] = max(1, int(warmup))
    return expected


@rule("fixed-for-trainer", "warning", FAILS_LATER)
def _fixed(config: Config, facts: Facts) -> Iterator[Hit]:
    expected = _expected(facts)
    for path, argument in _COMPARED.items() if facts.trainer == "hf" else ():
        value = config.get(*path)
        if value is None or value == "auto":
            continue
        if path[-1] == "betas" and path not in expected and isinstance(value, list) and len(value) == 2:
            known = facts.arguments or {}
            both = [known.get("adam_beta1", value[0]), known.get("adam_beta2", value[1])]
            expected |= {path: both} if both != value else {}  # one that is known, and differs
        if path in expected:
            if value != expected[path]:
                what = f"{argument} is {shown(expected[path])}, and the Trainer stops where the two differ"
                fix = 'write "auto"'
                if argument in ARGUMENTS:
                    fix += f", or set {argument} to {shown(value)}"
                yield Hit(path, value, what, fix, severity="error")
        elif path not in _WARNED_ELSEWHERE:
            what = f"the Trainer stops unless {argument} is {shown(value)} too"
            yield Hit(path, value, what, 'write "auto"')


@rule("two-learning-rates", "error", FAILS_LATER)
def _two_rates(config: Config, facts: Facts) -> Iterator[Hit]:
    path = ("scheduler", "params", "warmup_max_lr")
    first, second = config.number("optimizer", "params", "lr"), config.number(*path)
    if facts.trainer == "hf" and first is not None and second is not None and first != second:
        what = f"`optimizer.params.lr` is {shown(first)}; learning_rate cannot be both"
        yield Hit(path, second, what, 'write "auto" in both')


@rule("logged-twice", "warning", COSTS)
def _monitors(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer != "hf":
        return
    for name in ("wandb", "tensorboard", "comet"):
        if config.on(name, "enabled"):
            what = f"DeepSpeed and the Trainer both log to {name}"
            yield Hit((name, "enabled"), True, what, "remove the block and use report_to")


@rule("section-unused", "warning", WRONG)
def _ignored_sections(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer != "hf":
        return
    if config.get("data_efficiency", "enabled"):
        what = "affects only a data loader that deepspeed.initialize creates; the Trainer creates its own"
        yield Hit(("data_efficiency",), config.get("data_efficiency"), what, "remove it")
    if config.on("dataloader_drop_last"):
        what = "affects only a data loader that deepspeed.initialize creates; the Trainer creates its own"
        yield Hit(("dataloader_drop_last",), True, what, "set dataloader_drop_last=True in TrainingArguments")
    if (every := config.number("steps_per_print")) is not None and math.isfinite(every):
        what = "accelerate replaces it by infinity, and DeepSpeed prints nothing"
        yield Hit(("steps_per_print",), every, what, "remove it, and set logging_steps in TrainingArguments")
    if config.get("zero_allow_untested_optimizer") is False and not config.has("optimizer"):
        what = "accelerate replaces it by true for an optimizer of the Trainer's"
        yield Hit(("zero_allow_untested_optimizer",), False, what, "remove it")
    if config.has("pipeline"):
        what = "the Trainer creates no pipeline, so the section is ignored"
        yield Hit(("pipeline",), config.get("pipeline"), what, "remove it")
    if config.on("hybrid_engine", "enabled"):
        what = "the hybrid engine is for DeepSpeed-Chat's training loop; the Trainer does not use it"
        yield Hit(("hybrid_engine",), config.get("hybrid_engine"), what, "remove it")


@rule("timers-on", "warning", COSTS)
def _breakdown(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.get("wall_clock_breakdown") is True:
        what = "the timers synchronise the GPU in every micro-step"
        yield Hit(("wall_clock_breakdown",), True, what, "set it to false once you have the times")
