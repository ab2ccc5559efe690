"""Thousands of generated configs: the linter and DeepSpeed's own config class agree about them."""

import copy
import json
import logging
import os
import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from deepspeed_recipes.config import schema
from deepspeed_recipes.config.lint import judge
from deepspeed_recipes.config.rule import REJECTED, Facts
from deepspeed_recipes.config.rules import RULES
from scripts.maintain.schema.derive import SAMPLES
from tests.tiers import tiered

KINDS = {rule.id: rule.kind for rule in RULES}
PLAIN = Facts(trainer="plain", world_size=1)
ROOT = schema.load()["root"]
ODD = (None, True, False, 0, 1, 3, 7.5, -1, 0.5, "", "x", "8", "1.0", "true", "false", "auto", "cpu", "fp16")
WRONG_TYPES = st.sampled_from((*ODD, [], ["x"], [1], {}, {"x": 1}))

# Keys whose effect depends on the machine (use_gds), or that crash only with a real torch.distributed.
NOT_GENERATED = {("aio", "use_gds")}


@pytest.fixture(scope="module")
def config_class():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    logging.disable(logging.CRITICAL)
    yield DeepSpeedConfig
    logging.disable(logging.NOTSET)


def typed(kind: dict) -> st.SearchStrategy:
    """Return values that fit a typed field."""
    match kind["kind"]:
        case "bool":
            return st.booleans()
        case "int":
            low = kind.get("ge", kind.get("gt", -1) + 1)
            return st.integers(int(low), int(low) + 10**9)
        case "float":
            low, high = kind.get("ge", kind.get("gt", 0)), kind.get("le", kind.get("lt", 8))
            inside = {"exclude_min": "gt" in kind, "exclude_max": "lt" in kind, "allow_subnormal": False}
            return st.floats(low, high, width=32, **inside)
        case "str":
            return st.sampled_from(("auto", "x", "/tmp/x", "step"))
        case "enum" | "literal":
            return st.sampled_from(kind["values"])
        case "list":
            return st.lists(typed(kind["of"]), max_size=2)
        case "union":
            return st.one_of([typed(inner) for inner in kind["of"]])
        case "null":
            return st.none()
        case "object":
            return st.just({})
        case "nothing":
            return st.just("auto")
    return st.sampled_from((1, "x"))


def recorded(entry: dict) -> st.SearchStrategy:
    """Return values that an untyped key accepts."""
    if "texts" in entry:
        return st.sampled_from(entry["texts"])
    kinds = entry.get("loads", list(SAMPLES))
    default = entry.get("default")
    samples = [SAMPLES[kind] for kind in kinds if kind not in ("object", "list", "text")]
    return st.sampled_from([default] * 6 + samples if default is not None else samples or [None])


def value_of(path: tuple[str, ...], entry: dict) -> st.SearchStrategy:
    if "section" in entry:
        return section_of(path, entry["section"])
    return typed(entry["type"]) if "type" in entry else recorded(entry)


@st.composite
def section_of(draw, path: tuple[str, ...], node: dict) -> dict:
    usable = [
        name
        for name, entry in node["keys"].items()
        if not entry.get("alias_of") and not entry.get("deprecated") and (*path, name) not in NOT_GENERATED
    ]
    names = draw(st.lists(st.sampled_from(usable), max_size=4, unique=True)) if usable else []
    section = {name: draw(value_of((*path, name), node["keys"][name])) for name in names}
    return repaired(path, section)


def repaired(path: tuple[str, ...], section: dict) -> dict:
    """Undo most of the combinations that independently drawn values break, so that many configs are valid."""
    if path == ("zero_optimization",):
        offload = section.get("offload_optimizer") or {}
        if section.get("compute_grad_norm") is False or offload.get("ratio", 1) < 1:
            section["stage"] = 2 if section.get("compute_grad_norm") is False else 3
            offload.pop("ratio", None) if section["stage"] == 2 else None
    if path == ("data_efficiency", "data_sampling", "curriculum_learning") and section.get("enabled"):
        section["curriculum_metrics"] = {}
    if path == ("data_efficiency", "data_sampling", "dynamic_batching") and section.get("enabled"):
        section.setdefault("max_tokens", 8)
    if path == ("zero_optimization", "zenflow") and section.get("select_strategy") == "x":
        section["select_strategy"] = "step"
    if path == ("zero_optimization", "zenflow"):
        section.pop("select_interval", None)
        section.pop("update_interval", None)
    return section


@st.composite
def configs(draw) -> dict:
    """Draw a config that is meant to be valid: consistent batch sizes, and up to six sections."""
    micro, accumulation = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    batch = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation,
    }
    left_out = draw(st.sampled_from((None, *batch, "train_batch_size")))
    config = {name: value for name, value in batch.items() if name != left_out}
    names = draw(st.lists(st.sampled_from([n for n in ROOT["keys"] if n not in batch]), max_size=6, unique=True))
    if draw(st.booleans()) and "zero_optimization" not in names:
        names.append("zero_optimization")
    for name in names:
        config[name] = draw(value_of((name,), ROOT["keys"][name]))
    if draw(st.integers(0, 3)) and isinstance(config.get("fp16"), dict):
        config.pop("bf16", None)
        config.pop("bfloat16", None)
    return config


def places(config: dict, path: tuple = ()) -> list[tuple]:
    found = []
    for name, value in config.items():
        found.append((*path, name))
        if isinstance(value, dict):
            found.extend(places(value, (*path, name)))
    return found


def parent(config: dict, path: tuple) -> dict:
    for name in path[:-1]:
        config = config[name]
    return config


@st.composite
def mutated(draw, base: st.SearchStrategy) -> dict:
    """Rename, move, retype, drop or duplicate keys of a config."""
    config = json.loads(json.dumps(draw(base)))  # no object twice: a move could close a circle
    for _ in range(draw(st.integers(1, 2))):
        found = places(config)
        if not found:
            break
        path = draw(st.sampled_from(found))
        node, name = parent(config, path), path[-1]
        match draw(st.sampled_from(("rename", "move", "retype", "drop", "alias", "removed"))):
            case "rename":
                node[draw(st.sampled_from((name[:-1] + "x", name + "s", name.upper(), "_comment")))] = node.pop(name)
            case "move":
                target = draw(st.sampled_from([(), *(p for p in found if isinstance(parent(config, p)[p[-1]], dict))]))
                value = node.pop(name)
                spot = config
                for part in target:
                    spot = spot.get(part) if isinstance(spot, dict) else None
                if isinstance(spot, dict):
                    spot[name] = value
            case "retype":
                node[name] = copy.deepcopy(draw(WRONG_TYPES))
            case "drop":
                node.pop(name)
            case "alias":
                zero = config.setdefault("zero_optimization", {})
                if isinstance(zero, dict):
                    extra = draw(st.sampled_from(("cpu_offload", "prefetch_bucket_size", "cpu_offload_param")))
                    zero[extra] = draw(st.sampled_from((True, False, 5, "auto")))
            case "removed":
                config[draw(st.sampled_from(list(schema.load()["removed"])))] = {"enabled": False}
    return config


@pytest.mark.parametrize("examples", tiered((400, 3500), (400,)))
def test_linter_and_deepspeed_agree(config_class, examples):
    """A config that DeepSpeed rejects gets an error; one that it loads gets them only from rules about such configs."""
    seen = {"all": 0, "valid": 0}
    started = time.monotonic()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(configs(), mutated(configs()), mutated(configs())))
    def differential(config: dict) -> None:
        refusal = verdict(config_class, config)
        errors = [finding for finding in judge(config, PLAIN) if finding.severity == "error"]
        seen["all"] += 1
        seen["valid"] += refusal is None
        if refusal is not None:
            assert errors, f"DeepSpeed refuses, the linter is silent: {refusal}\n{json.dumps(config)}"
        else:
            wrong = [finding for finding in errors if KINDS[finding.rule] == REJECTED]
            assert not wrong, f"DeepSpeed loads, the linter says {wrong}\n{json.dumps(config)}"

    differential()
    share = seen["valid"] / seen["all"]
    print(f"{seen['all']} configs, {share:.0%} valid, {time.monotonic() - started:.0f} s")
    assert seen["all"] >= 0.85 * examples
    assert share >= 0.4


def verdict(config_class, config: dict) -> str | None:
    try:
        config_class(copy.deepcopy(config))
    except Exception as error:  # its verdict is whatever it raises
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None
