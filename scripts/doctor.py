"""The command `doctor` of this checkout; recipes/commands/doctor.py says what it does."""

from _checkout import run

run("doctor")
