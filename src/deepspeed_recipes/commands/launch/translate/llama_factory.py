"""LLaMA-Factory's training files (`llamafactory-cli train FILE.yaml`).

Names and defaults: its src/llamafactory/hparams and data/README.md, in the version of October 2026.
"""

from pathlib import Path

from ....recipe.errors import UserError
from ....recipe.files import JsonView
from ....recipe.overrides import OTHER_TOOLS
from ....recipe.run_folder import read_json
from ....recipe.samples import ROLES
from ....training.data import text_files
from . import trainer
from .translation import ADAPTERS, Translation, check_types, words_of

DEFAULTS = trainer.DEFAULTS | OTHER_TOOLS["llama_factory"]["defaults"]
METHODS = {"pt": "pretrain", "sft": "sft", "rm": "reward", "kto": "kto"}
OTHER_FIELDS = ("label", "history", "system", "tools", "chosen", "rejected")
ENTRY = (
    *(
        "file_name",
        "hf_hub_url",
        "ms_hub_url",
        "om_hub_url",
        "script_url",
        "cloud_file_name",
        "file_sha1",
        "formatting",
    ),
    *("ranking", "subset", "split", "folder", "num_samples", "columns", "tags"),
)
"""The keys of a data set in dataset_info.json."""
TYPES = {**dict.fromkeys(("columns", "tags"), (dict,)), **dict.fromkeys(("file_name", "hf_hub_url", "split"), (str,))}
TAGS = {role: role for role in ("user", "assistant", "system")} | {"observation": "tool", "function": "function_call"}
"""Our roles by those of its tags."""
PACKED = "documents never attend to each other here, as with neat_packing"


def translate(values: JsonView, gpus: int, place: Path) -> Translation:
    """Translate the settings of a file for a run on `gpus` GPUs; `dataset_dir` is in the current folder or `place`."""
    found = Translation("LLaMA-Factory", values, DEFAULTS)
    if "do_train" in values and not values["do_train"]:
        raise UserError("do_train: false: this file does not train; use ds-recipes evaluate or generate.")
    for name, instead in (("export_dir", "export RUN --merge"), ("infer_backend", "generate or serve")):
        if name in values and not {"stage", "dataset"} & values.keys():
            raise UserError(f"{name}: this file does not train; use ds-recipes {instead}.")
    found.name_model("model_name_or_path")
    trainer.settings(found, gpus)
    if found.given("use_muon"):
        found.set("optimizer", "muon", "use_muon")
        found.overrides["max_grad_norm"] = "0"
    _method(found)
    _model(found)
    _data(found, place)
    if found.method in ("sft", "pretrain"):
        packed = found.given("neat_packing") or found.values.get("packing")  # the first one implies the other
        usual = found.method == "pretrain" and packed is None
        names = [name for name in ("packing", "neat_packing") if name == "packing" or found.given(name)]
        found.set("packing", bool(packed) or usual, *names)
        if found.given("packing") and not found.given("neat_packing"):
            found.remarks.append(f"packing: {PACKED}")
    elif found.given("packing"):
        found.unneeded["packing"] = f"{found.method} does not pack, there and here"
    if found.overrides["precision"] == "fp32":
        found.remarks.append(
            "precision: without bf16 and fp16, LLaMA-Factory computes in the dtype of the model's files; "
            "if that is bf16, give precision=bf16"
        )
    off = found.take("disable_gradient_checkpointing") or values.get("gradient_checkpointing") is False
    found.set("gradient_checkpointing", not off, "disable_gradient_checkpointing", "gradient_checkpointing")
    found.finish("llama_factory")
    return found


def _method(found: Translation) -> None:
    stage, loss = str(found.take("stage")), str(found.take("pref_loss"))
    if stage == "dpo":
        found.method = loss if loss in ("orpo", "simpo") else "dpo"
        if loss not in ("orpo", "simpo", "sigmoid"):
            if loss in ("hinge", "ipo"):
                found.set("dpo.loss", loss, "pref_loss")
            else:
                found.lack("pref_loss", f"{loss}: there are sigmoid, hinge, ipo, orpo and simpo")
        elif found.given("pref_loss"):
            found.note("pref_loss", found.method)
    elif stage in METHODS:
        found.method = METHODS[stage]
    else:
        raise UserError(f"stage: {stage}: not available; there are pt, sft, rm, dpo and kto, and grpo in place of ppo.")
    found.note("stage", found.method)
    if found.method in ("dpo", "kto", "orpo", "simpo"):
        found.rename(f"{found.method}.beta", "pref_beta")
    if found.method == "simpo":
        found.rename("simpo.gamma")
    kind = str(found.take("finetuning_type"))
    if kind == "lora":
        bits = found.take("quantization_bit")
        found.adapter = "dora" if found.given("use_dora") else "qlora" if bits == 4 else "lora"
        method = found.values.get("quantization_method")
        if found.given("quantization_method") and method not in ("bnb", "bitsandbytes"):
            found.lack("quantization_method", f"{method}: base weights are in bitsandbytes' 4 bits (nf4) or whole")
        if bits == 4:
            found.set("model.quantization", "nf4", "quantization_bit")
        elif bits:
            found.lack("quantization_bit", f"{bits}: base weights are in 4 bits (nf4) or whole")
        found.defaults["lora_alpha"] = int(2 * trainer.number(found.take("lora_rank"), "lora_rank"))
        trainer.adapters(found)
        targets = words_of(found.take("lora_target"))
        found.set("lora.target_modules", "all-linear" if targets == ["all"] else targets, "lora_target")
        found.set_if_given("pissa_init", "lora.init", "pissa")
        found.note("finetuning_type", found.adapter)
    elif kind == "full":
        found.note("finetuning_type", "all weights")
        if found.given("quantization_bit"):
            found.lack("quantization_bit", "4-bit weights are frozen: train adapters (finetuning_type: lora)")
    elif kind == "freeze":
        _frozen(found)
    else:
        found.lack("finetuning_type", f"{kind}: all weights are trained, or adapters (lora)")
    if not found.adapter:
        found.need_none((*ADAPTERS, "loraplus_lr_embedding"), "there are no adapters")


def _frozen(found: Translation) -> None:
    """Translate the layers that `finetuning_type: freeze` trains, where their numbers do not depend on the model."""
    layers, modules = found.take("freeze_trainable_layers"), found.take("freeze_trainable_modules") or "all"
    layers = 2 if layers is None else layers
    names = words_of(modules)
    inside = "" if names == ["all"] else rf".*\b({'|'.join(names)})\b"
    if trainer.number(layers, "freeze_trainable_layers") < 0:  # the first ones
        count = abs(int(layers))
        pattern = rf"layers\.({'|'.join(map(str, range(count)))})\.{inside}"
        more = words_of(found.take("freeze_extra_modules"))
        sources = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
        found.set("train", "|".join([pattern, *(rf"\b{name}\b" for name in more)]), *sources)
        found.note("finetuning_type", "the weights that train matches")
    else:
        found.lack(
            "finetuning_type",
            f"freeze: write the numbers of the last {layers} layers, for example train='layers\\.(30|31)\\.' of 32",
        )


def _model(found: Translation) -> None:
    why = "transformers has the usual architectures itself; add model.trust_remote_code=true if yours needs it"
    found.need_none(["trust_remote_code"], why)
    template = found.take("template")
    if template == "chatml":
        found.set("model.chat_template", "chatml", "template")
    elif template in ("default", "empty", "fewshot", "alpaca", "vicuna"):
        found.lack("template", f"{template}: save it as a Jinja file, and give model.chat_template=FILE")
    elif template:
        found.note("template", "the tokenizer's own chat template (model.chat_template=FILE sets another)")
    attention = str(found.take("flash_attn") or "auto")
    kinds = {
        "fa2": "flash_attention_2",
        "fa3": "flash_attention_3",
        "sdpa": "sdpa",
        "disabled": "eager",
        "auto": "auto",
    }
    found.set("model.attention", kinds.get(attention, "auto"), "flash_attn")
    found.add_tokens(*((name, found.take(name)) for name in ("add_tokens", "add_special_tokens")))
    vision = found.take("freeze_vision_tower")
    if vision is False:
        found.set("model.train_vision", True, "freeze_vision_tower")
    elif vision:
        found.note("freeze_vision_tower", "as always, unless model.train_vision=true")
    if found.given("freeze_multi_modal_projector"):
        found.note("freeze_multi_modal_projector", "as always, unless model.train_vision=true")


def _data(found: Translation, place: Path) -> None:
    found.rename("sequence_length", "cutoff_len")
    if found.method == "sft" and not (found.given("packing") or found.given("neat_packing")):
        found.set("truncate", True, "cutoff_len")  # packed, longer examples are left out there too
    elif found.method != "pretrain":
        found.remarks.append("cutoff_len: longer examples are left out and counted, not cut")
    if found.given("train_on_prompt") and found.given("mask_history"):
        found.lack("mask_history", "with train_on_prompt: loss_on is all or last")
    folder = Path(str(found.take("dataset_dir")))
    if "dataset_dir" in found.values:
        found.unneeded["dataset_dir"] = "data.path names the files"
    known = next((base for base in (folder, place / folder) if (base / "dataset_info.json").is_file()), None)
    renamed, roles = dict[str, str](), dict[str, str]()  # of both: data.columns and data.roles change them alike
    for name, key in (("dataset", "data.path"), ("eval_dataset", "data.validation")):
        named = found.take(name)
        if not named:
            continue
        words = [str(word).strip() for word in (named.split(",") if isinstance(named, str) else named)]
        if known is None:
            found.lack(name, f"{folder}/dataset_info.json is not here; give {key}=FILE")
        else:
            _sources(found, name, key, known, words, renamed, roles)
    trainer.held_out_share(found, "val_size")
    if found.values.get("enable_thinking") is False and found.method == "sft":
        found.set("data.thinking", "strip", "enable_thinking")
    if found.given("max_samples") and "," in str(found.values.get("dataset", "")):
        found.remarks.append("max_samples: the number is of all data sets together, not of each")


def _unlisted(file: Path, columns: JsonView, sharegpt: bool) -> list[str]:
    """Return the fields of a file's first example that we read, and LLaMA-Factory only if they are listed."""
    try:
        first = next((example for _, example in text_files.read(file)), {})
    except (UserError, OSError):  # which the launcher reports
        return []
    listed = {"history": "history", "system": "system"} | ({"input": "query"} if columns else {})
    listed = {"system": "system", "tools": "tools"} if sharegpt else listed
    return [field for field, theirs in listed.items() if first.get(field) and theirs not in columns]


def _sources(
    found: Translation,
    name: str,
    key: str,
    folder: Path,
    words: list[str],
    renamed: dict[str, str],
    roles: dict[str, str],
) -> None:
    """Find the files and columns of the data sets named in dataset_info.json; adds to `renamed` and `roles`."""
    listed = read_json(folder / "dataset_info.json")
    paths, before = [], (dict(renamed), dict(roles))
    for word in words:
        if word not in listed:
            found.lack(f"{name}: {word}", f"not in {folder / 'dataset_info.json'}; give {key}=FILE")
            continue
        entry = listed[word]
        check_types(listed, {word: (dict,)}, "dataset_info.json: ")
        check_types(entry, TYPES, f"dataset_info.json: {word}.")
        paths.append(str(folder / entry["file_name"]) if "file_name" in entry else str(entry.get("hf_hub_url", word)))
        columns = entry.get("columns", {})
        asked = [one for one in ("subset", "num_samples", "folder", "script_url") if entry.get(one)]
        problems = [f"{one}: {entry[one]} cannot be asked for; give a file or folder" for one in asked]
        if not entry.keys() & {"file_name", "hf_hub_url"}:
            problems.append("neither a file nor a data set on the Hub")
        split = str(entry.get("split") or "train")
        if split != "train" and key == "data.path" and len(words) == 1 and "[" not in split:
            found.set("data.split", split, name)
        elif split != "train":
            problems.append(f"split: {split} cannot be asked for here; give a file")
        if unread := sorted(entry.keys() - set(ENTRY)):
            found.remarks.append(f"dataset_info.json: {word}: not read: {', '.join(unread)}")
        problems += [f"{kind} are not read" for kind in ("videos", "audios") if columns.get(kind)]
        if "file_name" in entry and found.method != "pretrain":
            sharegpt = entry.get("formatting", "alpaca") != "alpaca"
            for field in _unlisted(folder / str(entry["file_name"]), columns, sharegpt):
                problems.append(f"{field} is in the file and not in its columns, so it would be read here alone")
        if problems:
            found.lack(f"{name}: {word}", "; ".join(problems))
        usual = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
        if found.method == "pretrain":
            usual["prompt"] = "text"
        if entry.get("formatting") == "sharegpt" and entry.get("tags", {}).get("role_tag") == "role":
            usual["messages"] = "messages"
        for theirs, role in TAGS.items():
            tag = str(entry.get("tags", {}).get(f"{theirs}_tag") or role)
            if ROLES.get(tag.lower()) != ROLES[role]:
                roles[tag] = role
        for field, common in (("role", ("role", "from")), ("content", ("content", "value"))):
            if (tag := entry.get("tags", {}).get(f"{field}_tag")) and tag not in common:
                renamed[str(tag)] = field
        for theirs, column in columns.items():
            field = usual.get(theirs, {"kto_tag": "label"}.get(theirs, theirs))
            if column != field and field in (*usual.values(), *OTHER_FIELDS):
                found.rename_column(f"{name}.columns", renamed, column, field)
    if "dataset_dir" in found.values:
        found.unneeded.pop("dataset_dir", None)
        found.note("dataset_dir", key)
    if paths:
        found.set(key, ",".join(paths), name)
    if roles != before[1]:
        found.set("data.roles", ",".join(f"{word}:{role}" for word, role in roles.items()), name)
    if renamed != before[0]:
        found.set("data.columns", ",".join(f"{column}:{field}" for column, field in renamed.items()), name)
        named = [listed[word].get("columns", {}).values() for word in words if word in listed]
        found.note_shared_names(renamed, named)
