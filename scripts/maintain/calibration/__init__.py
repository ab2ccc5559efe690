"""Reads published and own measurements, and fits the planner's constants to them."""

from pathlib import Path

MEASUREMENTS = Path(__file__).parents[1] / "measurements"
"""Folder of published tables and own results."""
