"""zero.Init rounds the rotary frequencies of a model that is built in bf16.

`deepspeed.zero.Init` casts every floating-point tensor that is created while a model is built, buffers included.
transformers keeps `inv_freq` in fp32 on purpose: in bf16 a frequency is off by up to 0.4 %, which at position 1,000 is
radians. Such a model trains at other positions than later loads of its weights compute; the loss looks normal.
"""

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

RANKS = 1
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 64,
}


def measure() -> tuple[bool, str]:
    """Return whether the frequencies differ from those of a model that is built without zero.Init."""
    deepspeed.init_distributed(verbose=False)
    config = LlamaConfig(**SIZES, dtype="bfloat16")
    expected = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).model.rotary_emb.inv_freq
    settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=settings):
        found = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).model.rotary_emb.inv_freq
    apart = (found.float().cpu() - expected).abs()
    share, radians = (apart / expected).max().item(), 1000 * apart.max().item()
    return share > 1e-4, f"inv_freq in {found.dtype}, off by {share:.2%}: {radians:.1f} radians at position 1,000"


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
