"""Turn a template into JSON that plain deepspeed.initialize loads, with a concrete value for every "auto".

    ds-recipes resolve zero3.json --model path/to/config.json --world-size 8 micro_batch_size=2

Missing values default to those of TrainingArguments (precision=fp32, micro_batch_size=1, learning_rate=5e-5 ...). Of
the model, only the hidden size is read. The command imports neither torch nor DeepSpeed.

Exit status: 0; 1 if the template does not fit the given values; 2 for a mistake on the command line.
"""

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from ..config.lint import first_error, judge
from ..config.read import located, read
from ..config.resolve import Numbers, Unresolvable, dumps, resolve
from ..config.rule import Facts, hidden_size, model_config
from ..recipe import deepspeed_file, files, overrides
from ..recipe.errors import UserError
from ..recipe.files import Json
from ..recipe.project import CONFIGS
from .main import Parser, check_least

NAMES = {
    f"layout.{field.name}" if field.name in ("tensor", "pipeline", "sequence") else field.name: field.name
    for field in dataclasses.fields(Numbers)
    if field.name != "world_size"
}
"""The names on the command line, as in recipes, and the fields of `Numbers`."""
GLOBAL = "global_batch_size"
KEYS = (*NAMES, GLOBAL)
PRECISIONS = ("fp32", "bf16", "fp16")


def main(words: Sequence[str] | None = None) -> int:
    """Print a template with its "auto" values filled in; return 1 if a value cannot be determined."""
    parser = Parser("resolve", __doc__)
    parser.add_argument("template", help="a path, or the name of a file in configs/")
    parser.add_argument("--model", help="RECIPE-SIZE, a config.json, or its folder")
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="number of ranks (default 1)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result there instead of printing it")
    parser.add_argument("settings", nargs="*", default=[], metavar="key=value", help=", ".join(KEYS))
    arguments = parser.parse_intermixed_args(words)
    arguments.settings = [one if one.partition("=")[0] in KEYS else overrides.word(one) for one in arguments.settings]
    document = read(find(arguments.template))
    try:
        if error := first_error(judge(document, Facts()), arguments.template):
            raise Unresolvable(error)
        numbers = numbers_of(arguments)
        resolved = resolve(document.value, numbers)
        if arguments.output is None:
            print(dumps(resolved), end="", flush=True)
        elif arguments.output.exists():
            raise UserError(f"--output {arguments.output}: exists; choose another name.")
        else:
            files.check_writable("--output", arguments.output)
            files.write_text(arguments.output, dumps(resolved))
        if idle := unused(document.value, numbers, arguments.settings):
            print(f"{', '.join(idle)}: not in the result: {arguments.template} has no key for it", file=sys.stderr)
        if "optimizer" not in resolved:
            offloads = deepspeed_file.parse(resolved).offload_optimizer != "none"
            forced = offloads and resolved.get("zero_force_ds_cpu_optimizer", True)
            yours = "optimizer=DeepSpeedCPUAdam(...), as it offloads" if forced else "your optimizer=..."
            print(f"without an optimizer block: give deepspeed.initialize {yours}", file=sys.stderr)
    except Unresolvable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def unused(template: Json, numbers: Numbers, settings: Sequence[str]) -> list[str]:
    """Return those of `settings` that change nothing: with another value, the result would be the same."""
    idle = []
    for setting in settings:
        field = NAMES.get(key := setting.partition("=")[0])
        if field is None or key == "precision" or key.startswith("layout."):
            continue
        other: Json = {field: (getattr(numbers, field) or 0) + 2}
        try:
            if resolve(template, dataclasses.replace(numbers, **other)) == resolve(template, numbers):
                idle.append(setting)
        except Unresolvable:  # the template has a value of its own, which the setting has to match
            continue
    return idle


def find(name: str) -> Path:
    """Return the template at a path, or the file of that name in configs/."""
    path = located(name)
    if not path.exists():
        known = sorted(file.name for file in CONFIGS.glob("*.json"))
        near = difflib.get_close_matches(name.removesuffix(".json") + ".json", known, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"configs/ has: {', '.join(known)}."
        raise UserError(f"{name}: no such file. {hint}")
    return path


def numbers_of(arguments: argparse.Namespace) -> Numbers:
    """Return the numbers from the command line."""
    check_least(arguments, world_size=1)
    values: Json = {"world_size": arguments.world_size}
    if of_model := hidden_size(architecture(arguments.model)) if arguments.model else None:
        values["hidden_size"] = of_model
    batch, kinds = None, {item.name: str(item.type) for item in dataclasses.fields(Numbers)}
    given: dict[str, str] = {}
    for setting in arguments.settings:
        key, equals, text = setting.partition("=")
        if given.setdefault(key, text) != text:
            raise UserError(f"{key}: given twice, as {given[key]} and {text}; keep one of them.")
        if not equals or key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}=VALUE?" if near else f"the keys are {', '.join(KEYS)}."
            raise UserError(f"{setting}: unknown key; {hint}")
        if key == GLOBAL:
            batch = int(number(key, text, whole=True))
        elif key != "precision":
            values[NAMES[key]] = number(key, text, whole="int" in kinds[NAMES[key]])
        elif text in PRECISIONS:
            values[key] = text
        else:
            raise UserError(f"precision={text}: must be one of {', '.join(PRECISIONS)}.")
    if of_model and values["hidden_size"] != of_model:
        raise UserError(f"hidden_size={given['hidden_size']}: --model has {of_model}; leave one of them out.")
    numbers = Numbers(**values)
    if batch is None:
        return numbers
    replicas = numbers.world_size // (numbers.tensor * numbers.pipeline * numbers.sequence)
    step = numbers.micro_batch_size * max(1, replicas)
    if batch % step:
        raise UserError(
            f"{GLOBAL}={batch}: must be a multiple of {step} (micro_batch_size {numbers.micro_batch_size} x "
            f"data-parallel size {replicas})."
        )
    if "gradient_accumulation_steps" in given and numbers.gradient_accumulation_steps != batch // step:
        raise UserError(
            f"{GLOBAL}={batch}: with {step} sequences at a time it takes {batch // step} steps, not "
            f"gradient_accumulation_steps={numbers.gradient_accumulation_steps}; leave one of them out."
        )
    return dataclasses.replace(numbers, gradient_accumulation_steps=batch // step)


def number(key: str, text: str, whole: bool) -> int | float:
    """Return `text` as a number, at least 1 if it is whole."""
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        raise UserError(f"{key}={text}: must be a {'whole ' if whole else ''}number.") from None
    least = 0 if key == "warmup_steps" or not whole else 1
    if value < least or value != value:
        raise UserError(f"{key}={text}: must be at least {least}.")
    return value


def architecture(name: str) -> Json:
    """Return the model config at a path, or a recipe's."""
    if Path(name).exists():
        return model_config(name)
    from ..recipe import pages

    try:
        family = name.partition("-")[0]
        first = pages.variants(pages.page(family))[0] if family in pages.families() else "full"
        model = pages.find(name, first).model
    except UserError as error:
        raise UserError(f"--model {name}: neither a file nor a recipe. {error}") from None
    return dict(model.config) or architecture(model.path)
