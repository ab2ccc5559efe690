"""The linter's advice works: a config changed as a fix says has that finding no more, and no error that it had not."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deepspeed_recipes.config.accelerate import lint as accelerate_lint
from deepspeed_recipes.config.lint import judge
from deepspeed_recipes.config.read import parse
from tests import test_config_accelerate, test_config_rules
from tests.test_config_rules import CASES

AT_THE_TOP = (
    *("distributed_type", "compute_environment", "num_processes", "machine_rank", "num_machines", "mixed_precision"),
    *("main_process_port", "zero_allow_untested_optimizer"),
)
"""Keys that advice about another key adds at the top of the file."""
ELSEWHERE = (
    *(
        "pass ",
        "set torch_compile=",
        "set use_cpu=",
        "set gradient_checkpointing=",
        "use report_to",
        "correct the path",
    ),
    *("use GPUs", "use the Trainer", "set the groups", "look up", "fill the template", "shard the layers", "step it"),
)
"""What the reader does outside the file."""
SAID: dict[str, dict[str, Any]] = {
    "add deepspeed_hostfile": {"deepspeed_config.deepspeed_hostfile": "hosts"},
    "add iam_role_name": {"iam_role_name": "ours"},
    "add main_process_ip": {"main_process_ip": "10.0.0.1"},
    "set it in the JSON": {},
    "add them": {"fsdp_config.fsdp_activation_checkpointing": True},
    "add the first machine's address": {"main_process_ip": "10.0.0.1"},
    "add mpirun_config with mpirun_hostfile": {"mpirun_config": {"mpirun_hostfile": "hosts"}},
    "use deepspeed_config_file with configs/zero3_nvme.json": {
        "deepspeed_config": {"deepspeed_config_file": "configs/zero3_nvme.json"}
    },
    "write one `key: value` per line": {"deepspeed_config": {"zero_stage": 3}},
    "write auto in both": {"optimizer.params.lr": "auto", "scheduler.params.warmup_max_lr": "auto"},
    'write "auto" in both': {"optimizer.params.lr": "auto", "scheduler.params.warmup_max_lr": "auto"},
    "use `offload_optimizer`": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "add an `optimizer` block": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}},
    "offload the optimizer": {"zero_optimization.offload_optimizer": {"device": "cpu"}},
    "add `total_num_steps`": {"scheduler.params.total_num_steps": 100},
    "add `data_parallel_size`": {"data_parallel_size": 2},
    "add `curriculum_metrics`": {"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics": {}},
    "set `nvme_path` to a folder on a local NVMe drive": {"zero_optimization.offload_param.nvme_path": "nvme_offload"},
    "switch one of them off": {"bf16.enabled": False},
    "keep only `bf16`": {"bfloat16": None},
    "move the value to `gradient_clipping`": {"gradient_clipping": 1, "optimizer.params.max_grad_norm": None},
}
"""Advice in words, and the values that a reader writes for it; None: the key is removed."""
SAMPLES = {"a number": 1, "a whole number": 2, "the value": 10**9, "a folder": "nvme_offload", "how often": 10}
SAMPLES |= {"at least two numbers": "0,1", "a divisor": 2, "a size that divides": 2, "about 0.9 times": 10**6}
CHOICES = {"mixed_precision": "bf16", "zero_stage": 2, "parallelism_config_cp_backend": "torch"}
"""What is written for `one of them`."""


def ways(config: dict, path: tuple, fix: str) -> Iterator[dict]:
    """Yield the config after each of the ways that a fix offers; one that is outside the file leaves it as it is."""
    fix = re.sub(r" \([^)]*\)", "", fix.rstrip(".")).split("; ")[0]
    verb = r"(?:remove|write|set|add|use|move|offload|choose|pass|look|shard|step)"
    for way in re.split(rf",? or (?={verb}\b)|, or (?=[^ ]+$|at least|about|as much|the device)", fix, flags=re.I):
        changed = copy.deepcopy(config)
        for step in re.split(rf",? and (?={verb}\b|parallelism_config )", way, flags=re.I):
            do(changed, path, step[0].lower() + step[1:])
        yield changed


def do(config: dict, path: tuple, step: str) -> None:
    """Change the config as one step of advice says.

    Raises:
        AssertionError: it is in other words than advice is written in.
    """
    here: Any = config
    for part in path[:-1]:
        here = here.setdefault(part, {})
    name = path[-1] if path else ""
    sample = next(
        (value for words, value in SAMPLES.items() if re.sub("^(write|choose) ", "", step).startswith(words)), None
    )
    if step in SAID:
        for key, value in SAID[step].items():
            *parents, last = key.split(".")
            there = config
            for part in parents:
                there = there.setdefault(part, {})
            there.pop(last, None) if value is None else there.update({last: value})
    elif step.startswith(ELSEWHERE):
        return
    elif sample is not None:
        here[name] = sample
    elif step in ("remove it", "remove the block", "remove the section", "remove it here") or step.startswith(
        ("remove it:", "remove one")
    ):
        here.pop(name, None)
    elif step in ("write one of them", "one of them"):
        here[name] = CHOICES[name]
    elif found := re.fullmatch(r"remove `?(\w+)`?", step):
        next(part for part in (here, config, here.get(name)) if isinstance(part, dict) and found[1] in part).pop(
            found[1]
        )
    elif found := re.fullmatch(r"(?:did you mean|rename it to) `(\w+)`\??", step):
        here[found[1]] = here.pop(name)
    elif found := re.fullmatch(r"move it (?:to|into) `?([\w.]+)`?", step):
        *parents, last = [*found[1].split("."), *([name] if "." not in found[1] else [])]
        there = config
        for part in parents:
            there = there.setdefault(part, {})
        there[last] = here.pop(name)
    elif found := re.fullmatch(r"set the stage to (\d).*", step):
        config["zero_optimization"]["stage"] = int(found[1])
    elif found := re.fullmatch(r'(?:write )?the device to "(\w+)"', step):
        here[name] = found[1]
    elif found := re.fullmatch(r"parallelism_config with (\w+): (\d+) and (\w+): (\d+)", step):
        config["parallelism_config"] = {found[1]: int(found[2]), found[3]: int(found[4])}
    elif found := re.fullmatch(r"set (parallelism_\w+) to (\d+)(?:, which is left)?", step):
        config["parallelism_config"][found[1]] = int(found[2])
    elif found := re.fullmatch(r"write it as (\w+): (\w+)", step):
        here.pop(name)
        here[found[1]] = found[2]
    elif found := re.fullmatch(r'(?:add|write) "?(\w+)"?: (.+?)(?: (?:to|in) (\w+))?', step):
        there = config if found[1] in AT_THE_TOP else config[found[3]] if found[3] else here
        there[found[1]] = value_of(found[2])
    elif found := re.fullmatch(r"set it to (\w+)(?: once you have the times)?", step):
        here[name] = value_of(found[1])
    elif found := re.fullmatch(r"write at least (\d+)", step):
        here[name] = int(found[1])
    elif found := re.fullmatch(r"write (true) or false|write ([\w ]+?)(?: \| .*|, \w+.*)", step):
        here[name] = value_of(found[1] or found[2])
    elif found := re.fullmatch(r"(?:write )?(\{.*\}|\S+?)(?: without quotes|, in quotes)?", step):
        value = value_of(found[1])
        if isinstance(value, str) and "_" in value and value.islower():
            here[value] = here.pop(name)  # the right spelling of a key
        else:
            here[name] = found[1].strip('"') if "in quotes" in step else value
    else:
        raise AssertionError(f"advice that cannot be followed: {step!r} at {path}")


def value_of(text: str) -> Any:
    """Return a value as JSON and YAML read it."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def follow(config: dict, finding, lint) -> list[str]:
    """Return what is wrong with a finding's advice."""
    before = {(one.rule, one.key) for one in lint(config) if one.severity == "error"}
    wrong = []
    for changed in ways(config, tuple(finding.key.split(".")) if finding.key else (), finding.fix):
        if changed == config:
            continue  # it is outside the file
        after = lint(changed)
        if any((one.rule, one.key) == (finding.rule, finding.key) for one in after):
            wrong.append(f"{finding.key}: {finding.fix}: still there in {changed}")
        new = [one for one in after if one.severity == "error" and (one.rule, one.key) not in before]
        wrong += [f"{finding.key}: {finding.fix}: then {one.key}: {one.what} in {changed}" for one in new]
    return wrong


IN_TEXT = {"duplicate-key", "comment", "missing-comma", "trailing-comma", "not-a-number", "python-word"}
"""Rules about the text, which --fix corrects; `test_config_fix.py` tests them."""
NO_VALUE = {
    "unknown-parameter": "the fix lists what the optimizer has",
    "removed-feature": "the message names the replacement",
}


@pytest.mark.parametrize("rule", sorted(CASES.keys() - IN_TEXT))
def test_a_fix_of_the_json_works(rule):
    facts, config, _ = CASES[rule]
    config = parse(config).value if isinstance(config, str) else config
    found = [one for one in judge(config, facts) if one.rule == rule]
    assert found
    wrong = [line for one in found if rule not in NO_VALUE for line in follow(config, one, lambda it: judge(it, facts))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("number", range(len(test_config_accelerate.MISTAKES)))
def test_a_fix_of_the_yaml_works(number, tmp_path):
    config, key, what, _ = test_config_accelerate.MISTAKES[number]
    file = tmp_path / "accelerate.yaml"

    def lint(content):
        file.write_text(yaml.safe_dump(content))
        return accelerate_lint.judge(accelerate_lint.read(file), file)[0]

    (found,) = [one for one in lint(config) if one.key == key and what in one.what]
    assert not follow(config, found, lint)


def test_advice_that_does_not_work_is_noticed():
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 4}}
    (found,) = [one for one in judge(config, test_config_rules.HF) if one.rule == "wrong-type"]

    def lint(content):
        return judge(content, test_config_rules.HF)

    assert not follow(config, found, lint)
    for wrong in ("write 5", "remove it, and write zero_optimisation: 3", 'write "three"'):
        assert follow(config, type(found)(**{**vars(found), "fix": wrong}), lint), wrong
