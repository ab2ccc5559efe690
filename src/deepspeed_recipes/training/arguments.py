"""Translates a recipe into `transformers.TrainingArguments`, and puts the layout into its DeepSpeed configuration."""

import copy

from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from peft import PeftModel
from transformers import PreTrainedModel, TrainingArguments

from ..recipe import limits
from ..recipe.deepspeed_file import DeepSpeedFile, fill_prefetch, fill_swap_buffer, with_zero
from ..recipe.files import Json
from ..recipe.layout import gradient_accumulation_steps
from ..recipe.recipe import Recipe
from ..recipe.run_folder import RunFolder
from . import activation_checkpointing
from .checkpoint import universal
from .parallel import expert, stages


def common_arguments(recipe: Recipe, run: RunFolder, file: DeepSpeedFile, world_size: int, on_gpu: bool) -> Json:
    """Return the Trainer's arguments that do not depend on the method.

    The DeepSpeed file is passed as it is: the Trainer fills its `"auto"` values from these arguments. How often
    checkpoints are saved is set when the data is loaded, and with it the length of an epoch is known.
    """
    config = deepspeed_config(recipe, file)
    if file.offload_parameters == "nvme":
        largest = max(weight.numel() for weight in stages.without_weights(recipe).parameters())
        fill_swap_buffer(config, largest // world_size)
    if universal.is_needed(recipe.layout, run, world_size):
        config["checkpoint"] = config.get("checkpoint", {}) | {"load_universal": True}
    workers = recipe.data.workers if recipe.data.workers is not None else 2 * (on_gpu and not recipe.data.streaming)
    return {
        "output_dir": str(run.checkpoints),
        "deepspeed": config,
        "use_cpu": not on_gpu,
        "per_device_train_batch_size": recipe.micro_batch_size,
        "per_device_eval_batch_size": recipe.micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps(recipe, world_size),
        "num_train_epochs": recipe.epochs,
        "max_steps": recipe.max_steps or -1,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": recipe.schedule.kind,
        "warmup_steps": recipe.schedule.warmup,  # the Trainer reads values below 1 as a share of the steps
        "weight_decay": recipe.weight_decay,
        "adam_beta2": recipe.adam_beta2,
        "adam_epsilon": recipe.adam_epsilon,
        "max_grad_norm": recipe.max_grad_norm,
        "optim": "adamw_torch_fused",  # one kernel for all weights; under CPU offload it becomes DeepSpeed's CPUAdam
        "bf16": recipe.precision == "bf16",
        "fp16": recipe.precision == "fp16",
        # Pipeline stages turn it on themselves.
        "gradient_checkpointing": activation_checkpointing.of_layers(recipe) and recipe.layout.pipeline == 1,
        "gradient_checkpointing_kwargs": activation_checkpointing.options(recipe),
        "torch_compile": file.deepcompile,  # otherwise accelerate never calls engine.compile(), and it is plain ZeRO
        "seed": recipe.seed,
        "logging_steps": recipe.logging_steps,
        # Only one process can read a stream; the others would have nothing to read.
        "dataloader_num_workers": min(workers, 1) if recipe.data.streaming else workers,
        # Streams: accelerate would read on rank 0 and broadcast, which needs sequences of equal length. Pinned memory
        # lets sequences be copied while the GPU computes.
        "accelerator_config": {"dispatch_batches": False, "non_blocking": on_gpu},
        "dataloader_pin_memory": on_gpu,
        "disable_tqdm": True,  # our own progress bar shows more
        "report_to": "none",  # trackers get the numbers of metrics.jsonl, from tracking/
        "remove_unused_columns": False,
        "logging_nan_inf_filter": False,  # it hides NaN losses, and costs a device synchronisation per step
        "ddp_timeout": 1800,
    }


def gather_layers(arguments: TrainingArguments, model: PreTrainedModel, file: DeepSpeedFile) -> None:
    """Let ZeRO-3 gather a layer's weights in one message where its file has "auto"; call before the engine is made."""
    if file.stage < 3:
        return
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    layers = [one for one in inner.modules() if type(one).__name__ in (inner._no_split_modules or ())]
    sizes = [sum(getattr(weight, "ds_numel", weight.numel()) for weight in layer.parameters()) for layer in layers]
    hidden = inner.config.get_text_config().hidden_size
    fill_prefetch(arguments.hf_deepspeed_config.config, hidden, max(sizes, default=0))


def deepspeed_config(recipe: Recipe, file: DeepSpeedFile) -> Json:
    """Return the recipe's DeepSpeed configuration, with the layout's tensor- and expert-parallel sizes.

    The layout and the file have to split the model alike; the file needs a stage for experts that AutoEP supports.
    """
    limits.check_blocks(recipe, file)
    if recipe.optimizer == "muon" and file.stage == 3:
        file = with_zero(file, reduce_scatter=False)  # Muon needs whole gradients
    config, layout = copy.deepcopy(dict(file.content)), recipe.layout
    for key in ("sequence_parallel_size", "data_parallel_size"):  # `sequence.attend_over_ranks` makes the groups
        config.pop(key, None)
    if layout.pipeline > 1:
        config.pop("tensor_parallel", None)  # stages are split by `tensor.shard`
        config.pop("train_batch_size", None)  # the Trainer would count every stage as a data rank
        # Sending one shard per tensor rank fixes the first shape, but unpacked sequences vary in length.
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False, **config.get("pipeline", {})}
    elif layout.tensor > 1:
        sizes: Json = {"autotp_size": layout.tensor}
        if "vocab_parallel_lm_head" in TPTrainingConfig.model_fields:
            # DeepSpeed 0.19.8's default, a head that keeps its logits apart, saves memory, but evaluation and
            # generation need them whole.
            sizes["vocab_parallel_lm_head"] = False
        config["tensor_parallel"] = config.get("tensor_parallel", {}) | sizes
        # The Trainer and DeepSpeed count tensor-parallel ranks differently; each derives the size from the rest.
        config.pop("train_batch_size", None)
    if layout.expert > 1:
        config["expert_parallel"] |= {"autoep_size": layout.expert, **expert.mixture(recipe).keys}
        config.pop("optimizer", None)  # for other Trainers: ours groups the experts itself, and does not decay norms
    return config
