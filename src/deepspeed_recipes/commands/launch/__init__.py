"""Run a recipe: one launcher for every model, size and variant.

    ds-recipes launch --list
    ds-recipes launch tiny full
    ds-recipes launch tiny lora learning_rate=2e-3 lora.rank=8
    ds-recipes launch tiny full --resume
    ds-recipes launch auto MODEL          # a folder or Hub id without a recipe borrows the nearest recipe
    ds-recipes launch --from FILE.yaml    # what a file of LLaMA-Factory, Axolotl or TRL becomes here; starts nothing

The launcher checks everything that can be checked before the run, writes the run folder, prints the `deepspeed`
command, starts it and returns its exit status. On Ctrl-C or SIGTERM the run writes a checkpoint and ends with status
130 or 143; `--resume` continues it. With `--max-restarts N` the launcher itself resumes after a crash or a hang.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from ...launching.options import LaunchOptions
from ...recipe import pages
from ...recipe.errors import UserError, redact
from .. import list
from .options import AUTO, auto_words, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: the run's own."""
    typed = parse(arguments, __doc__)
    if typed.list:
        rest = [word for word in typed.words if not any(own.startswith(word) for own in ("--list", "--json"))]
        if more := [word for word in rest if word != typed.recipe]:
            raise UserError(f"--list: lists all recipes, or those of one page; leave out {redact(' '.join(more))}.")
        print(list.listing(typed.json, typed.recipe))
        return 0
    if typed.json:
        raise UserError("--json: only with --list; --dry-run full prints a recipe as JSON.")
    from . import translate  # not at the top, as `run` below

    words = [word for word in (typed.recipe, typed.variant, *typed.overrides) if word]
    if typed.source:
        return translate.main(typed.source, typed.gpus, typed.nodes, words, typed.write)
    if Path(words[0] if words else "").suffix in translate.SUFFIXES:
        raise UserError(
            f"{words[0]}: no recipe, but perhaps a file of another tool: ds-recipes launch --from {words[0]}"
        )
    if typed.write:
        raise UserError(f"--write {typed.write}: only with --from FILE, whose translation it keeps.")
    if not typed.recipe:
        raise UserError(
            "name a recipe and a variant, e.g. `ds-recipes launch tiny full`; `ds-recipes launch --list` lists all."
        )
    given = {field.name: getattr(typed, field.name) for field in fields(LaunchOptions) if hasattr(typed, field.name)}
    if typed.recipe == AUTO:
        given["model"], given["variant"], given["overrides"] = auto_words([typed.variant, *typed.overrides])
    if not given["variant"]:
        raise UserError(pages.choices(typed.recipe))
    options = LaunchOptions(**given | {"overrides": tuple(given["overrides"]), "words": tuple(typed.words)})
    try:
        from .run import run  # not at the top: the planner and the report take longer to import than --list to print

        return run(options)
    except KeyboardInterrupt:  # before the ranks start, or between two attempts
        return 130
