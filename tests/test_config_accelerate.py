"""accelerate's YAML: ours has no findings, each mistake has one with its key, value and fix, and accelerate agrees."""

import json
from dataclasses import fields
from functools import reduce
from pathlib import Path

import pytest
import yaml

from deepspeed_recipes.commands import check
from deepspeed_recipes.config.accelerate import keys
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.project import CONFIGS
from tests.versions import needs

SHIPPED = sorted((CONFIGS / "accelerate").glob("*.yaml"))
DEEPSPEED = {"distributed_type": "DEEPSPEED", "num_processes": 2}
DEEPSPEED["deepspeed_config"] = {"zero_stage": 3, "zero3_save_16bit_model": True}
FSDP = {"distributed_type": "FSDP", "num_processes": 2}
GPUS = {"distributed_type": "MULTI_GPU", "num_processes": 2}
SAGEMAKER = {"compute_environment": "AMAZON_SAGEMAKER"}
WRAP = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


@pytest.fixture
def found(tmp_path, capsys):
    """Return a function that gives the linter's status and findings for a YAML."""

    def lint(content):
        file = tmp_path / "accelerate.yaml"
        file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        status = check.main([str(file), "--json"])
        return status, json.loads(capsys.readouterr().out)

    return lint


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_ours_have_no_findings(file, printed_by):
    assert len(SHIPPED) >= 8
    reports = json.loads(printed_by("check", file, "--json"))
    assert all(report["findings"] == [] for report in reports)
    assert len(reports) == 1 + ("deepspeed_config_file" in file.read_text()), "the JSON is checked too"


def with_deepspeed(**changes):
    return DEEPSPEED | {"deepspeed_config": DEEPSPEED["deepspeed_config"] | changes}


def with_fsdp(**changes):
    return FSDP | {"fsdp_config": WRAP | changes}


def parallel(**sizes):
    return {f"parallelism_config_{name}_size": size for name, size in sizes.items()}


MISTAKES = [
    (DEEPSPEED | {"num_proceses": 2}, "num_proceses", "stops at this key", "write num_processes"),
    (DEEPSPEED | {"zero_stage": 3}, "zero_stage", "stops at this key", "move it into deepspeed_config"),
    (with_deepspeed(zero_stge=2), "deepspeed_config.zero_stge", "ignores this key", "write zero_stage"),
    (FSDP | {"fsdp_config": {**WRAP, "reshard": True}}, "fsdp_config.reshard", "ignores this key", "remove it"),
    ({"num_processes": 1}, "", "`distributed_type` is missing", "distributed_type: DEEPSPEED"),
    (DEEPSPEED | {"distributed_type": "DEEPSPED"}, "distributed_type", "not one of", "write DEEPSPEED"),
    (DEEPSPEED | {"mixed_precision": "bfloat16"}, "mixed_precision", "not one of", "one of them"),
    (with_deepspeed(zero_stage=4), "deepspeed_config.zero_stage", "not one of 0, 1, 2, 3", "one of them"),
    (FSDP | {"deepspeed_config": {"zero_stage": 2}}, "deepspeed_config", "not used with", "or remove the section"),
    (DEEPSPEED | {"num_processes": 3, "num_machines": 2, "main_process_ip": "a"}, "num_processes", "multiple", "write"),
    (DEEPSPEED | {"machine_rank": 1}, "machine_rank", "below num_machines: 1", "machine_rank: 0"),
    (
        DEEPSPEED | {"num_machines": 2},
        "deepspeed_config.deepspeed_multinode_launcher",
        "needs deepspeed_hostfile",
        "standard, which is started on each machine, and add main_process_ip",
    ),
    (with_fsdp() | {"num_machines": 2}, "num_machines", "needs main_process_ip", "first machine's address"),
    (
        with_deepspeed(deepspeed_config_file="no.json"),
        "deepspeed_config.deepspeed_config_file",
        "no such file",
        "correct the path",
    ),
    (
        with_deepspeed(deepspeed_config_file=str(CONFIGS / "zero3.json")),
        "deepspeed_config.zero_stage",
        "if deepspeed_config_file is set",
        "set it in the JSON",
    ),
    (
        with_deepspeed(zero_stage=2, offload_param_device="cpu"),
        "deepspeed_config.offload_param_device",
        "no effect at stage 2",
        "zero_stage: 3",
    ),
    (
        with_deepspeed(zero_stage=0, offload_optimizer_device="cpu"),
        "deepspeed_config.offload_optimizer_device",
        "no effect at stage 0",
        "zero_stage: 2",
    ),
    (with_deepspeed(zero_stage=2, zero3_init_flag=True), "deepspeed_config.zero3_init_flag", "at stage 2", "false"),
    (with_deepspeed(zero3_init_flag=False), "deepspeed_config.zero3_init_flag", "loads the whole model", "write true"),
    (
        with_deepspeed(offload_param_device="nvme", offload_param_nvme_path="/nvme"),
        "deepspeed_config.offload_param_nvme_path",
        "does not pass the NVMe path on",
        "zero3_nvme.json",
    ),
    (
        with_fsdp(fsdp_reshard_after_forward="FULL_SHARD"),
        "fsdp_config.fsdp_reshard_after_forward",
        "takes true",
        "true",
    ),
    (
        with_fsdp(fsdp_version=1, fsdp_reshard_after_forward=True),
        "fsdp_config.fsdp_reshard_after_forward",
        "FSDP1, the default",
        "fsdp_version: 2",
    ),
    (with_fsdp(fsdp_use_orig_params=True), "fsdp_config.fsdp_use_orig_params", "FSDP2 ignores it", "always does"),
    (with_fsdp(state_dict_type="LOCAL_STATE_DICT"), "fsdp_config.state_dict_type", "accelerate stops", "SHARDED"),
    (with_fsdp() | {"use_cpu": True}, "use_cpu", "makes DDP of it", "use GPUs"),
    (with_fsdp(fsdp_auto_wrap_policy="NO_WRAP"), "fsdp_config.fsdp_auto_wrap_policy", "one unit", "TRANSFORMER"),
    (
        with_fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP"),
        "fsdp_config.fsdp_auto_wrap_policy",
        "wraps nothing",
        "fsdp_min_num_params",
    ),
    (
        with_fsdp(fsdp_activation_checkpointing_offload=True),
        "fsdp_config.fsdp_activation_checkpointing_offload",
        "needs",
        "add them",
    ),
    (
        with_fsdp() | {"parallelism_config": {"parallelism_config_tp_size": 4}},
        "parallelism_config",
        "multiply to 4, but num_processes is 2",
        "write num_processes: 4",
    ),
    (DEEPSPEED | {"compute_environment": "SLURM"}, "compute_environment", "as SageMaker's", "LOCAL_MACHINE"),
    (DEEPSPEED | SAGEMAKER, "deepspeed_config", "AMAZON_SAGEMAKER", "remove it"),
    (SAGEMAKER | {"ec2_instance_type": "ml.p4d.24xlarge"}, "", "`iam_role_name` is missing", "add iam_role_name"),
    (DEEPSPEED | {"deepspeed_config": "zero3.json"}, "deepspeed_config", "keys with values", "key: value"),
    (
        DEEPSPEED | {"dynamo_config": {"backend": "INDUCTOR"}},
        "dynamo_config",
        "nothing is compiled",
        "torch_compile=True",
    ),
    (GPUS | {"dynamo_config": {"dynamo_backend": "INDUCTR"}}, "dynamo_config.dynamo_backend", "not one of", "INDUCTOR"),
    (GPUS | {"mixed_precision": False}, "mixed_precision", "bare no as false", '"no", in quotes'),
    (GPUS | {"gpu_ids": 0}, "gpu_ids", "is not text", 'write "all", in quotes'),
    (GPUS | {"gpu_ids": [0, 1]}, "gpu_ids", "is not text", 'write "0,1", in quotes'),
    (GPUS | {"gpu_ids": "0"}, "gpu_ids", "a single GPU", "write all"),
    (GPUS | {"gpu_ids": "0,1", "num_processes": 4}, "gpu_ids", "the other of 4 processes have none", "write all"),
    (with_deepspeed(zero_stage=2) | {"gpu_ids": "0", "num_processes": 2}, "gpu_ids", "names 1 GPU", "write all"),
    (GPUS | {"main_process_port": 99999}, "main_process_port", "not a port", "up to 65535"),
    (GPUS | {"main_process_port": "29500"}, "main_process_port", "not a port", "without quotes"),
    (
        with_deepspeed(zero_stage=2, zero3_save_16bit_model=True),
        *("deepspeed_config.zero3_save_16bit_model", "at stage 2", "false"),
    ),
    *(
        (with_deepspeed(zero_stage=3, zero3_save_16bit_model=saved), *expected)
        for expected in [("deepspeed_config.zero3_save_16bit_model", "save_model writes no weights", "write true")]
        for saved in (None, False, "false")
    ),
    (
        with_deepspeed(zero_stage="2") | {"parallelism_config": parallel(sp=2)},
        *("parallelism_config.parallelism_config_sp_size", "at stage 2 is 2 times too large", "zero_stage: 3"),
    ),
    (GPUS | {"num_machines": "2"}, "num_machines", "not a whole number", "num_machines: 1"),
    (GPUS | {"fp8_config": {"backend": "TE"}}, "fp8_config", "without mixed_precision: fp8", "mixed_precision: fp8"),
    (GPUS | {"rdzv_backend": "c10d"}, "rdzv_backend", "from its command line", "--rdzv_backend c10d"),
    (GPUS | {"enable_cpu_affinity": True}, "enable_cpu_affinity", "from its command line", "--enable_cpu_affinity"),
    (GPUS | {"use_cpu": True}, "use_cpu", "not passed on", "use_cpu=True in TrainingArguments"),
    (GPUS | {"tpu_zone": "a"}, "tpu_zone", "distributed_type: XLA", "remove it"),
    (GPUS | {"main_process_ip": "10.0.0.1"}, "main_process_ip", "no effect with num_machines: 1", "remove it"),
    (GPUS | {"commands": ["ls"]}, "commands", "does not read it", "remove it"),
    (GPUS | {"megatron_lm_config": {"megatron_lm_tp_degree": 2}}, "megatron_lm_config", "not used", "or remove"),
    (GPUS | {"mpirun_config": {"mpirun_hostfile": "h"}}, "mpirun_config", "not used", "MULTI_CPU"),
    (GPUS | {"distributed_type": "MULTI_CPU"}, "num_processes", "starts one process", "mpirun_hostfile"),
    (
        GPUS | {"distributed_type": "MULTI_CPU", "num_machines": 2, "main_process_ip": "a"},
        "num_machines",
        "needs main_process_port",
        "main_process_port: 29500",
    ),
    (with_deepspeed(gradient_clipping="none"), "deepspeed_config.gradient_clipping", "not a norm", "or auto"),
    (
        with_deepspeed(gradient_accumulation_steps="²"),
        "deepspeed_config.gradient_accumulation_steps",
        "not a",
        "above 0",
    ),
    (
        with_deepspeed(gradient_accumulation_steps="9" * 5000),
        "deepspeed_config.gradient_accumulation_steps",
        "not a",
        "0",
    ),
    (with_deepspeed(gradient_clipping=-1), "deepspeed_config.gradient_clipping", "not a norm", "or auto"),
    (with_deepspeed(gradient_accumulation_steps=0), "deepspeed_config.gradient_accumulation_steps", "not a", "above 0"),
    (with_deepspeed(zero3_save_16bit_model=1), "deepspeed_config.zero3_save_16bit_model", "not a switch", "true"),
    (with_deepspeed(deepspeed_hostfile="h"), "deepspeed_config.deepspeed_hostfile", "with num_machines: 1", "remove"),
    (
        with_deepspeed(deepspeed_hostfile="h", deepspeed_exclusion_filter="a", deepspeed_inclusion_filter="b")
        | {"num_machines": 2},
        "deepspeed_config.deepspeed_inclusion_filter",
        "together with deepspeed_exclusion_filter",
        "one of the two",
    ),
    (with_fsdp(fsdp_offload_params=None), "fsdp_config.fsdp_offload_params", "neither true nor false", "true or false"),
    (with_fsdp(fsdp_version=None), "fsdp_config.fsdp_version", "without a value", "write 2"),
    (
        with_fsdp(fsdp_version=1, fsdp_backward_prefetch="PRE"),
        "fsdp_config.fsdp_backward_prefetch",
        "not one of",
        "BACKWARD_PRE",
    ),
    (with_fsdp(fsdp_sync_module_states=False), "fsdp_config.fsdp_sync_module_states", "accelerate stops", "remove it"),
    (
        with_fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params="1e8"),
        "fsdp_config.fsdp_min_num_params",
        "without an exponent",
        "write 100000000",
    ),
    (
        with_fsdp(fsdp_version=1, fsdp_sharding_strategy="FULL"),
        "fsdp_config.fsdp_sharding_strategy",
        "not one of FULL_SHARD",
        "write FULL_SHARD",
    ),
    (
        with_fsdp(fsdp_version=1, fsdp_reshard_after_forward="SHARD_GRAD_OP"),
        "fsdp_config.fsdp_reshard_after_forward",
        "accelerate launch ignores it",
        "as fsdp_sharding_strategy: SHARD_GRAD_OP",
    ),
    (
        with_fsdp(sharding_strategy="HYBRID_SHARD_ZERO2")
        | {"num_machines": 2, "num_processes": 16, "main_process_ip": "10.0.0.1"},
        "fsdp_config.sharding_strategy",
        "FSDP2 ignores it",
        "fsdp_reshard_after_forward: false, and parallelism_config with parallelism_config_dp_replicate_size: 2 and "
        "parallelism_config_dp_shard_size: 8",
    ),
    (with_fsdp(fsdp_sharding_strategy="NO_SHARD"), "fsdp_config.fsdp_sharding_strategy", "ignores it", "MULTI_GPU"),
    *(
        (FSDP | {"fsdp_config": WRAP, "num_processes": 4, "parallelism_config": sizes}, key, what, fix)
        for sizes, key, what, fix in (
            (
                {"dp_shard_size": 4},
                "parallelism_config.dp_shard_size",
                "ignores",
                "write parallelism_config_dp_shard_size",
            ),
            (parallel(dp_shard=0), "parallelism_config.parallelism_config_dp_shard_size", "at least 1", "remove it"),
            (parallel(dp_replicate=4), "parallelism_config", "nothing to shard over", "dp_shard_size"),
            (parallel(tp=2), "parallelism_config", "multiply to 2", "dp_shard_size to 2"),
            (
                parallel(dp_shard=2, sp=2),
                "parallelism_config.parallelism_config_sp_size",
                "nothing is divided by it",
                "and set parallelism_config_dp_shard_size to 4",
            ),
            (parallel(tp=4), "parallelism_config", "nothing to shard over", "distributed_type: MULTI_GPU"),
            (parallel(dp_replicate=1), "parallelism_config", "multiply to 1", "dp_shard_size to 4"),
            (
                parallel(cp=2, dp_replicate=2),
                "parallelism_config.parallelism_config_dp_replicate_size",
                "stops",
                "and set parallelism_config_dp_shard_size to 2",
            ),
            (
                parallel(dp_shard=4) | {"parallelism_config_cp_backend": "ring"},
                "parallelism_config.parallelism_config_cp_backend",
                "not one of",
                "one of them",
            ),
        )
    ),
    (
        GPUS | {"num_processes": 4, "parallelism_config": parallel(tp=2, dp_replicate=2)},
        "parallelism_config.parallelism_config_dp_replicate_size",
        "stops",
        "remove it, and write num_processes: 2",
    ),
    (
        FSDP | {"fsdp_config": WRAP | {"fsdp_version": 1}, "parallelism_config": parallel(dp_shard=2)},
        "parallelism_config.parallelism_config_dp_shard_size",
        "FSDP1, the default",
        "fsdp_version: 2",
    ),
    (
        DEEPSPEED | {"parallelism_config": parallel(tp=2)},
        "parallelism_config.parallelism_config_tp_size",
        "nothing is divided by it",
        "and set parallelism_config_dp_shard_size to 2",
    ),
]


@pytest.mark.parametrize(("content", "key", "what", "fix"), MISTAKES)
def test_a_mistake_is_found_with_its_fix(found, content, key, what, fix):
    status, reports = found(content)
    findings = [one for one in reports[0]["findings"] if one["key"] == key and what in one["what"]]
    assert len(findings) == 1 and fix in findings[0]["fix"], reports
    assert status == int(any(one["severity"] == "error" for report in reports for one in report["findings"]))
    assert findings[0]["line"] or "missing" in what or "." in key
    written = reduce(lambda at, part: at.get(part) if isinstance(at, dict) else None, key.split("."), content)
    assert written is None or findings[0]["value"] in (None, written)


@pytest.mark.parametrize("size", [1, 2])
def test_the_json_is_checked_for_the_sequence_layout_of_the_yaml(found, size):
    named = {"deepspeed_config": {"deepspeed_config_file": str(CONFIGS / "zero2.json")}}
    status, (_, json_file) = found(DEEPSPEED | named | {"parallelism_config": parallel(sp=size, dp_shard=2 // size)})
    assert [one["rule"] for one in json_file["findings"]] == ["sequence-parallel-below-stage-3"] * (size - 1)
    assert status == size - 1


@pytest.mark.parametrize("norm", [0, 0.0, "0", 1, "auto"])
def test_a_norm_of_zero_switches_clipping_off(found, norm):
    assert found(with_deepspeed(gradient_clipping=norm))[1][0]["findings"] == []


def test_a_key_that_comes_twice_is_found_at_its_line(found):
    status, reports = found("distributed_type: FSDP\nnum_processes: 2\nnum_processes: 4\n")
    twice = reports[0]["findings"][0]
    assert status == 1 and (twice["key"], twice["line"]) == ("num_processes", 3) and "first on line 2" in twice["what"]


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "", "a: &a {b: *a", "\x00", "just words"])
def test_what_is_no_such_file_is_unreadable(found, text):
    status, reports = found(text)
    assert status == 2 and reports[0]["what"]


@pytest.mark.parametrize(("text", "line", "column"), [("num_machines: 1\n  gpu_ids: all\n", 2, 10), ("\x00", 1, 1)])
def test_what_is_not_yaml_is_reported_with_its_position(found, text, line, column):
    _, (report,) = found(text)
    assert (report["line"], report["column"]) == (line, column)


def test_an_alias_that_contains_itself_ends(found):
    status, reports = found("distributed_type: FSDP\nfsdp_config: &a\n  fsdp_version: 2\n  more: *a\n")
    assert status == 2 and "contains itself" in reports[0]["what"]


@needs("accelerate>=1.15")
def test_the_keys_are_those_of_accelerate():
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import constants

    assert set(keys.TOP) == {field.name for field in fields(ClusterConfig)}
    options = {action.dest for action in launch_command_parser()._actions}
    listed = {*(name for kind in ("deepspeed", "fsdp", "parallelism") for name in keys.SECTIONS[f"{kind}_config"])}
    assert listed - {"fsdp_ignored_modules"} <= options  # which the launcher reads, but does not list
    sections = ("fsdp_", "parallelism_config_", "zero", "offload_", "deepspeed_", "gradient_")
    assert {name for name in options if name.startswith(sections)} - {
        "deepspeed_fields_from_accelerate_config"
    } <= listed
    assert (
        tuple(constants.DEEPSPEED_MULTINODE_LAUNCHERS)
        == keys.CHOICES["deepspeed_config", "deepspeed_multinode_launcher"]
    )
    assert tuple(constants.FSDP_SHARDING_STRATEGY) == keys.STRATEGIES
    assert tuple(constants.FSDP_AUTO_WRAP_POLICY) == keys.CHOICES["fsdp_config", "fsdp_auto_wrap_policy"]


def test_accelerate_stops_where_the_linter_says_so(tmp_path, monkeypatch):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    file = tmp_path / "a.yaml"
    for changes in ({"num_proceses": 2}, {"zero_stage": 3}):
        file.write_text(yaml.safe_dump(DEEPSPEED | changes))
        with pytest.raises(ValueError, match="unknown keys"):
            load_config_from_file(str(file))
    with pytest.raises(ValueError):
        FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="LOCAL_STATE_DICT")
    for name in (*keys.IN_THE_FILE, "mixed_precision"):
        monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", f"deepspeed_config_file,{name}")
        with pytest.raises(ValueError, match="will be ignored"):
            DeepSpeedPlugin(hf_ds_config=str(CONFIGS / "zero3.json"))


def test_the_launcher_drops_the_nvme_path(monkeypatch):
    """When this fails, accelerate passes the path on, and `rules.nvme` can go."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    arguments = launch_command_parser().parse_args(
        ["--use_deepspeed", "--offload_param_device", "nvme", "--offload_param_nvme_path", "/there", "train.py"]
    )
    arguments.num_machines, arguments.num_processes, arguments.mixed_precision = 1, 1, "no"
    arguments.deepspeed_fields_from_accelerate_config, arguments.main_process_port = "", 0
    _, environment = prepare_deepspeed_cmd_env(arguments)
    assert "/there" not in environment.values()


def test_people_read_the_key_the_value_and_the_fix(tmp_path, capsys):
    file = Path(tmp_path / "a.yml")
    file.write_text(yaml.safe_dump(with_deepspeed(zero_stge=2), sort_keys=False))
    assert check.main([str(file)]) == 1
    said = capsys.readouterr().out
    assert f"{file}:6:3: error: deepspeed_config.zero_stge = 2: accelerate ignores this key" in said
    assert "    fix: write zero_stage" in said


def test_values_in_the_yaml_are_compared_with_the_trainers_arguments(tmp_path, capsys):
    file = tmp_path / "accelerate.yaml"
    section = {"zero_stage": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    file.write_text(
        yaml.safe_dump(
            {
                **{"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "mixed_precision": "bf16"},
                **{"num_machines": 1, "num_processes": 2, "machine_rank": 0, "deepspeed_config": section},
            }
        )
    )
    words = [str(file), "--argument", "max_grad_norm=1.0", "--argument", "bf16=true", "--argument"]
    assert check.main([*words, "gradient_accumulation_steps=4"]) == 0
    assert check.main([*words, "gradient_accumulation_steps=1"]) == 1
    assert "gradient_accumulation_steps = 4: gradient_accumulation_steps is 1, and the" in capsys.readouterr().out
    for name, text in (
        ("saved.json", '{"output_dir": "x", "max_grad_norm": 1.0}'),
        ("trl.yaml", "output_dir: x\nnum_train_epochs: 1\n"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=r"TrainingArguments, not a configuration; ds-recipes launch --from"):
            check.main([str(tmp_path / name)])
