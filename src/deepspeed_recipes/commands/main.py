"""`ds-recipes COMMAND ...`: the entry point of all commands, with their shared help, errors and exit status."""

import argparse
import importlib
import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from ..recipe import overrides
from ..recipe.errors import UserError, first_line, lasting, of_system, printable, redact
from ..recipe.files import check_ends
from ..recipe.project import command, program, python_path

COMMANDS = {
    "launch": "run a recipe",
    "list": "list the recipes, their sizes and variants",
    "plan": "predict what fits and how fast it trains, before a GPU is rented",
    "check": "lint DeepSpeed JSON",
    "resolve": "turn a DeepSpeed template into JSON that plain DeepSpeed loads",
    "configs": "copy one of the project's DeepSpeed JSON files",
    "page": "add a model family: start a page, compare it with the Hub, check its chat template",
    "doctor": "check that this machine is ready to train",
    "report": "show a run's results, or compare several runs",
    "export": "turn a run or a checkpoint into a Hugging Face folder",
    "shrink": "make a smaller model from a larger model's weights, for distillation",
    "generate": "chat with a fine-tuned model, locally or on a server",
    "evaluate": "measure and compare models on held-out examples",
    "serve": "serve a fine-tuned model over OpenAI's protocol",
    "certify": "compare a model folder or a server with the model that was trained",
    "publish": "upload an exported model to the Hugging Face Hub",
    "sweep": "run a recipe with several settings and compare them",
    "benchmark": "measure recipes, and compare them with the usual alternatives",
}
EXAMPLES = """
Start here:
  ds-recipes launch tiny full                    fine-tune a tiny model on any machine, in minutes
  ds-recipes plan llama3-8b --gpu H100 --gpus 8  which configuration fits, how fast it is, and why
  ds-recipes check my_deepspeed.json             find the errors in a DeepSpeed file, with a fix for each

launch, sweep, export, shrink, generate, evaluate, serve, publish and benchmark need more:
  pip install "deepspeed-recipes[train]"
COMMAND --help lists a command's options."""


def main() -> int:
    """Run the command that `sys.argv` names and return its exit status."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0
    name, *rest = words
    if name not in COMMANDS:
        print(f"ds-recipes: unknown command {name!r}; choose from {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    return run(name, rest)


def overview() -> str:
    """Return the help of `ds-recipes` itself."""
    lines = [f"  {name:<10} {about}" for name, about in COMMANDS.items()]
    head = "Fine-tune Hugging Face models with DeepSpeed: pick a recipe, check it, plan it, run it."
    text = [f"usage: {command('COMMAND')} ...", "", head, "", "commands:", *lines, EXAMPLES]
    return "\n".join(text)


def run(name: str, words: Sequence[str] | None = None, typed: str | None = None) -> int:
    """Run one command and return its exit status.

    `words` are `sys.argv`'s by default, and `typed` is the name that begins error messages, by default `program(name)`.
    """
    typed = typed or program(name)
    given = [_without_tilde(word) for word in (sys.argv[1:] if words is None else words)]
    try:
        os.getcwd()
    except FileNotFoundError:
        print(f"{typed}: the current folder does not exist any more; cd to another.", file=sys.stderr)
        return 2
    os.environ |= python_path(os.environ)  # for the processes that a command starts
    if not sys.stderr.isatty():  # libraries' progress bars would fill a log
        os.environ.setdefault("TQDM_DISABLE", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # DeepSpeed's line on stdout without a GPU would appear in the middle of a command's output or JSON.
    logging.getLogger("DeepSpeed").addFilter(lambda one: not one.getMessage().startswith("Setting accelerator to CPU"))
    try:
        for word in given:
            if dashed := re.fullmatch("[\u2010-\u2015\u2212]+([\\w-]+)(=.*)?", word):
                raise UserError(f"{word}: begins with a dash that is not a hyphen; write --{dashed[1]}.")
        for part in re.split("[=,\0]", "\0".join(given)):
            if os.path.exists(part):  # otherwise opening it could wait for a writer, or reading never end
                check_ends(part)
        return int(importlib.import_module(f".{name}", __package__).main(given))
    except UserError as error:
        print(f"{typed}: {_said(redact(str(error)))}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "deepspeed_recipes"):
            raise
        print(
            f"{typed}: {sys.executable} has no {missing}: activate the environment (source .venv/bin/activate), or "
            'create it first: make install in a checkout, pip install "deepspeed-recipes[train]" elsewhere.',
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:  # where a command does not end what it has begun
        print(f"\n{typed}: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        refused = lasting(error, _written(given))
        if refused is None and isinstance(error, OSError):
            # The user's mistake, if it is about a file named on the command line, in it or above it.
            values = [word.partition("=")[2] or word for word in given]
            named = [Path(os.path.abspath(value)) for value in values if value and "\0" not in value]
            about = [Path(os.path.abspath(os.fsdecode(file))) for file in (error.filename, error.filename2) if file]
            if any(file.is_relative_to(place) or place.is_relative_to(file) for file in about for place in named):
                refused = of_system(error)
        if refused is None and isinstance(error, RuntimeError) and "Symlink loop" in str(error):  # Python below 3.13
            refused = f"{first_line(error)}: remove the links that lead in a circle."
        if refused is None:
            raise
        print(f"{typed}: {_said(redact(refused))}", file=sys.stderr)
        return 2


def _without_tilde(word: str) -> str:
    """Return a word of the command line with the home folder for `~/`, which shells leave in `data.path=~/a,~/b`."""
    place = r"(?:^|(?<=[=,]))~(?=/)" if re.match(r"(--)?[\w.-]+=", word) else r"^~(?=/)"
    return re.sub(place, lambda _: os.path.expanduser("~"), word)


def _said(text: str) -> str:
    """Return text for a terminal: without control characters, and with very long names shortened."""
    return re.sub(r"\S{300,}", lambda found: f"{found[0][:150]}...{found[0][-100:]}", printable(text))


def _written(words: Sequence[str]) -> str | None:
    """Return the folder or file that the command line names for output, or None."""
    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in ("--output-dir", "--output", "--write"):
            return value if equals else next(iter(words[at + 1 :]), None)
    return None


def check_least(options: argparse.Namespace, **least: int) -> None:
    """Refuse options below their least values, by the options' names."""
    for name, low in least.items():
        if (value := getattr(options, name)) is not None and value < low:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {low}.")


OUTPUT = "output_dir"
"""TrainingArguments' name of an option of ours, which users type as a key, too."""


class Parser(argparse.ArgumentParser):
    """The command line of one command."""

    def __init__(self, name: str, about: str | None, epilog: str | None = None, add_help: bool = True) -> None:
        """`about` is the text of the help; its line breaks are kept."""
        super().__init__(
            prog=program(name),
            description=about,
            epilog=epilog,
            add_help=add_help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Exit with a line that names the mistake and the fix, instead of the whole usage."""
        name = next(iter(re.findall(r"^unrecognized arguments: (-[^\s=]*)", message)), None)
        if message.startswith("the following arguments are required"):  # argparse looks for these first
            words = (word.partition("=")[0] for word in self._typed if word.startswith("--") and word != "--")
            name = next(
                (word for word in words if not any(one.startswith(word) for one in self._option_string_actions)), None
            )
        if name:
            key = name.lstrip("-").replace("-", "_")
            ours = overrides.FOREIGN_NAMES.get(key, key)
            overridden = any(action.dest == "settings" for action in self._actions)
            if overridden and ours in overrides.override_keys() and not self._guessed(name):
                hint = f"write the recipe's key as {ours}=VALUE."
            elif near := self.nearest(name):
                hint = f"did you mean {near}?"
            else:
                writes = self.nearest("--out") is not None or any(action.dest == "folder" for action in self._actions)
                prints = not writes and name in ("--out", "--output", "-o", "--output-file")
                hint = "it prints the result: add > FILE." if prints else f"{self.prog} --help lists the options."
            said = f"{name}: no such option; {hint}"
        elif wrong := re.match(r"argument (\S+): invalid (int|float) value: '(.*)'", message):
            kind = "a whole number" if wrong[2] == "int" else "a number"
            said = f"{wrong[1]} {wrong[3]}: must be {kind}."
        else:
            said = f"{message.removeprefix('argument ')}; see {self.prog} --help."
        self.exit(2, f"{self.prog}: {said}\n")

    def parse_trusting(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parse arguments, with an option that permits models to run their own Python code."""
        self.add_argument(
            "--trust-remote-code", action="store_true", help="run the model's own Python code; read that code first"
        )
        options = self.parse_intermixed_args(arguments)  # words on both sides of an option
        if options.trust_remote_code:
            from ..training.model_folder import base_model  # most commands have no such option

            base_model.permit_remote_code()
        return options

    def refuse(self, options: argparse.Namespace, names: Sequence[str], why: str) -> None:
        """Refuse the first of some options, given as attributes of `options`, that is not at its default.

        The command would ignore it; `why` is the reason, such as `only with --tasks`.
        """
        for action in self._actions:
            value = getattr(options, action.dest, None)
            if action.dest in names and value != action.default:
                typed = "" if value is True else f" {value}"
                raise UserError(f"{action.option_strings[0]}{typed}: {why}; leave it out.")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit with a message, in which quoted words are made safe for a terminal."""
        super().exit(status, message and f"{_said(message.rstrip())}\n")

    def parse_known_args(self, *arguments: Any, **options: object) -> tuple[Any, list[str]]:
        """Parse arguments, and refuse an option that is given twice with different values."""
        self._given: dict[str, object] = {}
        words, *others = (*arguments, None)
        self._typed = list(sys.argv[1:] if words is None else words)
        return super().parse_known_args(self._with_keys(self._typed), *others[:1], **options)

    def _with_keys(self, words: list[str]) -> list[str]:
        """Return the words with `--learning_rate 1e-4`, as Hugging Face's parsers have it, as `learning_rate=1e-4`."""
        if not any(action.type is overrides.word for action in self._actions):
            return words
        found, keys, left = list[str](), list[str](), words[::-1]
        while left:
            word = left.pop()
            name, equals, value = word.partition("=")
            dashed = f"--{name.removeprefix('--').replace('_', '-')}"
            ours = name.startswith("--") or (name == OUTPUT and equals)
            if ours and dashed != name and dashed in self._option_string_actions:
                found.append(f"{dashed}{equals}{value}")
                continue
            key = name.removeprefix("--").replace("-", "_")
            if key == "resume_from_checkpoint" and "--resume" in self._option_string_actions:
                switch = value if equals else left[-1] if left else ""
                if (on := overrides.SWITCHES.get(switch.lower())) is not None:
                    print(
                        f"{key}={switch} is {'read as --resume' if on else 'left out: it is the default'}",
                        file=sys.stderr,
                    )
                    found += ["--resume"] * on
                    left = left if equals else left[:-1]
                    continue
            own = any(one.startswith(name) for one in self._option_string_actions) or self._guessed(name)
            if not name.startswith("--") or own or not overrides.is_known(key):
                found.append(word)
                continue
            typed = [one for one in found if not one.startswith("-") and "=" not in one]
            named = len(typed) > 1 + (typed[:1] == ["auto"])  # with the variant
            if not equals:
                value = left.pop() if left and overrides.takes(key, left[-1], named) else "true"
            several = overrides.FOREIGN_NAMES.get(key, key) in overrides.comma_keys()
            while several and named and left and not re.search("^-|=", left[-1]):
                value = f"{value},{left.pop()}"
            keys.append(f"{key}={value}")
        # Keys come after the words that name a recipe.
        return [word for word in found + keys if not overrides.is_redundant(word, found)]

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> object:
        """Return an option's values; only the system prompt may be empty, and argparse would take the last of several.

        The first check is not in `_get_value`, with which argparse also reads defaults, since some defaults are empty.
        """
        if action.option_strings and action.dest != "system" and any(not word.strip() for word in arg_strings):
            raise argparse.ArgumentError(action, "the value is missing")
        values = super()._get_values(action, arg_strings)
        if action.option_strings and type(action) is argparse._StoreAction:
            before = self._given.setdefault(action.dest, values)
            if str(before) != str(values):  # nan differs from itself
                raise argparse.ArgumentError(action, f"given twice, as {before} and {values}; give it once")
        return values

    def _get_value(self, action: argparse.Action, arg_string: str) -> object:
        """Return a value converted to its option's type, and refuse infinite and huge numbers."""
        value = super()._get_value(action, arg_string)
        if action.type in (int, float) and not (abs(value) < 2**32):  # nan is not below either
            option = "/".join(action.option_strings) or action.dest
            self.exit(2, f"{self.prog}: {option} {arg_string[:40]}: must be a number below {2**32}.\n")
        return value

    def nearest(self, option: str) -> str | None:
        """Return the option whose spelling is closest to an unknown option, or None if no option is close."""
        near = get_close_matches(option.replace("_", "-"), self._option_string_actions, 1, cutoff=0.7)
        return self._guessed(option) or next(iter(near), None)

    def _guessed(self, option: str) -> str | None:
        words = (
            (guessed.split(), real)
            for guessed, ours in overrides.OTHER_TOOLS["guesses"].items()
            for real in ours.split()
        )
        known = (real for guessed, real in words if option.replace("_", "-") in guessed)
        return next((real for real in known if real in self._option_string_actions), None)
