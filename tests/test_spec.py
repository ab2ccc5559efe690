"""Recipes, overrides and layouts: what a command line makes of a recipe page."""

import inspect
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import DPOTrainer

from deepspeed_recipes.recipe import bounds, overrides, pages
from deepspeed_recipes.recipe.conversions import from_dict, lora_options, to_dict
from deepspeed_recipes.recipe.errors import UserError, redact
from deepspeed_recipes.recipe.layout import gradient_accumulation_steps
from deepspeed_recipes.recipe.methods import Dpo
from deepspeed_recipes.recipe.overrides import FOREIGN_NAMES, override_keys
from deepspeed_recipes.recipe.project import PACKAGE
from deepspeed_recipes.recipe.recipe import Lora, Recipe

RELIED_ON = {
    "": "deepspeed learning_rate max_steps epochs global_batch_size micro_batch_size sequence_length precision "
    "gradient_checkpointing packing seed save_steps logging_steps",
    "model.": "path",
    "data.": "path",
    "lora.": "rank alpha dropout",
    "layout.": "tensor pipeline sequence expert",
    "wandb.": "mode project",
    "draft.": "layers hidden_size",
}


@pytest.fixture
def full():
    return pages.find("tiny", "full")


def test_the_keys_that_others_rely_on_exist():
    wanted = {section + name for section, names in RELIED_ON.items() for name in names.split()}
    assert wanted <= set(override_keys())


def test_own_data_is_not_judged_by_the_pages_held_out_set(full):
    def judged(*words, recipe=full):
        data = overrides.apply(recipe, ["data.path=mine", *words]).data
        return data.validation, data.validation_share, data.metric

    assert judged() == (None, "auto", "loss")
    assert judged("data.metric=exact_match") == (None, "auto", "exact_match")
    assert judged("data.validation=none") == (None, 0.0, "loss")
    assert judged("data.validation=other") == ("other", 0.0, "loss")
    assert judged("data.validation=other", "data.metric=exact_match") == ("other", 0.0, "exact_match")
    assert judged("data.validation_share=0.2") == (None, 0.2, "loss")
    assert judged("data.streaming=true", "max_steps=5") == (None, 0.0, "loss")
    assert judged(recipe=pages.find("tiny", "dpo_lora")) == (None, "auto", "preference_accuracy")
    own = overrides.apply(full, ["data.path=mine"])
    assert overrides.apply(own, ["data.validation=none"]).data.validation_share == 0.0
    assert overrides.apply(full, ["epochs=2"]).data == full.data
    assert overrides.apply(full, ["data.validation=other"]).data.metric == "loss"
    resumed = overrides.apply(full, ["data.path=mine", "data.validation=other"], resumed=True)
    assert resumed.data.metric == "exact_match", "a run keeps its metric"
    with pytest.raises(UserError, match=r"a number, e\.g\. 5e-5 or auto"):
        judged("data.validation_share=some")


def test_foreign_names_lead_to_keys_that_exist(full):
    assert set(FOREIGN_NAMES.values()) <= set(override_keys())
    for foreign, ours in FOREIGN_NAMES.items():
        with pytest.raises(UserError, match=ours.replace(".", r"\.")):
            overrides.apply(full, [f"{foreign}=1"])


def test_foreign_names_with_the_same_values_are_read_as_ours(full, capsys):
    assert set(FOREIGN_NAMES) >= overrides.SAME
    words = [
        "num_train_epochs=3",
        "lora_r=8",
        "lora_target=all",
        "lr_scheduler_type=linear",
        "warmup_ratio=0.1",
        "tiny",
    ]
    found = [overrides.word(one) for one in words]
    assert found[:2] == ["epochs=3", "lora.rank=8"] and found[-1] == "tiny"
    assert overrides.word("run_name=first") == "wandb.name=first"
    changed = overrides.apply(full, found[:-1])
    assert (changed.epochs, changed.lora.rank, changed.lora.target_modules) == (3, 8, "all-linear")
    assert (changed.schedule.kind, changed.schedule.warmup) == ("linear", 0.1)
    assert "num_train_epochs is read as epochs\n" in capsys.readouterr().err
    with pytest.raises(UserError, match="unknown, too: f, g"):
        overrides.apply(full, [f"{name}=1" for name in "abcdefg"])


def test_foreign_names_without_a_key_are_answered(full):
    for foreign, said in overrides.OTHER_TOOLS["words"].items():
        with pytest.raises(UserError, match=said[:20]):
            overrides.apply(full, [f"{foreign}=1"])
    for key, answer in {
        "group_by_length": "use packing=true",
        "hub_token": "ds-recipes publish",
        "beta": "dpo.beta",
    }.items():
        with pytest.raises(UserError, match=answer):
            overrides.apply(full, [f"{key}=1"])
    assert overrides.apply(pages.find("tiny", "kto_lora"), ["beta=1"]).method.beta == 1
    assert overrides.apply(pages.find("tiny", "grpo"), ["loss_type=dapo", "beta=0.1"]).method.loss == "dapo"
    with pytest.raises(UserError, match=r"Did you mean 'data\.sample_answers'"):
        overrides.apply(full, ["answers=3"])


def test_foreign_names_lead_to_options_that_exist(full):
    for foreign, ours in overrides.OTHER_TOOLS["options"].items():
        assert f'"{ours}"' in (PACKAGE / "commands" / "launch" / "options.py").read_text(encoding="utf-8")
        with pytest.raises(UserError, match=f"ds-recipes launch's option {ours}"):
            overrides.apply(full, [f"{foreign}=1"])


@pytest.mark.parametrize(
    "words",
    [
        ["data.path=a.jsonl"],
        ["data.path=a.jsonl,b.jsonl", "data.columns=x:text"],
        ["data.path=a.jsonl", "data.validation_share=0.2"],
        ["learning_rate=5e-05", "data.validation=none"],
    ],
)
def test_differences_say_again_what_was_typed_and_nothing_that_follows_from_it(full, words):
    changed = overrides.apply(full, words)
    assert set(overrides.differences(full, changed)) <= set(words)
    assert overrides.apply(full, overrides.differences(full, changed)) == changed


@pytest.mark.parametrize(
    "words",
    [
        ["data.path=own.jsonl", "data.validation=other.jsonl", "data.metric=loss", "loss_on=all"],
        ["data.path=own.jsonl", "data.validation=other.jsonl", "data.validation_share=0.2"],
        ["data.path=own.jsonl", "data.metric=exact_match", "data.validation_share=0.1"],
        ["data.validation=other.jsonl", "data.metric=loss"],
        ["data.path=own.jsonl", "data.streaming=true", "max_steps=5"],
    ],
)
def test_differences_from_a_page_give_the_recipe_back(words):
    page = pages.find("tiny", "full")
    changed = overrides.apply(page, words)
    assert overrides.apply(page, overrides.differences(page, changed)) == changed


def test_values_get_the_types_of_their_fields(full, capsys):
    changed = overrides.apply(
        full, ["learning_rate=5e-5", "max_steps=7", "packing=no", "lora.rank=32", "precision=bf16", "max_steps=8"]
    )
    assert (changed.learning_rate, changed.max_steps, changed.packing) == (5e-5, 8, False)
    assert capsys.readouterr().err == "max_steps is given twice, as 7 and 8: the last one counts\n"
    assert changed.lora.rank == 32 and changed.precision == "bf16"
    named = [
        overrides.apply(full, [f"deepspeed={name}"]).deepspeed for name in ("zero2", "zero2.json", "zero22", "auto")
    ]
    assert named == ["zero2.json", "zero2.json", "zero22", "auto"]
    assert overrides.apply(changed, ["max_steps=none"]).max_steps is None
    assert overrides.apply(full, []) == full


def test_the_order_of_overrides_never_breaks_a_valid_set(full):
    for pair in (["micro_batch_size=3", "global_batch_size=6"], ["global_batch_size=6", "micro_batch_size=3"]):
        assert overrides.apply(full, pair).global_batch_size == 6


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_gives_at_worst_a_user_error(key, value):
    recipe = pages.find("tiny", "full")
    for name in [key, *list(override_keys())[:40:3]]:
        try:
            changed = overrides.apply(recipe, [f"{name}={value}"])
        except UserError as error:
            assert str(error).count("\n") <= 2
        else:
            assert from_dict(to_dict(changed)) == changed


def test_no_example_has_a_deadline_that_load_could_break():
    assert settings.get_current_profile_name() in ("some", "all")
    assert settings().deadline is None


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_number_is_finite_or_refused(number):
    recipe = pages.find("tiny", "full")
    if 0 < number <= 3e38:  # beyond, fp32 has infinity
        assert overrides.apply(recipe, [f"learning_rate={number!r}"]).learning_rate == number
    else:
        with pytest.raises(UserError):
            overrides.apply(recipe, [f"learning_rate={number!r}"])


def test_a_misspelt_key_names_the_nearest(full):
    for wrong, right in (
        ("learning_rat", "learning_rate"),
        ("lora.rnak", "lora.rank"),
        ("seq_length", "sequence_length"),
    ):
        with pytest.raises(UserError, match=f"Did you mean '{right}'"):
            overrides.apply(full, [f"{wrong}=1"])


@pytest.mark.parametrize(("world", "micro", "expected"), [(2, 8, 1), (1, 8, 2), (2, 4, 2), (4, 2, 2)])
def test_accumulation_completes_the_global_batch(full, world, micro, expected):
    recipe = replace(full, global_batch_size=16, micro_batch_size=micro)
    assert gradient_accumulation_steps(recipe, world) == expected


def test_an_impossible_global_batch_names_possible_ones(full):
    with pytest.raises(UserError, match="12, 18"):
        gradient_accumulation_steps(replace(full, global_batch_size=16, micro_batch_size=2), 3)
    with pytest.raises(UserError, match="8, 16"):
        gradient_accumulation_steps(replace(full, global_batch_size=4, micro_batch_size=4), 2)


def test_an_unknown_field_in_a_file_is_a_user_error(full):
    with pytest.raises(UserError, match="'speed'"):
        from_dict(to_dict(full) | {"speed": 1})
    with pytest.raises(UserError, match="missing"):
        from_dict({"family": "tiny"})


def test_secrets_are_taken_out_of_texts():
    token = "hf_" + "Ab1" * 11
    text = f"--token {token} url https://me:pass1234@host/x key {'0a' * 20} hunter2hunter2 step 5"
    shown = redact(text, {"MY_PASSWORD": "hunter2hunter2", "HOME": "/root/somewhere"})
    assert shown == "--token *** url https://***@host/x key *** *** step 5"


def test_a_page_takes_few_examples_of_its_own_data_only():
    distill = pages.find("tiny", "distill")
    assert distill.data.max_examples == 250
    assert overrides.apply(distill, ["data.path=mine.jsonl"]).data.max_examples is None
    assert overrides.apply(distill, ["data.path=mine.jsonl", "data.max_examples=9"]).data.max_examples == 9


def test_a_teacher_makes_distillation_of_supervised_fine_tuning():
    recipe = overrides.apply(pages.find("qwen3-0.6b", "lora"), ["distill.teacher=Qwen/Qwen3-8B", "distill.alpha=0.5"])
    assert (recipe.method.name, recipe.lora.rank, recipe.method.alpha) == ("distill", 32, 0.5)


@pytest.mark.parametrize(
    ("variant", "assignment", "message"),
    [
        (
            "full",
            "dpo.beta=0.2",
            "dpo.beta: a setting of the method dpo, but this recipe's method is sft; ds-recipes",
        ),
        ("full", "reward=mine.py:right", "reward: a setting of the method grpo, but this recipe's method is sft"),
        ("full", "distill.alpha=0.5", "method distill, .* is sft; add distill.teacher=MODEL"),
        ("dpo_lora", "distill.teacher=teacher", "method distill, but this recipe's method is dpo"),
        ("simpo_lora", "dpo.beta=0.2", "method dpo, but this recipe's method is simpo"),
    ],
)
def test_a_setting_of_another_method_is_refused(variant, assignment, message):
    with pytest.raises(UserError, match=message):
        overrides.apply(pages.find("tiny", variant), [assignment])


def test_every_override_key_is_documented_where_it_is_defined():
    source = "".join(file.read_text(encoding="utf-8") for file in (PACKAGE / "recipe").rglob("*.py"))
    for key in override_keys():
        assert f"    {key.rpartition('.')[2]}: " in source, key


@pytest.mark.parametrize(
    ("typed", "why"),
    {
        "dpo.loss=dpo": "dpo.loss",
        "dpo.loss=aot": "dpo.loss",
        "dpo.beta=0": r"dpo\.beta=0.*: must be above 0, for instance 0\.1",
        "simpo.beta=-1": r"simpo\.beta=-1.*: must be above 0",
        "simpo.gamma=-1": r"simpo\.gamma=-1.*: must be at least 0",
        "dpo.label_smoothing=0.1": "with dpo.loss=sigmoid: only robust and exo_pair read it",
        "dpo.loss=exo_pair": "needs dpo.label_smoothing above 0",
        "dpo.loss=robust dpo.label_smoothing=0.5": "must be at least 0 and below 0.5",
    }.items(),
)
def test_settings_that_no_method_can_train_with_are_refused(typed, why):
    with pytest.raises(UserError, match=why):
        overrides.apply(pages.find("tiny", "dpo_lora"), typed.split())


@pytest.mark.parametrize("variant", ["reward", "kto_lora", "orpo_lora", "simpo_lora", "classify", "embed"])
def test_losses_without_that_of_the_routers_are_not_asked_for_it(variant):
    with pytest.raises(UserError, match="trains without the load-balancing loss"):
        overrides.apply(pages.find("tiny", variant), ["router_aux_loss_coef=0.1"])


def test_the_losses_of_dpo_that_are_offered_are_trls():
    source = inspect.getsource(DPOTrainer._compute_loss)
    for loss in get_args(get_type_hints(Dpo)["loss"]):
        assert f'loss_type == "{loss}"' in source
    recipe = overrides.apply(pages.find("tiny", "dpo_lora"), ["dpo.loss=robust", "dpo.label_smoothing=0.1"])
    assert (recipe.method.loss, recipe.method.label_smoothing) == ("robust", 0.1)


@pytest.mark.parametrize(
    ("kind", "modules", "left_out"),
    [
        ("mamba2", "all-linear", ["out_proj", "conv1d"]),
        ("mamba2", "in_proj", None),
        ("opt", "all-linear", None),  # whose attention has an out_proj too
    ],
)
def test_only_mambas_fused_weights_get_no_adapters(kind, modules, left_out):
    assert lora_options(Lora(target_modules=modules), kind=kind)["exclude_modules"] == left_out


def test_a_page_that_names_no_rate_gets_the_one_that_messages_suggest():
    (rate,) = (one for one in bounds._fields(Recipe) if one.name == "learning_rate")
    assert inspect.signature(Recipe).parameters["learning_rate"].default == rate.bounds.usual == 2e-5
