"""The command `benchmark` of this checkout; recipes/commands/benchmark.py says what it does."""

from _checkout import run

run("benchmark")
