"""Every rule, with a config that breaks it and a similar one that does not."""

import cProfile
import difflib
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspeed_recipes.config import schema
from deepspeed_recipes.config.lint import ask_deepspeed, judge, lint
from deepspeed_recipes.config.read import parse
from deepspeed_recipes.config.rule import REJECTED, Config, Facts, hidden_size
from deepspeed_recipes.config.rules import RULES, parallel
from tests.versions import needs

pytestmark = needs("deepspeed==0.19.8")  # what its schema and its engine say; another version says other things

ROOT = Path(__file__).resolve().parents[1]
M = {"train_micro_batch_size_per_gpu": 1}
CPU = {"device": "cpu"}
HF = Facts()
PLAIN = Facts(trainer="plain", world_size=1)
SP = Facts(sequence_parallel_size=2)
SPELLINGS = ((3, 1, ""), (3, 0, "x"), (2, 2, "zz"), (4, 3, ""), (1, 5, "abcde"), (0, 0, "my"), (5, 2, "qqqq"))
NVME = {"device": "nvme", "nvme_path": "nvme_offload"}


def zero(stage: object, **more: object) -> dict:
    return {**M, "zero_optimization": {"stage": stage, **more}}


def own(name: str) -> dict:
    return {**zero(1), "optimizer": {"type": name, "params": {"lr": 0.1}}}


def built(kind: str, **parameters: object) -> dict:
    return {**M, "optimizer": {"type": kind, "params": parameters}}


def scheduled(kind: str, **parameters: object) -> dict:
    return {**M, "scheduler": {"type": kind, "params": parameters}}


# rule -> (facts, a config that breaks it, one that does not). Strings are files.
CASES: dict[str, tuple[Facts, object, object]] = {
    "duplicate-key": (HF, '{"a": 1, "a": 1}', '{"a": 1}'),
    "comment": (HF, '{"a": 1 // why\n}', '{"a": "// why"}'),
    "missing-comma": (HF, '{"a": 1\n "b": 2}', '{"a": 1,\n "b": 2}'),
    "trailing-comma": (HF, '{"a": [1,]}', '{"a": [1]}'),
    "not-a-number": (HF, '{"a": NaN}', '{"a": "NaN"}'),
    "python-word": (HF, '{"a": None}', '{"a": null}'),
    "unknown-key": (HF, zero(2, overlap_com=True), zero(2, overlap_comm=True)),
    "misspelt-key": (HF, {**M, "gradient_cliping": 1}, {**M, "gradient_clipping": 1}),
    "misplaced-key": (HF, {**M, "sub_group_size": 9}, zero(3, sub_group_size=9)),
    "ignored-key": (HF, {**M, "my_notes": 1}, {**M, "dump_state": True}),
    "renamed-key": (HF, {"aio": {"thread_count": 2}}, {"aio": {"intra_op_parallelism": 2}}),
    "removed-feature": (HF, {"amp": {"enabled": False}}, {"fp16": {"enabled": False}}),
    "deprecated-key": (HF, zero(2, cpu_offload=True), zero(2, offload_optimizer=CPU)),
    "deprecated-and-new": (
        HF,
        zero(2, cpu_offload=True, offload_optimizer=CPU),
        zero(2, cpu_offload_use_pin_memory=True, offload_optimizer=CPU),
    ),
    "both-spellings": (
        HF,
        zero(3, prefetch_bucket_size=1, stage3_prefetch_bucket_size=1),
        zero(3, prefetch_bucket_size=1),
    ),
    "bf16-twice": (HF, {"bf16": {}, "bfloat16": {"enabled": True}}, {"bfloat16": {"enabled": True}}),
    "wrong-type": (HF, zero(4), zero("2")),
    "text-for-number": (PLAIN, {**M, "gradient_clipping": "1.0"}, {**M, "gradient_clipping": 1}),
    "text-for-truth": (HF, {"prescale_gradients": "false"}, {"prescale_gradients": False}),
    "text-for-trainer": (
        HF,
        {"bf16": {"enabled": "false"}},
        {"bf16": {"enabled": False, "check_grad_overflow": "true"}},
    ),
    "steps-per-print-0": (PLAIN, {**M, "steps_per_print": 0}, {**M, "steps_per_print": None}),
    "data-sampling-without-settings": (
        HF,
        {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
        {"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 512}}}},
    ),
    "unknown-dtype": (
        HF,
        {"data_types": {"grad_accum_dtype": "fp8"}},
        {"data_types": {"grad_accum_dtype": "bf16"}},
    ),
    "auto-without-trainer": (PLAIN, zero("auto"), {**M, "data_types": {"keep_in_fp32_modules": "auto"}}),
    "auto-not-filled": (HF, zero(3, sub_group_size="auto"), zero(3, reduce_bucket_size="auto")),
    "batch-value": (HF, {"train_batch_size": "8"}, {"train_batch_size": 8}),
    "batch-fraction": (PLAIN, {"train_batch_size": 2.5}, {"train_batch_size": 2.0}),
    "batch-missing": (HF, {"gradient_accumulation_steps": 2}, M),
    "batch-identity": (
        Facts(trainer="plain", world_size=2),
        {**M, "train_batch_size": 4, "gradient_accumulation_steps": 1},
        {**M, "train_batch_size": 4, "gradient_accumulation_steps": 2},
    ),
    "fixed-for-trainer": (HF, {**M, "gradient_clipping": 0.5}, {"gradient_clipping": "auto"}),
    "two-learning-rates": (
        HF,
        {**built("AdamW", lr=1e-4), **scheduled("WarmupLR", warmup_max_lr=2e-4)},
        {**built("AdamW", lr=1e-4), **scheduled("WarmupLR", warmup_max_lr=1e-4)},
    ),
    "offload-with-own-optimizer": (
        PLAIN,
        zero(2, offload_optimizer=CPU),
        {**zero(2, offload_optimizer=CPU), **built("AdamW", lr=1e-3)},
    ),
    "tensor-parallel-at-stage-3": (
        HF,
        {**zero(3), "tensor_parallel": {"autotp_size": 2}},
        {**zero(1), "tensor_parallel": {"autotp_size": 2}},
    ),
    "tensor-parallel-across-nodes": (
        Facts(world_size=16, gpus_per_node=8),
        {**zero(1), "tensor_parallel": {"autotp_size": 16}},
        {**zero(1), "tensor_parallel": {"autotp_size": 8}},
    ),
    "accumulation-missing": (HF, M, {**M, "gradient_accumulation_steps": "auto"}),
    "train-batch-fixed": (
        HF,
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto"},
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8},
    ),
    "offload-param-below-stage-3": (
        HF,
        zero(2, offload_param=CPU),
        zero(2, offload_param={"device": "none"}),
    ),
    "offload-optimizer-at-stage-0": (HF, zero(0, offload_optimizer=CPU), zero(1, offload_optimizer=CPU)),
    "needs-stage-3": (HF, zero(2, zero_quantized_weights=True), zero(2, zero_hpz_partition_size=1)),
    "super-offload-below-stage-3": (
        HF,
        zero(2, offload_optimizer={**CPU, "super_offload": True}),
        zero(3, offload_optimizer={**CPU, "super_offload": True}),
    ),
    "stage-3-key-below-stage-3": (
        HF,
        zero(2, stage3_max_live_parameters=9),
        zero(3, stage3_max_live_parameters=9),
    ),
    "nvme-without-path": (HF, zero(3, offload_param={"device": "nvme"}), zero(3, offload_param=NVME)),
    "nvme-below-stage-3": (HF, zero(2, offload_optimizer=NVME), zero(3, offload_optimizer=NVME)),
    "ratio-below-stage-3": (
        HF,
        zero(2, offload_optimizer={**CPU, "ratio": 0.5}),
        zero(3, offload_optimizer={**CPU, "ratio": 0.5}),
    ),
    "no-gather-on-save": (HF, zero(3), zero(3, stage3_gather_16bit_weights_on_model_save=True)),
    "prefetch-off": (
        HF,
        zero(3, stage3_prefetch_bucket_size=0),
        zero(3, stage3_prefetch_bucket_size=0, overlap_comm=False),
    ),
    "round-robin-order": (HF, zero(2, round_robin_gradients=True), zero(3, round_robin_gradients=True)),
    "sub-group-size-0": (HF, zero(3, sub_group_size=0), zero(2, sub_group_size=0)),
    "live-parameters-0": (HF, zero(3, stage3_max_live_parameters=0), zero(3, stage3_max_live_parameters=9)),
    "zenflow-without-offload": (HF, zero(2, zenflow={}), zero(2, zenflow={}, offload_optimizer=CPU)),
    "grad-norm-off": (HF, zero(3, compute_grad_norm=False), zero(2, compute_grad_norm=False)),
    "grad-norm-off-but-needed": (
        HF,
        zero(2, compute_grad_norm=False),
        {**zero(2, compute_grad_norm=False), "gradient_clipping": 0},
    ),
    "legacy-stage-1": (HF, zero(1, legacy_stage1=True), zero(1, legacy_stage1=False)),
    "legacy-zero-format": (HF, {**M, "zero_optimization": True}, zero(1)),
    "scaling-before-scatter": (
        HF,
        {**zero(3), "gradient_predivide_factor": 2.0},
        {**zero(3, reduce_scatter=False), "gradient_predivide_factor": 2.0},
    ),
    "step-of-zeros": (HF, {**zero(0), "bf16": {"enabled": True}}, {**zero(1), "bf16": {"enabled": True}}),
    "fp16-without-zero": (HF, {**zero(0), "fp16": {"enabled": True}}, {**zero(1), "fp16": {"enabled": True}}),
    "sum-of-gradients": (
        HF,
        {**zero(3), "gradient_allreduce_op": "sum"},
        {**zero(2), "gradient_allreduce_op": "sum"},
    ),
    "unknown-optimizer": (HF, own("OneBitAdam"), own("SGD")),
    "untested-optimizer": (HF, own("SGD"), {**own("SGD"), "zero_allow_untested_optimizer": True}),
    "max-grad-norm-in-optimizer": (
        HF,
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}},
        {"optimizer": {"type": "Adam", "params": {"lr": 1}}},
    ),
    "muon-at-stage-3": (
        HF,
        {**zero(3), "optimizer": {"type": "Muon"}},
        {**zero(3, reduce_scatter=False), "optimizer": {"type": "Muon"}},
    ),
    "unknown-scheduler": (
        HF,
        {"scheduler": {"type": "Cosine"}},
        {"scheduler": {"type": "CosineAnnealingLR"}},
    ),
    "torch-schedule": (
        PLAIN,
        {**zero(2), **built("AdamW", lr=0.1), **scheduled("CosineAnnealingLR", T_max=9)},
        {**zero(0), **built("AdamW", lr=0.1), **scheduled("CosineAnnealingLR", T_max=9)},
    ),
    "unknown-parameter": (PLAIN, built("AdamW", fused=True), built("AdamW", fused=True, torch_adam=True)),
    "parameter-value": (PLAIN, built("AdamW", lr="1e-5"), built("AdamW", lr=1e-5, betas=[0.9, 0.95])),
    "parameter-missing": (
        PLAIN,
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 50}}},
    ),
    "learning-rate-missing": (HF, built("AdamW", eps="auto"), built("AdamW", lr="auto")),
    "fp16-and-bf16": (
        HF,
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"fp16": {"enabled": "auto"}, "bf16": {"enabled": True}},
    ),
    "master-weights": (
        HF,
        {**zero(1), "bf16": {"bf16_optimizer_states": True}},
        {**zero(1), "bf16": {"bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}},
    ),
    "master-weights-without-offload": (
        HF,
        {**zero(1), "bf16": {"bf16_master_weights_and_grads": True}},
        {**zero(1, offload_optimizer=CPU), "bf16": {"bf16_master_weights_and_grads": True}},
    ),
    "overflow-unchecked": (
        HF,
        {"bf16": {"check_grad_overflow": False}},
        {"bf16": {"check_grad_overflow": True}},
    ),
    "loss-scale": (
        HF,
        {"fp16": {"enabled": True, "min_loss_scale": 0}},
        {"fp16": {"enabled": True, "loss_scale": 8, "min_loss_scale": 0}},
    ),
    "initial-scale-power": (
        HF,
        {"fp16": {"enabled": "auto", "initial_scale_power": 2000}},
        {"fp16": {"enabled": "auto", "initial_scale_power": 32}},
    ),
    "accumulation-type-at-stage-0": (
        HF,
        {**zero(0), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        {**zero(1), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    "activation-checkpointing-unused": (
        HF,
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        {"activation_checkpointing": {"cpu_checkpointing": False}},
    ),
    "sequence-parallel-below-stage-3": (SP, zero(2), zero(3)),
    "sequence-parallel-without-scatter": (SP, zero(3, reduce_scatter=False), zero(3)),
    "sequence-parallel-alone": (
        HF,
        {"sequence_parallel_size": 2},
        {"sequence_parallel_size": 2, "data_parallel_size": 1},
    ),
    "tensor-parallel-with-lora": (
        Facts(lora=True),
        {"tensor_parallel": {"autotp_size": 2}},
        {"tensor_parallel": {"autotp_size": 1}},
    ),
    "unknown-tensor-preset": (
        HF,
        {"tensor_parallel": {"preset_model": "gpt9"}},
        {"tensor_parallel": {"preset_model": "llama"}},
    ),
    "ranks-not-divisible": (
        Facts(world_size=6),
        zero(3, zero_hpz_partition_size=4),
        zero(3, zero_hpz_partition_size=3),
    ),
    "heads-not-divisible": (
        Facts(model={"num_attention_heads": 6, "num_key_value_heads": 6}),
        {"tensor_parallel": {"autotp_size": 4}},
        {"tensor_parallel": {"autotp_size": 3}},
    ),
    "pipeline-with-stage-2-or-3": (Facts(pipeline_stages=2), zero(2), zero(1)),
    "pipeline-with-autotp": (
        Facts(pipeline_stages=2),
        {"tensor_parallel": {"autotp_size": 2}},
        {"tensor_parallel": {"autotp_size": 1}},
    ),
    "unknown-expert-preset": (
        HF,
        {"expert_parallel": {"enabled": True, "preset_model": "gpt9"}},
        {"expert_parallel": {"enabled": True, "preset_model": "mixtral"}},
    ),
    "expert-parallel-without-optimizer": (
        HF,
        {"expert_parallel": {"enabled": True}},
        {"expert_parallel": {"enabled": False}},
    ),
    "deepcompile-at-stage-0": (
        HF,
        {**zero(0), "compile": {"deepcompile": True}},
        {**zero(1), "compile": {"deepcompile": True}},
    ),
    "compiled-pass-without-effect": (
        HF,
        {**zero(2), "compile": {"deepcompile": True, "passes": ["autosp"]}},
        {**zero(1), "compile": {"deepcompile": True, "passes": ["autosp"]}},
    ),
    "universal-at-stage-3": (
        HF,
        {**zero(3), "checkpoint": {"load_universal": True}},
        {**zero(2), "checkpoint": {"load_universal": True}},
    ),
    "clipping-missing": (HF, M, {**M, "gradient_clipping": "auto"}),
    "optimizer-block": (HF, own("AdamW"), {**own("AdamW"), "expert_parallel": {"enabled": True}}),
    "scheduler-block": (HF, {"scheduler": {"type": "WarmupLR"}}, {"scheduler": {}}),
    "zero-block-missing": (HF, M, zero(0)),
    "unmanaged-accumulation": (
        HF,
        {"managed_gradient_accumulation": False},
        {"managed_gradient_accumulation": True},
    ),
    "no-hidden-size": (
        Facts(model={"d_model": 8}),
        zero(3, reduce_bucket_size="auto"),
        zero(3, reduce_bucket_size=64),
    ),
    "logged-twice": (HF, {"wandb": {"enabled": True}}, {"wandb": {"enabled": False}}),
    "section-unused": (HF, {"pipeline": {"stages": 2}}, {"data_efficiency": {"enabled": False}}),
    "autotuning-ends-the-run": (
        HF,
        {**zero(2), "autotuning": {"enabled": True}},
        {**zero(2), "autotuning": {"enabled": False}},
    ),
    "timers-on": (HF, {"wall_clock_breakdown": True}, {"wall_clock_breakdown": False}),
    "bucket-too-large": (
        Facts(gpu_memory_gib=8),
        {**zero(2, overlap_comm=True), "bf16": {"enabled": True}},
        {**zero(2, reduce_bucket_size="auto"), "bf16": {"enabled": True}},
    ),
    "nvme-folder": (
        HF,
        zero(3, offload_param={"device": "nvme", "nvme_path": "/proc/version"}),
        zero(3, offload_param=NVME),
    ),
    "swap-buffer-too-small": (
        Facts(world_size=1, model={"vocab_size": 128_256, "hidden_size": 4096}),
        zero(3, offload_param=NVME),
        zero(3, offload_param={**NVME, "buffer_size": 600_000_000}),
    ),
}

# Rules that depend on the installed versions, or on the machine's accelerator.
MACHINE = {"known-bad-versions", "gds-without-cuda"}


def found(config: object, facts: Facts) -> set[str]:
    subject = parse(config) if isinstance(config, str) else config
    return {finding.rule for finding in judge(subject, facts)}


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_reports_the_one_config_and_not_the_other(rule: str):
    facts, bad, good = CASES[rule]
    assert rule in found(bad, facts)
    assert rule not in found(good, facts)


@pytest.mark.parametrize("stage", range(4))
def test_an_optimizer_that_zero_does_not_know_has_to_be_allowed_at_each_of_its_stages(stage: int):
    assert ("untested-optimizer" in found(own("SGD") | zero(stage), HF)) == (stage > 0)


MASTER = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (zero(2) | MASTER, True),
        (zero(3) | MASTER, True),
        (zero(2, offload_optimizer=CPU) | MASTER, False),
        (zero(0) | MASTER, False),
        (zero(0, offload_optimizer=CPU) | MASTER, False),
    ],
)
def test_low_precision_master_weights_need_offload_at_the_stages_that_have_them(config: dict, found: bool):
    rules = {one.rule for one in judge(config, PLAIN)}
    assert ("master-weights-without-offload" in rules) == found
    assert ("master-weights" in rules) == (config["zero_optimization"]["stage"] == 0)


@pytest.mark.parametrize(
    ("facts", "accumulation", "added"),
    [(HF, {}, True), (HF, {"gradient_accumulation_steps": 2}, False), (PLAIN, {}, False)],
)
def test_an_accumulation_that_accelerate_adds_is_said_to_be_its(facts, accumulation, added):
    config = {"train_batch_size": 33, "train_micro_batch_size_per_gpu": 4, **accumulation}
    (product,) = [one.what for one in judge(config, replace(facts, world_size=2)) if "micro batch 4 x" in one.what]
    assert ("which accelerate adds" in product) == added


@pytest.mark.parametrize(("version", "found"), [("5.22.2", False), ("5.23.0", True), ("6.0.0", True)])
def test_the_experts_of_a_newer_transformers_are_not_replaced(monkeypatch, version, found):
    monkeypatch.setattr(parallel.metadata, "version", lambda package: version)
    monkeypatch.setattr(schema, "installed_version", lambda: parallel._TESTED_DEEPSPEED)
    what = [one.what for one in judge({"expert_parallel": {"enabled": True}}, HF)]
    assert any("cannot replace the experts" in one for one in what) == found


def test_a_swap_buffer_has_room_for_the_embeddings_shard_and_a_hundredth_more():
    facts = Facts(world_size=2, model={"vocab_size": 128_256, "hidden_size": 4096})
    (found,) = [one for one in judge(zero(3, offload_param=NVME), facts) if one.rule == "swap-buffer-too-small"]
    shard = 128_256 * 2048
    assert f"{shard:,} elements" in found.what and found.fix == f"write at least {shard + 2_626_682}"


@pytest.mark.parametrize(
    ("batch", "steps", "severity"), [("auto", 2, "error"), ("auto", 1, "warning"), (None, 2, "warning")]
)
def test_a_missing_accumulation_stops_a_run_whose_whole_batch_is_filled_in(batch, steps, severity):
    config = {**M, **({"train_batch_size": batch} if batch else {})}
    facts = Facts(arguments={"gradient_accumulation_steps": steps})
    (found,) = [one for one in judge(config, facts) if one.rule == "accumulation-missing"]
    assert found.severity == severity and ("DeepSpeed refuses" in found.what) == (batch == "auto")


def test_a_section_that_deepspeed_does_not_read_is_not_checked():
    config = {**M, "bf16": {"enabled": True}, "bfloat16": {"enabled": 7.5}}
    assert not [one for one in judge(config, PLAIN) if one.key == "bfloat16.enabled"]
    assert [one for one in judge({**M, "bfloat16": {"enabled": 7.5}}, PLAIN) if one.key == "bfloat16.enabled"]


def test_every_rule_has_its_two_configs():
    assert len(RULES) == len({rule.id for rule in RULES}) == 105
    assert {rule.id for rule in RULES} == {*CASES} | MACHINE


@pytest.mark.parametrize(
    ("ignored", "used"),
    [
        ({"dataloader_drop_last": True}, {"dataloader_drop_last": False}),
        ({"steps_per_print": 2000}, {"steps_per_print": "auto"}),
        (
            {"zero_allow_untested_optimizer": False},
            {"zero_allow_untested_optimizer": False, "optimizer": {"type": "AdamW"}},
        ),
    ],
)
def test_keys_that_the_trainer_replaces_or_does_not_read_are_named(ignored, used):
    assert "section-unused" in found(ignored, HF) and "section-unused" not in found(used, HF)


@pytest.mark.parametrize("rule", [rule.id for rule in RULES if rule.kind == REJECTED and rule.id in CASES])
def test_deepspeed_rejects_what_the_rules_call_rejected(rule: str):
    facts, bad, _ = CASES[rule]
    if rule == "duplicate-key":  # only a file can have one; DeepSpeed's reader of files raises it
        return
    config = {**M, **bad} if rule not in ("batch-missing", "batch-value") else bad
    assert ask_deepspeed(config, facts.world_size or 1) is not None


@pytest.mark.parametrize("stem", ["key", "gradient_clip", "zero_optimization"])
def test_unknown_keys_cost_the_same_each_however_many_there_are(stem: str):
    """Counted in calls, which no load changes: 60,000 keys take 1 to 3 s, 0.4 s of it to parse the file."""

    def calls(keys: int) -> int:
        config = {f"{stem}_{index}": index for index in range(keys)}
        judge(config, HF)  # what is read once
        profile = cProfile.Profile()
        found = profile.runcall(judge, config, HF)
        assert len(found) >= keys
        return sum(entry.callcount for entry in profile.getstats())

    few, many = calls(500), calls(5000)
    assert many < 11 * few
    assert (many - few) / 4500 < 600


def test_the_nearest_key_is_the_one_that_difflib_finds():
    known = tuple(schema.load()["root"]["keys"])
    plain = {name.replace("_", ""): name for name in known}
    names = [name[:cut] + more + name[cut + gone :] for name in known for cut, gone, more in SPELLINGS]
    for name in names:
        close = difflib.get_close_matches(name.replace("_", ""), plain, n=1, cutoff=0.8)
        assert schema.nearest(name, known) == (plain[close[0]] if close else None), name
    assert schema.nearest("a" * 10**6, known) is None


WRONG_PARAMETERS = [
    (built("AdamW", lr="1e-5"), "write 1e-05"),
    (built("AdamW", lr=-1.0), "at least 0"),
    (built("AdamW", lr=True), "a number"),
    (built("AdamW", lr=None), "a number"),
    (built("AdamW", weight_decay="0.01"), "write 0.01"),
    (built("AdamW", betas=[0.9, 1.0]), "below 1"),
    (built("AdamW", betas=[0.9]), "2 values"),
    (built("AdamW", betas="0.9, 0.95"), "2 values"),
    (built("AdamW", learning_rate=1e-3), "AdamW has adam_w_mode"),
    (built("AdamW", weigth_decay=0.1), "did you mean `weight_decay`?"),
    (built("AdamW", fused=True), "AdamW has adam_w_mode"),
    (built("Muon", lr=1e-3, nesterov=True), "Muon has"),
    (built("SGD", lr="1e-5"), "write 1e-05"),
    (built("SGD", lr=-1), "at least 0"),
    (built("AdamW", amsgrad=True), "write false"),
    (built("Lion", eps=1e-8), "Lion has betas"),
    (scheduled("WarmupLR", warmup_num_steps=0), "above 0"),
    (scheduled("WarmupLR", warmup_num_steps=1e2), "write 100"),
    (scheduled("WarmupLR", warmup_max_lr="1e-5"), "write 1e-05"),
    (scheduled("WarmupLR", warmup_type="cosine"), '"linear" | "log"'),
    (scheduled("WarmupLR", total_num_steps=9), "WarmupLR has"),
    (scheduled("WarmupDecayLR", warmup_num_steps=5), "add `total_num_steps`"),
    (scheduled("WarmupDecayLR", total_num_steps="10"), "write 10"),
    (scheduled("OneCycle", cycle_min_lr=0.1), "add `cycle_max_lr`"),
    (scheduled("StepLR", gamma=0.1), "add `step_size`"),
]
RIGHT_PARAMETERS = [
    built("AdamW", lr=1e-5, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.0, bias_correction=False, adam_w_mode=True),
    built("Adam", lr=1e-3, torch_adam=True, foreach=False, fused=None),
    {**zero(2, offload_optimizer=CPU), **built("AdamW", lr=1e-3, fp32_optimizer_states=False)},
    built("Muon", lr=0.02, muon_lr=0.02, adam_lr=1e-3, momentum=0.95, ns_method="gram"),
    built("AdamW", lr=1e-3, amsgrad=True, torch_adam=True),
    built("SGD", lr=0.1, momentum=0.9, nesterov=True),
    built("MuAdam", width=8),
    scheduled("WarmupLR", warmup_min_lr=0, warmup_max_lr=[1e-3], warmup_num_steps=10, warmup_type="linear"),
    scheduled("WarmupCosineLR", total_num_steps=100, cos_min_ratio=0.01),
    scheduled("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_first_step_size=10, cycle_min_mom=0.8),
    scheduled("CosineAnnealingLR", T_max=100),
    scheduled("MultiStepLR", milestones=[10, 20]),
    scheduled("ReduceLROnPlateau", patience=5),
]


@pytest.mark.parametrize(("config", "words"), WRONG_PARAMETERS)
def test_a_wrong_parameter_is_named_with_what_is_right(config: dict, words: str):
    (finding,) = [item for item in judge(config, PLAIN) if "parameter" in item.rule]
    assert finding.severity == "error"
    assert words in finding.fix


@pytest.mark.parametrize("config", RIGHT_PARAMETERS)
def test_a_right_parameter_is_not_named(config: dict):
    assert not [item for item in judge(config, PLAIN) if "parameter" in item.rule]


@pytest.mark.parametrize(("device", "named"), [("auto", [("warning", 'write "cpu"')]), ("cpu", []), ("none", [])])
def test_an_offload_device_that_the_trainer_fills_with_none_is_named(device: str, named: list[tuple[str, str]]):
    found = judge(zero(3, offload_optimizer={"device": device}), HF)
    assert [(one.severity, one.fix) for one in found if one.rule == "auto-not-filled"] == named


@pytest.mark.parametrize(
    ("arguments", "severity"),
    [({}, "warning"), ({"learning_rate": 5e-5}, "error"), ({"learning_rate": 0.5}, None), ({"bf16": True}, "warning")],
)
def test_a_fixed_value_is_compared_with_the_arguments_that_are_known(arguments: dict, severity: str | None):
    found = lint(built("AdamW", lr=0.5), arguments=arguments)
    assert next((item.severity for item in found if item.key == "optimizer.params.lr"), None) == severity


@pytest.mark.parametrize(
    ("trainer", "config", "words"),
    [
        ("plain", {"train_batch_size": 8, **M}, None),
        ("hf", {"train_batch_size": 8, **M}, "accumulation 1 (which accelerate adds) x 2 data-parallel ranks"),
        ("hf", {"train_batch_size": 2, **M}, None),
        ("hf", {"train_batch_size": 8, **M, "gradient_accumulation_steps": "auto"}, None),
        ("hf", {"train_batch_size": 7, **M, "gradient_accumulation_steps": "auto"}, "not a multiple of micro batch 1"),
        ("hf", {"train_batch_size": "auto", **M}, None),
    ],
)
def test_the_batch_sizes_that_the_engine_gets_are_multiplied(trainer: str, config: dict, words: str | None):
    found = [item for item in lint(config, trainer=trainer, world_size=2) if item.rule == "batch-identity"]
    assert (words is None) == (not found)
    assert words is None or words in found[0].what


@pytest.mark.parametrize(("stages", "sequence", "ranks"), [(2, 1, 4), (1, 2, 4), (2, 2, 2)])
def test_pipeline_and_sequence_ranks_share_a_batch(stages: int, sequence: int, ranks: int):
    facts = {"world_size": 8, "trainer": "plain", "pipeline_stages": stages, "sequence_parallel_size": sequence}
    config = {"train_batch_size": 64, **M, "gradient_accumulation_steps": 1}
    (what,) = [item.what for item in lint(config, **facts) if item.rule == "batch-identity"]
    assert f"x {ranks} data-parallel ranks" in what


@pytest.mark.parametrize(("power", "works"), [(16, True), (63, True), (64, False), (2000, False)])
def test_the_loss_scaler_overflows_where_the_rule_says(power: int, works: bool):
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    config = {**zero(1), "fp16": {"enabled": True, "initial_scale_power": power}}
    assert ("initial-scale-power" not in found(config, PLAIN)) == works
    scaler = DynamicLossScaler(2**power, 2.0, 1000, 1.0, 2, False)
    loss = torch.ones((), requires_grad=True)
    with nullcontext() if works else pytest.raises(OverflowError):
        scaler.backward(loss)


@pytest.mark.parametrize("name", ["_comment", "comment", "//", "#why"])
def test_a_comment_written_as_a_key_is_only_a_warning(name: str):
    assert {"ignored-key"} == {item.rule for item in judge({**zero(1), name: "why"}, PLAIN)}


def test_gds_follows_the_accelerator(monkeypatch):
    config = {**M, "aio": {"use_gds": True}}
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert "gds-without-cuda" in found(config, HF)
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert "gds-without-cuda" not in found(config, HF)


def test_messages_are_short_and_complete():
    for rule, (facts, bad, _) in CASES.items():
        subject = parse(bad) if isinstance(bad, str) else bad
        for finding in judge(subject, facts):
            if finding.rule == rule:
                assert finding.what
                assert finding.fix
                assert "\n" not in finding.what + finding.fix
                assert len(finding.what) < 220
                assert json.dumps(finding.as_json())
                if isinstance(bad, dict):  # a finding shows the value that the file has
                    value = Config(bad).get(*finding.key.split("."), default=finding.value)
                    assert value == finding.value


def test_buckets_are_shown_with_their_share_of_the_gpu():
    config = {**zero(2, overlap_comm=True), "bf16": {"enabled": True}}
    (what,) = [one.what for one in judge(config, Facts(gpu_memory_gib=8)) if one.rule == "bucket-too-large"]
    assert what == "the buckets take 1.9 GiB, 23% of the GPU"


def test_lint_accepts_paths_dictionaries_and_models(tmp_path: Path):
    model = tmp_path / "config.json"
    model.write_text('{"d_model": 8}')
    config = zero(3, reduce_bucket_size="auto")
    assert "no-hidden-size" in {finding.rule for finding in lint(config, model=model)}
    assert "no-hidden-size" in {finding.rule for finding in lint(config, model=tmp_path)}
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(config, indent=1))
    (finding,) = [item for item in lint(file, model={"d_model": 8}) if item.rule == "no-hidden-size"]
    assert (finding.severity, finding.line, finding.key) == (
        "error",
        5,
        "zero_optimization.reduce_bucket_size",
    )


def test_an_absent_key_is_reported_at_the_section_that_lacks_it(tmp_path: Path):
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(zero(3), indent=1))
    (finding,) = [item for item in lint(file) if item.rule == "no-gather-on-save"]
    assert (finding.line, finding.column, finding.value) == (3, 2, None)


@pytest.mark.parametrize(
    ("config", "fix"),
    [
        ({"activation_checkpointing": 3}, "write an object"),
        ({"optimizer": {"type": 3}}, "write a string"),
        ({"expert_parallel": {"load_balance_coeff": 3}}, "write null"),
    ],
)
def test_a_rejected_value_is_answered_with_a_kind_that_is_accepted(config: dict, fix: str):
    assert fix in {item.fix for item in judge({**M, **config}, PLAIN)}


def test_the_trainer_finds_a_hidden_size_in_a_part_and_a_bare_accelerator_does_not():
    config = {"model_type": "gemma3", "text_config": {"hidden_size": 8}}
    assert hidden_size(config) == 8 and hidden_size(config, nested=False) is None
    assert hidden_size({"hidden_size": 4, "text_config": {"hidden_size": 8}}) == 4
    assert hidden_size({"model_type": "none", "text_config": [8]}) is None
