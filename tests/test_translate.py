"""`ds-recipes launch --from FILE`: files of other tools become commands, and every key of theirs is named."""

import json
import random
import re
import shlex
from dataclasses import fields, replace

import pytest
import yaml

from deepspeed_recipes.commands.launch import options, translate
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.samples import TINY_MODEL
from tests.launching import launched

FACTORY = {
    "model_name_or_path": TINY_MODEL,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "q_proj,v_proj",
    "dataset": "ours",
    "template": "qwen3",
    "cutoff_len": 512,
    "output_dir": "saves/ours",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": "1.0e-4",
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "resume_from_checkpoint": None,
}
AXOLOTL = {
    "base_model": TINY_MODEL,
    "datasets": [{"path": "ours.jsonl", "type": "chat_template", "field_messages": "chat"}],
    "val_set_size": 0.1,
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_linear": True,
    "sequence_len": 256,
    "sample_packing": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "num_epochs": 2,
    "optimizer": "adamw_bnb_8bit",
    "learning_rate": 2e-4,
    "bf16": "auto",
    "gradient_checkpointing": True,
    "evals_per_epoch": 4,
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Go to a folder with data and LLaMA-Factory's list of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    entry = {"file_name": "ours.jsonl", "columns": {"prompt": "question", "response": "answer"}}
    list_data(tmp_path, ours=entry)
    (tmp_path / "data" / "ours.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 40)
    return tmp_path


def list_data(place, **entries):
    """Write LLaMA-Factory's list of data sets."""
    (place / "data" / "dataset_info.json").write_text(json.dumps(entries))


def written(place, values, name="theirs.yaml"):
    (place / name).write_text(values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False))
    return place / name


def recipe_of(words):
    """Return the recipe of a printed command, whose words `ds-recipes launch` would read."""
    read = options.parse(words, "")
    return overrides.apply(pages.find(read.recipe, read.variant), read.overrides)


def translated(place, values, gpus=1):
    return translate.translate(written(place, values), gpus)


def command_of(values, place, gpus=1):
    found = translated(place, values, gpus)
    return found, recipe_of(translate.command_of(found))


def test_other_names_of_roles_become_data_roles(place):
    entry = {
        "file_name": "ours.jsonl",
        "formatting": "sharegpt",
        "tags": {"user_tag": "customer", "assistant_tag": "gpt", "role_tag": "from", "content_tag": "text"},
    }
    list_data(place, ours=entry)
    theirs = {"stage": "sft", "finetuning_type": "lora", "model_name_or_path": "Qwen/Qwen3-0.6B", "dataset": "ours"}
    _, recipe = command_of(theirs | {"template": "qwen3"}, place)
    assert (recipe.data.roles, recipe.data.columns) == ("customer:user", "text:content")
    sets = [{"path": "data/ours.jsonl", "type": "chat_template", "roles": {"user": ["human", "customer"]}}]
    axolotl = {"base_model": "Qwen/Qwen3-0.6B", "adapter": "lora", "datasets": sets}
    assert command_of(axolotl, place)[1].data.roles == "customer:user"


def test_a_file_of_llama_factory_becomes_its_recipe(place):
    found, recipe = command_of(FACTORY, place, gpus=3)
    assert not found.missing
    assert (recipe.global_batch_size, recipe.micro_batch_size, recipe.sequence_length) == (24, 2, 512)
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.target_modules) == (8, 16, "q_proj,v_proj")
    assert (recipe.learning_rate, recipe.epochs, recipe.max_grad_norm) == (1e-4, 3, 1.0)
    assert (recipe.schedule.kind, recipe.schedule.warmup, recipe.precision) == ("cosine", 0.1, "bf16")
    assert (recipe.data.path, recipe.data.columns) == ("data/ours.jsonl", "question:instruction,answer:output")
    assert recipe.packing is False and recipe.gradient_checkpointing is True  # its defaults, not the page's
    assert recipe.data.validation is None and recipe.data.validation_share == 0  # it holds nothing out by itself


def test_a_file_of_axolotl_becomes_its_recipe(place):
    found, recipe = command_of(AXOLOTL, place, gpus=2)
    assert not found.missing and not found.yours and recipe.eval_steps == "epoch/4"
    assert (recipe.global_batch_size, recipe.epochs, recipe.optimizer) == (12, 2, "adamw_8bit")
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.target_modules) == (4, 8, "all-linear")
    assert (recipe.schedule.kind, recipe.schedule.warmup) == ("cosine", 0.03)  # its defaults
    assert recipe.packing and recipe.data.columns == "chat:messages" and recipe.data.validation_share == 0.1


def test_what_the_user_gives_beside_the_file_wins_and_is_not_asked_for(place, capsys):
    """A data set that is not here and a model that the file lacks are no longer needed once the command has them."""
    mine = ["data.path=mine.jsonl", "learning_rate=5e-5", "model.path=Qwen/Qwen3-8B"]
    assert translate.main(written(place, FACTORY | {"dataset": "absent"}), 1, 1, mine) == 0
    shown = capsys.readouterr().out
    assert "launch qwen3-8b lora data.path=mine.jsonl" in shown.replace("scripts/launch.py", "launch")
    assert "STILL NEEDED" not in shown and "-> model.path=Qwen/Qwen3-8B (yours)" in shown
    assert "learning_rate: 1.0e-4 -> learning_rate=5e-5 (yours)" in shown


TRL = {"model_name_or_path": TINY_MODEL, "dataset_name": "ours.jsonl"}
TRL_MIXED = {"model_name_or_path": TINY_MODEL, "dataset_mixture": {"datasets": [{"path": "a", "data_files": 5}]}}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"loss_on": "all", "precision": "bf16", "gradient_checkpointing": "true", "learning_rate": "2e-05"}),
        ({"assistant_only_loss": True}, {"loss_on": "assistant"}),
        ({"completion_only_loss": True, "assistant_only_loss": False}, {"loss_on": "assistant"}),
        ({"fp16": True}, {"precision": "fp16", "deepspeed": "fp16.json"}),
        ({"bf16": False}, {"precision": "fp32"}),
        ({"use_peft": True}, {"lora.target_modules": "q_proj,v_proj", "lora.rank": "16"}),
        ({"use_peft": True, "lora_target_modules": ["all-linear"]}, {"lora.target_modules": "all-linear"}),
        ({"use_peft": True, "beta": 0.2}, {"dpo.beta": "0.2", "dpo.loss": "sigmoid", "learning_rate": "1e-06"}),
        ({"loss_type": ["ipo"]}, {"dpo.loss": "ipo", "dpo.beta": "0.1"}),
        ({"desirable_weight": 2.0, "use_peft": True}, {"kto.good_weight": "2.0", "kto.bad_weight": "1.0"}),
        (
            {"reward_funcs": ["mine.score"], "model_name_or_path": "Qwen/Qwen3-0.6B"},  # the other has 1,024 positions
            {"reward": "mine.py:score", "grpo.loss": "dapo", "grpo.beta": "0.0", "grpo.max_new_tokens": "512"},
        ),
    ],
)
def test_a_file_of_trl_has_trls_defaults(place, change, expected):
    found, _ = command_of(TRL | change, place)
    assert not found.missing
    assert found.overrides | expected == found.overrides
    assert set(change) <= {*found.translated, *found.off}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dataset_name": "someone/chats", "eval_strategy": "epoch"}, "someone/chats/test"),
        ({"dataset_name": "saved", "eval_strategy": "steps", "eval_steps": 2}, "saved/test"),
        ({"dataset_name": "files", "eval_strategy": "steps", "dataset_test_split": "val"}, "files/val.jsonl"),
        ({"dataset_name": "someone/chats", "eval_strategy": "no"}, None),
        ({"dataset_name": "someone/chats"}, None),
        ({"dataset_name": "files", "eval_strategy": "steps"}, "named as missing"),
        ({"eval_strategy": "steps"}, "named as missing"),
    ],
)
def test_the_split_that_trl_evaluates_is_held_out(tmp_path, place, monkeypatch, change, expected):
    (tmp_path / "saved/test").mkdir(parents=True)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/val.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    found, _ = command_of(TRL | change, place)
    missing = "named as missing" if "eval_strategy" in found.missing else None
    assert found.overrides.get("data.validation", missing) == expected


def test_the_table_of_trls_defaults_is_that_of_the_installed_trl(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    import trl
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.orpo import ORPOConfig

    classes = {
        "sft": trl.SFTConfig,
        "dpo": trl.DPOConfig,
        "kto": trl.KTOConfig,
        "orpo": ORPOConfig,
        "simpo": CPOConfig,
        "grpo": trl.GRPOConfig,
        "reward": trl.RewardConfig,
    }
    assert set(classes) == set(translate.trl.METHODS)
    adapters = {field.name: field.default for field in fields(trl.ModelConfig)}
    for method, kind in classes.items():
        theirs = adapters | vars(kind(output_dir=str(tmp_path), use_cpu=True))
        ours = translate.trl.DEFAULTS | translate.trl.METHODS[method]
        if method == "grpo":
            del ours["max_length"]  # it bounds the answers only
        assert ours == {name: theirs[name] for name in ours}, method


def test_peft_adapts_the_modules_that_a_file_of_trl_leaves_to_it():
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as theirs

    ours = translate.trl.PEFT_TARGETS.split(",")
    assert all(theirs[kind] == ours for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma2"))


def test_keys_that_are_read_on_the_command_line_are_read_in_a_file(place):
    arguments = {"per_device_train_batch_size": 2, "output_dir": "out", "temperature": 0.5, "num_tokens": 3}
    found = translate.translate(written(place, json.dumps(arguments | {"lora_r": 8, "lora_alpha": 32}), "a.json"), 1)
    assert (found.overrides["lora.rank"], found.overrides["lora.alpha"], found.adapter) == ("8", "32", "lora")
    assert {"temperature", "num_tokens"} <= found.missing.keys(), "a setting of GRPO, and an unknown one"
    trl = {"model_name_or_path": TINY_MODEL, "no_remove_unused_columns": True}
    assert "remove_unused_columns" in translated(place, trl).off, "as TRL's own examples switch"


def test_saved_training_arguments_become_what_the_user_set(place):
    import transformers

    arguments = transformers.TrainingArguments(
        "out", learning_rate=3e-4, warmup_steps=7, use_cpu=True, report_to="none", save_total_limit=1
    )
    file = written(place, json.dumps(arguments.to_dict()), "arguments.json")
    found = translate.translate(file, 1)
    assert found.overrides["learning_rate"] == "0.0003" and found.overrides["schedule.warmup"] == "7"
    assert {"model", "dataset"} <= set(found.missing) and "hub_model_id" not in found.unneeded
    assert found.overrides["tracking"] == "none" and "use_cpu" in found.unneeded
    shown = "\n".join(translate.report(found, file))
    assert "TrainingArguments's defaults:" in shown and "keep_checkpoints: at least 2" in shown


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("SFTConfig", {"assistant_only_loss": True, "packing": True}, {"loss_on": "assistant", "packing": "true"}),
        ("DPOConfig", {"loss_type": "ipo", "beta": 0.3}, {"dpo.loss": "ipo", "dpo.beta": "0.3"}),
        ("KTOConfig", {}, {"learning_rate": "1e-06", "kto.beta": "0.1"}),
        ("GRPOConfig", {"gradient_accumulation_steps": 2}, {"grpo.loss": "dapo", "global_batch_size": "16"}),
        ("RewardConfig", {}, {"learning_rate": "0.0001"}),
    ],
)
def test_saved_arguments_of_trl_keep_their_method_and_its_defaults(place, kind, options, expected):
    import trl

    arguments = getattr(trl, kind)("out", use_cpu=True, report_to=[], **options)
    found = translate.translate(written(place, json.dumps(arguments.to_dict()), "arguments.json"), 1)
    assert set(found.missing) == {"model", "dataset"} and found.overrides | expected == found.overrides
    assert found.method == kind.removesuffix("Config").lower()


@pytest.mark.parametrize(
    ("change", "variant", "expected"),
    [
        ({"finetuning_type": "full"}, "full", {}),
        ({"stage": "dpo", "pref_beta": 0.3}, "dpo_lora", {"dpo.beta": "0.3"}),
        ({"stage": "dpo", "quantization_bit": 4}, "dpo_lora", {"model.quantization": "nf4"}),
        ({"stage": "dpo", "pref_loss": "orpo"}, "orpo_lora", {"orpo.beta": "0.1"}),
        ({"stage": "dpo", "pref_loss": "simpo"}, "simpo_lora", {"simpo.gamma": "0.5"}),
        ({"stage": "kto"}, "kto_lora", {"kto.beta": "0.1"}),
        ({"stage": "pt"}, "pretrain", {"packing": "true", "lora.rank": "8"}),
        ({"stage": "rm", "finetuning_type": "full"}, "reward", {}),
        ({"finetuning_type": "full", "additional_target": "embed_tokens", "loraplus_lr_ratio": 16}, "full", {}),
        ({"use_dora": True}, "lora", {}),
        ({"max_steps": 9}, "lora", {"max_steps": "9"}),
        (
            {"deepspeed": "examples/deepspeed/ds_z3_offload_config.json"},
            "lora",
            {"deepspeed": "zero3_offload_params.json"},
        ),
        ({"fp16": True, "bf16": False}, "lora", {"precision": "fp16", "deepspeed": "fp16.json"}),
        ({"bf16": None}, "lora", {"precision": "fp32"}),
        ({"flash_attn": "fa2"}, "lora", {"model.attention": "flash_attention_2"}),
        ({"val_size": 0.1}, "lora", {"data.validation_share": "0.1"}),
    ],
)
def test_methods_and_settings_of_llama_factory(place, change, variant, expected):
    values = FACTORY | change
    found = translated(place, values)
    assert translate.command_of(found)[1] == variant
    assert found.overrides | expected == found.overrides
    assert found.translated["finetuning_type"] in ("all weights", "lora", "dora"), "as in the command"


def test_gpus_that_share_a_copy_of_the_model_do_not_enlarge_the_batch(place):
    file = written(place, FACTORY | {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})
    alone, eight = (translate.translate(file, gpus) for gpus in (1, 8))
    assert int(eight.overrides["global_batch_size"]) == 2 * int(alone.overrides["global_batch_size"])
    assert {"tensor_model_parallel_size", "pipeline_model_parallel_size"} <= eight.yours.keys()
    for values, key in ((AXOLOTL, "sequence_parallel_degree"), (TRL, "context_parallel_size")):
        split = translated(place, values | {key: 4}, 8)
        whole = translated(place, values, 2)
        assert split.overrides["layout.sequence"] == "4"
        assert split.overrides["global_batch_size"] == whole.overrides["global_batch_size"]


@pytest.mark.parametrize("values", [FACTORY, AXOLOTL, TRL])
@pytest.mark.parametrize("empty", [None, ""])
def test_a_file_without_a_model_needs_one(place, values, empty):
    key = "base_model" if "base_model" in values else "model_name_or_path"
    found = translated(place, values | {key: empty})
    assert found.model == "MODEL" and key in found.missing["model"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (FACTORY | {"report_to": 5}, "report_to: 5: must be text or a list"),
        (FACTORY | {"deepspeed": 5}, "deepspeed: 5: must be text or a mapping"),
        (AXOLOTL | {"rl": "grpo", "trl": "yes"}, "trl: yes: must be a mapping"),
        (AXOLOTL | {"datasets": [{"path": "a", "roles": ["a"]}]}, r"datasets\[0\]\.roles: a: must be a mapping"),
        (FACTORY | {"model_name_or_path": {"a": 1}}, r"model_name_or_path: \{'a': 1\}: must be text"),
        (AXOLOTL | {"base_model": ["a", "b"]}, "base_model: a,b: must be text"),
        (AXOLOTL | {"adapter": True}, "adapter: true: must be text"),
        (TRL_MIXED, "dataset_mixture: data_files: 5: must be text or a list or a mapping"),
    ],
)
def test_values_of_another_type_are_named(place, values, said):
    with pytest.raises(UserError, match=said):
        translated(place, values)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ([1], "ours: 1: must be a mapping"),
        ({"file_name": 5}, r"ours\.file_name: 5: must be text"),
        ({"file_name": "ours.jsonl", "tags": ["a"]}, r"ours\.tags: a: must be a mapping"),
    ],
)
def test_entries_of_another_type_are_named(place, entry, said):
    list_data(place, ours=entry)
    with pytest.raises(UserError, match=said):
        translated(place, FACTORY)


def test_turns_have_the_system_prompts_that_their_list_names(place):
    (place / "data" / "ours.jsonl").write_text('{"conversations": [], "system": "Be brief."}')
    entry = {"file_name": "ours.jsonl", "formatting": "sharegpt"}
    list_data(place, ours=entry)
    found = translated(place, FACTORY)
    assert "system is in the file and not in its columns" in found.missing["dataset: ours"]


def test_one_value_in_place_of_a_list_is_one(place):
    found = translated(place, AXOLOTL | {"adapter": None, "unfrozen_parameters": "^lm_head"})
    assert found.overrides["train"] == "^(?:^lm_head)"
    sets = [{"path": "ours.jsonl", "roles": {"user": "customer"}, "chat_template_jinja": "{{ messages }}"}]
    found = translated(place, AXOLOTL | {"datasets": sets})
    assert found.overrides["data.roles"] == "customer:user"
    assert any("at most 100 steps" in remark for remark in found.remarks)
    found = translated(place, AXOLOTL | {"warmup_steps": 3})
    assert not any("at most 100 steps" in remark for remark in found.remarks)


def test_quoted_switches_are_true_in_llama_factory_and_refused(place):
    with pytest.raises(UserError, match='packing: "false" is text, which is true there'):
        translated(place, FACTORY | {"packing": "false"})


def test_a_deepspeed_file_that_is_not_here_is_taken_by_its_name_and_named(place):
    found = translated(place, FACTORY | {"deepspeed": "my_zero3.json"})
    assert found.overrides["deepspeed"] == "zero3.json"
    assert "deepspeed: my_zero3.json is not here; zero3.json is taken by its name" in found.remarks


@pytest.mark.parametrize(
    ("tool", "change", "key"),
    [
        (FACTORY, {"use_galore": True}, "use_galore"),
        (FACTORY, {"finetuning_type": "freeze"}, "finetuning_type"),
        (FACTORY, {"train_on_prompt": True, "mask_history": True}, "mask_history"),
        (FACTORY, {"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type"),
        (FACTORY, {"metric_for_best_model": "rouge"}, "metric_for_best_model"),
        (FACTORY, {"quantization_bit": 8}, "quantization_bit"),
        (FACTORY, {"dataset": "ours,theirs"}, "dataset: theirs"),
        (FACTORY, {"a_key_of_tomorrow": 1}, "a_key_of_tomorrow"),
        (FACTORY, {"use_dora": True}, "dora"),  # tiny leaves it out
        (FACTORY, {"quantization_bit": 4, "quantization_type": "fp4"}, "quantization_type"),
        (FACTORY, {"deepspeed": "ours.json"}, "deepspeed"),
        (FACTORY, {"val_size": 0.1, "eval_dataset": "ours"}, "val_size"),
        (AXOLOTL, {"test_datasets": [{"path": "b.jsonl", "type": "alpaca"}]}, "val_set_size"),
        (FACTORY, {"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        (TRL, {"bf16": False, "torch_dtype": "float16"}, "torch_dtype"),
        (TRL, {"bf16": False, "dtype": "auto"}, "dtype"),
        (TRL, {"fsdp": "full_shard", "fsdp_config": "nowhere.json"}, "fsdp_config"),
        (AXOLOTL, {"lora_target_modules": ["embed_tokens", "lm_head"]}, "lora_target_modules"),
        (AXOLOTL, {"datasets": [{"path": "a", "roles_to_train": []}]}, "datasets[0].roles_to_train"),
        (AXOLOTL, {"datasets": [{"path": "a", "train_on_eos": "none"}]}, "datasets[0].train_on_eos"),
        (AXOLOTL, {"load_in_8bit": True}, "load_in_8bit"),
        (AXOLOTL, {"unfrozen_parameters": ["model.embed_tokens.weight$[:32000]"]}, "unfrozen_parameters"),
        (AXOLOTL, {"optimizer": "came_pytorch"}, "optimizer"),
        (AXOLOTL, {"rl": "gdpo"}, "rl"),
        (AXOLOTL, {"datasets": [{"path": "a", "type": {"format": "x"}}]}, "datasets[0].type"),
        (AXOLOTL, {"datasets": [{"path": "a", "type": "alpaca", "split": "train[:20%]"}]}, "datasets[0].split"),
    ],
)
def test_what_has_no_equivalent_is_named_and_is_status_1(place, tool, change, key, capsys):
    file = written(place, tool | change)
    assert translate.main(file, None, None, []) == 1
    shown = capsys.readouterr().out.partition("NO EQUIVALENT")[2]
    assert f"\n  {key}: " in shown


GRPO = {"base_model": "Qwen/Qwen3-0.6B", "rl": "grpo", "datasets": [{"path": "ours.jsonl"}]}
LAYERS = {"finetuning_type": "freeze", "freeze_trainable_layers": -2, "freeze_trainable_modules": "mlp, "}
WSD = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 10, "min_lr_ratio": 0.1}}


@pytest.mark.parametrize(
    ("tool", "change", "expected"),
    [
        (FACTORY, {"lora_target": ["q_proj", "v_proj"]}, {"lora.target_modules": "q_proj,v_proj"}),
        (AXOLOTL, {"sample_packing": "false", "train_on_inputs": "False"}, {"packing": "false"}),
        (TRL, {"use_peft": "true", "packing": "false"}, {"packing": "false", "lora.rank": "16"}),
        (TRL, {"loss_type": "simpo", "cpo_alpha": 0, "use_peft": True}, {"simpo.beta": "0.1"}),
        (TRL, {"bf16": False, "torch_dtype": "bfloat16"}, {"precision": "bf16"}),
        (TRL, {"bf16": False, "dtype": "torch.float32"}, {"precision": "fp32"}),
        (TRL, {"bf16": True, "dtype": "float32"}, {"precision": "bf16"}),
        (TRL, {"fsdp": "full_shard", "fsdp_config": "fsdp.json"}, {"deepspeed": "zero3_offload_params.json"}),
        (FACTORY, {"label_smoothing_factor": 0, "pref_ftx": 0.0}, {}),
        (AXOLOTL, {"eta_min": 0, "min_sample_len": 0, "datasets": [{"path": "a", "skip": 0}]}, {}),
        (GRPO, {"trl": {"reward_funcs": "mine.score"}}, {"reward": "mine.py:score", "grpo.loss": "dapo"}),
        (GRPO, {"trl": {"reward_funcs": ["mine.score"], "scale_rewards": False}}, {"grpo.scale": "none"}),
        (FACTORY, {"train_on_prompt": True}, {"loss_on": "all", "truncate": "true"}),
        (FACTORY, {"mask_history": True, "packing": True}, {"loss_on": "last"}),
        (FACTORY, WSD, {"schedule.kind": WSD["lr_scheduler_type"], "schedule.decay": "10", "schedule.min_rate": "0.1"}),
        (
            FACTORY,
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-5, "power": 2}},
            {"schedule.kind": "polynomial", "schedule.min_rate": "0.1", "schedule.power": "2"},
        ),
        (FACTORY, {"additional_target": "embed_tokens,lm_head"}, {"lora.modules_to_save": "embed_tokens,lm_head"}),
        (FACTORY, {"early_stopping_steps": 3, "val_size": 0.1}, {"early_stopping": "3"}),
        (
            FACTORY,
            {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "val_size": 0.1},
            {"keep_best": "true"},
        ),
        (FACTORY, {"neat_packing": True}, {"packing": "true"}),
        (FACTORY, LAYERS, {"train": r"layers\.(0|1)\..*\b(mlp)\b"}),
        (AXOLOTL, {"lora_modules_to_save": ["embed_tokens"]}, {"lora.modules_to_save": "embed_tokens"}),
        (FACTORY, {"add_tokens": "<a>,<b>", "resize_vocab": True}, {"model.new_tokens": "<a>,<b>"}),
        (
            FACTORY,
            {"add_tokens": "<a>", "add_special_tokens": "<b>"},
            {"model.new_tokens": '["<a>", {"content": "<b>", "special": true}]'},
        ),
        (AXOLOTL, {"tokens": ["<a>", "<b>"]}, {"model.new_tokens": "<a>,<b>"}),
        (
            AXOLOTL,
            {"special_tokens": {"pad_token": "<|pad|>", "additional_special_tokens": ["<b>"]}},
            {"model.new_tokens": '[{"content": "<b>", "special": true}]'},
        ),
        (AXOLOTL, {"train_on_inputs": True}, {"loss_on": "all"}),
        (AXOLOTL, {"excess_length_strategy": "truncate"}, {"truncate": "true"}),
        (FACTORY, {"eval_strategy": "steps", "eval_steps": 7}, {"eval_steps": "7"}),
        (FACTORY, {"eval_strategy": "steps", "logging_steps": 3}, {"eval_steps": "3"}),
        (FACTORY, {"eval_strategy": "no", "save_strategy": "no"}, {"eval_steps": "none", "save_steps": "0"}),
        (FACTORY, {"save_strategy": "steps"}, {"save_steps": "500"}),
        (FACTORY, {"model_name_or_path": "mistralai/Mixtral-8x7B-v0.1"}, {"lora.target_parameters": "none"}),
        (FACTORY, {}, {"tracking": "none"}),  # nothing is sent anywhere unless the file asks for it
        (AXOLOTL, {"wandb_project": ""}, {"tracking": "none"}),
        (AXOLOTL, {"wandb_project": "mine"}, {"tracking": "wandb", "wandb.project": "mine"}),
        (AXOLOTL, {"use_wandb": False, "wandb_project": "mine"}, {"tracking": "none"}),
        (AXOLOTL, {"use_tensorboard": True}, {"tracking": "tensorboard"}),
        (AXOLOTL, {"use_tensorboard": True, "use_wandb": False}, {"tracking": "tensorboard"}),
        (FACTORY, {"save_strategy": "epoch", "eval_strategy": "epoch"}, {"save_steps": "epoch", "eval_steps": "epoch"}),
        (AXOLOTL, {"saves_per_epoch": 1, "evals_per_epoch": 0}, {"save_steps": "epoch"}),
        (AXOLOTL, {"early_stopping_patience": 2}, {"early_stopping": "2"}),
        (
            AXOLOTL,
            {"cosine_min_lr_ratio": 0.1},
            {"schedule.kind": "cosine_with_min_lr", "schedule.min_rate": "0.1"},
        ),
        (
            AXOLOTL,
            {"adapter": None, "unfrozen_parameters": ["^lm_head.weight$", "model.norm"]},
            {"train": "^(?:^lm_head.weight$)|^(?:model.norm)"},
        ),
    ],
)
def test_how_runs_end_and_what_they_learn_is_translated(place, tool, change, expected):
    (place / "fsdp.json").write_text('{"offload_params": true}')
    found = translated(place, tool | change)
    assert found.overrides | expected == found.overrides
    assert not set(change) & {re.split(r"[.[]", name)[0] for name in found.missing}
    assert not any(became.endswith("=N") for became in found.translated.values())


@pytest.mark.parametrize("seed", range(20))
def test_every_key_is_in_exactly_one_list(place, seed):
    draw = random.Random(seed)
    tools = overrides.OTHER_TOOLS

    def some(tables, count):
        kinds = [table.get(kind, {}) for table in tables for kind in ("unneeded", "yours", "missing", "on")]
        names = sorted({name.replace("*", "x") for kind in kinds for name in kind})
        values = [1, 0.5, True, False, None, "", "word", {"a": 1}, [1]]
        return {name: draw.choice(values) for name in [*draw.sample(names, count), "odd"] if name not in TAKEN}

    tool, base = draw.choice([("llama_factory", FACTORY), ("axolotl", AXOLOTL), ("trl", TRL)])
    values = some([tools["trainer"], tools[tool]], 12) | base
    if tool == "axolotl":
        for name in ("datasets", "test_datasets"):
            usual = {"path": "ours.jsonl", "type": "chat_template", "message_property_mappings": {"role": "speaker"}}
            values[name] = [some([tools["axolotl_dataset"]], 4) | usual for _ in range(draw.choice([1, 2]))]
    try:
        found = translated(place, values)
    except UserError as error:  # a number in words, for instance
        assert str(error).startswith(f"{place}/theirs.yaml: ")
        return
    lists = [set(found.translated), set(found.unneeded), set(found.yours), set(found.off)]
    lists.append({*found.missing, *(re.split("[.:]", name)[0] for name in found.missing)})
    for name in found.values:
        assert sum(name in one for one in lists) == 1, name
    inner = [
        f"{name}[{number}].{key}"
        for name in ("datasets", "test_datasets")
        if tool == "axolotl"
        for number, entry in enumerate(values[name])
        for key in entry
    ]
    assert set(inner) <= set(found.values)
    words = translate.command_of(found)
    if "the command" not in found.missing:
        recipe_of(words)


TAKEN = ("do_train", "fsdp_config", "trl")
"""Keys with tests of their own."""


def test_the_command_that_is_printed_runs(place):
    status, printed = launched("--from", str(written(place, FACTORY)), "--gpus", "2", "max_steps=3")
    assert status == 0, printed
    words = shlex.split(printed.partition("\n\n")[2].partition("\n\n")[0].replace("\\\n", " "))
    assert words[-2:] == ["--gpus", "2"]
    assert "max_steps=3" in words
    status, shown = launched(*words[words.index("tiny-3m") :], "--dry-run", "full")
    assert status == 0 and '"rank": 8' in shown, shown


def test_a_translation_is_kept_as_a_page(place):
    file = written(place, FACTORY)
    status, shown = launched("--from", str(file), "--write", "ours.py", "max_steps=3")
    assert status == 0 and "written: ours.py" in shown, shown
    status, shown = launched("./ours.py", "lora", "--dry-run", "full")
    assert status == 0 and '"rank": 8' in shown and '"max_steps": 3' in shown, shown
    found = translate.translate(file, 1)
    wanted = recipe_of([*translate.command_of(found), "max_steps=3"])
    page = pages.find("./ours.py", "lora")
    assert replace(page, family=wanted.family, size=wanted.size, variant=wanted.variant, page="") == wanted
    status, shown = launched("--from", str(file), "--write", "ours.py")
    assert status == 2 and "exists; choose a new name" in shown
    status, shown = launched("tiny", "full", "--write", "other.py")
    assert status == 2 and "only with --from FILE" in shown
    elsewhere = written(place, FACTORY | {"model_name_or_path": "us/ours"}, "elsewhere.yaml")
    status, shown = launched("--from", str(elsewhere), "--write", "other.py")
    assert status == 2 and "has no page to start from" in shown and not (place / "other.py").exists()


def test_mixtures_of_data_sets_in_trls_files(place):
    common = {"model_name_or_path": TINY_MODEL, "model_revision": "main", "output_dir": "out", "eval_strategy": "steps"}
    mixer = {"dataset_mixer": {"a/b": 1.0, "a/c": 1.0}, "dataset_splits": ["train_prefs", "test_prefs"]}
    found = translated(place, common | mixer | {"beta": 0.1})
    given = {key: found.overrides[key] for key in ("data.path", "data.split", "data.validation")}
    assert given == {
        "data.path": "a/b,a/c",
        "data.split": "train_prefs",
        "data.validation": "a/b/test_prefs,a/c/test_prefs",
    }
    assert not found.missing and found.unneeded["model_revision"] == "it is the default"
    entries = [{"path": "two", "data_files": "a.jsonl"}, {"path": "json", "data_files": ["b.jsonl", "c.jsonl"]}]
    found = translated(place, common | {"datasets": [*entries, {"path": "d", "data_dir": "e"}]})
    assert found.overrides["data.path"] == "two/a.jsonl,b.jsonl,c.jsonl,d/e"
    entries = [{"id": "a/b", "config": "all", "split": "train", "weight": 0.5}, {"id": "a/c", "split": "part"}]
    mixture = {"dataset_mixture": {"datasets": entries, "test_split_size": 0.1}, "chat_template": "{{ messages }}"}
    found = translated(place, common | mixture)
    assert (found.overrides["data.path"], found.overrides["data.validation_share"]) == ("a/b,a/c", "0.1")
    parts = {f"dataset_mixture.{name}" for name in ("weight", "config", "split")}
    assert {*found.missing} == {"chat_template", *parts}


def test_columns_of_texts_and_of_system_prompts(place):
    list_data(place, ours={"file_name": "train.jsonl", "columns": {"prompt": "text"}})
    found = translated(place, FACTORY | {"stage": "pt"})
    assert (found.method, found.overrides.get("data.columns")) == ("pretrain", None)
    entry = {"path": "ours.jsonl", "type": "chat_template", "field_messages": "dialog", "field_system": "sys"}
    found = translated(place, AXOLOTL | {"datasets": [entry]})
    assert found.overrides["data.columns"] == "dialog:messages,sys:system" and not found.missing
    mixture = {"model_name_or_path": TINY_MODEL, "output_dir": "out", "packing": True}
    found = translated(place, mixture)
    translate.report(found, place / "theirs.yaml")
    assert [*found.missing] == ["dataset"], "the page's metric is for its own data"


def test_held_out_examples_that_the_user_gives_are_enough_for_the_best_step(place):
    saved = {
        "output_dir": "x",
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_steps": 5,
    }
    found = translated(place, saved)
    assert "give keep_best=true" in found.missing["load_best_model_at_end"]
    found.give({"data.validation": "held_out.jsonl"})
    assert found.overrides["keep_best"] == "true" and "load_best_model_at_end" not in found.missing


def test_what_the_launcher_would_refuse_is_said(place):
    found = translated(place, FACTORY | {"stage": "kto", "per_device_train_batch_size": 1})
    translate.report(found, place / "theirs.yaml")
    assert "use micro_batch_size=2 or more" in found.missing["the command"]
    common = {
        "model_name_or_path": TINY_MODEL,
        "output_dir": "out",
        "dataset_name": "a/b",
        "accelerate_config": "zero3",
    }
    assert translated(place, common).overrides["deepspeed"] == "zero3.json"


def test_a_deepspeed_file_of_the_tools_checkout_is_found_or_has_ours(place, monkeypatch):
    (place / "examples").mkdir()
    given = AXOLOTL | {"deepspeed": "deepspeed_configs/zero2.json"}
    for kind, ours, said in (
        ("adamw_torch", "zero2_offload.json", "to the CPU; deepspeed=zero2.json does not"),
        ("adamw_8bit", "zero2.json", "which adamw_8bit cannot do here"),
    ):
        found = translated(place, given | {"optimizer": kind})
        assert found.overrides["deepspeed"] == ours and any(said in remark for remark in found.remarks)
    (place / "deepspeed_configs").mkdir()
    (place / "deepspeed_configs" / "zero2.json").write_text("{}")
    inside = written(place, given, "examples/ours.yaml")
    monkeypatch.chdir(place / "data")
    assert translate.translate(inside, 1).overrides["deepspeed"] == str(place / "deepspeed_configs" / "zero2.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#!/bin/bash\nswift sft --lora_rank 8\n", "a script of commands"),
        ("model_name_or_path: a\nstage: sft\nstage: dpo\n", "the key stage is there twice"),
        ("base_model: ${MODEL}\n", "${MODEL} is filled in by another program"),
        ("base_model: '{{ model }}'\n", "is filled in by another program"),
        ("trainer:\n  epochs: 1\n", "a configuration in sections"),
        ("greeting: hello\n", "not a training file of LLaMA-Factory, Axolotl or TRL"),
        ("model: a\ntrain_dataset: b\n", "LLaMA-Factory's v1"),
        ("- a\n- b\n", "its top level must be settings"),
        ("base_model: a\ndatasets:\n - path: a\n  - path: b\n", ":4: not valid YAML"),
        ("base_model: a\nmicro_batch_size: many\n", "micro_batch_size: many: must be a number"),
        ("model_name_or_path: a\nstage: ppo\n", "stage: ppo: not available"),
        ("model_name_or_path: a\nstage: sft\ndo_train: false\n", "this file does not train"),
        ("model_name_or_path: a\ntemplate: b\nexport_dir: c\n", "use ds-recipes export RUN --merge"),
        ("model_name_or_path: a\ntemplate: b\ninfer_backend: vllm\n", "use ds-recipes generate or serve"),
        ("model: a\ntrain_type: lora\nper_device_train_batch_size: 1\n", "a file of ms-swift"),
        ("model:\n  _component_: a.b\noutput_dir: c\nlog_dir: ${output_dir}\n", "a file of torchtune"),
        ("model: a\ndataset: b\noutput_dir: c\n", "model: a key of another tool, such as ms-swift"),
        ("distributed_type: FSDP\nnum_processes: 8\n", "a configuration of accelerate"),
    ],
)
def test_a_file_that_is_no_training_file_is_a_line(place, text, message):
    file = written(place, text)
    with pytest.raises(UserError) as caught:
        translate.main(file, None, None, [])
    assert str(caught.value).startswith(str(file)) and message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("theirs", "renamed", "missing"),
    [
        ({"prompt": "theirs"}, "ours:instruction,theirs:instruction", None),
        (
            {"prompt": "input"},
            "ours:instruction,input:instruction",
            "data.columns: input becomes instruction in every data",
        ),
        ({"query": "ours"}, "ours:instruction", "'ours' is instruction in one data set, input in another"),
    ],
)
def test_data_sets_with_other_columns_go_together(place, theirs, renamed, missing):
    entries = {
        "ours": {"file_name": "train.jsonl", "columns": {"prompt": "ours"}},
        "theirs": {"file_name": "train.jsonl", "columns": theirs},
    }
    list_data(place, **entries)
    found = translated(place, FACTORY | {"dataset": "ours,theirs"})
    assert found.overrides["data.columns"] == renamed
    said = found.missing.get("dataset.columns") or "\n".join(found.remarks)
    assert (missing or "global_batch_size") in said and len(found.missing) == (missing or "").startswith("'")


def test_every_problem_of_a_data_set_is_named(place):
    entry = {"file_name": "train.jsonl", "subset": "fr", "num_samples": 9, "columns": {"videos": "clips"}}
    list_data(place, ours=entry)
    found = translated(place, FACTORY | {"dataset": "ours"})
    for problem in ("subset: fr cannot be asked for", "num_samples: 9 cannot be asked for", "videos are not read"):
        assert problem in found.missing["dataset: ours"]


def test_what_a_list_of_data_sets_says_is_used_or_named(place):
    entry = {"hf_hub_url": "us/ours", "split": "test_sft", "colums": {}}
    list_data(place, ours=entry, more={"file_name": "ours.jsonl"})
    found = translated(place, FACTORY | {"dataset": "ours"})
    assert found.overrides["data.split"] == "test_sft" and not found.missing
    assert "dataset_info.json: ours: not read: colums" in found.remarks
    found = translated(place, FACTORY | {"dataset": "ours,more"})
    assert "split: test_sft cannot be asked for" in found.missing["dataset: ours"]
    (place / "data" / "dataset_info.json").write_text('{"ours": {"file_name": "a"}, "ours": {"file_name": "b"}}')
    with pytest.raises(UserError, match=r"dataset_info\.json: not JSON .the key 'ours' twice"):
        translated(place, FACTORY | {"dataset": "ours"})
    with pytest.raises(UserError, match=r"theirs\.json: not valid JSON: the key 'stage' twice"):
        translate.translate(written(place, '{"stage": "sft", "stage": "pt"}', "theirs.json"), 1)


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        ({"freeze_multi_modal_projector": False}, "freeze_multi_modal_projector", "the projector is frozen"),
        ({"warmup_ratio": 1.0}, "warmup_ratio", "schedule.warmup is a number of steps from 1 on"),
        ({"shuffle_dataset": False, "num_generations": 4}, "shuffle_dataset", "always shuffled"),
        ({"use_bias_correction_kl": False, "num_generations": 4}, "use_bias_correction_kl", "unless this is false"),
        ({"disable_dropout": False, "loss_type": "sigmoid"}, "disable_dropout", "dropout is off in dpo"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices", "every token of a step counts"),
    ],
)
def test_what_is_on_by_default_there_is_not_off_as_here(place, values, key, said):
    theirs = FACTORY if key.startswith(("freeze", "warmup")) else TRL
    found = translated(place, {**theirs, **values})
    assert said in found.missing[key] and key not in found.off


def test_reasoning_columns_and_the_best_checkpoint_are_translated(place):
    theirs = FACTORY | {"enable_thinking": False, "save_strategy": "best"}
    found = translated(place, theirs)
    assert found.overrides["data.thinking"] == "strip" and "keep_best=true" in found.yours["save_strategy"]
    assert "save_steps" not in found.overrides
    found = translated(place, TRL | {"dataset_text_field": "body"})
    assert found.overrides["data.columns"] == "body:text"
    (place / "data" / "ours.jsonl").write_text('{"question": "1?", "answer": "2", "input": "x", "system": "y"}\n')
    found = translated(place, FACTORY)
    for field in ("input", "system"):
        assert f"{field} is in the file and not in its columns" in found.missing["dataset: ours"]


def test_columns_and_tags_of_held_out_data_count_too(place):
    tags = {"observation_tag": "result", "function_tag": "ask", "role_tag": "from", "user_tag": "customer"}
    held = {"file_name": "ours.jsonl", "formatting": "sharegpt", "columns": {"messages": "chat"}, "tags": tags}
    entries = {"ours": {"file_name": "ours.jsonl", "columns": {"prompt": "question"}}, "held": held}
    list_data(place, **entries)
    found = translated(place, FACTORY | {"dataset": "ours", "eval_dataset": "held"})
    assert found.overrides["data.columns"] == "question:instruction,chat:conversations" and not found.missing
    assert found.overrides["data.roles"] == "customer:user,result:tool,ask:function_call"
    found = translated(place, FACTORY | {"quantization_bit": 4, "quantization_method": "hqq"})
    assert "hqq: base weights" in found.missing["quantization_method"]


@pytest.mark.parametrize(
    ("values", "warmup", "ignored"),
    [
        ({"warmup_steps": 0, "warmup_ratio": 0.1}, "0.1", "warmup_steps"),
        ({"warmup_steps": 100, "warmup_ratio": 0.1}, "100", "warmup_ratio"),
        ({"warmup_steps": 7}, "7", None),
        ({"warmup_ratio": 0}, "0.0", None),
    ],
)
def test_steps_of_warm_up_count_before_their_share_as_in_transformers(place, values, warmup, ignored):
    theirs = {name: value for name, value in FACTORY.items() if "warmup" not in name} | values
    found = translated(place, theirs)
    assert found.overrides["schedule.warmup"] == warmup
    assert [name for name, why in found.unneeded.items() if why.endswith(" counts")] == [ignored] * bool(ignored)


@pytest.mark.parametrize("names", [("learning_rate", "lr"), ("lora_rank", "lora_r"), ("num_train_epochs", "epochs")])
def test_two_names_of_a_setting_have_to_agree(place, names):
    for values, clash in (((4, 4), False), ((4, 8), True)):
        theirs = FACTORY | dict(zip(names, values, strict=True))
        found = translated(place, theirs)
        assert any("another key of the file sets" in why for why in found.missing.values()) == clash


def test_anchors_are_read(place):
    text = (
        "base: &base\n  path: ours.jsonl\n  type: alpaca\nbase_model: x\ndatasets:\n  - <<: *base\n    split: train\n"
    )
    assert translated(place, text).overrides["data.path"] == "ours.jsonl"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lora_sft.yaml", "lora"], "ds-recipes launch --from lora_sft.yaml"),
        (["--from", "lora_sft.yaml", "lora"], "only key=value can be added"),
        (["--from", "absent.yaml"], "absent.yaml"),
        (["--from", "lora_sft.yaml", "lr=1"], "use 'learning_rate'"),
        (["--from", "elsewhere.yaml"], "learning_rate=fast: must be a number"),
    ],
)
def test_words_around_a_file_that_are_wrong(place, words, message):
    written(place, FACTORY, "lora_sft.yaml")
    written(place, FACTORY | {"model_name_or_path": "us/ours", "learning_rate": "fast"}, "elsewhere.yaml")
    status, shown = launched(*words)
    assert status == 2 and message in shown and "Traceback" not in shown


@pytest.mark.parametrize(
    ("tool", "change", "key"),
    [
        (FACTORY, {"early_stopping_steps": 3}, "early_stopping_steps"),
        (FACTORY, {"load_best_model_at_end": True}, "load_best_model_at_end"),
        (FACTORY, {"load_best_model_at_end": True, "save_strategy": "no", "val_size": 0.1}, "load_best_model_at_end"),
        (FACTORY, {"stage": "dpo", "early_stopping_steps": 3, "val_size": 0.1}, "early_stopping_steps"),
        (AXOLOTL, {"rl": "dpo", "sample_packing": False, "early_stopping_patience": 3}, "early_stopping_patience"),
    ],
)
def test_what_the_launcher_would_refuse_or_judge_otherwise_is_named(place, tool, change, key):
    """No held-out examples, no checkpoints, or a metric of the method's own where the other tool takes the loss."""
    found, recipe = command_of(tool | change, place)
    assert key in found.missing and "the command" not in found.missing
    assert recipe.early_stopping is None and not recipe.keep_best


def test_settings_that_exclude_each_other_are_shown_with_the_translation(place, capsys):
    for model in (TINY_MODEL, "us/ours"):
        file = written(place, AXOLOTL | {"base_model": model, "torch_compile": True, "activation_offloading": True})
        assert translate.main(file, None, None, []) == 1
        shown = capsys.readouterr().out
        assert "learning_rate" in shown and "the command: the launcher refuses it: activation_offloading=true" in shown


def test_fp16_keeps_the_given_deepspeed_file(place):
    values = {"fp16": True, "bf16": False, "deepspeed": "configs/zero3.json"}
    found, recipe = command_of(FACTORY | values, place)
    assert (recipe.precision, recipe.deepspeed) == ("fp16", "zero3.json")
    assert found.translated["fp16"] == "precision=fp16"


def test_data_sets_of_axolotl_have_each_key_named(place):
    """Keys of turns under other names are renamed; held-out data is held-out data; `bf16` is on unless set."""
    own = {"path": "ours.jsonl", "type": "chat_template", "field_messages": "dialog", "roles": {"user": ["customer"]}}
    mapping = {"message_property_mappings": {"role": "speaker", "content": "msg"}, "shards": 4, "split": "train"}
    values = AXOLOTL | {"datasets": [own | mapping, {"path": "b.jsonl", "type": "alpaca", "shards": 2}]}
    values |= {"test_datasets": [{"path": "val.jsonl", "type": "chat_template"}], "early_stopping_patience": 3}
    values = {name: value for name, value in values.items() if name not in ("bf16", "val_set_size")}
    found, recipe = command_of(values, place)
    assert set(found.missing) == {"datasets[0].shards", "datasets[1].shards"}
    assert any("alpaca: Axolotl writes prompts in words of its own" in remark for remark in found.remarks)
    assert (recipe.data.path, recipe.data.validation) == ("ours.jsonl,b.jsonl", "val.jsonl")
    renamed = "dialog:messages,speaker:role,msg:content"
    assert (recipe.data.columns, recipe.data.roles) == (renamed, "customer:user")
    values["datasets"][0]["message_property_mappings"] = {"role": "speaker", "tool": "api"}
    assert "datasets[0].message_property_mappings" in command_of(values, place)[0].missing
    assert (recipe.precision, recipe.early_stopping) == ("bf16", 3)
    assert "datasets[0].chat_template" not in found.translated  # the file does not have it
    del values["gradient_accumulation_steps"]
    assert command_of(values | {"batch_size": 8}, place, gpus=2)[1].global_batch_size == 16
    texts = {"datasets": None, "pretraining_dataset": [{"path": "t.jsonl", "text_column": "body"}], "max_steps": 5}
    found, recipe = command_of(values | texts, place)
    assert (recipe.method.name, recipe.data.streaming, recipe.data.columns) == ("pretrain", True, "body:text")
