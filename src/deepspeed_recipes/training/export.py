"""Exports a run as a folder that plain `transformers` loads, and proves that it does."""

import math
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType

import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ..machine import children
from ..machine.system import check_disk, free_memory
from ..recipe import quantization as stored_quantization
from ..recipe.errors import UserError, cannot_write, errors_only, first_line
from ..recipe.files import Json, JsonView
from ..recipe.run_folder import CHECK_FAILED, COMPLETE, RunFolder, read_json, read_recipe, write_json
from . import distributed, upstream
from .checkpoint import digests
from .console import say
from .data import chat_templates
from .model import generate, heads, new_tokens, stored, untrained
from .model import load as load_model
from .model import processor as vision
from .model_folder import base_model, complete, expected, weights
from .model_folder.base_model import ADAPTER, QUANTIZATION
from .model_folder.record import FOLDER, RECIPE

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ot", ".tflite")
"""Suffixes of weights in other formats, which are not copied."""
OF_DOWNLOADS = {".git", ".gitattributes", ".gitignore", ".cache", ".DS_Store", ".ipynb_checkpoints"}
"""Hidden files that belong to no model."""
OF_A_RUN = re.compile(
    rf"(global_step\d|checkpoint-\d|training/|trainer_state\.json$|{COMPLETE}$|latest$|zero_to_fp32\.py$)"
)
"""Contents of a checkpoint's or an export's folder in addition to a model; `complete.of_copy` copies the record."""
WEIGHTS_SHARE = 0.8
"""Share of the free memory, a GPU's or the host's, that weights may take; the rest is for activations and the cache of
answers."""


def save(trainer: Trainer, folder: Path, outline: PreTrainedModel) -> None:
    """Write the trained model, or its adapter, to `folder`, which is replaced; a collective.

    `outline` is the model as for `rehearse`.
    """
    if distributed.is_first():
        shutil.rmtree(folder, ignore_errors=True)
    distributed.check_on_first(lambda: check_space(trainer, outline))
    trainer.context.parallel.save(trainer, folder)
    torch.distributed.barrier()
    recipe = trainer.context.recipe
    if distributed.is_first():
        unset_hf_deepspeed_config()  # otherwise transformers would shard the models that it makes
        complete_export = untrained.name_adapter if recipe.lora else untrained.add
        complete_export(folder, recipe.model.path, heads.trained_by(recipe), recipe.model.trust_remote_code)
        tokenizer = trainer.processing_class
        if recipe.lora and {*chat_templates.ends_of_turn(recipe, tokenizer)} - {tokenizer.eos_token_id}:
            # Neither the adapter's tokenizer nor its base model has these ends.
            settings = (getattr(part, "generation_config", None) for part in trainer.model.modules())
            next(filter(None, settings)).save_pretrained(folder)
    torch.distributed.barrier()


def check_space(trainer: Trainer, model: PreTrainedModel) -> None:
    """Refuse a disk that is too small for the weights of the export; `model` as for `rehearse`."""
    total, trainable = load_model.parameter_counts(model)
    written = trainable if isinstance(model, PeftModel) else total
    copied = 0 if isinstance(model, PeftModel) else untrained.size(trainer.context.recipe.model.path)
    check_disk(trainer.context.run.path, written * model.dtype.itemsize + copied, "the export")


def rehearse(trainer: Trainer, model: PreTrainedModel) -> None:
    """Save everything of an export except its weights, and load it again, to find failures before training.

    On rank 0, by `distributed.check_on_first`. `model` is whole, with or without weights and adapters. A part that
    cannot be saved or loaded again, and a disk that is too small for the weights, are refused.
    """
    run, recipe = trainer.context.run, trainer.context.recipe
    check_space(trainer, model)
    own = model.get_base_model() if isinstance(model, PeftModel) else model
    reader = trainer.data_collator.seen if recipe.model.vision else trainer.processing_class
    saved = {
        "configuration": own.config,
        "generation settings": getattr(own, "generation_config", None),
        "processor" if recipe.model.vision else "tokenizer": reader,
    }
    with tempfile.TemporaryDirectory(prefix="rehearsal-", dir=run.path) as place:
        for what, part in saved.items():
            try:
                if part is not None:
                    part.save_pretrained(place)
            except Exception as error:  # raised by a library, or by the model's own code
                if full := cannot_write(error, run.path):
                    raise UserError(full) from error
                raise UserError(
                    f"model.path={recipe.model.path}: its {what} cannot be saved, so no export could be: "
                    f"{type(error).__name__}: {first_line(error)}"
                ) from error
        vision.load(place, recipe.model.trust_remote_code) if recipe.model.vision else load_tokenizer(Path(place))


def describe(run: RunFolder, results: JsonView, step: int | None = None) -> None:
    """Add the model card and `training/` to the folder that `save` wrote; a collective. An error never ends the run.

    `results` are `metric`, `before`, `after`, `held_out` and `logit_difference`. `step` has the
    exported weights, or is None for the last.
    """
    if distributed.is_first():
        try:
            complete.of_run(run.unverified, run, run.export, results, step)
        except Exception as error:
            say(f"the export has no complete model card: {type(error).__name__}: {first_line(error)}")
    torch.distributed.barrier()


def move(part: Path, folder: Path) -> None:
    """Rename `part` to `folder`, which is replaced, once every file is on the disk."""
    digests.flush([*part.rglob("*"), part])
    old = None
    if folder.exists() and (folder.is_symlink() or any(folder.iterdir())):  # an empty folder is replaced by renaming
        old = Path(tempfile.mkdtemp(prefix=f"{folder.name[:100]}.", dir=folder.parent))
        folder.rename(old)
    part.rename(folder)
    if old:
        shutil.rmtree(old, ignore_errors=True)
    digests.flush([folder.parent])


@torch.no_grad()
def verify(
    forward: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    folder: Path,
    tokens: list[int],
    beside: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> float:
    """Reload the export with plain transformers and return the largest difference in logits, relative to the largest.

    Raises RuntimeError if the reloaded model computes different logits, so that the export is not the model that was
    trained, in its `dtype`. `forward` maps token ids to the trained model's logits, and is called by every rank. Where
    sequences are scored, several are made of `tokens`; `beside` are a vision-language model's inputs for their images.
    """
    sequences = [tokens]
    if base_model.head_of(folder) == "scores":  # a few numbers, where one sequence has many logits
        starts = [len(tokens) * quarter // 4 for quarter in range(4)]
        sequences = [tokens[start:] + tokens[:start] for start in starts]
    inputs = torch.tensor(sequences, device=distributed.device())
    trained = forward(inputs).float().cpu()
    difference = 0.0
    if distributed.is_first():
        unset_hf_deepspeed_config()
        given = {"input_ids": inputs, **beside}
        differences = _differences(folder, dtype, given, trained)
        if dtype != torch.float32 and not differences.max() <= _allowed(dtype):
            # Rounding alone may make an MoE model's router choose another of two nearly equal experts. In fp32 the
            # export's weights choose without it: each token has to agree with one of the two.
            differences = differences.minimum(_differences(folder, torch.float32, given, trained))
        difference = differences.max().item()
    difference = distributed.total(difference)[0]
    allowed = _allowed(dtype)
    if not difference <= allowed:
        if distributed.is_first():
            write_json(folder / CHECK_FAILED, {"difference": difference, "allowed": allowed})
        raise RuntimeError(
            f"{folder}: reloaded logits differ by {difference:.1e} of the largest (allowed {allowed:.0e})"
        )
    return difference


def _differences(
    folder: Path, dtype: torch.dtype, given: Mapping[str, torch.Tensor], trained: torch.Tensor
) -> torch.Tensor:
    """Return how far the export's outputs are from the trained model's at each position, relative to the largest.

    Computed on the host, unless quantised: a GPU that still holds the engine's states cannot fit a whole model. What
    exceeds the host's memory stays on the disk, and each layer is read when it computes.
    """
    split: Json = {}
    with tempfile.TemporaryDirectory(prefix="reloaded-", dir=folder.parent) as place:
        # An adapter is not split: PEFT 0.21 leaves out the adapters of layers on the disk. Its base model's files are
        # mapped into the memory, not copied, where they have the dtype and the names that the model has.
        if not (folder / ADAPTER).exists():
            weight = dtype.itemsize * sum(math.prod(one.shape) for one in weights.tensors(folder).values())
            room = int(WEIGHTS_SHARE * free_memory())
            if weight >= room:
                split = {"device_map": "auto", "max_memory": {"cpu": room}, "offload_folder": place}
        reloaded = load_whole(folder, dtype, split=split).eval() if split else load(folder, dtype=dtype).eval()
        device = torch.device("cpu") if split else reloaded.device
        logits = heads.outputs(reloaded(**{name: value.to(device) for name, value in given.items()}))
        return (logits.float().cpu() - trained).abs().amax(-1) / trained.abs().max()


def _allowed(dtype: torch.dtype) -> float:
    return 1e-4 if dtype == torch.float32 else 3e-2


def load(
    folder: Path, dtype: torch.dtype | str = "auto", adapter: Path | None = None, placed: bool = False
) -> PreTrainedModel | PeftModel:
    """Return the model in `folder`: a whole model, or an adapter on its base model, quantised as in training.

    `dtype` "auto" keeps the stored one; `adapter` is put on the whole model in `folder`. A model that is `placed`, for
    answers, is on the GPU, or layer by layer over all GPUs if one is too small (`device_map`); otherwise on the host.
    """
    if wrong := expected.altered(adapter or folder):
        print(f"warning: {wrong}, so its answers are not the trained model's", file=sys.stderr, flush=True)
    if adapter is None and (folder / ADAPTER).exists():
        weights.check_intact(folder)
        folder, adapter = base_model.find(folder), folder
    split = device_map(folder) if placed else {}
    if adapter is None:
        model = load_whole(folder, dtype, split=split)
    else:
        weights.check_intact(adapter)
        base = load_base(folder, adapter, dtype, split)
        if split and "disk" in base.hf_device_map.values():  # PEFT 0.21 would leave those layers' adapters out
            raise UserError(f"{adapter}: its base model is larger than the GPUs' and the host's memory; use more GPUs.")
        model = with_adapter(base, adapter)
    if placed and not split:
        model = model.to(distributed.device())
    return model.eval() if placed else model


def device_map(folder: Path) -> Json:
    """Return the arguments of `from_pretrained` that split a model over all GPUs, or none if its weights fit on one.

    Accelerate puts what exceeds all GPUs into the host's memory. `folder` is a whole model's, or its Hub id.
    """
    place, device = stored.folder_of(str(folder)), distributed.device()
    if place is None or device.type != "cuda":
        return {}
    size = untrained.bytes_of(weights.unquantized(weights.tensors(place)))
    return {} if size < WEIGHTS_SHARE * torch.cuda.mem_get_info(device)[0] else {"device_map": "auto"}


def with_adapter(base: PreTrainedModel | PeftModel, adapter: Path, name: str = "default") -> PeftModel:
    """Return a model with one more adapter, whose configuration and tensors have to belong to it.

    PEFT only warns about tensors that the file lacks, and ignores those that have no place in the model.
    """
    # An adapter may be named for a whole model of which `base` is the text part alone.
    whole = any(name == "model.language_model" for name, _ in base.named_modules())
    options: Json = {"autocast_adapter_dtype": False, "key_mapping": None if whole else load_model.TEXT_PART}
    try:
        if PeftConfig.from_pretrained(adapter).is_prompt_learning:  # has one tensor, and no list of its keys
            return PeftModel.from_pretrained(base, adapter, name, autocast_adapter_dtype=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")
            model = base if isinstance(base, PeftModel) else PeftModel.from_pretrained(base, adapter, name, **options)
        found = model.load_adapter(str(adapter), name, **options)
    except torch.OutOfMemoryError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, NotImplementedError) as error:
        lines = str(error).strip().splitlines() or [""]
        reason = (lines[1] if lines[0].startswith("Error(s)") and lines[1:] else lines[0]).strip().rstrip(".")
        reason = (
            "its tensors are not named as PEFT names them" if "PEFT state_dict with key_mapping" in reason else reason
        )
        raise UserError(
            f"{adapter}: PEFT cannot put this adapter on {base.config.name_or_path} ({type(error).__name__}: "
            f"{reason[:200]}); use the adapter_config.json and the base model with which it was trained."
        ) from error
    # With other rows in the embedding, PEFT stores it once more, under the names that it has in memory.
    left = [name for name in found.unexpected_keys if ".modules_to_save." not in name]
    for names, what in (
        (found.missing_keys, f"{ADAPTER} names layers whose tensors the file lacks"),
        (left, f"the file has tensors without a place in {base.config.name_or_path} or {ADAPTER}"),
    ):
        if names:
            raise UserError(
                f"{adapter}: {what} ({len(names)}, such as {names[0]}); is the copy complete, and is this its base "
                "model?"
            )
    return model


def load_base(
    folder: Path, adapter: Path, dtype: torch.dtype | str = "auto", split: JsonView = MappingProxyType({})
) -> PreTrainedModel:
    """Return the model in `folder`, quantised if it was when `adapter` was trained on it; `split` is `load_whole`'s.

    Prints a warning if the adapter was trained on other weights.
    """
    if known := read_json(adapter / base_model.EXPECTED, {}).get("base"):
        with suppress(UserError):  # its weights are not on this machine
            now = expected.of_weights([folder])
            if len(known) == len(now) and known != now:  # earlier versions wrote shorter ones, of vectors alone
                text = f"warning: {folder} has other weights than the model that {adapter} was trained on"
                print(f"{text}, so the answers differ from those of the trained model.", file=sys.stderr, flush=True)
    quantization = adapter / QUANTIZATION
    if not quantization.exists():
        return load_whole(folder, dtype, of_adapter=adapter, split=split)
    config = BitsAndBytesConfig.from_dict(read_json(quantization))
    return load_whole(folder, config.bnb_4bit_compute_dtype, config, adapter, split)


def load_whole(
    folder: Path,
    dtype: torch.dtype | str,
    quantization: BitsAndBytesConfig | None = None,
    of_adapter: Path | None = None,
    split: JsonView = MappingProxyType({}),
) -> PreTrainedModel:
    """Return the whole model in `folder`, which may be a Hub id, with any head or none.

    A model for an adapter, `of_adapter`, has a random head where the files lack one, and the adapter replaces it.
    `split` is from `device_map`; without it the weights are on the host.
    """
    if of_adapter and (folder / ADAPTER).exists() and not (folder / "config.json").exists():
        raise UserError(
            f"{of_adapter}: its base model {folder} is an adapter itself; merge that first (ds-recipes export {folder} "
            "--output FOLDER --merge), and write FOLDER as base_model_name_or_path."
        )
    if folder.is_absolute() and not (folder / "config.json").exists():
        raise UserError(f"{folder}: not a model folder (it holds neither config.json nor {ADAPTER}).")
    if folder.is_dir():  # and not a Hub id
        weights.check_intact(folder)
        found_weights, config = weights.tensors(folder, "model"), base_model.config_of(folder)
        if "quantization_config" not in config:
            weights.check_scales(config, found_weights, str(folder))
        generate.check_settings(str(folder))
    trusted = base_model.may_run_code(of_adapter or folder)
    options: Json = {"dtype": dtype, "use_safetensors": True, "trust_remote_code": trusted, **split}
    if quantization:
        options["quantization_config"] = quantization
    found = base_model.head_of(of_adapter or folder)
    classes = heads.options(base_model.labels_of(of_adapter)) if of_adapter and found == "scores" else {}
    try:
        # transformers would list what the trained part of a whole checkpoint lacks, tensor by tensor.
        further = of_adapter and (of_adapter / base_model.FURTHER_TOKEN).exists()
        partial = further or (of_adapter and found != "vocabulary") or (folder / base_model.PROVENANCE).exists()
        quiet = errors_only("transformers") if partial else nullcontext()
        config = load_model.config_of(folder, trusted)
        state = load_model.dequantized_state(str(folder), config, dtype) if of_adapter else None
        part = {"config": config} | (load_model.text_part(config) if found == "vocabulary" else {})
        part["config"].update(classes)
        options |= part
        with quiet, upstream.reading_any_index(), upstream.reading_state(state):
            model = heads.CLASSES[found].from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot load the model: {_reason(error)}") from error
    generate.correct_settings(model, str(folder))
    upstream.keep_4bit_layout(model)
    if of_adapter:
        new_tokens.fit(model, of_adapter)
        generate.stop_at(model, *generate.ends_in(of_adapter))
    return model


def _reason(error: Exception) -> str:
    """Return why transformers does not load a folder."""
    if "trust_remote_code" in str(error):
        return "it brings its own Python code; read that code, then add --trust-remote-code."
    return first_line(error)


def load_merged(folder: Path) -> PreTrainedModel:
    """Return the adapter in `folder` merged into its base model.

    A quantised base is dequantised first, to the values that the adapter was trained on. PEFT would quantise the sum
    again, and lose most of what was learned to rounding; files of a quantised base are refused. An embedding and a head
    that share one weight are separated where either has an adapter: PEFT would add it to both. Raises RuntimeError if
    the merged model computes other logits than the adapter on its base model.
    """
    base = load_base(base_model.find(folder), folder)
    stored_quantization.check(base.config.to_dict() if not (folder / QUANTIZATION).exists() else {}, str(folder))
    if getattr(base, "hf_quantizer", None):
        base = base.dequantize()
    adapted = with_adapter(base, folder)
    _check_mergeable(adapted, folder)
    expected = _sample_logits(adapted)
    configs = (base.config, base.config.get_text_config())
    tied = [one.tie_word_embeddings for one in configs]
    _part_tied(base)
    model = adapted.merge_and_unload()
    for one, was_tied in zip(configs, tied, strict=True):  # PEFT unties them
        one.tie_word_embeddings = was_tied
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if any(tied) and output is not None and embedding.weight is not output.weight:
        if torch.equal(embedding.weight, output.weight):
            output.weight = embedding.weight
        else:  # an adapter has made them differ
            for one in configs:
                one.tie_word_embeddings = False
            model.all_tied_weights_keys = {}
    difference = (_sample_logits(model) - expected).abs().amax(-1) / expected.abs().max()
    # Rounding may choose other experts for a token, so in 16 bits the median counts.
    off = (difference.max() if model.dtype == torch.float32 else difference.median()).item()
    if not off <= _allowed(model.dtype):
        raise RuntimeError(
            f"{folder}: merged, its logits differ by {off:.1e} of the largest from the adapter's on its base model "
            f"(allowed {_allowed(model.dtype):.0e})"
        )
    return model


def _check_mergeable(adapted: PeftModel, folder: Path) -> None:
    """Refuse adapters that do not change the base model's weights, or not always in the same way."""
    config = adapted.active_peft_config
    kind = str(getattr(config, "init_lora_weights", ""))
    if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
        why = "it acts on some tokens only, and weights act on all; serve it as an adapter"
    elif getattr(config, "layer_replication", None):
        why = "layer_replication gives layers of the base model several changes; serve it as an adapter"
    elif getattr(config, "lora_bias", False) and any(
        layer.get_base_layer().bias is None for layer in adapted.modules() if hasattr(layer, "lora_bias")
    ):
        why = "lora_bias=true adds a bias to layers that have none; serve it as an adapter"
    elif kind.startswith("pissa_niter"):
        why = (
            f"init_lora_weights={kind} takes a random part of the base model away each time it is loaded; convert it "
            "with PEFT's path_initial_model_for_weight_conversion"
        )
    elif bad := next((name for name, one in adapted.named_parameters() if not one.isfinite().all()), None):
        why = f"{bad} has values that are not finite: its training diverged, or the file is damaged"
    else:
        return
    raise UserError(f"{folder}: this adapter cannot be merged ({config.peft_type.value}): {why}.")


def _part_tied(model: PreTrainedModel) -> None:
    """Give the head its own weight if it shares the embedding's and one of them has an adapter."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    bare = []
    for layer in ends:  # the base model's layers inside PEFT's
        while layer is not None and (inner := getattr(layer, "base_layer", getattr(layer, "original_module", None))):
            layer = inner
        bare.append(layer)
    embedding, output = bare
    if output is None or embedding is None or (embedding, output) == ends:
        return
    if embedding.weight is output.weight:
        output.weight = torch.nn.Parameter(output.weight.detach().clone(), requires_grad=False)


def load_processor(folder: Path) -> PreTrainedTokenizerBase | ProcessorMixin:
    """Return a folder's tokenizer, or its processor if it holds a vision-language model."""
    folder = _with_tokenizer(folder)
    if base_model.head_of(folder) == "vision":
        return vision.load(str(folder), base_model.may_run_code(folder))
    return load_tokenizer(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in `folder`."""
    folder = _with_tokenizer(folder)
    weights.check_has_tokenizer(folder)
    weights.check_intact(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=base_model.may_run_code(folder))
    except Exception as error:  # each kind of tokenizer fails in its own way
        raise UserError(f"{folder}: cannot load the tokenizer: {_reason(error)}") from error


def _with_tokenizer(folder: Path) -> Path:
    """Return the base model's folder for an adapter without a tokenizer, as plain PEFT saves it."""
    own = weights.has_tokenizer(folder) or not (folder / ADAPTER).exists()
    return folder if own else base_model.find(folder)


def model_files(source: Path) -> tuple[list[Path], list[str]]:
    """Return the files of a model's folder, and the names of its weights in other formats and of its hidden files.

    What a run's own folder holds in addition is in neither.
    """
    marks = (COMPLETE, "trainer_state.json", "global_step*", f"{FOLDER}/{RECIPE}")
    of_run = any(any(source.glob(mark)) for mark in marks)
    files: list[Path] = []
    others: list[str] = []
    for file in sorted(one for one in source.rglob("*") if not one.is_dir()):
        path = file.relative_to(source)
        if not file.exists():
            raise UserError(f"{file}: a link to {os.readlink(file)}, which does not exist; copy or download it again.")
        hidden = next((part for part in path.parts if part.startswith(".")), None)
        if (of_run and OF_A_RUN.match(str(path))) or "__pycache__" in path.parts or hidden in OF_DOWNLOADS:
            continue
        if hidden or file.suffix in OTHER_WEIGHTS:
            others.append(str(path))
        else:
            files.append(file)
    return files, others


def write(source: Path, output: Path, merge: bool) -> str:
    """Write the model in `source` as a Hugging Face folder, empty or new, and return its kind.

    The source is an export, a checkpoint, or any folder with safetensors. After a `merge` PEFT is not needed to load
    the result.
    """
    complete.check(source, output)
    weights.check_intact(source)
    is_adapter = (source / ADAPTER).exists()
    if not is_adapter and not list(source.glob("*.safetensors")):
        if found := [
            file.parent.name for file in sorted(source.glob(f"*/{ADAPTER}")) if not file.parent.match("checkpoint-*")
        ]:
            raise UserError(f"{source}: holds adapters in {', '.join(found)}; name one of these folders.")
        if list(source.glob("checkpoint-*")):
            raise UserError(f"{source}: holds checkpoints but no model; name one of them, or the run's folder.")
        raise UserError(
            f"{source}: no .safetensors file. A ZeRO-3 checkpoint has one if the DeepSpeed config sets\n"
            '"stage3_gather_16bit_weights_on_model_save": true.'
        )
    copied, left_out = ([], []) if is_adapter and merge else model_files(source)
    output.parent.mkdir(parents=True, exist_ok=True)
    with children.scratch(f"{output.name[:100]}.", inside=output.parent) as place:
        part = place / "part"
        if is_adapter and merge:
            merged = load_merged(source)
            expected = _sample_logits(merged)
            whole = dict(merged.state_dict())
            if (further := source / base_model.FURTHER_TOKEN).exists():
                whole |= load_file(further)
            merged.save_pretrained(part, state_dict=whole)
            del merged, whole  # before it is loaded again
            load_processor(source).save_pretrained(part)
            base, trusted = str(base_model.find(source)), base_model.may_run_code(source)
            untrained.add(part, base, base_model.head_of(source), trusted)
            reloaded = load_whole(part, "auto")
            difference = ((_sample_logits(reloaded) - expected).abs().max() / expected.abs().max()).item()
            if not difference <= _allowed(reloaded.dtype):
                raise RuntimeError(f"{part}: reloaded logits differ by {difference:.1e} of the largest")
            kind = "a whole model with the adapter merged into it"
        else:
            if left_out and not (source / COMPLETE).exists():
                say(f"left out: {', '.join(left_out)} (weights in other formats, and hidden files)")
            written = read_json(source / COMPLETE, {}).get("digests", {})
            for file in copied:
                name = str(file.relative_to(source))
                target = part / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)
                if digests.of_file(target) != (written.get(name) or digests.of_file(file)):
                    raise UserError(f"{file} is damaged ({digests.harm(source, name)}); export another checkpoint.")
            if is_adapter:
                name = str(base_model.find(source))
                untrained.name_adapter(part, name, base_model.head_of(source), base_model.may_run_code(source))
            elif (run := RunFolder(source.parents[1])).recipe.exists():
                recipe = read_recipe(run)
                base = str(run.draft_model if recipe.draft.enabled else base_model.located(recipe.model.path))
                trained = heads.trained_by(recipe)
                if trained in ("vocabulary", "vision") and stored.folder_of(base) is None:
                    say(
                        f"warning: the run's model, {base}, is not on this machine; the export lacks what the run did "
                        "not load of it, if anything"
                    )
                untrained.add(part, base, trained, recipe.model.trust_remote_code)
            untrained.check(part)
            kind = "an adapter (add --merge for a whole model)" if is_adapter else "a whole model"
            kind += ", and no adapter to merge" if merge else ""
        complete.of_copy(part, source, output)
        move(part, output)
    return kind


@torch.no_grad()
def _sample_logits(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits of a few arbitrary tokens, shape (1, 16, vocabulary), or their scores or hidden states."""
    return heads.outputs(model.eval()(input_ids=torch.arange(16, device=model.device)[None])).float().cpu()
