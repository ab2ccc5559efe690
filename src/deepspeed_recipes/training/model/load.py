"""Loads a recipe's model, with its adapters; or a draft of it."""

import re
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, models
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...recipe import quantization as stored_quantization
from ...recipe.bounds import Bounds
from ...recipe.conversions import MAMBA, NOT_IN_MAMBA
from ...recipe.errors import UserError, errors_only, first_line, lasting, passing
from ...recipe.files import Json
from ...recipe.recipe import Recipe
from .. import activation_checkpointing, upstream
from ..console import say
from ..model_folder import base_model, dequantized, weights
from . import attention, generate, heads, lora, new_tokens, stored, transforms

TEXT_PART = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head": "lm_head",
    r"^model\.language_model\.": "model.",
}
"""Names of a language model's weights in a vision-language checkpoint -> their names in the language model."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


WRONG_VALUES = (AttributeError, KeyError, TypeError, StrictDataclassError)
"""The errors of transformers about values of a model's files that it does not check, such as `dtype: float99`."""


def config_of(path: str | Path, trusted: bool) -> PreTrainedConfig:
    """Return the configuration of a folder or Hub id, with transformers' own choice of attention instead of its own."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    config._attn_implementation = None  # also of its parts; see `without_attention`
    return config


def load_config(recipe: Recipe) -> PreTrainedConfig:
    """Return the model's configuration."""
    if recipe.model.trust_remote_code:
        base_model.permit_remote_code()
    path = recipe.model.path
    try:
        config = config_of(path, recipe.model.trust_remote_code)
    except (OSError, ValueError, ArithmeticError, RecursionError, *WRONG_VALUES) as error:
        raise UserError(cannot_load("configuration", recipe, error)) from error
    parts, wrong = (config, config.get_text_config()), None
    if config.return_dict is False:
        wrong = "return_dict=false, with which its parts do not find each other's outputs"
    elif recipe.model.attention != "eager" and any(one.output_attentions for one in parts):
        wrong = "output_attentions=true, which only model.attention=eager computes"
    elif config.is_encoder_decoder and not type(config).is_encoder_decoder:
        wrong = f"is_encoder_decoder=true, and {config.model_type} has no encoder"
    if wrong:
        raise UserError(f"model.path={path}: its config.json has {wrong}; remove the key.")
    classifier = next((name for name in config.architectures or () if name.endswith("Classification")), None)
    if classifier and heads.trained_by(recipe) in ("vocabulary", "vision"):
        raise UserError(f"{path}: was trained to classify ({classifier}), not to write; name a language model.")
    _check_numbers(config.to_dict(), path)
    _check_keys(PreTrainedConfig.get_config_dict(path)[0], config, path)
    return config


def _check_keys(written: Json, config: PreTrainedConfig, path: str) -> None:
    """Refuse a misspelt key, which transformers keeps as an attribute while it computes with the right key's default.

    Other keys that a class does not have are usual in published files: a name that any of transformers' classes has is
    no misspelling (`eos_token_id`, where a vision-language model has an `eoi_token_id`).
    """
    kind = type(config)
    if not kind.__module__.startswith("transformers."):
        return
    with errors_only("transformers"):  # some classes' defaults contradict each other
        known = {*kind().to_dict(), *kind.attribute_map, "rope_theta", "rope_scaling", "torch_dtype"}
    for key in written.keys() - known:
        meant = next((one for one in known - written.keys() if one[0] != "_" and _is_one_edit(key, one)), None)
        word, files = re.compile(rf"\b{re.escape(key)}\b"), Path(models.__file__).parent.glob("*/configuration_*.py")
        if meant and not any(word.search(file.read_text(encoding="utf-8")) for file in files):
            raise UserError(
                f"model.path={path}: its config.json has {key!r}, which {kind.__name__} does not read, and no "
                f"{meant!r}; correct or remove the key."
            )
    theta, rope = written.get("rope_theta"), written.get("rope_parameters")
    if theta and isinstance(rope, dict) and rope.get("rope_theta", theta) != theta:
        raise UserError(
            f"model.path={path}: its config.json has rope_theta={theta}, and rope_theta={rope['rope_theta']} in "
            "rope_parameters, of which transformers reads only the latter; make them equal."
        )
    for name in kind.sub_configs:
        if isinstance(written.get(name), dict):
            _check_keys(written[name], getattr(config, name), path)


def _is_one_edit(one: str, other: str) -> bool:
    """Return whether one letter more, less or changed, or two that change places, make `other` of `one`."""
    differing = (at for at, (x, y) in enumerate(zip(one, other, strict=False)) if x != y)
    start = next(differing, min(len(one), len(other)))
    a, b = one[start:], other[start:]
    return b in (a[1:], a[1::-1] + a[2:]) or b[1:] in (a, a[1:])


_NUMBERS = {r"(\w+_)?eps(ilon)?": Bounds(least=0), r"rope_theta|rotary_emb_base|rope_local_base_freq": Bounds(above=0)}
"""Numbers that transformers does not check and with which a model computes NaN, at once or for some tokens."""


def _check_numbers(section: Json, path: str) -> None:
    for key, value in section.items():
        if isinstance(value, dict):
            _check_numbers(value, path)
        for name, bounds in _NUMBERS.items():
            if re.fullmatch(name, str(key)) and isinstance(value, int | float) and bounds.broken_by(value):
                raise UserError(f"model.path={path}: its config.json has {key}={value}: must be {bounds}; correct it.")


def load_model(recipe: Recipe, kind: type | None = None, labels: Sequence[str] = ()) -> PreTrainedModel | PeftModel:
    """Return the model in the recipe's precision, with adapters where the recipe has them.

    Call it after the training arguments exist: under ZeRO-3 every parameter is then sharded as it is read, and no rank
    ever holds the whole model. `kind` is the class to load, by default the method's; a pipeline's stages have their
    own. `labels` are the names of a classifier's classes, in the order of its outputs. Weights that exist only as
    pickles are refused.
    """
    return adapted(load_base(recipe, kind, labels), recipe)


def adapted(model: PreTrainedModel, recipe: Recipe) -> PreTrainedModel | PeftModel:
    """Return a model from `transforms.apply` with the recipe's adapters, or unchanged if the recipe has none."""
    if recipe.lora is None:
        return model
    if activation_checkpointing.of_layers(recipe):
        model.enable_input_require_grads()
    added = new_tokens.rows_of(recipe)
    rows = new_tokens.trained_rows(model, recipe.lora, added) if added else []
    beside = None
    if recipe.model.vision and not recipe.model.train_vision:  # no adapters outside the language part
        decoder: object = model.get_decoder()
        name = next(name for name, module in model.named_modules() if module is decoder)
        beside = rf"(?!{re.escape(name)}\.).*"
    last = list(getattr(model.base_model, "layers", ()))[-1:]
    further = last[0] if last and hasattr(last[0], "eh_proj") else None  # the head of `heads.with_further_token`
    if further:  # trained whole: PEFT would freeze it, and give it adapters
        del model.base_model.layers[-1]
    found = lora.add(model, recipe.lora, recipe.seed, recipe.method.scores, recipe.method.embeds, beside, rows)
    if further:
        model.base_model.layers.append(further)
    return found


def load_base(recipe: Recipe, kind: type | None = None, labels: Sequence[str] = ()) -> PreTrainedModel:
    """Return the model of `load_model` without adapters."""
    path, dtype = recipe.model.path, DTYPES[recipe.precision]
    loaded: Any = kind or heads.CLASSES[heads.trained_by(recipe)]
    weights.check_intact(Path(path))
    config = load_config(recipe)
    stored_quantization.check(config.to_dict(), f"model.path={path}")
    weights.check(Path(path))
    stored.check_tied(path, config)
    generate.check_settings(path)
    state = dequantized_state(path, config, dtype)
    part = {"config": config} | ({} if recipe.model.vision else text_part(config))
    part["config"].update(heads.options(labels) if recipe.method.scores else {})
    if recipe.model.train_mtp:
        loaded = heads.with_further_token(config, recipe.model.mtp_loss_weight)
    quiet = errors_only("transformers") if recipe.method.headless else nullcontext()
    try:
        with quiet, upstream.reading_any_index(), upstream.reading_state(state):
            model, about = loaded.from_pretrained(
                path,
                dtype=dtype,
                quantization_config=quantization(recipe, config),
                attn_implementation=attention.loadable(recipe.model.attention),
                trust_remote_code=recipe.model.trust_remote_code,
                use_safetensors=True,  # a pickle from a stranger can run code
                output_loading_info=True,
                **part,
            )
    except (OSError, ValueError, ArithmeticError, AssertionError, SafetensorError, MemoryError, *WRONG_VALUES) as error:
        raise UserError(cannot_load("model", recipe, error)) from error
    except ImportError as error:
        if attention.loadable(recipe.model.attention) in ("sdpa", "eager"):
            raise
        raise UserError(attention.not_installed(recipe.model.attention, error)) from error
    except RuntimeError as error:
        if not any(words in str(error) for words in ("mismatched_sizes", "negative dimension", "allocate", "overflow")):
            raise
        raise UserError(cannot_load("model", recipe, error)) from error
    upstream.keep_used_conversions(model)
    missing = set(about["missing_keys"])  # one of tied weights is enough, and transformers does not list the other
    if recipe.method.scores:
        head = {name for name in missing if name.partition(".")[0] in heads.NAMES}
        missing -= head
        if head:  # the files hold a language model
            heads.start(model, recipe.seed)
    if missing:
        names = sorted(missing)
        if recipe.model.train_mtp and (lacks := [name for name in names if f".{config.num_hidden_layers}." in name]):
            raise UserError(
                f"model.path={path}: its files have no head for a further token (they lack "
                f"{lacks[0]}{weights.more(lacks)}); leave out model.train_mtp=true."
            )
        raise UserError(
            f"model.path={path}: its files lack {', '.join(names[:2])}{weights.more(names, 2)}; copy or "
            "download it again, or correct its config.json."
        )
    if kind is None:  # a pipeline stage has only its own layers; `stages.check` reads all
        say_left_out(recipe, stored.check(path, model, part.get("key_mapping")))
    if line := generate.correct_settings(model, path):
        say(line)
    new_tokens.start(model, recipe)
    return transforms.apply(model, recipe)


def dequantized_state(path: str, config: PreTrainedConfig, dtype: torch.dtype | str) -> dict[str, torch.Tensor] | None:
    """Return the weights of a folder or Hub id that were published quantised, as ordinary ones; None if they are.

    `config` loses its `quantization_config`. The `dtype` "auto" is the configuration's.
    """
    content = config.to_dict()
    if not stored_quantization.is_read(content):
        return None
    block = stored_quantization.block_of(content) or {}
    folder = stored.folder_of(path) or Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
    for one in {id(part): part for part in (config, config.get_text_config())}.values():
        if hasattr(one, "quantization_config"):
            del one.quantization_config
    say(f"model.path={path}: published as {stored_quantization.title(content)}, dequantised on loading")
    if isinstance(dtype, str):
        dtype = getattr(config.get_text_config(), "dtype", None) or torch.bfloat16
    return dequantized.state(folder, block, dtype)


def say_left_out(recipe: Recipe, parts: Sequence[str]) -> None:
    """Print the parts of a model's files that are not loaded, and what the export has of them."""
    if parts:
        export = "a merged export" if recipe.lora else "the export"
        whole = heads.trained_by(recipe) in ("vocabulary", "vision")
        exported = f"{export} has them unchanged" if whole else f"not in {export}"
        say(f"model.path={recipe.model.path}: neither loaded nor trained: {', '.join(parts)}; {exported}")
    if pickles := [file.name for file in sorted(Path(recipe.model.path).glob("pytorch_model*.bin"))]:
        say(f"model.path={recipe.model.path}: its .safetensors are loaded, not {pickles[0]}{weights.more(pickles)}")
    if mtp := stored.MTP.get(recipe.model.path):
        say(f"{', '.join(mtp)}: {base_model.DRAFTS}")


def text_part(config: PreTrainedConfig) -> Json:
    """Return the arguments with which `from_pretrained` loads only the language model of a vision-language checkpoint.

    Empty where transformers needs none: for a language model, or a whole model that it has a class for. Mistral 3's
    checkpoints (Ministral 3 is one) are neither: their text part has a class, the whole has none.
    """
    text = config.get_text_config()
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {}
    text.tie_word_embeddings = config.tie_word_embeddings  # the whole decides whether the files hold a head
    return {"config": text, "key_mapping": TEXT_PART}


def quantization(recipe: Recipe, config: PreTrainedConfig) -> QuantizationConfigMixin | None:
    """Return the quantisation of weights on loading to 4 bits for `nf4`, or None."""
    if recipe.model.quantization != "nf4":
        return None
    kept = lora.HEAD_AND_TOWER if recipe.model.vision else None
    if config.get_text_config().model_type in MAMBA:
        kept = (*(kept or ("lm_head",)), *NOT_IN_MAMBA)
    return lora.nf4(DTYPES[recipe.precision], kept)


def cannot_load(what: str, recipe: Recipe, error: Exception) -> str:
    """Return why the model's folder or Hub id cannot be loaded, in a line with the fix."""
    reason, frames = first_line(error), traceback.extract_tb(error.__traceback__)
    if refused := lasting(error) or passing(error):
        return refused
    if frames and frames[-1].filename.endswith("deepspeed/runtime/config.py"):  # zero.Init reads it as the model loads
        return f"deepspeed={recipe.deepspeed}: DeepSpeed refuses this configuration: {reason}"
    if isinstance(error, SafetensorError):
        reason = f"a .safetensors file is damaged or cut off ({reason}); copy or download it again"
    elif isinstance(error, WRONG_VALUES) or type(error) is Exception:
        file = "tokenizer_config.json or tokenizer.json" if what == "tokenizer" else "config.json"
        kind = "" if isinstance(error, StrictDataclassError) else f"{type(error).__name__}: "
        reason = f"its {file} is wrong: {kind}{' '.join(str(error).split())}"
    elif (
        isinstance(error, ArithmeticError | AssertionError | MemoryError)
        or "negative dimension" in reason
        or "allocate" in reason
    ):
        reason = f"the numbers in its config.json make no model ({reason})"
    elif "mismatched_sizes" in reason or "size mismatch" in str(error):  # the second under ZeRO-3, on a line of its own
        named = re.search(r"size mismatch for ([\w.]+)", str(error))
        reason = f"the sizes in its config.json are not those of its weights{f' ({named[1]})' if named else ''}"
    folder = Path(recipe.model.path)
    if folder.is_dir() and not list(folder.glob("*.safetensors")):
        reason = (
            "the folder holds no .safetensors file; pickled weights (.bin, .pt) are not loaded, since they can run code"
        )
    if "trust_remote_code" in str(error):
        reason = "it brings its own Python code; read that code, then add model.trust_remote_code=true"
    if "gated" in str(error):
        reason = "its licence must be accepted on the Hub first; then set HF_TOKEN, or log in with `hf auth login`"
    elif "internet connection" in str(error) or "couldn't connect" in str(error).lower() or "offline" in reason:
        reason = "no network, and not in the cache; download it elsewhere and give its folder as model.path=FOLDER"
    return f"model.path={recipe.model.path}: cannot load the {what}: {reason}"


def whole_shape(weight: torch.nn.Parameter) -> torch.Size:
    """Return a weight's shape: of one that ZeRO-3 has sharded the whole, of a 4-bit one that of the unpacked values."""
    packed = getattr(weight, "quant_state", None)  # bitsandbytes keeps two values in a byte
    return torch.Size(packed.shape if packed is not None else getattr(weight, "ds_shape", weight.shape))


def parameter_counts(model: PreTrainedModel | PeftModel) -> tuple[int, int]:
    """Return the numbers of all and of trainable parameters."""
    counts = [(whole_shape(weight).numel(), weight.requires_grad) for weight in model.parameters()]
    return sum(n for n, _ in counts), sum(n for n, trains in counts if trains)
