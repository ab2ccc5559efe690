"""`accelerate launch` itself, up to where it starts processes: it stops at, or ignores, what the linter reports."""

import copy
import os
import subprocess

import pytest
import yaml

from deepspeed_recipes.config.accelerate import lint as accelerate_lint
from deepspeed_recipes.recipe.project import CONFIGS
from tests.test_config_accelerate import parallel
from tests.tiers import tiered
from tests.versions import needs

pytestmark = needs("accelerate>=1.15")

RANKS = {"compute_environment": "LOCAL_MACHINE", "num_processes": 2, "num_machines": 1}
TWO = {"num_machines": 2, "main_process_ip": "10.0.0.1", "main_process_port": 29500}
WRAP = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
STAGE_3 = {"zero_stage": 3, "zero3_save_16bit_model": True}
BASES = {
    "deepspeed": {"distributed_type": "DEEPSPEED", "deepspeed_config": STAGE_3},
    "deepspeed on two": TWO
    | {"distributed_type": "DEEPSPEED", "deepspeed_config": STAGE_3 | {"deepspeed_hostfile": "hosts"}},
    "deepspeed on two without ssh": TWO
    | {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": STAGE_3 | {"deepspeed_multinode_launcher": "standard"},
    },
    "fsdp1": {"distributed_type": "FSDP", "fsdp_config": WRAP | {"fsdp_version": 1}},
    "fsdp2": {"distributed_type": "FSDP", "fsdp_config": WRAP | {"fsdp_version": 2}},
    "ddp": {"distributed_type": "MULTI_GPU"},
    "ddp on two": TWO | {"distributed_type": "MULTI_GPU"},
    "cpus": {"distributed_type": "MULTI_CPU", "mpirun_config": {"mpirun_hostfile": "hosts"}},
    "one": {"distributed_type": "NO", "num_processes": 1},
}
TOP = {
    "compute_environment": ("SLURM", "AMAZON_SAGEMAKER", "local_machine", None),
    "distributed_type": ("deepspeed", "TPU", False),
    "mixed_precision": ("bf16", False, "bfloat16"),
    "use_cpu": (True, False),
    "machine_rank": (1,),
    "num_processes": (-1, 4),
    "num_machines": ("2", None),
    "gpu_ids": ("0,1", 0, [0, 1], "0", "all"),
    "main_process_ip": ("10.0.0.2", None),
    "main_process_port": (29501,),
    "rdzv_backend": ("c10d", "static"),
    "main_training_function": ("go", "main"),
    "enable_cpu_affinity": (True, False),
    "downcast_bf16": (True, "no"),
    "tpu_name": ("x",),
    "tpu_use_sudo": (True, False),
    "command_file": ("x",),
    "commands": (["x"], []),
    "tpu_env": (["x"], []),
    "deepspeed_config": ({"zero_stage": 2}, "zero3.json", [1], {}),
    "fsdp_config": (WRAP, {}),
    "megatron_lm_config": ({"megatron_lm_tp_degree": 2}, {}),
    "mpirun_config": ({"mpirun_hostfile": "other"}, {}),
    "fp8_config": ({"fp8_backend": "TE"}, {}),
    "dynamo_config": ({"dynamo_backend": "INDUCTOR"}, {"backend": "AOT"}, {"dynamo_backend": False}, {}),
    "dynamo_backend": ("INDUCTOR", "NO"),
    "parallelism_config": (
        *(parallel(dp_shard=2), parallel(tp=2), parallel(cp=2), parallel(sp=2), parallel(dp_replicate=2)),
        *(parallel(tp="2"), parallel(cp="2"), parallel(sp=None), parallel(dp_shard=0), {}),
        *(parallel(cp=2, sp=2), {"dp_shard_size": 2}, {"parallelism_config_cp_backend": "ring"}),
    ),
    "num_procesess": (2,),
}
SECTIONS = {
    "deepspeed_config": {
        "zero_stage": (0, "1", 1.0, True, "x"),
        "offload_optimizer_device": ("cpu", "CPU"),
        "offload_param_device": ("cpu",),
        "offload_optimizer_nvme_path": ("/x",),
        "gradient_accumulation_steps": (2, "auto", "2"),
        "gradient_clipping": (0.5, "auto", "x", True),
        "zero3_init_flag": (True, "yes", "x"),
        "zero3_save_16bit_model": (True,),
        "deepspeed_hostfile": ("other",),
        "deepspeed_exclusion_filter": ("a",),
        "deepspeed_inclusion_filter": ("a",),
        "deepspeed_multinode_launcher": ("nossh", "openmpi"),
        "deepspeed_moe_layer_cls_names": ("Block",),
        "zero_stge": (2,),
        "deepspeed_config_file": (str(CONFIGS / "zero3.json"),),
    },
    "fsdp_config": {
        "fsdp_version": (2, "2", 3, 2.0, None, "x"),
        "fsdp_reshard_after_forward": (True, "false", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", None),
        "fsdp_offload_params": (True, "x", None),
        "fsdp_min_num_params": (100,),
        "fsdp_sharding_strategy": ("SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "x", None, 2),
        "fsdp_auto_wrap_policy": ("SIZE_BASED_WRAP", "x", True),
        "fsdp_state_dict_type": ("FULL_STATE_DICT", "x", "LOCAL_STATE_DICT"),
        "fsdp_backward_prefetch": ("BACKWARD_PRE", "x", "NO_PREFETCH"),
        "fsdp_forward_prefetch": (True, "x", None),
        "fsdp_use_orig_params": (True, "x", None),
        "fsdp_cpu_ram_efficient_loading": (False, "x", None),
        "fsdp_sync_module_states": (True, False, "x", None),
        "fsdp_activation_checkpointing": (True, "x", None),
        "fsdp_activation_checkpointing_offload": (True, "x", None),
        "fsdp_transformer_layer_cls_to_wrap": ("Block",),
        "offload_params": (True, "x"),
        "fsdp_wrap": ("x",),
    },
}
DEFAULTS = {
    "gpu_ids": "all",
    "rdzv_backend": "static",
    "main_training_function": "main",
    "dynamo_backend": "NO",
    "deepspeed_config.zero_stage": 2,
    "fsdp_config.fsdp_sync_module_states": True,
    "fsdp_config.fsdp_version": 1,
    "fsdp_config.fsdp_use_orig_params": True,
    "fsdp_config.fsdp_reshard_after_forward": True,
}
READ_LATER = {"fp8_config"}
NOTHING = (None, False, "", "no", [], {})
HARMLESS = {
    "machine_rank": "an error beyond num_machines: 1",
    "num_processes": "counted by the rules about ranks",
    "compute_environment": "the default",
}


class Started(Exception):
    """Processes would be started now."""


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """Return a function that gives what accelerate would start: words and variables; it raises what accelerate raises.

    The plugins that each rank makes of these variables are made as well.
    """
    from accelerate import utils
    from accelerate.commands import launch
    from torch.distributed import run

    script, file = tmp_path / "train.py", tmp_path / "accelerate.yaml"
    script.touch()
    monkeypatch.chdir(tmp_path)
    clean = dict(os.environ)

    def start(words, env=None, **options):
        if env is None:  # uname and its like, which libraries call
            return popen(words, **options)
        raise Started(list(words), env)

    def elastic(arguments):
        words = {name: value for name, value in vars(arguments).items() if name != "config_file"}
        raise Started(words, dict(os.environ))

    popen = subprocess.Popen
    monkeypatch.setattr(launch.subprocess, "Popen", start)
    monkeypatch.setattr(run, "run", elastic)
    monkeypatch.setattr(utils.launch, "_get_mpirun_args", lambda: ("mpirun", "--hostfile", "-n", "--npernode", ""))
    monkeypatch.setattr(utils.launch, "is_port_in_use", lambda port: False)
    monkeypatch.setattr(utils.launch, "is_fp8_available", lambda: True)

    def started(config):
        file.write_text(yaml.safe_dump(config))
        words, variables = None, {}
        try:
            launch.launch_command(launch.launch_command_parser().parse_args(["--config_file", str(file), str(script)]))
        except Started as now:
            words, variables = now.args
        finally:
            os.environ.clear()
            os.environ.update(clean)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        try:
            make_plugins(variables, utils)
        finally:
            os.environ.clear()
            os.environ.update(clean)
        fields = ("ACCELERATE_CONFIG_DS_FIELDS", "PYTORCH_NVML_BASED_CUDA_CHECK", "OMP_NUM_THREADS")
        return words, {name: value for name, value in variables.items() if name not in fields}

    return started


def make_plugins(variables, utils):
    """Make what a rank makes of its variables."""
    sizes = None
    if variables.get("ACCELERATE_USE_DEEPSPEED"):
        utils.DeepSpeedPlugin()
    if variables.get("ACCELERATE_USE_PARALLELISM_CONFIG"):
        sizes = utils.ParallelismConfig()
    if variables.get("ACCELERATE_USE_FSDP"):
        try:
            plugin = utils.FullyShardedDataParallelPlugin()
        except RuntimeError as error:  # the last thing that FSDP1 asks for
            if "no available devices" not in str(error):
                raise
        else:
            # What ParallelismConfig._validate_accelerator checks, which needs ranks.
            if sizes and plugin.fsdp_version == 2 and not sizes.dp_shard_enabled and not sizes.cp_enabled:
                raise ValueError("the parallelism config has no dimension for FSDP to shard across")


@pytest.fixture
def findings(tmp_path):
    """Return a function that gives the linter's findings for a YAML."""
    file = tmp_path / "linted.yaml"

    def lint(config):
        file.write_text(yaml.safe_dump(config))
        return accelerate_lint.judge(accelerate_lint.read(file), file)[0]

    return lint


def changes(base):
    """Yield each key with each of its values, in a copy of the config, and the config without the key."""
    for name, values in TOP.items():
        for value in values:
            yield name, value, base | {name: value}, {key: base[key] for key in base if key != name}
    for section, names in SECTIONS.items():
        if section not in base:
            continue
        for name, values in names.items():
            for value in values:
                without = {key: base[section][key] for key in base[section] if key != name}
                if name == "deepspeed_config_file":
                    without = {"deepspeed_hostfile": "hosts"} if "deepspeed_hostfile" in base[section] else {}
                changed = base | {section: without | {name: value}}
                yield f"{section}.{name}", value, changed, base | {section: without}


@pytest.mark.parametrize("base", tiered(BASES, ("deepspeed", "fsdp2")))
def test_what_accelerate_stops_at_or_ignores_is_reported(base, outcome, findings):
    start = RANKS | BASES[base]
    assert outcome(start) and not findings(start), "the config that each key is added to is right"
    tried, wrong = 0, []
    for key, value, changed, without in changes(start):
        tried += 1
        found = findings(changed)
        errors = [one for one in found if one.severity == "error"]
        try:
            with_it = outcome(copy.deepcopy(changed))
        except Exception as stop:  # whatever accelerate raises
            if not errors:
                wrong.append(f"{key}={value!r}: accelerate stops ({type(stop).__name__}: {stop}), the linter is silent")
            continue
        here = [one for one in found if one.key in (key, key.partition(".")[0]) or one.key.startswith(f"{key}.")]
        if value in NOTHING or key in HARMLESS:
            continue
        try:
            ignored = with_it == outcome(copy.deepcopy(without))
        except Exception:  # without the key it does not start, so it has an effect
            continue
        if ignored and not here and value != DEFAULTS.get(key):
            wrong.append(f"{key}={value!r}: accelerate ignores it, the linter is silent")
        unread = [one for one in here if one.rule == "accelerate-unread" and one.key == key]
        if not ignored and unread and key not in READ_LATER:
            wrong.append(f"{key}={value!r}: accelerate reads it, the linter says {unread[0].what}")
    assert tried > 70
    assert not wrong, "\n".join(wrong)
