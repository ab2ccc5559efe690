"""The command `plan` of this checkout; recipes/commands/plan.py says what it does."""

from _checkout import run

run("plan")
