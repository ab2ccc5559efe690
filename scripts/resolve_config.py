"""Turn a template into a JSON that plain deepspeed.initialize loads: every "auto" becomes a number.

python scripts/resolve_config.py zero3.json --model path/to/config.json --world-size 8 micro_batch_size=2
What is not given is TrainingArguments' default: precision=fp32, micro_batch_size=1, learning_rate=5e-5 ...; of the
model only the hidden size counts. Costs no GPU and imports neither torch nor DeepSpeed.
"""

import argparse
import dataclasses
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from recipes.zero_config.lint import describe, judge  # noqa: E402
from recipes.zero_config.read import SHIPPED, Document, Unreadable, located, read  # noqa: E402
from recipes.zero_config.resolve import Numbers, Unresolvable, dumps, hidden_size, resolve  # noqa: E402
from recipes.zero_config.rule import Facts, model_config  # noqa: E402

# The command line's names (as in recipes) -> the fields of Numbers.
NAMES = {
    "micro_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "layout.tensor": "tensor",
    "layout.pipeline": "pipeline",
    "layout.sequence": "sequence",
    "hidden_size": "hidden_size",
    "precision": "precision",
    "max_grad_norm": "gradient_clipping",
    "learning_rate": "learning_rate",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_epsilon": "adam_epsilon",
    "weight_decay": "weight_decay",
    "warmup_steps": "warmup_steps",
    "max_steps": "total_steps",
}
GLOBAL = "global_batch_size"
PRECISIONS = ("fp32", "bf16", "fp16")


class Mistake(Exception):
    """A mistake on the command line; the message says what to write instead."""


def main(words: Sequence[str] | None = None) -> int:
    """Print the resolved config. Exit status 0; 1: does not fit the numbers; 2: cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("template", help="a file in configs/, or a path")
    parser.add_argument("--model", help="RECIPE-SIZE, a config.json, or its folder")
    parser.add_argument("--world-size", type=int, default=1, help="number of ranks (default 1)")
    parser.add_argument("settings", nargs="*", default=[], metavar="key=value", help=", ".join([*NAMES, GLOBAL]))
    arguments = parser.parse_intermixed_args(words)
    try:
        document = read(find(arguments.template))
        if wrong := objections(document, arguments.template):
            return fail(1, wrong)
        print(dumps(resolve(document.value, gather(arguments))), end="")
    except Unreadable as error:
        return fail(2, f"{arguments.template}:{error.line}:{error.column}: {error.what}")
    except Mistake as error:
        return fail(2, str(error))
    except Unresolvable as error:
        return fail(1, str(error))
    return 0


def find(name: str) -> Path:
    """Return the template at a path, or of that name in configs/. Raises Mistake with the nearest name."""
    path = located(name)
    if not path.exists():
        known = sorted(file.name for file in SHIPPED.glob("*.json"))
        near = difflib.get_close_matches(name.removesuffix(".json") + ".json", known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; shipped are {', '.join(known)}"
        raise Mistake(f"{name}: there is no such file{hint}")
    return path


def objections(document: Document, name: str) -> str | None:
    """Return the linter's first error and how many more there are; None where there is none."""
    errors = [describe(found, name) for found in judge(document, Facts()) if found.severity == "error"]
    more = f"\n({len(errors) - 1} more; check_config.py shows them)" if len(errors) > 1 else ""
    return errors[0] + more if errors else None


def gather(arguments: argparse.Namespace) -> Numbers:
    """Return the numbers of the command line. Raises Mistake."""
    if arguments.world_size < 1:
        raise Mistake(f"--world-size {arguments.world_size}: write a number of ranks, 1 or more")
    values: dict[str, object] = {"world_size": arguments.world_size}
    if arguments.model:
        values["hidden_size"] = hidden_size(architecture(arguments.model))
    wanted = None
    for setting in arguments.settings:
        key, equals, text = setting.partition("=")
        if not equals or key not in (*NAMES, GLOBAL):
            near = difflib.get_close_matches(key, [*NAMES, GLOBAL], n=1)
            hint = f"did you mean {near[0]}=...?" if near else f"keys are {', '.join([*NAMES, GLOBAL])}"
            raise Mistake(f"{setting}: {hint}")
        if key == GLOBAL:
            wanted = int(number(key, text, whole=True))
        else:
            values[NAMES[key]] = parse(key, NAMES[key], text)
    numbers = Numbers(**values)
    return numbers if wanted is None else accumulate(numbers, wanted)


def parse(key: str, field: str, text: str) -> object:
    """Return the value of one key=value. Raises Mistake."""
    if field == "precision":
        if text not in PRECISIONS:
            raise Mistake(f"precision={text}: write one of {', '.join(PRECISIONS)}")
        return text
    kinds = {item.name: str(item.type) for item in dataclasses.fields(Numbers)}
    return number(key, text, whole="int" in kinds[field])


def number(key: str, text: str, whole: bool) -> int | float:
    """Return `text` as a number, positive where it is whole. Raises Mistake."""
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        raise Mistake(f"{key}={text}: write a {'whole ' if whole else ''}number") from None
    if value < (0 if key in ("warmup_steps",) or not whole else 1) or value != value:
        raise Mistake(f"{key}={text}: too small")
    return value


def accumulate(numbers: Numbers, wanted: int) -> Numbers:
    """Return the numbers with as many accumulation steps as reach the global batch. Raises Mistake."""
    copies = numbers.world_size // (numbers.tensor * numbers.pipeline * numbers.sequence)
    step = numbers.micro_batch_size * max(1, copies)
    if wanted % step:
        raise Mistake(
            f"{GLOBAL}={wanted}: write a multiple of {step}, micro batch {numbers.micro_batch_size} x {copies} replicas"
        )
    return dataclasses.replace(numbers, gradient_accumulation_steps=wanted // step)


def architecture(name: str) -> dict:
    """Return the model's config at a path, or of a recipe. Raises Mistake."""
    if not Path(name).exists():
        return recipe_model(name)
    try:
        return model_config(name)
    except (OSError, ValueError) as error:
        raise Mistake(f"--model {name}: cannot be read as a model's config.json ({error})") from None


def recipe_model(name: str) -> dict:
    """Return the dimensions on a recipe's page. Raises Mistake."""
    from recipes.spec import pages
    from recipes.spec.errors import UserError

    try:
        family = name.partition("-")[0]
        first = pages.variants(pages.page(family))[0] if family in pages.families() else "full"
        model = pages.find(name, first).model
    except UserError as error:
        raise Mistake(f"--model {name}: neither a file nor a recipe. {error}") from None
    return dict(model.config) or architecture(str(ROOT / model.path))


def fail(status: int, message: str) -> int:
    """Print a message for people and return the exit status."""
    print(message, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.stderr.reconfigure(errors="backslashreplace")
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
