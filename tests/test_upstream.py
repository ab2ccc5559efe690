"""Workarounds for other projects' mistakes, each held against the mistake: a test that fails says that it can go."""

import inspect

from deepspeed.runtime.engine import DeepSpeedEngine


def test_deepspeed_forgets_the_fp32_gradient_norm():
    """`report_grad_norm` in recipes/training/trainer.py can go when DeepSpeed keeps what `clip_grad_norm_` returns."""
    source = inspect.getsource(DeepSpeedEngine.clip_fp32_gradients)
    assert "clip_grad_norm_(" in source and "_global_grad_norm" not in source
