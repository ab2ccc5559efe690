"""How much of experts' whole weights is alive after a forward pass under ZeRO-3, by what autograd's graph has saved."""

from collections.abc import Iterator

import deepspeed
import torch
from torch.autograd.graph import Node
from transformers import AutoConfig, AutoModelForCausalLM

from deepspeed_recipes.training import distributed
from deepspeed_recipes.training.parallel.tensor import nodes

WIDTHS = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
}
ZERO = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": ZERO,
}


def saved_tensors(root: Node) -> Iterator[torch.Tensor]:
    """Yield what the nodes of a graph have saved for their backward passes."""
    for node in nodes(root):
        names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
        for saved in (getattr(node, name) for name in names):
            yield from (one for one in (saved if isinstance(saved, tuple) else (saved,)) if torch.is_tensor(one))


def main() -> None:
    """Say how much of the experts' weights the graph of a forward pass keeps whole, beside the ranks' own shards."""
    distributed.start()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **WIDTHS), dtype=torch.bfloat16)
    sizes = [2 * weight.numel() for name, weight in model.named_parameters() if ".experts." in name]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=SETTINGS)
    tokens = torch.randint(0, WIDTHS["vocab_size"], (1, 64), device=engine.device)
    loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
    shards = {weight.ds_tensor.untyped_storage().data_ptr() for weight in model.parameters()}
    storages = {
        saved.untyped_storage().data_ptr(): saved.untyped_storage().nbytes() for saved in saved_tensors(loss.grad_fn)
    }
    whole = sum(size for place, size in storages.items() if place not in shards and size >= min(sizes))
    print(f"held {whole / sum(sizes):.2f} of the experts", flush=True)
    engine.backward(loss)
    distributed.stop()
