"""The command `check` of this checkout; recipes/commands/check.py says what it does."""

from _checkout import run

run("check")
