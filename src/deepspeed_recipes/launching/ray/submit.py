"""Submits a run as a Ray job: the launcher itself runs on the head of the cluster behind the dashboard's address.

The nodes have the checkout, the environment and the current folder at the same paths, as hosts over ssh do.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...recipe.errors import UserError, redact
from ...recipe.project import python_path
from .. import variables
from .cluster import check_installed

SHELL = '$`"\\'
"""Characters that the shell interprets despite the double quotes with which Ray quotes a job's words."""


def is_dashboard(address: str | None) -> bool:
    """Return True if an address is a dashboard's, to which jobs are submitted."""
    return (address or "").startswith(("http://", "https://"))


def command(address: str, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the `ray job submit` command that runs the launcher with the command line `words` on the cluster.

    Raises:
        UserError: Ray or the shell would change a word on its way to the launcher.
    """
    given = variables.forwarded(environment) | python_path({})
    job = ["env", "-C", os.getcwd(), *(f"{name}={value}" for name, value in given.items())]
    job += [sys.executable, "-m", "deepspeed_recipes.commands", "launch", *without_address(words), "--address", "auto"]
    for word in words:
        if redact(word) != word:
            raise UserError(f"{redact(word)}: its credential could be read in the Ray job's command; leave it out.")
    for word in job:
        if set(word) & set(SHELL):
            raise UserError(f"{word}: a Ray job's words may not have {' '.join(SHELL)}; choose another name or value.")
    ray = Path(sys.executable).with_name("ray")
    return [str(ray) if ray.exists() else "ray", "job", "submit", "--address", address, "--", *job]


def without_address(words: Sequence[str]) -> list[str]:
    """Return a command line without `--address A` and `--submit`."""
    kept, skip = [], False
    for word in words:
        if not skip and word != "--submit" and not word.startswith("--address"):
            kept.append(word)
        skip = word == "--address"
    return kept


def run(address: str, words: Sequence[str], submit: bool) -> int:
    """Print the command and, with `submit`, run it; return its exit status.

    Raises:
        UserError: Ray or the shell would change a word, or Ray is not installed here.
    """
    ready = command(address, words, os.environ)
    print(redact(shlex.join(ready)), flush=True)
    if submit:
        check_installed()
    return subprocess.run(ready).returncode if submit else 0
