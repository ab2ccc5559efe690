"""Rules about configs that DeepSpeed loads, each proven by a run that fails or ignores the config."""

import json
import os
import subprocess
import sys

import pytest

from deepspeed_recipes.config.lint import lint
from deepspeed_recipes.config.rule import FAILS_LATER, WRONG
from deepspeed_recipes.config.rules import RULES
from tests.launching import WORKERS, environment, free_port
from tests.tiers import tiered
from tests.versions import needs

pytestmark = needs("deepspeed==0.19.8")  # what its schema and its engine say; another version says other things

M = {"train_micro_batch_size_per_gpu": 1}
A = {"type": "AdamW", "params": {"lr": 0.01}}
HF = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 1},
}
CPU = {"device": "cpu"}


def zero(stage: int, **more: object) -> dict:
    return {**M, "zero_optimization": {"stage": stage, **more}}


CORE = ("comment", "misspelt-key", "misplaced-key", "auto-not-filled", "needs-stage-3")
"""The rules whose proof `make test` runs; `make test-all` runs them all."""


# rule -> (who reads it, config, words of the error, or what is seen instead of what is written)
PROOFS: dict[str, tuple[str, object, object]] = {
    "comment": ("trainer", '{"train_batch_size": 1 // one\n}', "JSONDecodeError"),
    "missing-comma": ("trainer", '{"train_batch_size": 1\n"steps_per_print": 5}', "JSONDecodeError"),
    "trailing-comma": ("trainer", '{"train_batch_size": 1,}', "JSONDecodeError"),
    "python-word": ("trainer", '{"train_batch_size": 1, "dump_state": True}', "JSONDecodeError"),
    "misspelt-key": ("plain", {**M, "gradient_cliping": 0.1}, {"clipping": 1.0}),
    "misplaced-key": ("plain", {**M, "stage": 3}, {"stage": 0, "partitioned": False}),
    "bf16-twice": (
        "plain",
        {**M, "bf16": {"enabled": False}, "bfloat16": {"enabled": True}},
        {"dtype": "torch.float32"},
    ),
    "text-for-number": ("plain", {**zero(1), "gradient_clipping": "1.0"}, "not supported between instances"),
    "text-for-truth": ("plain", {**M, "prescale_gradients": "false"}, {"postscale": False}),
    "text-for-trainer": ("trainer", {**HF, "bf16": {"enabled": "false"}}, "mismatch TrainingArguments"),
    "steps-per-print-0": ("plain", {**M, "steps_per_print": 0}, "modulo by zero"),
    "unknown-dtype": ("plain", {**M, "data_types": {"grad_accum_dtype": "fp8"}}, "DtypeEnum"),
    "auto-without-trainer": ("plain", {**M, "zero_optimization": {"stage": "auto"}}, {"stage": 0}),
    "auto-not-filled": (
        "trainer",
        {**HF, "zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}},
        "not found in kwargs",
    ),
    "offload-param-below-stage-3": ("plain", zero(2, offload_param=CPU), {"partitioned": False}),
    "offload-optimizer-at-stage-0": ("plain", zero(0, offload_optimizer=CPU), {"offloaded": False}),
    "needs-stage-3": (
        "plain",
        zero(2, zero_quantized_weights=True, zero_hpz_partition_size=8),
        {"optimizer": "DeepSpeedZeroOptimizer", "partitioned": False},
    ),
    "super-offload-below-stage-3": (
        "plain",
        zero(2, offload_optimizer={**CPU, "super_offload": True}),
        {"optimizer": "DeepSpeedZeroOptimizer", "basic": "DeepSpeedCPUAdam"},
    ),
    "nvme-without-path": ("plain", zero(3, offload_optimizer={"device": "nvme"}), "TypeError"),
    "nvme-below-stage-3": (
        "plain",
        zero(2, offload_optimizer={"device": "nvme", "nvme_path": "swap"}),
        {"offloaded": True, "files": 0},
    ),
    "zenflow-without-offload": ("plain", {**zero(2, zenflow={}), "optimizer": A}, "cpu offload"),
    "grad-norm-off-but-needed": ("plain", zero(1, compute_grad_norm=False), "requires gradient_clipping=0"),
    "legacy-stage-1": ("plain", zero(1, legacy_stage1=True), "deprecated version of ZeRO Stage 1"),
    "scaling-before-scatter": ("plain", {**zero(2), "prescale_gradients": True}, "pre-scale gradients"),
    "unknown-optimizer": ("plain", {**M, "optimizer": {"type": "OneBitAdam"}}, "not a supported DeepSpeed"),
    "untested-optimizer": (
        "plain",
        {**zero(1), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        "untested ZeRO Optimizer",
    ),
    "max-grad-norm-in-optimizer": (
        "plain",
        {**M, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        "gradient_clipping",
    ),
    "muon-at-stage-3": (
        "plain",
        {**zero(3), "optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
        "(?i)muon",
    ),
    "unknown-scheduler": (
        "plain",
        {**M, "optimizer": A, "scheduler": {"type": "Cosine"}},
        "does not recognize LR scheduler",
    ),
    "torch-schedule": (
        "plain",
        {**zero(2), "optimizer": A, "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 9}}},
        "DeepSpeedZeroOptimizer is not an Optimizer",
    ),
    "unknown-parameter": (
        "plain",
        {**M, "optimizer": A, "scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 9}}},
        "unexpected keyword argument",
    ),
    "parameter-value": (
        "plain",
        {**M, "optimizer": A, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
        "must be a positive integer, got 0",
    ),
    "parameter-missing": (
        "trainer",
        {**HF, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}}},
        "missing 1 required positional argument: 'total_num_steps'",
    ),
    "learning-rate-missing": (
        "trainer",
        {**HF, "optimizer": {"type": "AdamW", "params": {"weight_decay": "auto"}}},
        {"rates": [0.001, 0.001]},
    ),
    "master-weights-without-offload": (
        "plain",
        {**zero(2), "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        "Master weights feature requires",
    ),
    "accumulation-type-at-stage-0": (
        "plain",
        {**zero(0), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        "unsupported mix",
    ),
    "fixed-for-trainer": ("trainer", {**HF, "gradient_clipping": 0.5}, "ds gradient_clipping=0.5 vs hf max_grad_norm"),
    "two-learning-rates": (
        "trainer",
        {**HF, "optimizer": A, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02}}},
        "ds scheduler.params.warmup_max_lr=0.02 vs hf learning_rate=0.01",
    ),
    "offload-with-own-optimizer": ("own optimizer", zero(2, offload_optimizer=CPU), "client provided optimizer"),
    "zero-block-missing": (
        "trainer",
        {**M, "gradient_accumulation_steps": "auto"},
        "Please specify the ZeRO",
    ),
    "unmanaged-accumulation": ("trainer", {**HF, "managed_gradient_accumulation": False}, "AssertionError"),
    "clipping-missing": (
        "trainer",
        {k: v for k, v in HF.items() if k != "gradient_clipping"},
        {"clipping": 1.0},
    ),
    "accumulation-missing": (
        "trainer",
        {k: v for k, v in HF.items() if k != "gradient_accumulation_steps"},
        {"accumulation": 1},
    ),
    "optimizer-block": (
        "trainer",
        {**HF, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}},
        {"basic": "FusedAdam", "decays": [0.1]},
    ),
    "train-batch-fixed": ("trainer", {**HF, "train_batch_size": 64}, "mismatch TrainingArguments"),
}

# What looks wrong and trains: the linter must not call it an error.
HARMLESS: dict[str, tuple[str, dict]] = {
    "hpZ over more ranks than there are": ("plain", zero(3, zero_hpz_partition_size=8)),
    "one class without a list": ("plain", zero(3, leaf_module={"classes": "MixtralSparseMoeBlock"})),
    "a typed switch in quotes": ("plain", zero(2, overlap_comm="true")),
    "a schedule of torch": (
        "plain",
        {**M, "optimizer": A, "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 9}}},
    ),
    "never printing": ("plain", {**M, "steps_per_print": None}),
}

# rule -> what only the Trainer refuses, of rules about what DeepSpeed refuses.
BY_TRAINER: dict[str, tuple[str, dict, object]] = {
    "batch-identity": (
        "trainer",
        {"train_batch_size": 2, **M, "gradient_clipping": "auto", "zero_optimization": {"stage": 1}},
        r"micro_batch_per_gpu \* gradient_acc_step \* world_size 2 != 1 \* 1 \* 1",
    )
}

# Not run here, with the reason.
NOT_RUN = {
    "not-a-number": "Python's reader takes NaN, DeepSpeed's does not: the effect depends on the key",
    "ignored-key": "a warning about keys that are not DeepSpeed's: there is no effect to show",
    "initial-scale-power": "CPUs have no fp16: tests/test_config_rules.py asks DeepSpeed's loss scaler",
    "renamed-key": "the number of I/O threads shows only as speed",
    "batch-fraction": "a warning about arithmetic",
    "no-gather-on-save": "shown when a checkpoint is saved and loaded; see the tests of export",
    "overflow-unchecked": "a warning; needs an overflow",
    "activation-checkpointing-unused": "shows only as memory",
    "ranks-not-divisible": "needs more ranks than two",
    "heads-not-divisible": "needs a model whose heads do not divide",
    "no-hidden-size": "needs a model without a hidden size",
    "step-of-zeros": "shown by step_of_zeros of prove/defects/in_deepspeed.py, which tests/test_prove.py runs",
    "round-robin-order": "shown by round_robin_order of prove/defects/in_deepspeed.py, which tests/test_prove.py runs",
    "section-unused": "a warning",
    "fp16-without-zero": "tests/test_upstream.py shows it, on processors that have fp16",
    "scheduler-block": "a warning; the Trainer's own documentation says so",
    "nvme-folder": "about the machine",
    "autotuning-ends-the-run": "ends the process in which it is on",
    "swap-buffer-too-small": "needs a parameter of more than 1e8 elements",
    "sequence-parallel-below-stage-3": "two ranks: tests/test_config_proofs_ranks.py",
    "sequence-parallel-without-scatter": "two ranks: tests/test_config_proofs_ranks.py",
    "sequence-parallel-alone": "a warning",
    "tensor-parallel-with-lora": "two ranks: tests/test_config_proofs_ranks.py",
    "tensor-parallel-at-stage-3": "two ranks: tests/test_config_proofs_ranks.py",
    "unknown-tensor-preset": "a warning",
    "pipeline-with-stage-2-or-3": "two ranks: tests/test_config_proofs_ranks.py",
    "pipeline-with-autotp": "hangs or corrupts the groups of the process: not for a test suite",
    "unknown-expert-preset": "two ranks: tests/test_config_proofs_ranks.py",
    "expert-parallel-without-optimizer": "two ranks: tests/test_config_proofs_ranks.py",
    "known-bad-versions": "needs another version of transformers",
    "deepcompile-at-stage-0": "a warning; needs CUDA",
    "compiled-pass-without-effect": "tests/test_levers.py asks DeepSpeed's engine; the passes themselves need CUDA",
    "universal-at-stage-3": "a warning; needs a universal checkpoint",
}


def outcomes(folder: str, rules: set[str]) -> dict[str, dict]:
    known = {**PROOFS, **BY_TRAINER, **HARMLESS}
    cases = [(name, kind, config) for name, (kind, config, *_) in known.items() if name in rules]
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, str(WORKERS / "run_configs.py"), os.path.join(folder, "outcomes.json")]
    run = subprocess.run(
        command,
        input=json.dumps(cases),
        cwd=folder,
        env={**environment(), **port, **rank},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    with open(os.path.join(folder, "outcomes.json")) as file:
        return json.load(file)


@pytest.fixture(scope="module")
def happened(request, tmp_path_factory) -> dict[str, dict]:
    """Return what happened in the runs that the selected tests ask for, all of them in one process."""
    own = [item for item in request.session.items if "happened" in getattr(item, "fixturenames", ())]
    return outcomes(str(tmp_path_factory.mktemp("proofs")), {item.callspec.params["name"] for item in own})


@pytest.mark.parametrize("name", tiered({**PROOFS, **BY_TRAINER}, CORE))
def test_the_run_shows_what_the_rule_claims(happened: dict[str, dict], name: str):
    expected = {**PROOFS, **BY_TRAINER}[name][2]
    outcome = happened[name]
    if isinstance(expected, str):
        import re

        assert "error" in outcome, outcome
        assert re.search(expected, outcome["error"]), outcome["error"]
    else:
        assert "error" not in outcome, outcome["error"]
        assert {key: outcome[key] for key in expected} == expected


@pytest.mark.parametrize("rule", {**PROOFS, **BY_TRAINER})
def test_the_linter_finds_it(tmp_path, rule: str):
    kind, config, _ = {**PROOFS, **BY_TRAINER}[rule]
    file = tmp_path / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    found = lint(file, trainer="hf" if kind == "trainer" else "plain", world_size=1)
    assert rule in {finding.rule for finding in found}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_trains_is_not_called_an_error(happened: dict[str, dict], name: str):
    kind, config = HARMLESS[name]
    assert "error" not in happened[name], happened[name]
    found = lint(config, trainer="hf" if kind == "trainer" else "plain", world_size=1)
    assert not [finding for finding in found if finding.severity == "error"]


def test_every_rule_about_configs_that_load_is_proven_or_excused():
    loading = {rule.id for rule in RULES if rule.kind in (WRONG, FAILS_LATER)}
    assert loading == {*PROOFS, *NOT_RUN}
    assert not {*PROOFS} & {*NOT_RUN}
