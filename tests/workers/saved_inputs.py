"""What the graph of a forward pass with adapters keeps of each layer, under ZeRO-2 and ZeRO-3."""

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from deepspeed_recipes.training import distributed
from tests.workers.held_experts import SETTINGS, saved_tensors

HIDDEN, INNER, TOKENS = 128, 320, 64
LAYERS = (2, 6)
"""Of two models: what they differ in is the layers'."""


def main(dropout: float, target_modules: str) -> None:
    """Say how many bytes per token a layer keeps more under ZeRO-3, beside weights."""
    distributed.start()
    kept = {stage: [graph_bytes(stage, layers, dropout, target_modules) for layers in LAYERS] for stage in (2, 3)}
    each = {stage: (many - few) / (LAYERS[1] - LAYERS[0]) / TOKENS for stage, (few, many) in kept.items()}
    print(f"more {each[3] - each[2]:.1f} bytes", flush=True)
    distributed.stop()


def graph_bytes(stage: int, layers: int, dropout: float, target_modules: str) -> int:
    """Return the bytes that a model's graph keeps of activations, each storage once."""
    torch.manual_seed(0)
    widths = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=64, num_hidden_layers=layers, **widths)
    settings = {**SETTINGS, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names = target_modules if target_modules == "all-linear" else target_modules.split(",")
    options = LoraConfig(r=4, lora_dropout=dropout, target_modules=names)
    model = get_peft_model(base, options, autocast_adapter_dtype=False)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=settings)
    tokens = torch.randint(0, 64, (1, TOKENS))
    loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
    found = {
        saved.untyped_storage().data_ptr(): saved.untyped_storage().nbytes()
        for saved in saved_tensors(loss.grad_fn)
        if TOKENS in saved.shape  # activations, not weights
    }
    engine.backward(loss)
    engine.destroy()
    return sum(found.values())
