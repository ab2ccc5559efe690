"""AutoEP routes tokens of DeepSeek's models in bf16, where transformers routes in fp32.

DeepSpeed's expert parallelism multiplies by the router's weights in the weights' dtype. A token near a decision
boundary then goes to other experts than in transformers, so the results of training and of all later use disagree.
"""

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

try:
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
except ImportError:  # before 0.19.2
    AutoEPMoELayer = None

RANKS = 2
SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 48, "num_hidden_layers": 3,
    "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "initializer_range": 0.2,
}  # fmt: skip


def model() -> PreTrainedModel:
    """Return the same DeepSeek-V3 each time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("deepseek_v3", **SIZES, norm_topk_prob=True, routed_scaling_factor=2.5)
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


def measure() -> tuple[bool, str]:
    """Return whether logits change if the routers, and nothing else, multiply in fp32."""
    if AutoEPMoELayer is None:
        return False, f"DeepSpeed {deepspeed.__version__} has no AutoEP"
    deepspeed.init_distributed(verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
    }  # fmt: skip
    split = model()
    engine, *_ = deepspeed.initialize(model=split, model_parameters=split.parameters(), config=config)
    engine.eval()
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1)).to(engine.device)
    with torch.no_grad():
        found = engine(tokens).logits
        for layer in split.modules():
            if isinstance(layer, AutoEPMoELayer):
                gate = layer.router.gate
                gate.forward = lambda hidden, gate=gate: torch.nn.functional.linear(hidden.float(), gate.weight.float())
        expected = engine(tokens).logits
    apart = (found - expected).abs().amax(-1) / expected.abs().max()
    changed = (apart > 1e-3).sum().item()
    return (
        changed > 0,
        f"{changed} of {tokens.numel()} tokens get other logits, up to {apart.max().item():.1%} of the largest",
    )


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
