"""Published and own measurements, and the constants fitted to them."""

from pathlib import Path

MEASUREMENTS = Path(__file__).parents[1] / "measurements"
"""Published tables and own results."""
