"""The result of a run as a folder that plain `transformers` loads, and the proof that it does."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from recipes.spec.errors import UserError
from recipes.training import world

ADAPTER = "adapter_config.json"


def save(trainer: Trainer, folder: Path) -> None:
    """Write the trained model, or its adapter, to `folder`; a collective, since ZeRO-3 gathers the weights.

    Not `Trainer.save_model`: that clones the whole state on every rank below ZeRO-3, and stores tied weights twice.
    """
    engine, model = trainer.deepspeed, trainer.model
    state = None
    if engine.zero_optimization_partition_weights():
        state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=isinstance(model, PeftModel))
    if world.is_first():
        draft = folder.with_name(folder.name + ".part")
        shutil.rmtree(draft, ignore_errors=True)
        model.save_pretrained(draft, state_dict=state)
        trainer.processing_class.save_pretrained(draft)
        (draft / "README.md").unlink(missing_ok=True)  # PEFT's model card: a page of blanks
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    torch.distributed.barrier()


@torch.no_grad()
def verify(trainer: Trainer, folder: Path, tokens: list[int]) -> float:
    """Reload the export with plain transformers and return the largest difference in logits, relative to the largest.

    Args:
        trainer: holds the trained model; every rank must call, since under ZeRO-3 a forward pass is a collective.
        folder: what `save` wrote.
        tokens: one row of token ids to compare on.

    Raises:
        RuntimeError: the reloaded model computes something else, so the export is not the model that was trained.
    """
    inputs = torch.tensor([tokens], device=world.device())
    trainer.model.eval()
    trained = trainer.model(input_ids=inputs).logits.float().cpu()
    difference = 0.0
    if world.is_first():
        unset_hf_deepspeed_config()  # or transformers would shard what it loads
        reloaded = load(folder, dtype=trainer.model.dtype).to(world.device()).eval()
        logits = reloaded(input_ids=inputs).logits.float().cpu()
        difference = ((logits - trained).abs().max() / trained.abs().max()).item()
    difference = world.total(difference)[0]
    allowed = 1e-4 if trainer.model.dtype == torch.float32 else 3e-2
    if not difference <= allowed:
        raise RuntimeError(
            f"{folder}: reloaded logits differ by {difference:.1e} of the largest (allowed {allowed:.0e})"
        )
    return difference


def load(folder: Path, dtype: Any = "auto", adapter: Path | None = None) -> PreTrainedModel | PeftModel:
    """Return the model in `folder`: a whole one, or an adapter together with its base model.

    Raises:
        UserError: not a model folder, or the adapter's base model cannot be found.
    """
    if (folder / ADAPTER).exists():
        base = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
        return load(Path(base), dtype, adapter=folder)
    if folder.is_absolute() and not (folder / "config.json").exists():
        raise UserError(f"{folder}: not a model folder (it holds neither config.json nor {ADAPTER}).")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot load the model: {str(error).partition(chr(10))[0]}") from error
    return model if adapter is None else PeftModel.from_pretrained(model, adapter)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in `folder`.

    Raises:
        UserError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot load the tokenizer: {str(error).partition(chr(10))[0]}") from error


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
        raise UserError(
            f"{source}: no .safetensors file. A ZeRO-3 checkpoint has one when the DeepSpeed config says\n"
            '"stage3_gather_16bit_weights_on_model_save": true.'
        )
    draft = output.with_name(output.name + ".part")
    shutil.rmtree(draft, ignore_errors=True)
    if is_adapter and merge:
        model = load(source).merge_and_unload()
        model.save_pretrained(draft)
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
