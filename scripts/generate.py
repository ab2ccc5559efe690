"""The command `generate` of this checkout; recipes/commands/generate.py says what it does."""

from _checkout import run

run("generate")
