"""`ds-recipes check --fix`: it edits in place, and makes no file worse."""

import contextlib
import copy
import io
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from deepspeed_recipes.commands import main
from deepspeed_recipes.config import edits
from deepspeed_recipes.config.lint import judge
from deepspeed_recipes.config.read import parse
from deepspeed_recipes.config.resolve import Numbers, resolve
from deepspeed_recipes.config.rule import Edit, Facts
from tests.test_config_fuzz import configs, mutated
from tests.test_config_read import values
from tests.tiers import examples
from tests.versions import needs

pytestmark = needs("deepspeed==0.19.8")  # what its schema and its engine say; another version says other things


def check(*arguments: str) -> SimpleNamespace:
    """Run the command, and return its exit status and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = main.run("check", [*arguments])
    return SimpleNamespace(returncode=status, stdout=printed.getvalue())


def fixed(text: str, trainer: str = "plain") -> tuple[str, list[str]]:
    return edits.fix(parse(text), lambda document: judge(document, Facts(trainer=trainer, world_size=1)))


LAID_OUT = """{
    // for the small cluster
    "train_micro_batch_size_per_gpu" : "8",
    "gradient_clipping": 1e0, # as before
    "amp": {"enabled": false},
    "zero_optimization": {
        "stage": 3,  "overlap_com": true,
        "reduce_bucket_size": 5e8,
        "stage3_gather_16bit_weights_on_model_save": false
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "3e-4", "betas": [0.9,   0.95]}},
    "aio": { "thread_count": 4 }
}
"""


def test_a_stage_in_quotation_marks_becomes_its_number():
    text, _ = fixed('{"zero_optimization": {"stage": "2"}}', "hf")
    assert parse(text).value["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("indent", ["    ", "\t", " "])
def test_only_what_is_wrong_changes(newline: str, indent: str):
    text = LAID_OUT.replace("    ", indent).replace("\n", newline)
    right = (
        text.replace('"8"', "8").replace("overlap_com", "overlap_comm").replace("thread_count", "intra_op_parallelism")
    )
    right = right.replace(f'{indent}"amp": {{"enabled": false}},{newline}', "")
    right = right.replace('"3e-4"', "0.0003").replace('model_save": false', 'model_save": true')
    after, left = fixed(text)
    assert after == right
    assert left == ["comments: not removed: move them to another file if the Trainer reads this file"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"a": 1,\n "zero_optimization": {"stage": "auto",},}', '{"a": 1,\n "zero_optimization": {"stage": "auto"}}'),
        ('{"dump_state": True\n "a": "auto"}', '{"dump_state": true,\n "a": "auto"}'),
    ],
)
def test_strict_json_is_made_by_single_characters(before: str, after: str):
    assert edits.fix(parse(before), lambda _: []) == (after, [])


@pytest.mark.parametrize(
    ("text", "edit", "after"),
    [
        ('{"a": {}}', Edit("set", ("a", "b"), 1), '{"a": {"b": 1}}'),
        ('{"a": [1,  2]}', Edit("set", ("b",), None), '{"a": [1,  2], "b": null}'),
        ('{\n  "a": 1\n}', Edit("set", ("b",), {"c": 1}), '{\n  "a": 1,\n  "b": {"c": 1}\n}'),
        ('{\r\n\t"a": 1 // b\r\n}', Edit("set", ("b",), 2), '{\r\n\t"a": 1,\r\n\t"b": 2 // b\r\n}'),
        ('{"a": 1, "b": 2}', Edit("remove", ("a",)), '{"b": 2}'),
        ('{"a": 1, "b": 2}', Edit("remove", ("b",)), '{"a": 1}'),
        ('{\n  "a": 1, // first\n  "b": 2\n}', Edit("remove", ("b",)), '{\n  "a": 1 // first\n}'),
        ('{"a": 1}', Edit("remove", ("a",)), "{}"),
        ('{"a": 1, "b": 2}', Edit("rename", ("a",), "b"), '{"a": 1, "b": 2}'),
        ('{"a": 1}', Edit("remove", ("c",)), '{"a": 1}'),
    ],
)
def test_one_edit(text: str, edit: Edit, after: str):
    assert edits.edit_text(text, edit) == after


@settings(max_examples=examples(300))
@given(st.dictionaries(st.text(), values, max_size=4), st.data())
def test_an_edit_of_the_text_is_that_edit_of_the_value(config: dict, data):
    text = json.dumps(config, indent=data.draw(st.sampled_from([None, 1, 4, "\t"])))
    name = data.draw(st.sampled_from([*config, "new"]))
    action = data.draw(st.sampled_from(["set", "remove", "rename"]))
    edit = Edit(action, (name,), "renamed" if action == "rename" else data.draw(values))
    after = {"set": config | {name: edit.value}, "remove": {key: config[key] for key in config if key != name}}
    after["rename"] = {"renamed" if key == name else key: config[key] for key in config}
    expected = config if action == "rename" and "renamed" in config else after[action]
    assert parse(edits.edit_text(text, edit)).value == expected


@pytest.mark.parametrize(
    "config",
    [
        {"lr_scheduler": "cosine"},
        {"optimzer": "AdamW"},
        {"zero_optimisation": 2},
        {"gradient_cliping": True},
        {"wall_clock_breakdwn": 3},
        {"zero_optimization": {"overlap_com": [1]}},
        {"zero_optimization": {"stage": 2, "cpu_offload": False, "cpu_offload_use_pin_memory": True}},
    ],
)
def test_no_key_is_renamed_to_one_of_another_type(config: dict):
    text = json.dumps({"train_micro_batch_size_per_gpu": 1, **config})
    assert fixed(text)[0] == text


@pytest.mark.parametrize("stage", [2, 3])
def test_a_deprecated_key_is_renamed_at_any_stage(stage: int):
    text = f'{{"train_batch_size": 1, "zero_optimization": {{"stage": {stage}, "OLD": true}}}}'
    old, new = (f"stage3_gather_{kind}_weights_on_model_save" for kind in ("fp16", "16bit"))
    assert fixed(text.replace("OLD", old)) == (text.replace("OLD", new), [])


def test_a_duplicate_stays_and_the_reason_is_said(tmp_path: Path):
    file = tmp_path / "twice.json"
    text = '{"train_batch_size": 8,\n "train_batch_size": 16}'
    file.write_text(text)
    run = check(str(file), "--fix")
    assert run.returncode == 1
    assert file.read_text() == text
    assert f"{file}: line 2: not fixed: the key appears twice; remove the value" in run.stdout


def test_auto_is_added_to_templates_only():
    text = '{"train_batch_size": 8, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 1}}'
    after, left = fixed(text, trainer="hf")
    assert after == text
    reason = 'the file has no "auto" yet, and without the Trainer it would no longer load; --trainer hf permits it'
    assert left == [f"`gradient_clipping`: not fixed: {reason}"]
    hf = Facts(trainer="hf", world_size=1)
    after, left = edits.fix(parse(text), lambda document: judge(document, hf), of_trainer=True)
    assert json.loads(after)["gradient_clipping"] == "auto" and not left
    template = '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}}'
    assert json.loads(fixed(template, trainer="hf")[0]) == {
        **json.loads(template),
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }


def test_a_missing_batch_size_is_left_to_the_trainer_and_to_nobody_else():
    text = '{"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 1}}'
    assert json.loads(fixed(text, trainer="hf")[0])["train_micro_batch_size_per_gpu"] == "auto"
    assert "train_micro_batch_size_per_gpu" not in json.loads(fixed(text)[0])


def test_the_command_shows_the_diff_and_writes_the_file(tmp_path: Path):
    file = tmp_path / "old.json"
    file.write_bytes(b'{"train_batch_size": "auto",\r\n "amp": {"enabled": false}, "gradient_cliping": "auto"}')
    run = check(str(file), "--fix")
    assert '-{"train_batch_size": "auto",' not in run.stdout
    assert '+ "gradient_clipping": "auto"' in run.stdout
    assert file.read_bytes().startswith(b'{"train_batch_size": "auto",\r\n "gradient_clipping": "auto"')
    assert check(str(file)).returncode == 0


def test_a_file_that_loads_still_loads():
    """For both trainers; a template is filled before DeepSpeed reads it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    def loads(config: dict) -> bool:
        try:
            DeepSpeedConfig(resolve(config, Numbers(hidden_size=8, max_steps=9)) if "auto" in str(config) else config)
        except Exception:  # its verdict is whatever it raises
            return False
        return True

    seen = {"loading": 0, "changed": 0}

    @settings(
        max_examples=400,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(configs(), mutated(configs())), st.sampled_from(["hf", "plain"]), st.booleans())
    def nothing_breaks(config: dict, trainer: str, template: bool) -> None:
        if template:
            config["gradient_clipping"] = "auto"
        text = json.dumps(config)
        after, _ = fixed(text, trainer)
        if loads(copy.deepcopy(config)):
            seen["loading"] += 1
            seen["changed"] += after != text
            assert loads(json.loads(after)), f"{trainer}: {text} became {after}"

    logging.disable(logging.CRITICAL)
    try:
        nothing_breaks()
    finally:
        logging.disable(logging.NOTSET)
    assert seen["loading"] > 100 and seen["changed"] > 50, seen


def test_a_misspelt_key_and_value_keep_what_the_user_wrote():
    """The rule for a missing key would fill in "auto" for the key that the other rule has just renamed."""
    zero = '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "CPU"}}'
    text, _ = fixed(f'{{"train_batch_size": "auto", "gradient_clippin": 0.3, {zero}}}', "hf")
    after = parse(text).value
    assert after["gradient_clipping"] == 0.3 and after["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
