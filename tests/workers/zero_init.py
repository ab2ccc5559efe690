"""What `deepspeed.zero.Init` does to the buffers of a model that is built under it; run on one rank."""

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from deepspeed_recipes.recipe import pages
from deepspeed_recipes.training import distributed, upstream


def main() -> None:
    """Build a small model in bf16 under zero.Init, say what became of its rotary frequencies, and mend them."""
    distributed.start()
    config = AutoConfig.for_model(**pages.page("tiny").SIZES["3m"].config)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).model.rotary_emb.inv_freq
    settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rounded = model.model.rotary_emb.inv_freq
    error = ((rounded.float() - plain) / plain).abs().max().item()
    upstream.restore_rotary_frequencies(model)
    mended = torch.equal(model.model.rotary_emb.inv_freq, plain)
    print(f"rounded to {rounded.dtype}, off by {error:.4f}, mended {mended}", flush=True)
    distributed.stop()
