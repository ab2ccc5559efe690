"""The command `launch` of this checkout; recipes/commands/launch.py says what it does."""

from _checkout import run

run("launch")
