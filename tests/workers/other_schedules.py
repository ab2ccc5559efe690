"""Asks DeepSpeed and PyTorch for what configs/README.md says that they do not have; executed on every rank."""

import deepspeed
import deepspeed.pipe
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import mse_loss, scaled_dot_product_attention

from deepspeed_recipes.training import distributed


def two_stages_per_rank() -> None:
    """Give DeepSpeed's DualPipeV a pipeline whose batches differ in length, as a recipe's do, and print its answer."""
    distributed.start()
    layers = [torch.nn.Linear(4, 4) for _ in range(4)]
    module = deepspeed.pipe.DualPipeVModule(layers=layers, num_stages=2, loss_fn=mse_loss, dynamic_shape=True)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    config |= {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
    try:
        deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    except AssertionError as error:
        print(f"DualPipeV: {error}", flush=True)
    distributed.stop()


def ring() -> None:
    """Compute attention by PyTorch's ring over two ranks, and print its answer."""
    distributed.start()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    query, key, value = (torch.randn(1, 2, 8, 16) for _ in range(3))
    try:
        with context_parallel(mesh, buffers=(query, key, value), buffer_seq_dims=(2, 2, 2)):
            ringed = scaled_dot_product_attention(query, key, value, is_causal=True)
            own = [one.clone() for one in (query, key, value)]
        if torch.equal(ringed, scaled_dot_product_attention(*own, is_causal=True)):
            print("ring: attends to its own part of the sequence only", flush=True)
    except NotImplementedError as error:
        print(f"ring: {error}", flush=True)
    distributed.stop()
