"""Train two steps and measure all tensors of the process at three moments of the second, each storage once."""

import gc
import json
import time
from typing import Any

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from deepspeed_recipes.planning.model_profile.allocations import LiveBytes
from deepspeed_recipes.training import distributed, optimizer

LAYERS, WIDTH = 96, 96
"""Many and small, so that DeepSpeed's buffers for one weight are small too."""


class Layers(nn.Sequential):
    """Linear layers, without an embedding and a head."""

    def get_output_embeddings(self) -> None:
        """Return None, as a language model does that has no head."""


def main(cases: list[dict[str, Any]]) -> None:
    """Print every case with its numbers of parameters and the bytes that a rank holds, one line each."""
    distributed.start()
    gc.collect()
    gc.freeze()  # what existed before does not count, and looking at it takes seconds
    for case in cases:
        before = settled_bytes()
        model = build(case)
        numbers = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "routed": sum(p.numel() for name, p in model.named_parameters() if ".experts." in name),
        }
        engine = initialize(model, case)
        del model
        for _ in range(case["accumulation"]):
            engine.backward(loss(engine))
            engine.step()
        measured = {}
        for micro in range(1, case["accumulation"] + 1):
            result = loss(engine)
            if micro == case["accumulation"]:
                measured["forward"] = tensor_bytes() - before
            engine.backward(result)
            del result
            if micro == 1:
                measured["backward"] = tensor_bytes() - before
            if micro < case["accumulation"]:
                engine.step()
        # The optimizer step allocates and frees again, so all of it is tracked.
        live = LiveBytes()
        live.watch(tensors())
        with live:
            engine.step()
        measured["step"] = live.peak - before
        print(json.dumps({**case, **numbers, "bytes": measured}), flush=True)
        engine.destroy()
        del engine, live
    distributed.stop()


def build(case: dict[str, Any]) -> nn.Module:
    """Return a pile of linear layers, or a mixture whose experts are to be spread."""
    torch.manual_seed(0)
    if case.get("expert_ranks"):
        widths = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}
        experts = {"num_local_experts": 4, "intermediate_size": 64, "num_hidden_layers": 12}
        return MixtralForCausalLM(MixtralConfig(**widths, **experts))
    model = Layers(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model[: case.get("frozen", 0)]:
        layer.requires_grad_(False)
    if case.get("rank"):
        config = LoraConfig(r=case["rank"], target_modules=[str(index) for index in range(LAYERS)])
        return get_peft_model(model, config, autocast_adapter_dtype=False)
    return model


def initialize(model: nn.Module, case: dict[str, Any]) -> Any:
    """Return the engine of a case, its buffers as small as they can be."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case["accumulation"],
        "bf16": {"enabled": case["precision"] == "bf16"},
        "zero_optimization": {
            "stage": case["stage"],
            "reduce_bucket_size": 1000,
            "allgather_bucket_size": 1000,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "sub_group_size": case.get("sub_group", 10**9),
        },
        "zero_allow_untested_optimizer": True,
    }
    if case.get("offload"):
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if case.get("fp32_accumulation"):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if case.get("bf16_states"):
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if case.get("expert_ranks"):
        config["expert_parallel"] = {"enabled": True, "autoep_size": case["expert_ranks"]}
    trained = [p for p in model.parameters() if p.requires_grad]
    own = None
    if case.get("offload") or case.get("expert_ranks"):
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    else:
        own = make_optimizer(case.get("optimizer"), model, trained)
    if case.get("optimizer") == "muon" and case["stage"] == 3:
        config["zero_optimization"]["reduce_scatter"] = False
    return deepspeed.initialize(model=model, optimizer=own, model_parameters=trained, config=config)[0]


def make_optimizer(name: str | None, model: nn.Module, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return what the run brings along."""
    if name == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(trained, lr=1e-3)
    if name == "muon":
        group = {"params": trained, "lr": 1e-3, "weight_decay": 0.0}
        return optimizer._muon(model, [group], betas=(0.9, 0.999), eps=1e-8, fused=True)
    return torch.optim.AdamW(trained, lr=1e-3, fused=True)  # what the Trainer brings along


def loss(engine: Any) -> torch.Tensor:
    """Return a loss that every parameter has a part in."""
    if isinstance(engine.module, MixtralForCausalLM):
        return engine(torch.arange(32)[None]).logits.float().pow(2).mean()
    dtype = next(engine.module.parameters()).dtype
    return engine(torch.ones(1, WIDTH, dtype=dtype)).float().pow(2).mean()


def tensors() -> list[torch.Tensor]:
    """Return all tensors of this process."""
    gc.collect()
    found = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    # A gradient is an object of Python's only once it has been asked for.
    found += [leaf.grad for leaf in found if leaf.is_leaf and leaf.grad is not None]
    return [one for one in found if one.device.type != "meta"]


def settled_bytes() -> int:
    """Return `tensor_bytes` once it is stable: gloo's threads hold what they have sent for a moment longer."""
    before, now = -1, tensor_bytes()
    while now != before:
        time.sleep(0.1)
        before, now = now, tensor_bytes()
    return now


def tensor_bytes() -> int:
    """Return the bytes of all tensors of this process."""
    storages = (one.untyped_storage() for one in tensors())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
