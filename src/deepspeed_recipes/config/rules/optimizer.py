"""Rules about the `optimizer` and `scheduler` blocks: what DeepSpeed can build, and what it can be combined with."""

from collections.abc import Iterator

from .. import schema
from ..rule import FAILS_LATER, Config, Edit, Facts, Hit, Rule

_ZERO = "zero_optimization"


def _optimizer_names(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("optimizer", "type")
    known = schema.load()
    if not name or name == "auto" or name.lower() in known["optimizers"]:
        return
    if name not in known["torch_optimizers"]:
        gone = "1-bit optimizers were removed; " if "bit" in name.lower() or "zeroone" in name.lower() else ""
        what = f"{gone}neither DeepSpeed nor torch.optim has an optimizer `{name}`"
        yield Hit(("optimizer", "type"), name, what, "write AdamW, Adam, Lion, Adagrad, Lamb, Muon or SGD")


def _untested(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("optimizer", "type")
    tested = (
        "adam",
        "adamw",
        "adagrad",
        "lamb",
        "lion",
        "muadam",
        "muadamw",
        "musgd",
        "muon",
        "Adam",
        "AdamW",
    )
    if not name or name.lower() in tested or name not in schema.load()["torch_optimizers"]:
        return
    if config.stage in (1, 2, 3) and not config.get("zero_allow_untested_optimizer"):
        what = f"ZeRO refuses `{name}` unless it is explicitly allowed"
        edit = Edit("set", ("zero_allow_untested_optimizer",), True)
        yield Hit(("optimizer", "type"), name, what, 'add "zero_allow_untested_optimizer": true', (edit,))


def _max_grad_norm(config: Config, facts: Facts) -> Iterator[Hit]:
    path = ("optimizer", "params", "max_grad_norm")
    if config.has(*path) and config.text("optimizer", "type"):
        what = "DeepSpeed clips by `gradient_clipping` and rejects this key"
        yield Hit(path, config.get(*path), what, "move the value to `gradient_clipping`")


def _muon(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("optimizer", "type") or ""
    if name.lower() == "muon" and config.stage == 3 and config.on(_ZERO, "reduce_scatter", default=True):
        what = "Muon at stage 3 needs whole gradients"
        path = (_ZERO, "reduce_scatter")
        fix = 'add "reduce_scatter": false'
        yield Hit(path, config.get(*path), what, fix, (Edit("set", path, False),))


def _scheduler(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("scheduler", "type")
    known = schema.load()
    if not name or name in known["torch_schedulers"]:
        return
    if name not in known["schedulers"]:
        what = f"neither DeepSpeed nor torch has a schedule `{name}`"
        yield Hit(("scheduler", "type"), name, what, f"write {', '.join(known['schedulers'])}")


def _wrapped(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("scheduler", "type") or ""
    known = schema.load()
    if name not in known["torch_schedulers"] or name in known["schedulers"]:
        return
    half = [section for section in ("bf16", "bfloat16", "fp16") if config.on(section, "enabled")]
    if config.stage in (1, 2, 3) or half:
        by = f"ZeRO stage {config.stage}" if config.stage else half[0]
        what = f"{by} wraps the optimizer, and torch's schedules accept only torch's own"
        yield Hit(
            ("scheduler", "type"), name, what, f"remove `scheduler`; DeepSpeed's own: {', '.join(known['schedulers'])}"
        )
    elif name == "ReduceLROnPlateau":
        what = "DeepSpeed passes it the batch size in place of a loss, so the rate falls whatever the loss does"
        yield Hit(("scheduler", "type"), name, what, "remove `scheduler`, and step it yourself, in your loop")


RULES = (
    Rule(
        "torch-schedule",
        "error",
        FAILS_LATER,
        '"TypeError: DeepSpeedZeroOptimizer is not an Optimizer"; with ReduceLROnPlateau the rate falls without reason',
        "With ZeRO, bf16 or fp16 the schedule is built on DeepSpeed's wrapper of the optimizer (DeepSpeed issue 6992).",
        "Use one of DeepSpeed's schedules, or step your own in the loop.",
        _wrapped,
    ),
    Rule(
        "unknown-optimizer",
        "error",
        FAILS_LATER,
        '"OneBitAdam is not a supported DeepSpeed Optimizer"',
        "The name is looked up when the engine is built, first in DeepSpeed's list, then in torch.optim.",
        "Use the name of an existing optimizer.",
        _optimizer_names,
    ),
    Rule(
        "untested-optimizer",
        "error",
        FAILS_LATER,
        '"You are using an untested ZeRO Optimizer. Please add <"zero_allow_untested_optimizer": true>"',
        "ZeRO is tested with DeepSpeed's own optimizers and Adam; others have to be allowed.",
        'Add "zero_allow_untested_optimizer": true.',
        _untested,
    ),
    Rule(
        "max-grad-norm-in-optimizer",
        "error",
        FAILS_LATER,
        "\"'max_grad_norm' is not supported as an optimizer parameter\"",
        "The engine does the clipping, not the optimizer.",
        "Use `gradient_clipping`.",
        _max_grad_norm,
    ),
    Rule(
        "muon-at-stage-3",
        "error",
        FAILS_LATER,
        '"Muon and reduce scatter cannot be used together"',
        "Muon orthogonalises whole matrices, so a rank needs whole gradients.",
        'Add "reduce_scatter": false.',
        _muon,
    ),
    Rule(
        "unknown-scheduler",
        "error",
        FAILS_LATER,
        '"DeepSpeed does not recognize LR scheduler ..."',
        "The name is looked up when the engine is built, first in DeepSpeed's list, then in torch.",
        "Use an existing schedule.",
        _scheduler,
    ),
)
