"""The test suite: one file per module, parity against plain PyTorch, and the documentation."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
