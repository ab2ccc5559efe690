"""The command `export` of this checkout; recipes/commands/export.py says what it does."""

from _checkout import run

run("export")
