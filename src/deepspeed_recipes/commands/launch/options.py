"""The command line of `ds-recipes launch`, and its help on override keys: type, default and meaning of each."""

import argparse
import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...launching.options import IMAGE, VOLUME
from ...recipe import compatibility, overrides
from ...recipe.bounds import typed
from ...recipe.conversions import dataclass_in
from ...recipe.errors import UserError, first_sentence
from ...recipe.methods import METHODS
from ...recipe.recipe import Recipe
from ...report.profiler import window
from ..main import Parser

WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Key:
    """An override key."""

    name: str
    kind: str
    """The key's type, for display, and the default if the page sets none."""
    meaning: str
    """The field's documentation, as one paragraph."""

    def short(self) -> str:
        """Return name, type, default and the first sentence of the meaning."""
        about = textwrap.shorten(first_sentence(self.meaning), WIDTH, placeholder=" ...", break_on_hyphens=False)
        return f"  {self.name:<27} {self.kind}\n      {about}"

    def long(self) -> str:
        """Return name, type, default, the whole meaning, and the settings that exclude the key."""
        meaning = textwrap.indent(textwrap.fill(self.meaning, WIDTH), "    ")
        refused = (f"refused: {line}" for line in compatibility.beside(self.name))
        lines = [textwrap.fill(f"    {line}", WIDTH, subsequent_indent="      ") for line in refused]
        return "\n".join([f"{self.name}: {self.kind}", meaning, *lines])


def keys() -> dict[str, Key]:
    """Return every override key, in the order of the fields."""
    found = {}
    for name, hint in overrides.override_keys().items():
        section, _, field = name.rpartition(".")
        owner = METHODS.get(section) or (dataclass_in(typing.get_type_hints(Recipe)[section]) if section else Recipe)
        assert owner is not None, name
        meaning = _meanings(owner.__module__)[owner.__name__].get(field, "")
        default = next(one.default for one in dataclasses.fields(owner) if one.name == field)
        usual = "" if default is dataclasses.MISSING else typed(default)
        found[name] = Key(name, f"{type_name(hint)} (default: {usual})" if usual else type_name(hint), meaning)
    return found


def type_name(hint: Any) -> str:
    """Return a field's type for display: `true | false | selective | feed_forward`."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " | ".join(type_name(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(typing.get_args(hint))
    return {bool: "true | false", int: "whole number", float: "number", str: "text", type(None): "none"}[hint]


@functools.cache
def _meanings(module: str) -> dict[str, dict[str, str]]:
    """Return the documentation below each field of a module's classes, by class and field."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {}
            for field, below in zip(node.body, node.body[1:], strict=False):
                text = below.value if isinstance(below, ast.Expr) else None
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Constant):
                    found[node.name][ast.unparse(field.target)] = " ".join(str(text.value).split())
    return found


AUTO = "auto"
"""The word on the command line in place of a recipe's name."""
VARIANT = "lora"
"""The variant that `auto` takes by default: LoRA fits the most hardware, and the model forgets least."""


def auto_words(typed: list[str | None]) -> tuple[str, str, list[str]]:
    """Return the model, variant and overrides from the words after `auto` on the command line."""
    given = [word for word in typed if word]
    names, changes = [word for word in given if "=" not in word], [word for word in given if "=" in word]
    if not names or len(names) > 2:
        what = f"too many words: {' '.join(names[2:])}" if names else "name a model folder or a Hub id"
        raise UserError(f"auto: {what}; ds-recipes launch auto MODEL [VARIANT] [key=value ...]")
    if "model.path" in overrides.keys_of(changes):
        raise UserError("model.path=...: auto takes the model as its first word: ds-recipes launch auto MODEL")
    return names[0], names[1] if len(names) == 2 else VARIANT, changes


def parse(arguments: Sequence[str] | None, description: str) -> argparse.Namespace:
    """Read the command line; options and key=value may come in any order."""
    parser = Parser("launch", description, add_help=False)
    parser.add_argument("-h", "--help", nargs="?", action=Help, metavar="KEY", help="print this help, or explain a key")
    parser.add_argument("recipe", nargs="?", metavar="RECIPE[-SIZE]", help="e.g. tiny, or PATH/TO/page.py; see --list")
    parser.add_argument("variant", nargs="?", metavar="VARIANT", help="for example full or lora; see --list")
    parser.add_argument(
        "overrides",
        nargs="*",
        type=overrides.word,
        metavar="key=value",
        help="change the recipe; the keys are listed below",
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="translate a training file of LLaMA-Factory, Axolotl or TRL, and print the command",
    )
    parser.add_argument(
        "--write", type=Path, metavar="PAGE.py", help="with --from: keep the translation as a page of your own"
    )
    parser.add_argument("--list", action="store_true", help="list recipes, sizes and variants, or RECIPE's only")
    parser.add_argument("--json", action="store_true", help="with --list: as JSON")
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="ranks per machine (default: all GPUs; without GPUs 2 CPU ranks; with --kubernetes 1)",
    )
    parser.add_argument("--output-dir", type=Path, metavar="D", help="run folder (default: a dated one in runs/)")
    parser.add_argument("--resume", action="store_true", help="resume from the newest complete checkpoint")
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="resume from the newest checkpoint after a crash or a hang, at most N times (default: 0; 3 in pods and in "
        "clouds, which may move a job)",
    )
    parser.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        help="record these steps (without a value: 4:6) and report where the time went, in the run folder",
    )
    parser.add_argument("--nsys", action="store_true", help="record the steps with Nsight Systems instead, on GPUs")
    parser.add_argument("--draft", action="store_true", help="train a shrunken, randomly initialised model instead")
    parser.add_argument("--no-plan", action="store_true", help="start even if the plan does not fit")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what differs from the page, and the command; --dry-run full: the whole recipe; starts nothing",
    )
    several = parser.add_argument_group("several machines (scripts/README.md)")
    several.add_argument("--hostfile", type=Path, metavar="F", help="hosts over ssh, one `name slots=N` per line")
    several.add_argument(
        "--include", default="", metavar="H", help="only these hosts, in DeepSpeed's form host1@host2:0,2"
    )
    several.add_argument("--exclude", default="", metavar="H", help="all except these hosts, in the same form")
    several.add_argument("--nodes", type=int, metavar="N", help="number of hosts (default: all) or cluster nodes (1)")
    several.add_argument(
        "--master-addr", metavar="A", help="address for the rendezvous of the ranks (default: the first host's)"
    )
    several.add_argument("--slurm", action="store_true", help="write a batch script, submit it, and follow its log")
    several.add_argument("--partition", metavar="P", help="with --slurm")
    several.add_argument("--time", metavar="T", help="with --slurm: time limit; the job saves and requeues before it")
    several.add_argument("--account", metavar="A", help="with --slurm")
    several.add_argument("--mem", metavar="M", help="with --slurm: host memory per node, for example 200G; 0: all")
    several.add_argument(
        "--shared", action="store_true", help="with --slurm: only --gpus of each node, not the whole node"
    )
    several.add_argument("--sbatch", metavar="O", help="with --slurm: further options, '--qos=high --constraint=h100'")
    several.add_argument(
        "--write-only", action="store_true", help="with --slurm: write the job and print its command; needs no SLURM"
    )
    several.add_argument(
        "--kubernetes", action="store_true", help="write manifests: Job, JobSet and Kubeflow's TrainJob"
    )
    several.add_argument("--ray", action="store_true", help="run on a Ray cluster; without --address on this machine")
    several.add_argument(
        "--address", metavar="A", help="with --ray: HOST:6379 of a cluster, auto, or its dashboard, http://HOST:8265"
    )
    several.add_argument(
        "--submit", action="store_true", help="with a dashboard's address: also submit the job, not only print it"
    )
    several.add_argument("--sagemaker", action="store_true", help="write the script of a SageMaker training job")
    several.add_argument("--skypilot", action="store_true", help="write a SkyPilot task, for machines of any cloud")
    several.add_argument(
        "--prepare",
        action="store_true",
        help="write the run folder, and print the torchrun, mpirun and srun commands that start its ranks",
    )
    several.add_argument("--image", metavar="I", help=f"the jobs' container image (default: {IMAGE})")
    several.add_argument(
        "--volume", metavar="V", help=f"with --kubernetes, --skypilot: shared volume (default: {VOLUME})"
    )
    words = window.words(sys.argv[1:] if arguments is None else arguments)
    for at in range(len(words) - 1, 0, -1):  # argparse takes a value that begins with a dash for an option
        if words[at - 1] == "--sbatch":
            words[at - 1 : at + 1] = [f"--sbatch={words[at]}"]
    options, unknown = parser.parse_known_intermixed_args(words)
    options.words = words
    # A word after the variant, which with `auto` may be left out.
    after = [word for word in options.overrides if "=" not in word][1 if options.recipe == AUTO else 0 :]
    options.whole_recipe = after == ["full"] and ("--dry-run", "full") in pairwise(words)
    if options.whole_recipe:
        options.overrides.reverse()
        options.overrides.remove("full")
        options.overrides.reverse()
    if unknown:  # without the value, which may be a credential
        name = unknown[0].partition("=")[0]
        usual = name.lstrip("-").replace("-", "_")
        hint = overrides.answer(usual.lower())
        if near := overrides.OTHER_TOOLS["options"].get(usual) or (None if hint else parser.nearest(name)):
            hint = f"did you mean {near}?"
        elif hint is None:
            hint = "ds-recipes launch --help lists options and keys."
        parser.exit(2, f"{parser.prog}: {name}: no such option; {hint}\n")
    return options


class Help(argparse.Action):
    """Print the options and an overview of the keys or, given a key or a section such as `lora`, explain it."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        """Print the help and exit."""
        known = keys()
        if values is None:
            head = "override keys (--help KEY explains one; a page may set another default, which --dry-run prints):"
            parser.epilog = "\n".join([head, *(key.short() for key in known.values())])
            parser.print_help()
            parser.exit()
        ours = overrides.FOREIGN_NAMES.get(values, values)
        found = [known[ours]] if ours in known else [key for name, key in known.items() if name.startswith(f"{ours}.")]
        if not found:
            raise UserError(overrides.unknown(values, list(known)))
        meaning = overrides.OTHER_TOOLS["meanings"].get(ours)
        if values not in {ours, *overrides.SAME}:
            print(f"{values}: use {ours}{f' ({meaning})' * bool(meaning)}.")
        print(*(key.long() for key in found), sep="\n")
        parser.exit()
