"""Axolotl's training files (`axolotl train FILE.yaml`).

Names and defaults: its src/axolotl/utils/schemas, in the version of July 2026.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import trainer
from .translation import Translation, as_text, choose

DEFAULTS: dict[str, Any] = trainer.DEFAULTS | {
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.03,
    "sequence_len": 512,
    "val_set_size": 0.0,
    "lora_r": 8,
    "lora_alpha": 16,
}
LORA = {
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "dora": "peft_use_dora",
    "rslora": "peft_use_rslora",
}
METHODS = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "simpo", "grpo": "grpo"}
ATTENTION = ("flash_attention_2", "flash_attention_3", "sdpa", "eager", "flex_attention")
LANGUAGE = re.compile(
    r"\^?(model\\?\.)?(language_model|text_model)\b.*\((.*\|)?gate\b.*\bq\b|.*\(up\|down\|gate\|q\|k\|v\|o\)_proj"
)
"""Patterns for all linear layers of the language model in Axolotl's files for models with a vision tower."""
UNNEEDED = trainer.UNNEEDED | {
    "strict": "every key of a recipe is checked",
    "model_type": "config.json names the class",
    "tokenizer_type": "tokenizer_config.json names the class",
    "tokenizer_use_fast": "always on",
    "tokenizer_legacy": "the tokenizer's own setting",
    "processor_type": "preprocessor_config.json names the class",
    "is_llama_derived_model": "config.json names the class",
    "dataset_prepared_path": "tokens are kept in the cache and found again",
    "dataset_processes": "chosen from the machine's cores",
    "push_dataset_to_hub": "data is not uploaded",
    "skip_prepare_dataset": "images are read while training, as always",
    "shuffle_merged_datasets": "the data is always shuffled with the run's seed",
    "pad_to_sequence_len": "packed sequences are full, and others are padded as far as needed",
    "eval_sample_packing": "the evaluation packs as the training does",
    "wandb_name": "a run is named after its recipe; wandb.group and wandb.tags can be set",
    "wandb_run_id": "a run keeps its id over restarts",
    "eot_tokens": "the end tokens that the chat template writes are learned",
    "lora_mlp_kernel": "lora.fused=true is this project's fused adapter",
    "lora_qkv_kernel": "lora.fused=true is this project's fused adapter",
    "lora_o_kernel": "lora.fused=true is this project's fused adapter",
    "lora_fan_in_fan_out": "found from the layer",
    "loss_watchdog_*": "on_spike=stop stops at a spike",
    "flash_attn_*": "kernels do not change what is trained",
    "flash_attention": "model.attention is chosen from what is installed, and tried on a draft",
    "flex_attn_compile_kwargs": "chosen here",
    "torch_compile_backend": "Inductor compiles",
    "save_first_step": "the export is tried before the first step",
    "debug": "ds-recipes launch --draft tries a run",
    "experimental_skip_move_to_device": "DeepSpeed moves the model",
    "low_cpu_mem_usage": "always on: no rank holds a second copy",
    "device_map": "DeepSpeed places the model",
    "accelerator_config": "DeepSpeed accumulates",
    "hf_use_auth_token": "the Hub's own login is used",
    "dp_shard_size": "what the layout leaves is data parallel",
    "include_tkps": "every logged step has its tokens per second",
    "torchdistx_path": "not used",
    "gptq_*": "belongs to gptq",
    "output_router_logits": "router_aux_loss_coef decides",
    "roles": "roles are recognised in every form",
}
YOURS = trainer.YOURS | {
    "batch_size": "global_batch_size is micro_batch_size x gradient_accumulation_steps x GPUs",
    "evals_per_epoch": "give eval_steps=N",
    "saves_per_epoch": "give save_steps=N",
    "swanlab_*": "there are wandb, tensorboard, mlflow and trackio",
    "use_swanlab": "there are wandb, tensorboard, mlflow and trackio",
    "trackio_*": "give tracking=trackio",
    "comet_*": "there are wandb, tensorboard, mlflow and trackio",
    "use_tensorboard": "give tracking=wandb,tensorboard",
    "use_mlflow": "give tracking=mlflow",
    "mlflow_*": "give tracking=mlflow",
    "wandb_mode": "give wandb.mode=offline",
    "wandb_watch": "give layer_stats=true, which logs every layer",
    "dp_replicate_size": "give deepspeed=zero3_hpz.json, which shards within a node",
}
MISSING = trainer.MISSING | {
    "load_in_8bit": "base weights are in 4 bits (qlora) or whole (lora)",
    "gptq": "quantised bases are refused; take the model's own weights",
    "lora_modules_to_save": "embeddings and head are not trained beside adapters",
    "lora_model_dir": "merge it first (`ds-recipes export --merge`), and train on the result",
    "tokens": "no tokens are added",
    "added_tokens_overrides": "no tokens are added",
    "resize_token_embeddings_to_32x": "no tokens are added",
    "unfrozen_parameters": "layers cannot be frozen; lora.target_modules chooses what adapters change",
    "train_on_inputs": "only answers are learned; data of plain text trains on everything (pretrain)",
    "plugins": "no code of another tool is run",
    "cosine_min_lr_ratio": "cosine falls to zero",
    "cosine_constant_lr_ratio": "cosine falls to zero",
    "eta_min": "cosine falls to zero",
    "adam_eps": "give adam_epsilon",
    "model_config": "the model's own config.json decides",
    "tokenizer_use_mistral_common": "the tokenizer is transformers'",
    "min_sample_len": "short examples are kept",
    "dataset_exact_deduplication": "copies are counted and kept",
    "revision_of_model": "download that revision, and give its folder",
    "reinit_weights": "a run starts from the model's weights",
    "lr_quadratic_warmup": "the warm-up is linear",
    "qat": "export --quantize quantises the finished model",
    "quantize_moe_experts": "experts are whole",
    "model_quantization_config*": "weights are loaded as config.json stores them",
    "bnb_config_kwargs": "4 bits are nf4 with double quantisation",
    "pretraining_dataset": "give data.path=FILE data.streaming=true",
    "test_datasets": "give data.validation=FILE",
    "num_labels": "a reward model has one output; classify counts the classes in the data",
    "noisy_embedding_alpha": "give neftune_alpha",
    "dpo_use_weighting": "every pair counts the same",
    "rl_adapter_ref_model": "the reference is the model as it was before the run",
    "reward_model": "the chat template of the base is used",
    "trl": "see the keys inside",
    "ebft": "not available",
    "llama4_linearized_experts": "experts are loaded as transformers has them",
    "experts_implementation": "experts are loaded as transformers has them",
    "use_kernels": "kernels of the Hub are not loaded",
    "use_scattermoe": "experts are loaded as transformers has them",
    "use_sonicmoe": "experts are loaded as transformers has them",
    "cut_cross_entropy": "tiled_loss=true never holds whole logits",
    "peft_*": "adapters are LoRA or DoRA on whole layers",
    "relora*": "adapters are merged once, at the end",
    "s2_attention": "attention is exact",
}


def is_one(values: Mapping[str, Any]) -> bool:
    """Return True if a file is Axolotl's."""
    return "base_model" in values


def translate(values: Mapping[str, Any], gpus: int, place: Path) -> Translation:
    """Translate the settings of a file; the arguments are those of `llama_factory.translate`.

    Raises:
        UserError: a value of the wrong kind.
    """
    found = Translation("Axolotl", values, DEFAULTS)
    found.model = str(found.take("base_model"))
    found.note("base_model", "the model")
    trainer.settings(found, gpus)
    _method(found)
    _adapter(found)
    _model(found)
    _data(found)
    _checkpointing(found)
    found.set("packing", bool(found.take("sample_packing")), "sample_packing")
    for name, key in (
        ("tensor_parallel_size", "layout.tensor"),
        ("context_parallel_size", "layout.sequence"),
        ("sequence_parallel_degree", "layout.sequence"),
        ("expert_parallel_size", "layout.expert"),
    ):
        if found.given(name):
            found.rename(name, key)
    for name, key in (("wandb_project", "wandb.project"), ("wandb_entity", "wandb.entity")):
        if found.given(name):
            found.rename(name, key)
    if found.given("wandb_log_model"):
        found.take("wandb_log_model")
        found.set("wandb.artifacts", True, "wandb_log_model")
    found.finish(UNNEEDED, YOURS, MISSING)
    return found


def _method(found: Translation) -> None:
    rl = found.take("rl")
    if found.given("reward_model"):
        found.take("reward_model")
        found.method = "reward"
        found.note("reward_model", "reward")
    elif rl in METHODS:
        found.method = METHODS[rl]
        found.note("rl", found.method)
        if rl == "ipo":
            found.set("dpo.loss", "ipo", "rl")
        beta = found.take("rl_beta", "dpo_beta", "orpo_alpha")
        if found.method != "grpo":
            found.set(f"{found.method}.beta", beta or 0.1, "rl_beta", "dpo_beta", "orpo_alpha")
        if found.method == "simpo" and found.given("simpo_gamma"):
            found.rename("simpo_gamma", "simpo.gamma")
        for name, key in (("kto_desirable_weight", "kto.good_weight"), ("kto_undesirable_weight", "kto.bad_weight")):
            if found.given(name):
                found.rename(name, key)
        if found.method == "grpo":
            _grpo(found)
    elif rl:
        found.lack("rl", f"{rl}: there are {', '.join(METHODS)}")
    elif _kinds(found) <= {"completion", "pretrain"} and _kinds(found):
        found.method = "pretrain"


def _grpo(found: Translation) -> None:
    settings = found.take("trl") or {}
    names = {
        "beta": "grpo.beta",
        "num_generations": "grpo.group_size",
        "max_completion_length": "grpo.max_new_tokens",
        "temperature": "grpo.temperature",
        "reward_weights": "grpo.reward_weights",
        "reward_funcs": "reward",
        "epsilon": "grpo.epsilon",
        "epsilon_high": "grpo.epsilon_high",
        "num_iterations": "grpo.iterations",
        "loss_type": "grpo.loss",
        "mask_truncated_completions": "grpo.mask_truncated",
    }
    for name, value in settings.items():
        if name == "reward_funcs":
            files = [
                f"{module.replace('.', '/')}.py:{function}"
                for module, _, function in (one.rpartition(".") for one in value)
            ]
            found.set("reward", files, "trl")
        elif name in names and value is not None:
            found.set(names[name], value, "trl")
        elif value not in (None, False):
            found.lack(f"trl.{name}", f"{value}: no such setting of grpo")


def _adapter(found: Translation) -> None:
    kind = found.take("adapter")
    bits = bool(found.take("load_in_4bit"))
    if kind in ("lora", "qlora"):
        found.adapter = choose(
            [(bool(found.given("peft_use_dora")), "dora"), (kind == "qlora" or bits, "qlora")], "lora"
        )
        if kind == "qlora" or bits:
            found.set("model.quantization", "nf4", "load_in_4bit" if "load_in_4bit" in found.values else "adapter")
        found.note("adapter", found.adapter)
        trainer.adapters(found, LORA)
        targets, linear = found.take("lora_target_modules"), found.take("lora_target_linear")
        name = "lora_target_linear" if linear else "lora_target_modules"
        if isinstance(targets, str) and not targets.replace("_", "").isalnum() and not linear:
            if LANGUAGE.match(targets):
                found.set("lora.target_modules", "all-linear", "lora_target_modules")
                found.note("lora_target_modules", "without the vision tower, unless model.train_vision=true")
            else:
                found.lack("lora_target_modules", "a pattern: name the modules with lora.target_modules=a,b")
        else:
            if linear and targets:
                found.note("lora_target_modules", "all-linear has them")
            found.set("lora.target_modules", "all-linear" if linear or not targets else targets, name)
        if found.given("lora_target_parameters"):
            found.rename("lora_target_parameters", "lora.target_parameters")
        if found.values.get("peft_init_lora_weights") == "pissa":
            found.take("peft_init_lora_weights")
            found.set("lora.init", "pissa", "peft_init_lora_weights")
        return
    if kind:
        found.lack("adapter", f"{kind}: adapters are LoRA or DoRA")
    for name in (*LORA.values(), "lora_target_modules", "lora_target_linear", "lora_target_parameters"):
        if found.given(name):
            found.take(name)
            found.unneeded[name] = "no adapter is set: all weights are trained"


def _model(found: Translation) -> None:
    if found.given("trust_remote_code"):
        found.rename("trust_remote_code", "model.trust_remote_code")
    if tokens := found.take("special_tokens"):
        found.note("special_tokens", "the tokenizer's own")
        if set(tokens) - {"pad_token"}:
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
        found.take("chat_template_jinja")
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
            found.take(name)
            found.note(name, "model.attention=auto")
    liger = [name for name in found.values if name.startswith("liger_") and found.given(name)]
    if liger:
        found.set("liger_kernel", True, *liger)
    plugins = [str(one) for one in found.values.get("plugins") or []]
    ours = [one for one in plugins if "liger" in one.lower() or "cut_cross_entropy" in one.lower()]
    if plugins and len(ours) == len(plugins):
        found.take("plugins")
        found.note("plugins", "liger_kernel=true" if liger else "tiled_loss holds no whole logits")
        if found.given("cut_cross_entropy"):
            found.take("cut_cross_entropy")
            found.note("cut_cross_entropy", "tiled_loss holds no whole logits")
    elif plugins:
        found.lack(
            "plugins", f"{', '.join(one.rpartition('.')[2] for one in plugins if one not in ours)}: not available"
        )


def _kinds(found: Translation) -> set[str]:
    """Return the types of the data sets, without Axolotl's variants of them (`chat_template.default`)."""
    sets = found.values.get("datasets") or found.values.get("pretraining_dataset") or []
    sets = sets if isinstance(sets, list) else [sets]
    kinds = {str(one.get("type") or "") for one in sets if isinstance(one, dict)}
    return {kind.partition(".")[0].partition(":")[0] for kind in kinds if kind}


def _data(found: Translation) -> None:
    found.rename("sequence_len", "sequence_length")
    found.remarks.append("sequence_len: longer examples are left out and counted, as in Axolotl")
    sets = found.take("datasets")
    sets = sets if isinstance(sets, list) else [sets] if sets else []
    paths, splits, renamed = [], set(), {}
    for number, entry in enumerate(sets):
        if not isinstance(entry, dict) or not entry.get("path"):
            found.lack("datasets", f"{as_text(entry)}: no path; give data.path=FILE")
            continue
        path = entry.get("data_files") if entry.get("path") in ("json", "csv", "parquet", "text") else entry["path"]
        paths.append(as_text(path))
        splits.add(str(entry.get("split") or "train"))
        for problem in _problems(entry, found.method):
            found.lack(f"datasets[{number}]", problem)
        for theirs, field in (
            ("field_messages", _turns(entry)),
            ("field_chosen", "chosen"),
            ("field_rejected", "rejected"),
        ):
            if entry.get(theirs) and entry[theirs] not in (field, "messages", "conversations"):
                renamed[entry[theirs]] = field
        if entry.get("type") in ("completion", "pretrain") and entry.get("field") not in (None, "text"):
            renamed[entry["field"]] = "text"
        if entry.get("field_thinking"):
            found.remarks.append("field_thinking: reasoning in `reasoning_content`, `thinking` or <think> is learned")
    if paths:
        found.set("data.path", ",".join(paths), "datasets")
    if splits and splits != {"train"}:
        split = next(iter(splits))
        first = re.fullmatch(r"(\w+)\[:(\d+)\]", split)
        if len(splits) == 1 and "[" not in split:
            found.set("data.split", split, "datasets")
        elif len(splits) == len(sets) == 1 and first:
            found.set("data.split", first[1], "datasets")
            found.set("data.max_examples", first[2], "datasets")
            found.remarks.append(f"datasets: {split}: as many examples, drawn with the seed instead of the first")
        else:
            found.lack("datasets: split", f"{', '.join(sorted(splits))}: give data.max_examples=N")
    if renamed:
        found.set("data.columns", ",".join(f"{column}:{field}" for column, field in renamed.items()), "datasets")
    share = trainer._number(found.take("val_set_size"), "val_set_size")
    if share >= 1:
        found.lack("val_set_size", f"{share:g} examples: give a share, data.validation_share=0.05")
    else:
        found.set("data.validation_share", share, "val_set_size")
    if found.given("streaming"):
        found.rename("streaming", "data.streaming")


def _turns(entry: Mapping[str, Any]) -> str:
    """Return the field for a data set's turns: ShareGPT's names (`from`, `value`) or OpenAI's (`role`, `content`)."""
    mapping = entry.get("message_property_mappings") or {}
    role = entry.get("message_field_role") or mapping.get("role", "role")
    return "conversations" if role == "from" else "messages"


def _problems(entry: Mapping[str, Any], method: str) -> Iterator[str]:
    """Yield what of a data set cannot be asked for."""
    kind = entry.get("type")
    usual = (
        "",
        "chat_template",
        "alpaca",
        "sharegpt",
        "completion",
        "pretrain",
        "chatml",
        "llama3",
        "bradley_terry",
        "gpteacher",
    )
    if isinstance(kind, dict):
        yield f"{entry['path']}: a format of its own; rename the columns (data.columns), or write messages"
    elif str(kind or "").partition(".")[0].partition(":")[0] not in usual:
        yield f"{entry['path']}: type {kind}; write messages, or rename the columns with data.columns"
    if entry.get("name"):
        yield f"{entry['path']}: the subset {entry['name']} cannot be asked for; save it as files"
    for key in (
        "shards",
        "preprocess_shards",
        "revision",
        "drop_system_message",
        "roles_to_train",
        "train_on_eos",
        "train_on_eot",
    ):
        value = entry.get(key)
        if value and (key, value) not in (
            ("roles_to_train", ["assistant"]),
            ("roles_to_train", ["gpt"]),
            ("train_on_eos", "turn"),
        ):
            yield f"{entry['path']}: {key}: {as_text(value)}; answers and their end tokens are learned"


def _checkpointing(found: Translation) -> None:
    value = found.take("gradient_checkpointing")
    if value in ("offload", "offload_disk", "unsloth"):
        found.set("gradient_checkpointing", True, "gradient_checkpointing")
        found.set("activation_offloading", True, "gradient_checkpointing")
    else:
        found.set("gradient_checkpointing", bool(value), "gradient_checkpointing")
    if found.given("activation_offloading"):  # true, legacy or disk
        found.take("activation_offloading")
        found.set("activation_offloading", True, "activation_offloading")
