"""Pipeline parallelism: each rank holds one stage, some of the model's layers, and trains it through the Trainer.

DeepSpeed's PipelineEngine runs whole optimizer steps. The Trainer passes the step's micro-batches one by one, and the
last one starts the engine.
"""

import contextlib
import io
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from deepspeed import DeepSpeedEngine
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from ...recipe.recipe import Recipe
from ...recipe.run_folder import read_json, write_json
from .. import distributed, upstream
from ..data.collate import IGNORED, Batch, Collator, next_labels
from ..model import lora
from ..model.load import load_config
from . import scores, sequence, stages, tensor


def check(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model that computes different logits in stages."""
    stages.check(recipe, tokenizer)
    if recipe.layout.tensor > 1:
        tensor.styles(recipe)


def load(recipe: Recipe, labels: Sequence[str] = ()) -> "StagedModel":
    """Return this rank's stage, with its own weights only."""
    config, layout = load_config(recipe), recipe.layout
    parts = stages.stages(config, layout.pipeline)
    shared = (parts[0], parts[-1]) if config.get_text_config().tie_word_embeddings else ()
    specs = [
        TiedLayerSpec("embedding", stages.Stage, recipe, part, tied_weight_attr="embedding.weight")
        if part in shared
        else LayerSpec(stages.Stage, recipe, part)
        for part in parts
    ]
    data = dist.get_world_size() // (layout.pipeline * layout.tensor)
    topology = PipeModelDataParallelTopology(num_pp=layout.pipeline, num_mp=layout.tensor, num_dp=data)
    # DeepSpeed prints its partition; without no_grad autograd would record the copying of tied weights.
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad(), upstream.without_tensor_parallel_block():
        module = StagedModel(
            specs, topology=topology, loss_fn=LastStageOutput(), partition_method="uniform", dynamic_shape=True
        )
    if layout.tensor > 1:
        tensor.shard(stage(module).model, tensor.styles(recipe), module._grid.get_slice_parallel_group())
    _count_once(module)
    if layout.sequence > 1:
        sequence.attend_over_ranks(module, layout)
    return module


class StagedModel(PipelineModule):
    """The stages of a model. The Trainer counts the tokens of a step for it, since they weight its loss."""

    accepts_loss_kwargs = True


Loss = Callable[[torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]
"""A function of logits and (labels, weights)."""


class LastStageOutput:
    """Computes the last stage's result from logits and labels: the training loss, or temporarily another function."""

    def __init__(self) -> None:
        self.function: Loss = weighted_loss

    def __call__(self, logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the function's result."""
        return self.function(logits, labels)


def outline(recipe: Recipe, model: PipelineModule) -> PreTrainedModel | PeftModel:
    """Return the whole model without weights, adapters included; this rank holds only one stage of it."""
    whole = stages.without_weights(recipe)
    return lora.add(whole, recipe.lora) if recipe.lora else whole


def stage(module: PipelineModule) -> stages.Stage:
    """Return this rank's stage."""
    return module.forward_funcs[0]


def _count_once(module: PipelineModule) -> None:
    """Mark which parameters count in the gradient norm on this rank.

    DeepSpeed takes the whole last stage for a copy of the first if one of its weights is tied. Without ZeRO, on every
    stage but the first, it skips parameters that are not marked as model parallel.
    """
    tied = stage(module).embedding.weight if module.tied_modules and module.stage_id > 0 else None
    split = {weight for layer in tensor.layers(module).values() for weight in layer.parameters()}
    counted_elsewhere = module._grid.get_slice_parallel_rank() > 0
    for parameter in module.parameters():
        parameter.ds_pipe_replicated = parameter is tied
        parameter.model_parallel = parameter is not tied and (parameter in split or not counted_elsewhere)


def weighted_loss(logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the summed cross-entropy of a micro-batch times its weight; logits are [sequences, length, vocabulary].

    `labels` are the token after each position, [sequences, length], -100 where it is not in the loss, and the weight.
    """
    of_next, weight = labels
    return _cross_entropy(logits, of_next).sum() * weight


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy per position, [sequences, length]; zero where the label is ignored.

    The vocabulary is the last dimension: of any other torch rounds each probability at the size of the largest logit,
    which makes a token's loss 3e-6 too small where logits reach 35.
    """
    flat = logits.float().flatten(0, 1), labels.flatten()
    return nn.functional.cross_entropy(*flat, ignore_index=IGNORED, reduction="none").view(labels.shape)


def step(trainer: Trainer, ordinary: Callable[..., torch.Tensor], inputs: Batch, items: object) -> torch.Tensor:
    """Return the loss of the optimizer step for its last micro-batch, and zero for the others.

    As elsewhere in the Trainer, the loss is the mean over all tokens of the global batch. The engine averages over
    micro-batches and data-parallel ranks, so each token is weighted by the number of both divided by the number of
    tokens. The Trainer counts a token once per rank that reads it.
    """
    engine, layout = trainer.deepspeed, trainer.context.recipe.layout
    trainer.micro_batches.append(inputs)
    if len(trainer.micro_batches) < trainer.current_gradient_accumulation_steps:
        return torch.zeros((), device=engine.device)
    copies = layout.pipeline * layout.tensor
    weight = engine.gradient_accumulation_steps() * engine.dp_world_size * copies / items
    batches = [(_inputs(batch), (_labels(batch), weight)) for batch in trainer.micro_batches]
    trainer.micro_batches.clear()
    return upstream.train_pipeline(engine, batches)


def _inputs(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["input_ids"], batch["position_ids"]


def _labels(batch: Batch) -> torch.Tensor:
    return batch["shift_labels"] if "shift_labels" in batch else next_labels(batch["labels"])


def logits(trainer: Trainer, tokens: torch.Tensor, **beside: torch.Tensor) -> torch.Tensor:
    """Return the logits of sequences, [number, length, vocabulary], on every rank; a collective."""
    assert not beside, "no model with a vision tower is trained in stages"
    vocabulary = load_config(trainer.context.recipe).get_text_config().vocab_size
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    batch = ((tokens, positions), tokens)
    return _evaluate(trainer.deepspeed, [batch], lambda outputs, _: outputs.float(), (*tokens.shape, vocabulary))


def measure(trainer: Trainer, sequences: Dataset) -> dict[str, float]:
    """Return the `loss` per token of held-out sequences, and the share of last answers that greedy decoding reproduces.

    A pipeline cannot generate, but greedy decoding reproduces an answer exactly (`exact_match`) if each of its tokens
    is the likeliest after the correct tokens before it.
    """
    recipe = trainer.context.recipe
    collator = Collator(trainer.processing_class.pad_token_id)
    shares = list(scores.rank_batches(sequences, recipe.micro_batch_size, recipe.layout))
    batches = [scores.to_device(collator(batch)) for batch, _ in shares]
    pairs = [(_inputs(batch), _labels(batch)) for batch in batches]
    shape = (sum(len(batch["input_ids"]) for batch in batches), 2)
    found = _evaluate(trainer.deepspeed, pairs, losses_and_mistakes, shape)
    results = found.split([len(batch) for batch, _ in shares])
    loss = right = tokens = 0.0
    for batch, (_, count), result in zip(batches, shares, results, strict=True):
        mine = result[:count]
        loss += mine[:, 0].sum().item()
        right += int((mine[:, 1] == 0).sum())
        tokens += int((batch["labels"][:count, 1:] != IGNORED).sum())
    loss, right, tokens = distributed.total(loss, right, tokens)
    return {"loss": loss / tokens, "exact_match": right / len(sequences)}


def losses_and_mistakes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed loss, and how many tokens of the last answer are not the likeliest, [sequences, 2].

    `logits` are [sequences, length, vocabulary]; `labels`, [sequences, length], are the token after each position, or
    -100 where it is not learned.
    """
    learned = labels != IGNORED
    starts = learned & ~nn.functional.pad(learned[:, :-1], (1, 0), value=False)
    run = starts.cumsum(1)  # the last one is the last answer
    wrong = (logits.argmax(-1) != labels) & (learned & (run == run[:, -1:]))
    return torch.stack([_cross_entropy(logits, labels).sum(1), wrong.sum(1).float()], dim=1)


def _evaluate(engine: DeepSpeedEngine, batches: list[Any], function: Any, shape: Sequence[int]) -> torch.Tensor:
    """Return `function(logits, labels)` of all batches, joined, on every rank of the pipeline."""
    results: list[torch.Tensor] = []

    def keep(logits: torch.Tensor, labels: Any) -> torch.Tensor:
        results.append(function(logits, labels))
        return logits.new_zeros(())  # DeepSpeed adds up what is returned, and the results differ in shape

    output = engine.module.loss_fn
    output.function = keep
    try:
        engine.eval_batch(iter(batches), reduce_output=None, bcast_loss=False, num_micro_batches=len(batches))
    finally:
        output.function = weighted_loss
    result = torch.cat(results) if engine.is_last_stage() else torch.zeros(*shape, device=engine.device)
    dist.broadcast(result, engine.grid.stage_to_global(engine.num_stages - 1), engine.grid.get_pipe_parallel_group())
    return result


def save(trainer: Trainer, folder: Path) -> None:
    """Write an ordinary Hugging Face folder, or a PEFT adapter; every stage writes its own weights; a collective."""
    module = trainer.deepspeed.module
    part = folder / f"stage-{module.stage_id:05d}"
    if module._grid.data_parallel_id == 0:
        mine = stage(module).model
        writes = module._grid.get_slice_parallel_rank() == 0
        state = tensor.whole_state(mine, writes, frozen=not isinstance(mine, PeftModel))
        if module.tied_modules and module.stage_id > 0:  # the first stage writes the weight that both hold
            tied = stage(module).embedding.weight
            held = {name for name, value in mine.state_dict().items() if value.data_ptr() == tied.data_ptr()}
            state = {name: value for name, value in state.items() if name not in held}
        if writes:
            mine.save_pretrained(part, state_dict=state)
    dist.barrier()
    if distributed.is_first():
        _join_stages(stage(module).model, folder)
        trainer.processing_class.save_pretrained(folder)
    dist.barrier()


def _join_stages(model: PreTrainedModel | PeftModel, folder: Path) -> None:
    """Make one model, or one adapter, of the stages' folders in `folder`, and remove these; `model` is any stage's."""
    parts = sorted(folder.glob("stage-*"))
    if isinstance(model, PeftModel):
        configs = [read_json(part / "adapter_config.json") for part in parts]
        targets = sorted({name for config in configs for name in config["target_modules"] or ()})
        write_json(folder / "adapter_config.json", configs[0] | {"target_modules": targets})
        joined: dict[str, torch.Tensor] = {}
        for part in parts:
            joined |= load_file(part / "adapter_model.safetensors")
        save_file(joined, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    else:
        files = [file for part in parts for file in sorted(part.glob("*.safetensors"))]
        weights: dict[str, str] = {}
        size = 0
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
        model.whole_config.save_pretrained(folder)
    for part in parts:
        shutil.rmtree(part)
