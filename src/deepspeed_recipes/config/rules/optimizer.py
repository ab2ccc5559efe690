"""Rules about the `optimizer` and `scheduler` blocks: their types, their parameters, and what they combine with."""

import difflib
import math
from collections.abc import Iterator

from ...recipe.files import Json
from .. import schema
from ..rule import FAILS_LATER, WRONG, Config, Edit, Facts, Hit, rule, shown
from ..schema import describe, fits

_ZERO = "zero_optimization"


@rule("torch-schedule", "error", FAILS_LATER)
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


@rule("unknown-optimizer", "error", FAILS_LATER)
def _optimizer_names(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("optimizer", "type")
    known = schema.load()
    if not name or name == "auto" or name.lower() in known["optimizers"]:
        return
    if name not in known["torch_optimizers"]:
        gone = "1-bit optimizers were removed; " if "bit" in name.lower() or "zeroone" in name.lower() else ""
        what = f"{gone}neither DeepSpeed nor torch.optim has an optimizer `{name}`"
        yield Hit(("optimizer", "type"), name, what, "write AdamW, Adam, Lion, Adagrad, Lamb, Muon or SGD")


@rule("untested-optimizer", "error", FAILS_LATER)
def _untested(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("optimizer", "type")
    tested = ("adam", "adamw", "adagrad", "lamb", "lion", "muadam", "muadamw", "musgd", "muon", "Adam", "AdamW")
    if not name or name.lower() in tested or name not in schema.load()["torch_optimizers"]:
        return
    if config.stage in (1, 2, 3) and not config.get("zero_allow_untested_optimizer"):
        what = f"ZeRO refuses `{name}` unless it is explicitly allowed"
        edit = Edit("set", ("zero_allow_untested_optimizer",), True)
        yield Hit(("optimizer", "type"), name, what, 'add "zero_allow_untested_optimizer": true', (edit,))


@rule("max-grad-norm-in-optimizer", "error", FAILS_LATER)
def _max_grad_norm(config: Config, facts: Facts) -> Iterator[Hit]:
    path = ("optimizer", "params", "max_grad_norm")
    if config.has(*path) and config.text("optimizer", "type"):
        what = "DeepSpeed clips by `gradient_clipping` and rejects this key"
        yield Hit(path, config.get(*path), what, "move the value to `gradient_clipping`")


@rule("muon-at-stage-3", "error", FAILS_LATER)
def _muon(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("optimizer", "type") or ""
    if name.lower() == "muon" and config.stage == 3 and config.on(_ZERO, "reduce_scatter", default=True):
        what = "Muon at stage 3 needs whole gradients"
        path = (_ZERO, "reduce_scatter")
        fix = 'add "reduce_scatter": false'
        yield Hit(path, config.get(*path), what, fix, (Edit("set", path, False),))


@rule("unknown-scheduler", "error", FAILS_LATER)
def _scheduler(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("scheduler", "type")
    known = schema.load()
    if not name or name in known["torch_schedulers"]:
        return
    if name not in known["schedulers"]:
        what = f"neither DeepSpeed nor torch has a schedule `{name}`"
        yield Hit(("scheduler", "type"), name, what, f"write {', '.join(known['schedulers'])}")


def _calls(config: Config) -> Iterator[tuple[tuple[str, str], str, Json]]:
    """Yield the classes that DeepSpeed builds: the path of the arguments, the class's name and its parameters.

    Other rules report unknown classes.
    """
    optimizer, scheduler = config.text("optimizer", "type") or "", config.text("scheduler", "type") or ""
    known, name = schema.load(), optimizer.lower()
    parameters = known["torch_optimizers"].get(optimizer)
    if classes := known["optimizer_parameters"].get("adam" if name == "adamw" else name):
        offloads = "cpu" in classes and config.offload_device("offload_optimizer")  # to a class of its own
        by_torch = "torch" in classes and config.get("optimizer", "params", "torch_adam")
        parameters = classes["torch" if by_torch else "cpu" if offloads else "gpu"]
    if parameters:
        yield ("optimizer", "params"), optimizer, parameters
    parameters = known["schedulers"].get(scheduler) or known["torch_schedulers"].get(scheduler)
    if parameters:
        yield ("scheduler", "params"), scheduler, parameters


@rule("unknown-parameter", "error", FAILS_LATER)
def _unknown(config: Config, facts: Facts) -> Iterator[Hit]:
    for path, name, parameters in _calls(config):
        given = config.section(*path)
        for parameter, value in given.items():
            if parameter in parameters or parameter == "max_grad_norm":
                continue
            near = difflib.get_close_matches(parameter.lower(), parameters, n=1, cutoff=0.8)
            fix = f"did you mean `{near[0]}`?" if near else f"{name} has {', '.join(parameters)}"
            kind = near and parameters[near[0]]["type"]
            edits = (Edit("rename", (*path, parameter), near[0]),) if kind and fits(kind, value) else ()
            what = f"{name} has no parameter `{parameter}`"
            yield Hit((*path, parameter), value, what, fix, () if near and near[0] in given else edits)


@rule("parameter-value", "error", FAILS_LATER)
def _value(config: Config, facts: Facts) -> Iterator[Hit]:
    for path, _, parameters in _calls(config):
        for parameter, value in config.section(*path).items():
            kind = parameters.get(parameter, {}).get("type")
            if kind is None or value == "auto" or fits(kind, value):
                continue
            right = _meant(kind, value)
            fix = f"write {describe(kind)}" if right is None else f"write {shown(right)}"
            edits = () if right is None else (Edit("set", (*path, parameter), right),)
            yield Hit((*path, parameter), value, f"{shown(value)} is not {describe(kind)}", fix, edits)


def _meant(kind: Json, value: object) -> object:
    """Return the value behind quotes or an exponent, 1e-5 for "1e-5" and 100 for 1e2, or None."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        right: object = value.lower() == "true"
    else:
        try:
            number = float(value) if isinstance(value, (str, float)) else math.inf
        except ValueError:
            return None
        right = int(number) if abs(number) < 2**53 and number.is_integer() else number
    return right if fits(kind, right) and right != math.inf else None


@rule("parameter-missing", "error", FAILS_LATER)
def _missing(config: Config, facts: Facts) -> Iterator[Hit]:
    for path, name, parameters in _calls(config):
        for parameter, entry in parameters.items():
            if entry["required"] and not config.has(*path, parameter):
                auto = facts.trainer == "hf" and parameter == "total_num_steps"
                fix = f'add "{parameter}": "auto"' if auto else f"add `{parameter}`"
                edits = (Edit("set", (*path, parameter), "auto"),) if auto else ()
                yield Hit((*path, parameter), None, f"{name} cannot be built without `{parameter}`", fix, edits)


@rule("learning-rate-missing", "warning", WRONG)
def _rate(config: Config, facts: Facts) -> Iterator[Hit]:
    path = ("optimizer", "params", "lr")
    if facts.trainer == "hf" and config.text("optimizer", "type") and not config.has(*path):
        default = "DeepSpeed's default, 1e-3 for most optimizers"
        edits = (Edit("set", path, "auto"),) if config.has(*path[:2]) else ()
        yield Hit(path, None, f"the learning rate is {default}, whatever learning_rate is", 'add "lr": "auto"', edits)
