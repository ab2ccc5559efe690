"""The command `resolve` of this checkout; recipes/commands/resolve.py says what it does."""

from _checkout import run

run("resolve")
