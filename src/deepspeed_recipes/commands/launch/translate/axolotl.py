"""Axolotl's training files (`axolotl train FILE.yaml`).

Names and defaults: its src/axolotl/utils/schemas, in the version of July 2026.
"""

import re

from ....recipe.files import Json, JsonView
from ....recipe.overrides import OTHER_TOOLS, key_of, listed
from ....recipe.samples import ROLES
from . import trainer, trl
from .translation import ADAPTERS, KINDS, Translation, as_text, check_types, listed_of, words_of

DEFAULTS: Json = trainer.DEFAULTS | OTHER_TOOLS["axolotl"]["defaults"]
SETS = ("datasets", "test_datasets", "pretraining_dataset")
METHODS = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "simpo", "grpo": "grpo"}
TYPES = (
    *("", "chat_template", "alpaca", "sharegpt", "completion", "pretrain"),
    *("chatml", "llama3", "bradley_terry", "gpteacher"),
)
"""The types of data sets whose examples are in a form that is detected here."""
ENTRY = {
    **dict.fromkeys(("path", "data_files"), (str, list)),
    **dict.fromkeys(("type", "message_property_mappings"), (str, dict)),
    **dict.fromkeys(("field_messages", "field_system", "field_chosen", "field_rejected", "field", "split"), (str,)),
    "roles": (dict,),
}
"""The types of the values of a data set."""
ATTENTION = ("flash_attention_2", "flash_attention_3", "sdpa", "eager", "flex_attention")
LANGUAGE = re.compile(
    r"\^?(model\\?\.)?(language_model|text_model)\b.*\((.*\|)?gate\b.*\bq\b|.*\(up\|down\|gate\|q\|k\|v\|o\)_proj"
)
"""Patterns for all linear layers of the language model in Axolotl's files for models with a vision tower."""


def translate(values: JsonView, gpus: int) -> Translation:
    """Translate the settings of a file for a run on `gpus` GPUs."""
    check_types(values, KINDS)
    for start, entry in (pair for name in SETS for pair in _entries(values, name)):
        check_types(entry, ENTRY, start)
    check_types(values.get("trl") or {}, {"reward_funcs": (str, list)}, "trl.")
    found = Translation("Axolotl", _flat(values), DEFAULTS)
    found.name_model("base_model")
    if found.given("batch_size") and not found.given("gradient_accumulation_steps"):  # of one GPU, there
        micro = trainer.number(found.take("micro_batch_size") or 1, "micro_batch_size")
        found.defaults["gradient_accumulation_steps"] = int(trainer.number(values["batch_size"], "batch_size") // micro)
        found.note("batch_size", "in global_batch_size")
    if found.given("fp16") or found.given("float16"):
        found.defaults["bf16"] = False
    trainer.settings(found, gpus)
    if not {"warmup_steps", "warmup_ratio"} & values.keys():
        found.remarks.append("schedule.warmup: 3 % of the steps, and in Axolotl at most 100 steps")
    _method(found, values)
    _adapter(found)
    _model(found)
    _data(found, values)
    checkpointing = found.take("gradient_checkpointing")
    offloads = checkpointing in ("offload", "offload_disk", "unsloth")
    found.set("gradient_checkpointing", offloads or bool(checkpointing), "gradient_checkpointing")
    if offloads:
        found.set("activation_offloading", True, "gradient_checkpointing")
    found.set_if_given("activation_offloading", "activation_offloading")  # it may be true, legacy or disk
    if found.method in ("sft", "pretrain"):
        streamed = bool(values.get("pretraining_dataset"))  # such texts always fill sequences
        found.set("packing", bool(found.take("sample_packing")) or streamed, "sample_packing")
    elif found.given("sample_packing"):
        found.unneeded["sample_packing"] = f"{found.method} does not pack, there and here"
    found.set_if_given("wandb_log_model", "wandb.artifacts")
    found.finish("axolotl")
    return found


def _flat(values: JsonView) -> Json:
    """Return the settings, with those inside data sets and `trl` under names of their own (`datasets[0].path`)."""
    flat: Json = {}
    for name, value in values.items():
        inside = value if isinstance(value, list) else [value]
        if name in SETS and inside and all(isinstance(entry, dict) for entry in inside):
            flat |= {
                f"{name}[{number}].{key}": one for number, entry in enumerate(inside) for key, one in entry.items()
            }
        elif name == "trl" and isinstance(value, dict):
            flat |= {f"trl.{key}": one for key, one in value.items()}
        else:
            flat[name] = value
    return flat


def _entries(values: JsonView, name: str) -> list[tuple[str, Json]]:
    """Return the data sets of a key, each with the beginning of its keys' names."""
    given = values.get(name)
    listed = given if isinstance(given, list) else [given] if given else []
    return [(f"{name}[{number}].", entry) for number, entry in enumerate(listed) if isinstance(entry, dict)]


def _method(found: Translation, values: JsonView) -> None:
    rl = found.take("rl")
    if found.given("reward_model"):
        found.method = "reward"
        found.note("reward_model", "reward")
    elif isinstance(rl, str) and rl in METHODS:
        found.method = METHODS[rl]
        found.note("rl", found.method)
        if rl == "ipo":
            found.set("dpo.loss", "ipo", "rl")
        beta = found.take("rl_beta", "dpo_beta", "orpo_alpha")
        if found.method != "grpo":
            found.set(f"{found.method}.beta", beta or 0.1, "rl_beta", "dpo_beta", "orpo_alpha")
        if found.method == "simpo":
            found.settle_imitation(values.get("cpo_alpha", 1))
        given = (values.get("trl") or {}) if found.method == "grpo" else {}
        settings = trl.METHODS["grpo"] | given if found.method == "grpo" else {}
        for name, value in settings.items():
            if name == "reward_funcs":
                found.set_rewards("trl.reward_funcs", value)
            elif name == "scale_rewards":
                found.set("grpo.scale", trl.SCALES.get(str(value), value), "trl.scale_rewards")
            elif (key := key_of(name, "grpo")).startswith("grpo.") and value is not None:
                found.set(key, value, f"trl.{name}")
            elif name in given and value not in (None, False):
                found.lack(f"trl.{name}", f"{value}: no such setting of grpo")
    elif rl:
        found.lack("rl", f"{rl}: there are {', '.join(METHODS)}")
    else:
        # Without Axolotl's variants of the types (`chat_template.default`).
        types = [str(entry["type"]) for _, entry in _entries(values, "datasets") if entry.get("type")]
        kinds = {one.partition(".")[0].partition(":")[0] for one in types}
        if values.get("pretraining_dataset") or (kinds and kinds <= {"completion", "pretrain"}):
            found.method = "pretrain"


def _adapter(found: Translation) -> None:
    kind = found.take("adapter")
    bits = bool(found.take("load_in_4bit"))
    if kind in ("lora", "qlora"):
        found.adapter = "dora" if found.given("peft_use_dora") else "qlora" if kind == "qlora" or bits else "lora"
        if kind == "qlora" or bits:
            found.set("model.quantization", "nf4", "load_in_4bit" if "load_in_4bit" in found.values else "adapter")
        found.note("adapter", found.adapter)
        trainer.adapters(found)
        for key in ("dora", "rslora"):
            found.set_if_given(f"peft_use_{key}", f"lora.{key}")
        targets, linear = found.take("lora_target_modules"), found.take("lora_target_linear")
        name = "lora_target_linear" if linear else "lora_target_modules"
        if isinstance(targets, str) and not targets.replace("_", "").isalnum() and not linear:
            if LANGUAGE.match(targets):
                found.set("lora.target_modules", "all-linear", "lora_target_modules")
                found.note("lora_target_modules", "without the vision tower, unless model.train_vision=true")
            else:
                found.lack("lora_target_modules", "a pattern: name the modules with lora.target_modules=a,b")
        else:
            if outside := [name for name in words_of(targets) if re.search("emb|head|wte|wpe", name)] if linear else []:
                found.lack("lora_target_modules", f"all-linear has no {', '.join(outside)}; name all modules")
            elif linear and targets:
                found.note("lora_target_modules", "all-linear has them")
            found.set("lora.target_modules", "all-linear" if linear or not targets else targets, name)
        if found.values.get("peft_init_lora_weights") == "pissa":
            found.set("lora.init", "pissa", "peft_init_lora_weights")
        return
    if kind:
        found.lack("adapter", f"{kind}: adapters are LoRA or DoRA")
    if patterns := found.take("unfrozen_parameters"):
        if any("[" in str(one) for one in listed_of(patterns)):
            found.lack("unfrozen_parameters", "rows of a weight cannot be chosen; train=REGEX chooses whole weights")
        else:
            found.set("train", "|".join(f"^(?:{one})" for one in listed_of(patterns)), "unfrozen_parameters")
    if found.given("load_in_4bit"):
        found.lack("load_in_4bit", "4-bit weights are frozen: train adapters (adapter: qlora)")
    found.need_none((*ADAPTERS, "lora_target_linear"), "no adapter is set: all weights are trained")


def _model(found: Translation) -> None:
    tokens = found.take("special_tokens") or {}
    if not isinstance(tokens, dict):
        found.lack("special_tokens", f"{as_text(tokens)}: names no tokens")
        tokens = {}
    found.add_tokens(("tokens", found.take("tokens")), ("special_tokens", tokens.get("additional_special_tokens")))
    if named := set(tokens) - {"additional_special_tokens"}:
        found.note("special_tokens", "the tokenizer's own")
        if named - {"pad_token"}:
            found.remarks.append(
                "special_tokens: if they differ from the tokenizer's own, save a tokenizer that has them"
            )
    config, tokenizer = found.take("base_model_config"), found.take("tokenizer_config")
    for name, value in (("base_model_config", config), ("tokenizer_config", tokenizer)):
        if value == found.model:
            found.note(name, "the model's own")
        elif value:
            found.lack(name, f"{value}: the model's folder has its own; copy the file into it")
    template = str(found.take("chat_template") or "tokenizer_default")
    if template == "chatml":
        found.set("model.chat_template", "chatml", "chat_template")
    elif template == "jinja" or found.given("chat_template_jinja"):
        found.lack("chat_template_jinja", "save it as a file, and give model.chat_template=FILE")
    elif "chat_template" in found.values:
        found.note("chat_template", "the tokenizer's own chat template (model.chat_template=FILE sets another)")
    attention = found.take("attn_implementation")
    if attention in ATTENTION or str(attention).startswith("kernels-community/"):
        found.set("model.attention", attention, "attn_implementation")
    elif attention:
        found.lack("attn_implementation", f"{attention}: model.attention=auto takes the fastest that is right")
    for name in ("sdp_attention", "flex_attention", "xformers_attention", "eager_attention"):
        if found.given(name):
            found.note(name, "model.attention=auto")
    liger = [name for name in found.values if name.startswith("liger_") and found.given(name)]
    if liger:
        found.set("liger_kernel", True, *liger)
    given = found.values.get("plugins") or []
    plugins = [str(one) for one in (given if isinstance(given, list) else [given])]
    ours = [one for one in plugins if "liger" in one.lower() or "cut_cross_entropy" in one.lower()]
    if plugins and len(ours) == len(plugins):
        found.note("plugins", "liger_kernel=true" if liger else "tiled_loss holds no whole logits")
        if found.given("cut_cross_entropy"):
            found.note("cut_cross_entropy", "tiled_loss holds no whole logits")
    elif plugins:
        found.lack(
            "plugins", f"{', '.join(one.rpartition('.')[2] for one in plugins if one not in ours)}: not available"
        )


def _data(found: Translation, values: JsonView) -> None:
    found.rename("sequence_length", "sequence_len")
    if found.take("excess_length_strategy") == "truncate":
        found.set("truncate", True, "excess_length_strategy")
    else:
        found.remarks.append("sequence_len: longer examples are left out and counted, as in Axolotl")
        if "excess_length_strategy" in found.values:
            found.note("excess_length_strategy", "longer examples are left out")
    if found.given("train_on_inputs"):
        if found.method == "sft":
            found.set("loss_on", "all", "train_on_inputs")
        else:
            found.unneeded["train_on_inputs"] = f"{found.method} decides what is learned, there and here"
    for name in SETS:
        if found.given(name):  # not a list of data sets
            if name == "pretraining_dataset" and isinstance(values[name], str):
                found.set("data.path", values[name], name)
            else:
                found.lack(name, "data sets without a path; give data.path=FILE")
    learned = _entries(values, "datasets") or _entries(values, "pretraining_dataset")
    _sources(found, "data.path", learned)
    _sources(found, "data.validation", _entries(values, "test_datasets"))
    _fields(found, [*learned, *_entries(values, "test_datasets")])
    if values.get("pretraining_dataset"):
        found.set("data.streaming", True, "pretraining_dataset")
    trainer.held_out_share(found, "val_set_size")


def _sources(found: Translation, key: str, entries: list[tuple[str, Json]]) -> None:
    """Translate the paths and splits of data sets."""
    paths, used = [], []
    for start, entry in entries:
        in_files = entry.get("path") in ("json", "csv", "parquet", "text") and entry.get("data_files")
        if not (path := entry["data_files"] if in_files else entry.get("path")):
            found.lack(f"{start}path", f"no path; give {key}=FILE")
            continue
        paths.append(as_text(path))
        used += [f"{start}path", f"{start}data_files"] if in_files else [f"{start}path"]
        split = str(entry.get("split") or "train")
        first = re.fullmatch(r"(\w+)\[:(\d{1,18})\]", split)
        if split == "train":
            if "split" in entry:
                found.note(f"{start}split", "the whole source")
        elif key == "data.path" and len(entries) == 1 and (first or "[" not in split):
            found.set("data.split", first[1] if first else split, f"{start}split")
            if first:
                found.set("data.max_examples", first[2], f"{start}split")
                found.remarks.append(f"datasets: {split}: as many examples, drawn with the seed instead of the first")
        else:
            found.lack(f"{start}split", f"save it as a file, and give {key}=FILE; data.max_examples=N takes fewer")
    if paths:
        found.set(key, ",".join(paths), *used)


def _fields(found: Translation, entries: list[tuple[str, Json]]) -> None:
    """Translate the names of columns, of the fields of turns and of roles, and the types of data sets."""
    renamed, roles = dict[str, str](), dict[str, str]()
    for start, entry in entries:
        kind = entry.get("type")
        if isinstance(kind, dict):
            found.lack(f"{start}type", "a format of its own; rename the columns (data.columns), or write messages")
        elif str(kind or "").partition(".")[0].partition(":")[0] not in TYPES:
            found.lack(f"{start}type", "write messages, or rename the columns with data.columns")
        elif kind:
            found.note(f"{start}type", "detected from the examples")
            if str(kind).startswith(("alpaca", "gpteacher")):
                found.remarks.append(
                    f'{start}type: {kind}: Axolotl writes prompts in words of its own ("### Instruction:"), and this '
                    "project in the model's chat template"
                )
        # ShareGPT's names for turns (`from`, `value`), or OpenAI's (`role`, `content`).
        mapping = entry.get("message_property_mappings") or {}
        role = entry.get("message_field_role") or (mapping.get("role") if isinstance(mapping, dict) else None)
        for theirs, field in (
            ("field_messages", "conversations" if role == "from" else "messages"),
            ("field_system", "system"),
            ("field_chosen", "chosen"),
            ("field_rejected", "rejected"),
            ("field", "text"),
            ("text_column", "text"),
        ):
            if not entry.get(theirs):
                continue
            if entry[theirs] in (field, "messages", "conversations"):
                found.note(f"{start}{theirs}", "the same here")
            else:
                found.note(f"{start}{theirs}", f"data.columns={entry[theirs]}:{field}")
                found.rename_column(f"{start}{theirs}", renamed, entry[theirs], field)
        for name in ("message_property_mappings", "message_field_role", "message_field_content"):
            if not entry.get(name):
                continue
            part = {"message_field_role": "role", "message_field_content": "content"}.get(name)
            pairs = {part: entry[name]} if part else entry[name]
            known = {"role": ("role", "from"), "content": ("content", "value")}
            own = {"": name}
            if isinstance(pairs, dict):
                own = {str(own): field for field, own in pairs.items() if own not in known.get(field, (field,))}
            if {*own.values()} <= known.keys():
                renamed |= own
                found.note(f"{start}{name}", "data.columns" if own else "the same here")
            else:
                found.lack(f"{start}{name}", "only role and content are renamed; data.transform=FILE.py:FUNCTION can")
        if entry.get("roles"):
            named = {
                str(word): role
                for role, words in entry["roles"].items()
                for word in listed_of(words)
                if ROLES.get(str(word).lower()) != role
            }
            roles |= named
            found.note(f"{start}roles", "data.roles" if named else "the same here")
        for key, usual in (
            ("roles_to_train", (["assistant"], ["gpt"])),
            ("train_on_eos", ("turn",)),
            ("chat_template", ("tokenizer_default", found.values.get("chat_template"))),
        ):
            if entry.get(key) is None:
                continue
            if key == "roles_to_train" and found.given("train_on_inputs"):
                found.lack(f"{start}{key}", "train_on_inputs became loss_on=all, which is for all sources")
            elif entry[key] in usual:
                found.note(f"{start}{key}", "the same here")
            else:
                found.lack(f"{start}{key}", listed(key, OTHER_TOOLS["axolotl_dataset"]["missing"]) or "")
    if roles:
        found.set("data.roles", ",".join(f"{word}:{role}" for word, role in roles.items()))
    if renamed:
        found.set("data.columns", ",".join(f"{column}:{field}" for column, field in renamed.items()))
        if len(entries) > 1:
            found.remarks.append("data.columns renames the columns of every source that has them")
            found.note_shared_names(renamed, [[*map(str, entry.values())] for _, entry in entries])
    found.by_default -= {"data.roles", "data.columns"}
