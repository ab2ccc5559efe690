"""Random configs and TrainingArguments: the linter reports what the Trainer's own class compares, and nothing else."""

import copy
from dataclasses import MISSING, fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed_recipes.commands import check
from deepspeed_recipes.config.lint import judge
from deepspeed_recipes.config.rule import Facts
from deepspeed_recipes.config.rules import hf_trainer
from tests.tiers import tiered

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
