"""Compares every family's draft whole and split over the ranks by `tensor.shard`; and what AutoTP does instead."""

import contextlib
import copy
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer

from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.recipe import Draft, Lora
from deepspeed_recipes.recipe.run_folder import write_json
from deepspeed_recipes.training import distributed, export, run
from deepspeed_recipes.training.model import attention, draft
from deepspeed_recipes.training.model import lora as adapters
from deepspeed_recipes.training.parallel import tensor
from tests.small import language_families

ROW = 48
"""Tokens, more than a draft's sliding window."""


def shard_all(output: str) -> None:
    """Compare for every model type, with ours."""
    say(output, shard_layers, kinds())


def shard_wrongly(output: str) -> None:
    """Compare without the sum of what local heads have in common."""
    tensor._summed_over = lambda group: lambda gradient: gradient
    found = kinds()
    say(output, shard_layers, {kind: found[kind] for kind in ("llama", "qwen3")})


def split_without_plan(output: str) -> None:
    """Say for some model types what can be split without a plan, and what cannot; and for one with a mistake."""
    distributed.start()
    group = dist.new_group([0, 1])
    kinds = ("cohere", "gemma2", "olmo2", "opt", "phi3", "qwen3")
    found = {kind: tensor.split(AutoConfig.for_model(kind), "eager", group) for kind in kinds}
    tensor._summed_over = lambda group: lambda gradient: gradient
    found["qwen3, wrongly"] = tensor.split(AutoConfig.for_model("qwen3"), "eager", group)
    if distributed.is_first():
        write_json(Path(output), found)
    distributed.stop()


def say(output: str, split, configs: dict[str, object]) -> None:
    """Compare each, and write down what differs."""
    distributed.start()
    found = {kind: attempt(config, split) for kind, config in configs.items()}
    if distributed.is_first():
        write_json(Path(output), found)
    distributed.stop()


def kinds() -> dict[str, object]:
    """Return a shrunken configuration of every model type in the catalogue, with heads to share out."""
    tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
    found = {}
    for family in language_families():
        for size in pages.page(family).SIZES:
            recipe = pages.page(family).full(size)
            config = draft.shrink(AutoConfig.for_model(**recipe.model.config), Draft(layers=2), tokenizer)
            config.use_cache = False
            if getattr(config, "num_key_value_heads", None):
                config.num_key_value_heads = max(2, config.num_key_value_heads)
            config.attn_implementation = attention.loadable(recipe.model.attention)
            found.setdefault(config.model_type, config)
    return found


def attempt(config, split) -> dict[str, object]:
    """Return how far logits and gradients of the split model are from the whole one's, or why there is none."""
    try:
        return compare(config, split)
    except (ValueError, NotImplementedError, RuntimeError, AssertionError, AttributeError) as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def compare(config, split) -> dict[str, object]:
    """Return the largest relative differences, and the weight where each gradient's is."""
    whole = build(config, torch.float64)
    tokens = torch.randint(5, config.vocab_size, (2, ROW), generator=torch.Generator().manual_seed(0))
    model = split(copy.deepcopy(whole))
    logits, gradients = look(whole, tokens)
    expected = whole.state_dict()
    ours, parts = look(model, tokens)
    parts = {name: whole_gradient(model, name, part) for name, part in parts.items()}
    state = tensor.whole_state(model)
    errors = {name: relative(parts[name], gradient) for name, gradient in gradients.items()}
    worst = max(errors, key=errors.get)
    return {
        "split": len(tensor.layers(model)),
        "logits": relative(ours, logits),
        "gradient": errors[worst],
        "worst": worst,
        "weights": state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state),
    }


def build(config, dtype) -> torch.nn.Module:
    """Return the model, the same on every rank, with norms and biases that are not all ones and zeros."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=config.attn_implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def look(model, tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return logits, and the gradient of every weight as this rank has it."""
    output = model(input_ids=tokens, labels=tokens)
    output.loss.backward()
    return output.logits.detach(), {name: weight.grad for name, weight in model.named_parameters()}


def whole_gradient(model, name: str, part: torch.Tensor) -> torch.Tensor:
    """Return a gradient put together, or, of what every rank holds, the one that is furthest from rank 0's."""
    owner, _, own = name.rpartition(".")
    layer = tensor.layers(model).get(owner)
    if layer is not None and not (own == "bias" and isinstance(layer, tensor.LinearAllreduce)):
        return tensor.gathered(layer, own, part)
    all_of_them = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, part.contiguous())
    return max(all_of_them, key=lambda one: (one - all_of_them[0]).abs().max())


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item()


def shard_layers(model: torch.nn.Module) -> torch.nn.Module:
    """Split each decoder layer by itself, as a stage of a pipeline has them."""
    styles = tensor.plan(model.config)
    for layer in model.get_decoder().layers:
        tensor.shard(layer, styles, dist.group.WORLD)
    return model


def autotp(model: torch.nn.Module) -> object:
    """Return an engine that has split the model, without ZeRO."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 0},
        "tensor_parallel": {"autotp_size": dist.get_world_size(), "vocab_parallel_lm_head": False},
    }
    optimizer = torch.optim.SGD(model.parameters())  # DeepSpeed has no backward pass without one
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def counted_twice(folder: str) -> None:
    """Train with the mistake that the tokens of both ranks of one copy are counted."""
    count = Trainer._get_num_items_in_batch
    Trainer._get_num_items_in_batch = lambda *arguments: 2 * count(*arguments)
    run.main(folder)


def parts_of_norms(folder: str) -> None:
    """Train with the mistake that the norms of local heads are trained on the gradient of those alone."""
    tensor._summed_over = lambda group: lambda gradient: gradient
    export.verify = lambda *_: 0.0  # which notices it too
    run.main(folder)


def head_in_parts(folder: str) -> None:
    """Train with the mistake that each rank computes the loss from its own rows of the head."""
    shard = tensor.shard_model

    def shard_model(model: torch.nn.Module, size: int, styles: object) -> None:
        shard(model, size, styles)
        with torch.no_grad():
            for rank, rows in enumerate(model.get_output_embeddings().weight.chunk(size)):
                rows *= rank == dist.get_rank()

    tensor.shard_model = shard_model
    export.verify = lambda *_: 0.0
    run.main(folder)


def lose_adapters() -> None:
    """Say how many layers with adapters AutoTP leaves of a model's."""
    distributed.start()
    model = adapters.add(build(kinds()["llama"], torch.float32), Lora())
    before = adapted(model)
    with contextlib.suppress(Exception):  # what the engine says about it changes with the ZeRO stage
        autotp(model)
    print(f"{before} layers with adapters, {adapted(model)} after AutoTP", flush=True)
    distributed.stop()


def split_head() -> None:
    """Say how many rows AutoTP leaves of an output head that is not tied to the embeddings."""
    distributed.start()
    model = build(kinds()["llama"], torch.float32)
    before = model.lm_head.out_features
    print(f"{before} rows, {len(autotp(model).module.lm_head.weight)} after AutoTP", flush=True)
    distributed.stop()


def adapted(model: torch.nn.Module) -> int:
    """Return the number of layers with adapters."""
    return sum(isinstance(layer, LoraLayer) for layer in model.modules())
