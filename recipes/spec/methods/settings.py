"""The methods' own settings, each a section of the recipe (`dpo.beta=0.2`)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dpo:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), run by TRL."""

    beta: float = 0.1
    """How strongly the trained model is kept close to the reference model."""


@dataclass(frozen=True)
class Kto:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306), run by TRL."""

    beta: float = 0.1
    """How strongly the trained model is kept close to the reference model."""
    good_weight: float = 1.0
    """Weight of the answers labelled true; raise it where they are fewer (the paper's equation 8)."""
    bad_weight: float = 1.0
    """Weight of the answers labelled false."""
