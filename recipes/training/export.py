"""The result of a run as a folder that plain `transformers` loads, and the proof that it does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from recipes.spec.errors import UserError, first_line
from recipes.spec.run_folder import read_json, write_json
from recipes.training import experts, pipeline_engine, tensor, world
from recipes.training.adapters import keep_layout

ADAPTER = "adapter_config.json"
QUANTIZATION = "base_quantization.json"
"""Beside an adapter that was trained on a quantised base model: how to quantise it again."""


def save(trainer: Trainer, folder: Path) -> None:
    """Write the trained model, or its adapter, to `folder`; a collective, since ranks hold parts of the weights.

    Not `Trainer.save_model`: that clones the whole state on every rank below ZeRO-3, and stores tied weights twice.
    """
    draft = folder.with_name(folder.name + ".part")
    if world.is_first():
        shutil.rmtree(draft, ignore_errors=True)
    torch.distributed.barrier()
    _write(trainer, draft)
    if world.is_first():
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    torch.distributed.barrier()


def save_with_checkpoints(trainer: Trainer) -> None:
    """Make the Trainer's checkpoints hold the same ordinary weights, where the DeepSpeed file does not decline them.

    Below ZeRO-3 the Trainer's own way stores tied weights twice; of split models it would store one rank's part; and
    without `stage3_gather_16bit_weights_on_model_save` it writes DeepSpeed's checkpoint a second time instead. Set that
    key to false, and ZeRO-3's checkpoints hold no weights besides DeepSpeed's own.
    """

    def save_model(output_dir: str, _internal_call: bool = False) -> None:
        engine = trainer.deepspeed
        zero = engine._config._param_dict["zero_optimization"]
        wanted = zero.get("stage3_gather_16bit_weights_on_model_save", True)
        if wanted or not engine.zero_optimization_partition_weights():
            _write(trainer, Path(output_dir))

    trainer.save_model = save_model


def _write(trainer: Trainer, folder: Path) -> None:
    if isinstance(trainer.deepspeed.module, PipelineModule):
        pipeline_engine.save(trainer.deepspeed.module, trainer.processing_class, folder)
    else:
        _save_whole(trainer, folder)


def _save_whole(trainer: Trainer, folder: Path) -> None:
    engine, model = trainer.deepspeed, trainer.model
    state = None
    if experts.layers(model):
        state = experts.whole_state(model)
    elif engine.zero_optimization_partition_weights():
        state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=isinstance(model, PeftModel))
    elif tensor.layers(model):
        state = tensor.whole_state(model, world.is_first(), frozen=not isinstance(model, PeftModel))
    if world.is_first():
        model.save_pretrained(folder, state_dict=state)
        trainer.processing_class.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's model card: a page of blanks
        if isinstance(model, PeftModel) and getattr(model, "hf_quantizer", None):
            write_json(folder / QUANTIZATION, model.hf_quantizer.quantization_config.to_dict())


@torch.no_grad()
def verify(
    forward: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, folder: Path, tokens: list[int]
) -> float:
    """Reload the export with plain transformers and return the largest difference in logits, relative to the largest.

    Args:
        forward: from token ids to the trained model's logits; every rank must call, since under ZeRO-3 it is a
            collective.
        dtype: the trained model's.
        folder: what `save` wrote.
        tokens: one row of token ids to compare on.

    Raises:
        RuntimeError: the reloaded model computes something else, so the export is not the model that was trained.
    """
    inputs = torch.tensor([tokens], device=world.device())
    trained = forward(inputs).float().cpu()
    difference = 0.0
    if world.is_first():
        unset_hf_deepspeed_config()  # or transformers would shard what it loads
        # On the host, unless it is quantised: a GPU that still holds the engine's states has no room for a whole model.
        reloaded = load(folder, dtype=dtype).eval()
        logits = reloaded(input_ids=inputs.to(reloaded.device)).logits.float().cpu()
        difference = ((logits - trained).abs().max() / trained.abs().max()).item()
    difference = world.total(difference)[0]
    allowed = 1e-4 if dtype == torch.float32 else 3e-2
    if not difference <= allowed:
        raise RuntimeError(
            f"{folder}: reloaded logits differ by {difference:.1e} of the largest (allowed {allowed:.0e})"
        )
    return difference


def load(folder: Path, dtype: Any = "auto", adapter: Path | None = None) -> PreTrainedModel | PeftModel:
    """Return the model in `folder`: a whole one, or an adapter on its base model in the form that it was trained on.

    Args:
        folder: a whole model, or an adapter that names its base model.
        dtype: of the weights; "auto" as they are stored.
        adapter: put this adapter on the whole model in `folder`.

    Raises:
        UserError: not a model folder, or the adapter's base model cannot be found.
    """
    if adapter is None and (folder / ADAPTER).exists():
        folder, adapter = base_of(folder), folder
    if adapter is None:
        return load_whole(folder, dtype)
    return PeftModel.from_pretrained(load_base(folder, adapter, dtype), adapter, autocast_adapter_dtype=False)


def base_of(adapter: Path) -> Path:
    """Return the folder or Hub id of the model that an adapter was trained on."""
    return Path(json.loads((adapter / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"])


def load_base(folder: Path, adapter: Path, dtype: Any = "auto") -> PreTrainedModel:
    """Return the model in `folder`, quantised if it was when `adapter` was trained on it."""
    quantization = adapter / QUANTIZATION
    if not quantization.exists():
        return load_whole(folder, dtype)
    config = BitsAndBytesConfig.from_dict(read_json(quantization))
    return load_whole(folder, config.bnb_4bit_compute_dtype, config)


def load_whole(folder: Path, dtype: Any, quantization: BitsAndBytesConfig | None = None) -> PreTrainedModel:
    """Return the whole model in `folder`, which may be a Hub id.

    Raises:
        UserError: not a model folder, or weights that cannot be loaded.
    """
    if folder.is_absolute() and not (folder / "config.json").exists():
        raise UserError(f"{folder}: not a model folder (it holds neither config.json nor {ADAPTER}).")
    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True}
    if quantization:
        options["quantization_config"] = quantization
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot load the model: {first_line(error)}") from error
    keep_layout(model)
    return model


def load_merged(folder: Path) -> PreTrainedModel:
    """Return the adapter in `folder` merged into its base model.

    Into a quantised base's own values, dequantised: those the adapter was trained on. PEFT would quantise the sum
    again, and lose most of what was learned to rounding.
    """
    base = load_base(base_of(folder), folder)
    if getattr(base, "hf_quantizer", None):
        base = base.dequantize()
    return PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).merge_and_unload()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in `folder`.

    Raises:
        UserError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot load the tokenizer: {first_line(error)}") from error


def write(source: Path, output: Path, merge: bool) -> str:
    """Write what `source` holds as a Hugging Face folder and return which kind it is.

    Args:
        source: an export, a checkpoint, or any folder with safetensors.
        output: an empty or new folder.
        merge: add an adapter into its base model, so that PEFT is not needed to load the result.

    Raises:
        UserError: `source` holds no model, or `output` is not empty.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output}: exists and is not empty; choose a new folder.")
    is_adapter = (source / ADAPTER).exists()
    if not is_adapter and not list(source.glob("*.safetensors")):
        if list(source.glob("checkpoint-*")):
            raise UserError(f"{source}: no model, but checkpoints; name one of them, or the run's folder.")
        raise UserError(
            f"{source}: no .safetensors file. A ZeRO-3 checkpoint has one when the DeepSpeed config says\n"
            '"stage3_gather_16bit_weights_on_model_save": true.'
        )
    draft = output.with_name(output.name + ".part")
    shutil.rmtree(draft, ignore_errors=True)
    if is_adapter and merge:
        load_merged(source).save_pretrained(draft)
        load_tokenizer(source).save_pretrained(draft)
        kind = "a whole model, the adapter merged into it"
    else:
        draft.mkdir(parents=True)
        for file in sorted(source.iterdir()):
            if file.suffix in (".json", ".safetensors", ".jinja", ".model", ".txt") and file.name not in _OF_THE_RUN:
                shutil.copy2(file, draft)
        kind = "an adapter (add --merge for a whole model)" if is_adapter else "a whole model"
    if output.exists():
        output.rmdir()
    draft.rename(output)
    return kind


_OF_THE_RUN = {"trainer_state.json", "complete.json"}
