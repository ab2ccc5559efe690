"""Tests that say something about certain versions of the stack only; the others hold in the whole range."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from . import ROOT

CASES = {
    "nemotron_h": "transformers>=5.14",  # which names its kinds of layers otherwise
    "expert_parallel": "deepspeed>=0.19.2",  # which has AutoEP
}
"""What a case needs that has one of these words in its name."""


def pins(file: Path = ROOT / "constraints.txt") -> dict[str, str]:
    """Return the versions that a list of requirements pins."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", file.read_text(), re.MULTILINE))


def has(requirement: str) -> bool:
    """Return whether a package has a version: `has("torch>=2.13")`."""
    asked = Requirement(requirement)
    return asked.specifier.contains(version(asked.name))


def needs(*requirements: str) -> pytest.MarkDecorator:
    """Skip where one of these packages has another version: `needs("torch>=2.13")`."""
    missing = [one for one in requirements if not has(one)]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
