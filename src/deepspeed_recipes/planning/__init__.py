"""Predicts the memory and time of a run before a GPU is rented, and searches for the configuration that fits."""

import tomllib
from pathlib import Path

TABLES = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
"""Names, and what is known of other software and of other models."""
