"""Layouts without a pipeline: a rank's model has all layers, whole or sharded by ZeRO, tensor or expert parallelism."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from datasets import Dataset
from deepspeed.runtime.engine import DeepSpeedEngine
from peft import PeftModel
from torch import distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from ...recipe.layout import data_parallel_size, gradient_accumulation_steps
from ...recipe.limits import tiles_loss
from ...recipe.methods import Embed
from ...recipe.recipe import Recipe
from ...recipe.run_folder import write_json
from .. import distributed, upstream
from ..data.collate import IGNORED, Batch, Collator
from ..model import heads, lora, transforms
from ..model.load import load_config, load_model
from ..model_folder import complete
from ..model_folder.base_model import LABELS, QUANTIZATION
from . import expert, scores, sequence, tensor


def check(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Find how tensor parallelism splits the model; without it, accept every model."""
    if recipe.layout.tensor > 1:
        tensor.styles(recipe)


def load(recipe: Recipe, labels: Sequence[str] = ()) -> PreTrainedModel | PeftModel:
    """Return the model, split over tensor-parallel ranks; a classifier has `labels`."""
    with upstream.without_tensor_parallel_block():
        model = load_model(recipe, labels=labels)
        if recipe.layout.tensor > 1:
            tensor.shard_model(model, recipe.layout.tensor, tensor.styles(recipe))
    if recipe.router_aux_loss_coef:
        world_size = dist.get_world_size()
        micro_batches = gradient_accumulation_steps(recipe, world_size) * data_parallel_size(recipe.layout, world_size)
        transforms.balance_experts(model, recipe.router_aux_loss_coef, micro_batches)
    if recipe.layout.sequence > 1:
        sequence.attend_over_ranks(model, recipe.layout)
    return model


def outline(recipe: Recipe, model: PreTrainedModel | PeftModel) -> PreTrainedModel | PeftModel:
    """Return the model itself."""
    return model


def step(trainer: Trainer, ordinary: Callable[..., torch.Tensor], inputs: Batch, items: object) -> torch.Tensor:
    """Return the loss of a micro-batch after its backward pass: the Trainer's `ordinary` training step."""
    return ordinary(inputs, items)


def logits(trainer: Trainer, tokens: torch.Tensor, **beside: torch.Tensor) -> torch.Tensor:
    """Return the logits of sequences, [number, length, vocabulary], or hidden states; a collective under ZeRO-3.

    `beside`: a vision-language model's other inputs, for the images of a sequence.
    """
    return heads.outputs(trainer.model.eval()(input_ids=tokens, **beside))


@torch.no_grad()
def measure(trainer: Trainer, sequences: Dataset) -> dict[str, float]:
    """Return the `loss` per token of held-out sequences, the mean over all labelled tokens, in nats; a collective."""
    recipe = trainer.context.recipe
    labelled = tiles_loss(recipe, trainer.model.config.get_text_config().vocab_size)
    own = Collator(trainer.processing_class.pad_token_id, labelled=labelled)
    collator = trainer.data_collator if recipe.model.vision else own
    loss = tokens = 0.0
    for batch, count in scores.rank_batches(sequences, recipe.micro_batch_size, recipe.layout):
        inputs = scores.to_device(collator(batch))
        summed = trainer.model(**inputs, num_items_in_batch=torch.ones((), device=distributed.device())).loss
        if count:
            loss += summed.item()
            tokens += int((inputs["labels"][:, 1:] != IGNORED).sum())
    loss, tokens = distributed.total(loss, tokens)
    return {"loss": loss / tokens}


def save(trainer: Trainer, folder: Path) -> None:
    """Write an ordinary Hugging Face folder, or a PEFT adapter; a collective, since ranks hold parts of the weights.

    `Trainer.save_model` would clone the whole state on every rank below ZeRO-3, and store tied weights twice.
    """
    model, recipe = trainer.model, trainer.context.recipe
    state = _state(trainer.deepspeed, model)
    if distributed.is_first():
        with transforms.balancing_declared(model, load_config(recipe)):
            # PEFT would add the embeddings to an adapter if new tokens have made them larger; it has the new rows. And
            # it would write TRL's second adapter, the frozen reference of DPO and KTO.
            adapters = {"save_embedding_layers": False, "selected_adapters": ["default"]}
            options = adapters if isinstance(model, PeftModel) else {}
            model.save_pretrained(folder, state_dict=state, **options)
        if recipe.model.vision:
            trainer.data_collator.seen.save_pretrained(folder)  # the processor, and its tokenizer
        else:
            trainer.processing_class.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's model card, an empty form
        if isinstance(model, PeftModel) and recipe.model.train_mtp:
            heads.save_further_token(model, state or model.state_dict(), folder)
        adapter = recipe.lora
        if adapter is not None and adapter.init == "pissa":
            lora.export_pissa(model, folder)
        if isinstance(model, PeftModel) and getattr(model, "hf_quantizer", None):
            write_json(folder / QUANTIZATION, model.hf_quantizer.quantization_config.to_dict())
        # Details of the outputs that config.json lacks.
        if isinstance(recipe.method, Embed):
            hidden_size = model.config.get_text_config().hidden_size
            complete.write_pooling(folder, recipe.method, hidden_size, recipe.sequence_length)
        if recipe.method.scores and isinstance(model, PeftModel) and model.config.num_labels > 1:
            write_json(folder / LABELS, [model.config.id2label[at] for at in range(model.config.num_labels)])


def _state(engine: DeepSpeedEngine, model: PreTrainedModel | PeftModel) -> dict[str, torch.Tensor] | None:
    """Return the ordinary model's weights on rank 0, or None where `save_pretrained` finds them in the model."""
    adapters = isinstance(model, PeftModel)
    if expert.layers(model):
        return expert.whole_state(model, engine._config._param_dict["expert_parallel"])
    if engine.zero_optimization_partition_weights():
        return engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=adapters)
    if tensor.layers(model):
        return tensor.whole_state(model, distributed.is_first(), frozen=not adapters)
    return None
