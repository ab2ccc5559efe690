"""How far AutoEP's logits are from transformers' on DeepSeek's models, before and after our correction; two ranks."""

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from deepspeed_recipes.training import distributed, upstream

WIDTHS = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "initializer_range": 0.2,
}
CASES = (
    ("deepseek_v2", torch.float32, {"topk_method": "greedy"}),
    ("deepseek_v2", torch.float32, {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}),
    ("deepseek_v2", torch.bfloat16, {"topk_method": "group_limited_greedy"}),
    ("deepseek_v3", torch.float32, {"norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    ("deepseek_v3", torch.bfloat16, {"norm_topk_prob": True, "routed_scaling_factor": 2.5}),
)


def main() -> None:
    """Say for every case the largest difference of logits, relative to the largest, before and after."""
    distributed.start()
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    for family, dtype, changes in CASES:
        expected = build(family, dtype, changes)(tokens).logits
        model = build(family, dtype, changes)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": dtype == torch.bfloat16},
            "optimizer": {"type": "AdamW"},
            "expert_parallel": {"enabled": True, "autoep_size": 2},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        engine.eval()
        before = engine(tokens).logits
        upstream.route_as_transformers(engine.module)
        after = engine(tokens).logits
        largest = expected.abs().max()
        differences = [((logits - expected).abs().max() / largest).item() for logits in (before, after)]
        print("differences {:.1e} {:.1e}".format(*differences), flush=True)
    distributed.stop()


def build(family: str, dtype: torch.dtype, changes: dict) -> PreTrainedModel:
    """Return a random model of the family, with a correction of its routers' choice where it knows one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **WIDTHS, **changes))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    return model.to(dtype).eval()
