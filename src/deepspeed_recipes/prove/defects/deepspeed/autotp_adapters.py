"""AutoTP replaces adapters: a model with LoRA that is split over two ranks has no adapters left.

DeepSpeed's AutoTP splits PEFT's layers as if they were linear layers, so the weights to train are lost. Training then
fails with an error that does not mention the reason, or does not fail.
"""

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import LlamaConfig, LlamaForCausalLM

RANKS = 2
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}


def measure() -> tuple[bool, str]:
    """Return whether layers with adapters are lost when the engine is created."""
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    whole = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=4))
    model = get_peft_model(whole, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    before = sum(isinstance(module, LoraLayer) for module in model.modules())
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0},
        "tensor_parallel": {"autotp_size": 2},
    }  # fmt: skip
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    except Exception as error:
        return True, f"{before} layers with adapters; {type(error).__name__}: {error}"[:200]
    after = sum(isinstance(module, LoraLayer) for module in engine.module.modules())
    return after < before, f"{before} layers with adapters, {after} after AutoTP"


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
