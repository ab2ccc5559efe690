"""What the plain loop and the run beside it have in common."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What the reference and the run under test have in common, and the mistakes that a test must notice."""

    steps: int = 6
    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    clip: float = 1.0
    epsilon: float = 1e-5
    """Adam's. It divides each gradient by its own size plus this: where a gradient is of the size of epsilon, its
    rounding error moves the weight like a gradient of size one. At 1e-8 plain PyTorch in fp32 disagrees with itself in
    fp64 (`test_the_reference_is_exact_enough`), so nothing could be compared to it; at 1e-5 it agrees."""
    router_aux_loss_coef: float = 0.0
    """Of a mixture's load-balancing loss: the mean of each conversation's own, its padding included."""
    mean_of_means: bool = False
    """Mistake: every conversation weighs the same, however long its answer is."""
    decay_everything: bool = False
    """Mistake: norms are decayed like matrices."""
    learn_prompts: bool = False
    """Mistake: the user's words are in the loss."""
    scaled_experts: float = 1.0
    """Mistake, unless 1: the gradients of a mixture's experts are this much too large."""
