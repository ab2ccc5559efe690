"""Settings shared by the plain loop and the run that is compared with it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Settings of the reference and the run under test, and the mistakes that a test must detect."""

    steps: int = 6
    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    clip: float = 1.0
    epsilon: float = 1e-5
    """Adam's epsilon. Adam divides each gradient by its size plus epsilon: where a gradient is as small as that, its
    rounding error moves the weight like a gradient of size one. At 1e-8 plain PyTorch in fp32 disagrees with itself in
    fp64 (`test_the_reference_is_exact_enough`), so nothing could be compared with it; at 1e-5 it agrees."""
    router_aux_loss_coef: float = 0.0
    """Weight of an MoE model's load-balancing loss: the mean over conversations of each one's own, padding included."""
    mean_of_means: bool = False
    """Mistake: every conversation has the same weight, however long its answer is."""
    decay_everything: bool = False
    """Mistake: norms are decayed like matrices."""
    learn_prompts: bool = False
    """Mistake: the user's words are in the loss."""
    scaled_experts: float = 1.0
    """Mistake, unless 1: the factor by which the gradients of an MoE model's experts are too large."""
