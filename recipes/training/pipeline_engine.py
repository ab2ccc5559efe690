"""Pipeline parallelism through the Trainer: DeepSpeed's PipelineEngine takes each optimizer step as a whole."""

import contextlib
import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer

from recipes.spec.recipe import Layout, Recipe
from recipes.spec.run_folder import read_json, write_json
from recipes.training import model, pipeline, tensor, world
from recipes.training.data import IGNORED, following

TIED = "embedding"
"""DeepSpeed's key for the weight that the first and the last stage share."""


def build(recipe: Recipe) -> PipelineModule:
    """Return this rank's stage, its own weights loaded and nobody else's.

    Raises:
        UserError: the model cannot be staged.
    """
    config = model.load_config(recipe)
    parts = pipeline.stages(config, recipe.layout.pipeline)
    shared = (parts[0], parts[-1]) if config.get_text_config().tie_word_embeddings else ()
    specs = [
        TiedLayerSpec(TIED, pipeline.Stage, recipe, part, tied_weight_attr="embedding.weight")
        if part in shared
        else LayerSpec(pipeline.Stage, recipe, part)
        for part in parts
    ]
    layout = recipe.layout
    data = dist.get_world_size() // (layout.pipeline * layout.tensor)
    topology = PipeModelDataParallelTopology(num_pp=layout.pipeline, num_mp=layout.tensor, num_dp=data)
    # What it prints about itself is for its makers, and it would record how tied weights are made equal.
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        module = PipelineModule(
            specs, topology=topology, loss_fn=weighted_loss, partition_method="uniform", dynamic_shape=True
        )
    if layout.tensor > 1:
        tensor.shard(stage(module).model, tensor.plan(config), module._grid.get_slice_parallel_group())
    _count_once(module)
    return module


def stage(module: PipelineModule) -> pipeline.Stage:
    """Return this rank's stage."""
    return module.forward_funcs[0]


def _count_once(module: PipelineModule) -> None:
    """Mark which parameters count in the gradient norm on this rank.

    DeepSpeed takes the whole last stage for a copy of the first where a weight in it is tied, and without ZeRO it
    leaves out what is not marked as model parallel on every stage but the first.
    """
    tied = stage(module).embedding.weight if module.tied_modules and module.stage_id > 0 else None
    split = {weight for layer in tensor.layers(module).values() for weight in layer.parameters()}
    counted_elsewhere = module._grid.get_slice_parallel_rank() > 0
    for parameter in module.parameters():
        parameter.ds_pipe_replicated = parameter is tied
        parameter.model_parallel = parameter is not tied and (parameter in split or not counted_elsewhere)


def weighted_loss(logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the summed cross-entropy of a micro-batch times its weight.

    Args:
        logits: [rows, length, vocabulary].
        labels: the token after each position ([rows, length], -100 where it is not learned), and the weight.
    """
    of_next, weight = labels
    return _cross_entropy(logits, of_next).sum() * weight


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return it per position, [rows, length], zero where nothing is learned."""
    return nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")


def drive(trainer: Trainer, layout: Layout) -> None:
    """Make the Trainer hand every optimizer step to the pipeline as one.

    The loss is what the Trainer makes of it elsewhere: the mean over all tokens of the global batch. The engine
    averages over micro-batches and data ranks, so every token is weighted by their number over that of the tokens,
    which the Trainer counts once per rank that reads them.
    """
    trainer.model_accepts_loss_kwargs = True  # or it would not count the tokens
    waiting: list[dict[str, Any]] = []
    copies = layout.pipeline * layout.tensor

    def training_step(_: Any, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
        waiting.append(inputs)
        engine = trainer.deepspeed
        if len(waiting) < trainer.current_gradient_accumulation_steps:
            return torch.zeros((), device=engine.device)
        engine.micro_batches = len(waiting)  # fewer at the end of an epoch
        weight = engine.gradient_accumulation_steps() * engine.dp_world_size * copies / num_items_in_batch
        batches = [(_inputs(batch), (_labels(batch), weight)) for batch in waiting]
        waiting.clear()
        return engine.train_batch(iter(batches)).detach()

    trainer.training_step = training_step


def _inputs(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["input_ids"], batch["position_ids"]


def _labels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["shift_labels"] if "shift_labels" in batch else following(batch["labels"])


def measure(engine: Any, batches: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Return, per row, the summed loss and how many tokens of its last answer are not the likeliest, [rows, 2].

    Greedy decoding reproduces an answer exactly where every token of it is the likeliest after the right ones before.
    """

    def losses_and_mistakes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wrong = (logits.argmax(-1) != labels) & _last_answer(labels)
        return torch.stack([_cross_entropy(logits, labels).sum(1), wrong.sum(1).float()], dim=1)

    pairs = [(_inputs(batch), _labels(batch)) for batch in batches]
    return _evaluate(engine, pairs, losses_and_mistakes, (sum(len(batch["input_ids"]) for batch in batches), 2))


def _last_answer(labels: torch.Tensor) -> torch.Tensor:
    """Return the positions of the last run of learned tokens, [rows, length]."""
    learned = labels != IGNORED
    starts = learned & ~nn.functional.pad(learned[:, :-1], (1, 0), value=False)
    run = starts.cumsum(1)
    return learned & (run == run[:, -1:])


def logits(engine: Any, tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the logits of one row, [1, length, vocabulary], on every rank."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    batch = ((tokens, positions), tokens)
    return _evaluate(engine, [batch], lambda outputs, _: outputs.float(), (*tokens.shape, vocabulary))


def _evaluate(engine: Any, batches: Sequence[Any], function: Any, shape: Sequence[int]) -> torch.Tensor:
    """Return `function(logits, labels)` of all batches, joined, on every rank of the pipeline."""
    training = engine.module.loss_fn
    engine.module.loss_fn, engine.total_loss = function, None
    outputs = engine.eval_batch(iter(batches), reduce_output=None, bcast_loss=False, num_micro_batches=len(batches))
    engine.module.loss_fn = training
    result = torch.cat(outputs) if engine.is_last_stage() else torch.zeros(*shape, device=engine.device)
    dist.broadcast(result, engine.grid.stage_to_global(engine.num_stages - 1), engine.grid.get_pipe_parallel_group())
    return result


def save(module: PipelineModule, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write an ordinary Hugging Face folder, or a PEFT adapter; every stage writes its own weights; a collective."""
    part = folder / f"stage-{module.stage_id:05d}"
    if module._grid.data_parallel_id == 0:
        mine = stage(module).model
        writes = module._grid.get_slice_parallel_rank() == 0
        state = tensor.whole_state(mine, writes, frozen=not isinstance(mine, PeftModel))
        if module.tied_modules and module.stage_id > 0:  # the first stage writes what both hold
            tied = stage(module).embedding.weight
            held = {name for name, value in mine.state_dict().items() if value.data_ptr() == tied.data_ptr()}
            state = {name: value for name, value in state.items() if name not in held}
        if writes:
            mine.save_pretrained(part, state_dict=state)
    dist.barrier()
    if world.is_first():
        parts = sorted(folder.glob("stage-*"))
        if isinstance(stage(module).model, PeftModel):
            _join_adapters(parts, folder)
        else:
            _join_models(parts, folder)
            stage(module).model.whole_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for one in parts:
            shutil.rmtree(one)
    dist.barrier()


def _join_models(parts: Sequence[Path], folder: Path) -> None:
    files = [file for part in parts for file in sorted(part.glob("*.safetensors"))]
    weights, size = {}, 0
    for index, file in enumerate(files, start=1):
        name = f"model-{index:05d}-of-{len(files):05d}.safetensors"
        with safe_open(file, "pt") as opened:
            weights |= dict.fromkeys(opened.keys(), name)
        size += file.stat().st_size
        file.rename(folder / name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weights})
    generation = parts[0] / "generation_config.json"
    if generation.exists():
        generation.rename(folder / generation.name)


def _join_adapters(parts: Sequence[Path], folder: Path) -> None:
    configs = [read_json(part / "adapter_config.json") for part in parts]
    targets = sorted({name for config in configs for name in config["target_modules"] or ()})
    write_json(folder / "adapter_config.json", configs[0] | {"target_modules": targets})
    joined: dict[str, torch.Tensor] = {}
    for part in parts:
        joined |= load_file(part / "adapter_model.safetensors")
    save_file(joined, folder / "adapter_model.safetensors", metadata={"format": "pt"})
