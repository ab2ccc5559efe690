"""The resolver compared with a real Trainer, key by key: what the engine gets.

Random configs and TrainingArguments: the linter reports what the Trainer's own class compares, and nothing else.
"""

import copy
import json
import math
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed_recipes.commands import check
from deepspeed_recipes.commands import resolve as resolve_config
from deepspeed_recipes.config.lint import judge
from deepspeed_recipes.config.resolve import Numbers, Unresolvable, dumps, resolve
from deepspeed_recipes.config.rule import MODEL_TYPES, Facts, dimension, hidden_size, text_model
from deepspeed_recipes.config.rules import hf_trainer
from deepspeed_recipes.config.rules.kinds import FILLED
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.files import NEVER
from scripts.maintain.schema import model_types
from tests.launching import ROOT
from tests.test_configs_run import LIBAIO, RUN
from tests.tiers import tiered

# SETTINGS of tests/workers/use_config.py, two ranks.
NUMBERS = Numbers(
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    world_size=2,
    hidden_size=32,
    precision="bf16",
    max_grad_norm=0.5,
    learning_rate=3e-4,
    adam_beta2=0.95,
    weight_decay=0.02,
    max_steps=2,
)


def template(name: str) -> dict:
    return json.loads((ROOT / "configs" / f"{name}.json").read_text())


CORE = ("zero1", "zero2", "zero3", "bf16_states", "zero3_offload", "pipeline", "tensor_parallel")


@pytest.mark.parametrize("name", tiered([name for name in RUN if LIBAIO or name != "zero3_nvme"], CORE))
def test_the_result_is_what_the_trainer_passes_to_the_engine(used, name: str):
    handed = used("trainer", ROOT / "configs" / f"{name}.json")["config"]
    width = 256 if name == "zero3_nvme" else 32
    numbers = replace(NUMBERS, hidden_size=width, sequence=2 if name == "sequence_parallel" else 1)
    # deepspeed.initialize writes the size a second time into the dictionary that it is handed.
    assert handed.get("tensor_parallel", {}).pop("tp", {"tp_size": 2}) == {"tp_size": 2}
    assert handed.pop("steps_per_print") == math.inf
    ours = resolve(template(name), numbers)
    assert ours.pop("steps_per_print") == NEVER
    assert ours == handed


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.json")))
def test_the_result_loads_in_deepspeed(name: str):
    from deepspeed_recipes.config.lint import ask_deepspeed

    numbers = Numbers(world_size=8, hidden_size=64, precision="fp16" if name == "fp16" else "bf16")
    text = dumps(resolve(template(name), numbers))
    assert '"auto"' not in text
    assert ask_deepspeed(json.loads(text), world_size=8) is None


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({}, 2 * 4 * 8),
        ({"pipeline": 2}, 2 * 4 * 4),
        ({"sequence": 4}, 2 * 4 * 2),
        ({"tensor": 2}, 2 * 4 * 8),
        ({"pipeline": 2, "tensor": 2}, 2 * 4 * 4),
    ],
)
def test_batch_identity_under_each_layout(layout: dict, expected: int):
    numbers = Numbers(micro_batch_size=2, gradient_accumulation_steps=4, world_size=8, **layout)
    assert numbers.train_batch_size == expected


def test_every_key_that_the_trainer_fills_is_filled():
    config: dict = {}
    for key in FILLED:
        node = config
        *parts, last = key.split(".")
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = "auto"
    assert len(FILLED) == 23
    numbers = Numbers(hidden_size=10, max_steps=7, warmup_steps=3, learning_rate=0.25)
    filled = resolve(config, numbers)
    assert "auto" not in dumps(filled)
    assert filled["zero_optimization"]["reduce_bucket_size"] == 100
    assert filled["zero_optimization"]["stage3_prefetch_bucket_size"] == 90
    assert filled["zero_optimization"]["stage3_param_persistence_threshold"] == 100
    params = {"warmup_min_lr": 0, "warmup_max_lr": 0.25, "warmup_num_steps": 3, "total_num_steps": 7}
    assert filled["scheduler"]["params"] == params


@pytest.mark.parametrize(
    ("config", "numbers", "words"),
    [
        ({"fp16": {"enabled": True}}, Numbers(precision="bf16"), "fp16.enabled is true"),
        ({"train_batch_size": 7}, Numbers(), "train_batch_size is 7 in the template but 1 in the run"),
        (
            {"zero_optimization": {"reduce_bucket_size": "auto"}},
            Numbers(),
            "which needs the model's hidden size; add --model or hidden_size=N",
        ),
        (
            {"zero_optimization": {"sub_group_size": "auto"}},
            Numbers(),
            "the Trainer has no value for it; write a value",
        ),
        ({"scheduler": {"params": {"total_num_steps": "auto"}}}, Numbers(), "max_steps=N"),
        ({}, Numbers(world_size=6, tensor=4), "layout.tensor=4 does not divide 6 ranks"),
        ({}, Numbers(world_size=12, tensor=4, sequence=6), "12 ranks are not divisible by 24"),
    ],
)
def test_what_does_not_fit_is_named(config: dict, numbers: Numbers, words: str):
    with pytest.raises(Unresolvable, match=words):
        resolve(config, numbers)


def test_the_optimizer_that_initialize_wants_is_named(capsys: pytest.CaptureFixture):
    for name, said in (("zero2.json", "your optimizer=..."), ("zero2_offload.json", "optimizer=DeepSpeedCPUAdam(...)")):
        assert resolve_config.main([name, "--model", "llama3-8b", "micro_batch_size=1", "global_batch_size=4"]) == 0
        assert said in capsys.readouterr().err


def test_the_result_is_written_to_a_new_file(tmp_path: Path, capsys: pytest.CaptureFixture, printed_by, refusal):
    words = ["zero3.json", "--model", "llama3-8b", "micro_batch_size=1", "global_batch_size=4"]
    printed = printed_by("resolve", *words)
    file = tmp_path / "resolved.json"
    assert resolve_config.main([*words, "--output", str(file)]) == 0
    assert file.read_text() == printed and not capsys.readouterr().out
    assert f"--output {file}: exists; choose another name." in refusal("resolve", *words, "--output", file)


def test_what_the_linter_rejects_is_not_resolved(tmp_path: Path, capsys: pytest.CaptureFixture):
    template = tmp_path / "template.json"
    template.write_text('{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 5}}')
    assert resolve_config.main([str(template)]) == 1
    shown = capsys.readouterr()
    assert "zero_optimization.stage" in shown.err and not shown.out


@pytest.mark.parametrize(
    ("name", "settings", "idle"),
    [
        ("zero2.json", ["learning_rate=5e-5", "weight_decay=0.1", "micro_batch_size=4"], "learning_rate=5e-5, weight"),
        (
            "zero1.json",
            ["max_grad_norm=0.5", "warmup_steps=0", "hidden_size=64"],
            "warmup_steps=0, hidden_size=64: not",
        ),
        ("zenflow.json", ["learning_rate=1e-3"], ""),
    ],
)
def test_a_setting_that_changes_nothing_is_named(name, settings, idle, capsys):
    assert resolve_config.main([name, *settings]) == 0
    shown = capsys.readouterr()
    assert ("not in the result" in shown.err) == bool(idle) and shown.err.startswith(idle)
    assert ("give deepspeed.initialize your optimizer" in shown.err) == ("optimizer" not in json.loads(shown.out))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["micro_batch_size=2", "micro_batch_size=3"], "micro_batch_size: given twice, as 2 and 3"),
        (["global_batch_size=8", "gradient_accumulation_steps=4"], "global_batch_size=8: with 1 sequences at a time"),
        (["--model", "llama3-8b", "hidden_size=64"], "hidden_size=64: --model has 4096"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        resolve_config.main(["zero3.json", *settings])
    assert resolve_config.main(["zero2.json", "global_batch_size=8", "gradient_accumulation_steps=8"]) == 0


def test_infinity_is_written_as_a_number():
    assert json.loads(dumps({"steps_per_print": math.inf})) == {"steps_per_print": NEVER}


@pytest.mark.parametrize(
    ("model", "width"),
    [
        ({"hidden_size": 8}, 8),
        ({"text_config": {"hidden_size": 8}}, 8),
        ({"hidden_sizes": [8, 16]}, 16),
        ({"d_model": 8}, None),
        ({"model_type": "gpt2", "n_embd": 8}, 8),
        ({"model_type": "gpt2"}, 768),
        ({"model_type": "gptj", "n_embd": 16}, 16),
        ({"model_type": "dbrx", "d_model": 24}, 24),
        ({"model_type": "opt", "hidden_size": 32}, 32),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, 4096),
        ({"model_type": "llava", "text_config": {"vocab_size": 7}}, 4096),
        ({"model_type": "llava"}, 4096),
        ({"model_type": "unheard_of", "d_model": 8}, None),
    ],
)
def test_hidden_size_is_found_where_the_trainer_finds_it(model: dict, width: int | None):
    assert hidden_size(model) == width


@pytest.mark.parametrize("name", ["gpt2", "gptj", "dbrx", "bloom", "mpt", "llava", "gemma3", "llama4"])
def test_a_saved_model_is_read_as_transformers_reads_it(name: str, tmp_path: Path):
    """Whatever `save_pretrained` leaves out, because it is a default, counts too."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[name]()
    config.save_pretrained(tmp_path)
    inner = config.get_text_config()
    text = text_model(json.loads((tmp_path / "config.json").read_text()))
    assert dimension(text, "hidden_size") == inner.hidden_size
    assert dimension(text, "num_attention_heads") == inner.num_attention_heads
    assert dimension(text, "vocab_size") == inner.vocab_size


def test_the_model_types_are_those_of_transformers():
    """model_types.json is derived, never edited (`python -m scripts.maintain.schema.model_types`). Every tenth."""
    shipped = json.loads(MODEL_TYPES.read_text())
    some = [*sorted(shipped)[::10], "gpt2", "gptj", "dbrx"]
    assert len(shipped) > 600
    assert model_types.derive(some) == {name: shipped[name] for name in some}


def test_a_folder_of_gpt2_passes_under_zero3(tmp_path: Path):
    from deepspeed_recipes.config.lint import lint

    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": 64, "n_head": 4}')
    found = lint(ROOT / "configs" / "zero3.json", model=tmp_path)
    assert "no-hidden-size" not in {finding.rule for finding in found}


BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
SIZES, RATES, STEPS = (
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((5e-5, 1e-4, 0.5)),
    st.sampled_from((1, 2, 10, 100)),
)
ARGUMENTS = {
    "per_device_train_batch_size": SIZES,
    "gradient_accumulation_steps": SIZES,
    "max_grad_norm": st.sampled_from((0, 1, 1.0, 0.5)),
    "learning_rate": RATES,
    "adam_beta1": st.sampled_from((0.9, 0.95)),
    "adam_beta2": st.sampled_from((0.999, 0.95)),
    "adam_epsilon": st.sampled_from((1e-8, 1e-6)),
    "weight_decay": st.sampled_from((0, 0.0, 0.1)),
    "warmup_steps": st.sampled_from((0, 1, 2, 10, 0.1, 0.015)),
    "max_steps": STEPS,
    "fp16": st.booleans(),
    "bf16": st.booleans(),
    "fp16_full_eval": st.booleans(),
    "bf16_full_eval": st.booleans(),
}


def auto(strategy: st.SearchStrategy) -> st.SearchStrategy:
    """Return also what is not compared, and a number in quotes, which equals none."""
    return st.one_of(strategy, strategy, st.sampled_from(("auto", None, "8")))


def section(**keys: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries({}, optional=keys)


CONFIGS = st.fixed_dictionaries(
    {"zero_optimization": st.just({"stage": 2})},
    optional={
        **dict.fromkeys(BATCH[:2], auto(SIZES)),
        "train_batch_size": auto(st.sampled_from((2, 4, 8, 16, 32, 64))),
        "gradient_clipping": auto(ARGUMENTS["max_grad_norm"]),
        "fp16": section(enabled=auto(st.booleans())),
        "bf16": section(enabled=auto(st.booleans())),
        "optimizer": section(
            params=section(
                lr=auto(RATES),
                betas=auto(st.sampled_from(([0.9, 0.999], [0.9, 0.95], [0.9]))),
                eps=auto(ARGUMENTS["adam_epsilon"]),
                weight_decay=auto(ARGUMENTS["weight_decay"]),
            )
        ),
        "scheduler": section(
            params=section(warmup_max_lr=auto(RATES), warmup_num_steps=auto(STEPS), total_num_steps=auto(STEPS))
        ),
    },
)


@pytest.fixture(scope="module")
def compare():
    """Return a function that gives the keys at which the Trainer's class stops."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    class Arguments(TrainingArguments):
        """The defaults and the arithmetic of TrainingArguments, without looking for devices."""

        world_size = 0

        def __post_init__(self):
            for one in fields(self):
                if one.default is MISSING and one.default_factory is MISSING:
                    setattr(self, one.name, None)

    def stops(config: dict, world_size: int, given: dict) -> set[str]:
        arguments = Arguments(output_dir="x", **given)
        type(arguments).world_size = world_size
        filled = HfTrainerDeepSpeedConfig(copy.deepcopy(config))
        filled.trainer_config_process(arguments)
        try:
            filled.trainer_config_finalize(arguments, None, arguments.max_steps)
        except ValueError as error:
            return {line.split()[2].partition("=")[0] for line in str(error).splitlines() if line.startswith("- ds ")}
        return set()

    return stops


def reported(config: dict, world_size: int | None, given: dict) -> set[str]:
    findings = judge(config, Facts(world_size=world_size, arguments=given))
    return {one.key for one in findings if one.rule == "fixed-for-trainer" and one.severity == "error"}


def possible(given: dict) -> bool:
    """Return whether TrainingArguments accept this precision."""
    return not (given["fp16"] and given["bf16"]) and not (given["fp16_full_eval"] and given["bf16_full_eval"])


def mixed(given: dict) -> bool:
    """Return whether a run trains in one precision and evaluates in the other, which the linter has to be told."""
    return (given["fp16"] or given["fp16_full_eval"]) and (given["bf16"] or given["bf16_full_eval"])


@pytest.mark.parametrize("examples", tiered((200, 5000), (200,)))
def test_the_linter_stops_where_the_trainer_does(compare, examples):
    seen = {"stopped": 0, "passed": 0}

    @settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(
        CONFIGS, st.sampled_from((1, 2, 4)), st.fixed_dictionaries(ARGUMENTS), st.sets(st.sampled_from([*ARGUMENTS]))
    )
    def agree(config, world_size, given, untold):
        if not possible(given):
            return
        stops = compare(config, world_size, given)
        seen["stopped" if stops else "passed"] += 1
        assert reported(config, world_size, given) == stops
        if not mixed(given):
            part = {name: value for name, value in given.items() if name not in untold}
            assert reported(config, world_size, part) <= stops, "what it is not told it does not claim"
        assert reported(config, None, {}) == set()

    agree()
    assert min(seen.values()) > examples / 10, seen


def test_every_argument_that_is_compared_is_generated():
    assert set(hf_trainer.ARGUMENTS) == {*ARGUMENTS}


def test_an_argument_that_is_not_compared_is_named(tmp_path, capsys):
    file = tmp_path / "c.json"
    file.write_text('{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}')
    check.main([str(file), "--argument", "per_device_batch_size=8"])
    assert "--argument per_device_batch_size: ignored; the Trainer" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["per_device_train_batch_size=8.5", "bf16=maybe", "learning_rate=fast", "fp16=1"])
def test_an_argument_that_training_arguments_cannot_have_is_refused(tmp_path, capsys, word):
    with pytest.raises(SystemExit) as ended:
        check.main([str(tmp_path / "c.json"), "--argument", word])
    assert ended.value.code == 2 and f"{word}: must be " in capsys.readouterr().err


@pytest.mark.parametrize("pair", hf_trainer.EXCLUSIVE)
def test_arguments_that_exclude_each_other_are_refused(tmp_path, pair):
    words = [word for name in pair for word in ("--argument", f"{name}=true") if name != "deepspeed"]
    with pytest.raises(UserError, match=f"{pair[0]} and {pair[1]} exclude each other"):
        check.main([str(tmp_path / "c.json"), *words])


@pytest.mark.parametrize(("told", "stops"), [({"adam_beta1": 0.8}, True), ({"adam_beta2": 0.999}, False), ({}, False)])
def test_one_of_two_betas_is_enough_to_stop(told, stops):
    config = {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.999]}}}
    assert (reported(config, None, told) == {"optimizer.params.betas"}) == stops
