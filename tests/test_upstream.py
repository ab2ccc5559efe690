"""Workarounds for other projects' mistakes, each held against the mistake: a test that fails says that it can go."""

import inspect
import re
import subprocess
import sys

import torch
from bitsandbytes.nn import Linear4bit
from deepspeed.runtime.engine import DeepSpeedEngine

from recipes.spec.pages import ROOT
from recipes.training import adapters
from tests.ranks import read_logs
from tests.workers import split_layers, zero_init


def test_deepspeed_forgets_the_fp32_gradient_norm():
    """`report_grad_norm` in recipes/training/trainer.py can go when DeepSpeed keeps what `clip_grad_norm_` returns."""
    source = inspect.getsource(DeepSpeedEngine.clip_fp32_gradients)
    assert "clip_grad_norm_(" in source and "_global_grad_norm" not in source


def test_zero_init_rounds_the_rotary_frequencies(ranks, tmp_path):
    """`restore_rotary_frequencies` in recipes/training/model.py can go when `zero.Init` leaves buffers alone."""
    ranks.check(zero_init.main, world_size=1, log=tmp_path / "log")
    said = read_logs(tmp_path / "log")[0]
    assert "rounded to torch.bfloat16" in said and "mended True" in said
    assert 1e-3 < float(re.search(r"off by ([\d.]+)", said)[1]) < 5e-3


def test_autotp_loses_adapters(ranks, tmp_path):
    """The adapters' half of `shard_where_autotp_cannot` in recipes/training/tensor.py can go when AutoTP keeps them."""
    ranks.check(split_layers.lose_adapters, log=tmp_path / "log")
    assert "14 layers with adapters, 0 after AutoTP" in read_logs(tmp_path / "log")[0]


def test_peft_imports_bitsandbytes():
    """recipes/training/lean_peft.py can go when `import peft` leaves bitsandbytes alone."""
    for code, expected in (("import peft", True), ("import recipes.training.run", False)):
        code += f"; import sys; assert ('bitsandbytes' in sys.modules) is {expected}"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_bitsandbytes_repacks_on_the_cpu():
    """`keep_layout` in recipes/training/adapters.py can go when 4-bit layers keep their bytes in evaluation."""
    source = inspect.getsource(Linear4bit.forward)
    assert "support_avx512bf16_for_cpu" in source and "_convert_weight_packed_for_cpu(" in source
    layer = Linear4bit(64, 48, bias=False, compute_dtype=torch.bfloat16)
    adapters.keep_layout(layer)
    assert layer.support_avx512bf16_for_cpu is False
