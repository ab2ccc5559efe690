"""The keys of accelerate 1.15's YAML and their allowed words, and those that it does not read with the file's type.

A test compares them with accelerate's own (utils/launch.py). `same_network` is not reported: `accelerate config` always
writes it, and nothing reads it.
"""

from collections.abc import Iterator
from pathlib import Path

from ..rule import Config, Hit

TOP = (
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes"),
    *("machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port"),
    *("rdzv_backend", "same_network"),
    *("main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config"),
    *("parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone"),
    *("tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config"),
)
"""Keys at the top of the file; accelerate stops at any other key."""
OLD = ("fp16", "dynamo_backend")
"""Old keys at the top, which accelerate still translates."""
DEEPSPEED = (
    *("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device"),
    *("offload_optimizer_nvme_path", "offload_param_nvme_path", "gradient_accumulation_steps", "gradient_clipping"),
    *("zero3_init_flag", "zero3_save_16bit_model", "deepspeed_hostfile", "deepspeed_exclusion_filter"),
    *("deepspeed_inclusion_filter", "deepspeed_multinode_launcher", "deepspeed_moe_layer_cls_names"),
)
"""Keys of `deepspeed_config`; accelerate ignores any other."""
FSDP = (
    *("fsdp_version", "fsdp_offload_params", "fsdp_min_num_params", "fsdp_sharding_strategy"),
    *("fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap"),
    *("fsdp_backward_prefetch", "fsdp_state_dict_type", "fsdp_forward_prefetch", "fsdp_use_orig_params"),
    *("fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states", "fsdp_activation_checkpointing"),
    *("fsdp_activation_checkpointing_offload", "fsdp_ignored_modules"),
)
"""Keys of `fsdp_config`, whose prefix is optional; accelerate ignores any other."""
PARALLELISM = (
    *("parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size", "parallelism_config_tp_size"),
    *("parallelism_config_cp_size", "parallelism_config_cp_backend", "parallelism_config_cp_comm_strategy"),
    *("parallelism_config_sp_size", "parallelism_config_sp_backend", "parallelism_config_sp_seq_length"),
    *("parallelism_config_sp_seq_length_is_variable", "parallelism_config_sp_attn_implementation"),
)
"""Keys of `parallelism_config`; accelerate ignores any other."""
FP8 = (
    *("fp8_backend", "fp8_use_autocast_during_eval", "fp8_margin", "fp8_interval", "fp8_format"),
    *("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_override_linear_precision", "fp8_opt_level"),
    *("fp8_enable_fsdp_float8_all_gather", "fp8_pad_inner_dim"),
)
"""Keys of `fp8_config`, whose prefix is optional; accelerate ignores any other."""
DYNAMO = (
    *("dynamo_backend", "dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic"),
    "dynamo_use_regional_compilation",
)
"""Keys of `dynamo_config`, whose prefix is optional; accelerate ignores any other."""
MPIRUN = ("mpirun_hostfile",)
"""Keys of `mpirun_config`; accelerate ignores any other."""
SECTIONS = {
    "deepspeed_config": DEEPSPEED,
    "fsdp_config": FSDP,
    "parallelism_config": PARALLELISM,
    "fp8_config": FP8,
    "dynamo_config": DYNAMO,
    "mpirun_config": MPIRUN,
}
PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
"""The prefix that accelerate adds to keys of a section that lack it."""
SAGEMAKER = (
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "ec2_instance_type"),
    *("iam_role_name", "image_uri", "profile", "region", "num_machines", "gpu_ids", "base_job_name"),
    *("pytorch_version", "transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file"),
    *("additional_args", "dynamo_config", "enable_cpu_affinity"),
)
"""Keys at the top with `compute_environment: AMAZON_SAGEMAKER`; accelerate stops at any other."""
TYPES = (
    *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU"),
    *("MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM"),
)
ALONE = ("NO", "MULTI_CPU")
"""Types for which accelerate starts the script once, or mpirun, instead of one process per rank."""
MULTI_DEVICE = tuple(name for name in TYPES if name.startswith("MULTI_") and name != "MULTI_CPU")
LAUNCHERS = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
PRECISIONS = ("no", "fp16", "bf16", "fp8")
DEVICES = ("none", "cpu", "nvme")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
BACKENDS = (
    *("NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT"),
    *("ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "TVM", "HPU_BACKEND", "NEURON"),
)
SWITCH = ("true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0")
SWITCHES = (
    *("fsdp_offload_params", "fsdp_cpu_ram_efficient_loading", "fsdp_activation_checkpointing"),
    "fsdp_activation_checkpointing_offload",
)
SWITCHES_OF_FSDP1 = ("fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states")
"""Keys that take a word of `SWITCH`; FSDP2 does not read those of FSDP1."""
CHOICES = {
    ("distributed_type",): TYPES,
    ("mixed_precision",): PRECISIONS,
    ("dynamo_config", "dynamo_backend"): BACKENDS,
    ("dynamo_config", "backend"): BACKENDS,
    ("dynamo_backend",): BACKENDS,
    ("parallelism_config", "parallelism_config_cp_backend"): ("torch",),
    ("parallelism_config", "parallelism_config_sp_backend"): ("deepspeed",),
    ("deepspeed_config", "deepspeed_multinode_launcher"): LAUNCHERS,
    ("deepspeed_config", "offload_optimizer_device"): DEVICES,
    ("deepspeed_config", "offload_param_device"): DEVICES,
    ("deepspeed_config", "zero_stage"): (0, 1, 2, 3),
    ("fsdp_config", "fsdp_version"): (1, 2),
    ("fsdp_config", "fsdp_auto_wrap_policy"): WRAPS,
    ("fsdp_config", "fsdp_state_dict_type"): STATES,
}
"""The allowed values of a key; words are compared without case, except for the keys in `EXACT`."""
EXACT = ("distributed_type", "deepspeed_multinode_launcher")
IN_THE_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model"),
)
"""Keys of `deepspeed_config` that accelerate refuses together with a `deepspeed_config_file`."""
ONLY_FSDP1 = {
    "fsdp_backward_prefetch": "FSDP2 prefetches by itself",
    "fsdp_forward_prefetch": "FSDP2 prefetches by itself",
    "fsdp_use_orig_params": "FSDP2 always does",
    "fsdp_sync_module_states": "FSDP2 always does",
}
"""Keys that FSDP2 ignores, and its own behaviour."""


DEEPSPEED_KEYS = "deepspeed_config"
_UNSET: tuple[object, ...] = (None, False, "", "no", "NO", [], {})
"""Values that count as unset; `accelerate config` writes some of them for every type."""
_TPU = ("downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env")


def unread(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield keys that have no effect with the file's type, as warnings."""
    kind = str(config.get("distributed_type", default="")).upper()
    kind = "NO" if config.get("distributed_type") is False else kind  # YAML reads a bare NO as false
    if kind not in TYPES:
        return
    for name, (what, fix) in {**_sections(config, kind), **_options(config, kind)}.items():
        if config.get(name) not in _UNSET:
            yield Hit((name,), config.get(name), what, fix, severity="warning")
    if kind == "DEEPSPEED":
        yield from _machines(config)
        if not config.section(DEEPSPEED_KEYS):
            what = "without deepspeed_config accelerate trains with ZeRO-2"
            fix = "add deepspeed_config with deepspeed_config_file"
            yield Hit(("distributed_type",), kind, what, fix, severity="warning")


def _sections(config: Config, kind: str) -> dict[str, tuple[str, str]]:
    """Return the sections that this type does not read, each with the reason and the fix."""
    found = {}
    owners = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP", "megatron_lm_config": "MEGATRON_LM"}
    for section, needs in owners.items():
        if kind != needs:
            fix = f"write distributed_type: {needs}, or remove the section"
            found[section] = (f"not used with distributed_type: {kind}", fix)
    if kind == "DEEPSPEED":
        for name in ("dynamo_config", "dynamo_backend"):
            backend = config.get(name, "dynamo_backend", default=config.get(name, "backend", default=config.get(name)))
            if str(backend).upper() != "NO":
                what = "not passed on with distributed_type: DEEPSPEED, so nothing is compiled"
                found[name] = (what, "remove it, and set torch_compile=True in TrainingArguments")
    if str(config.get("mixed_precision")).lower() != "fp8":
        found["fp8_config"] = ("not used without mixed_precision: fp8", "write mixed_precision: fp8, or remove it")
    section, needs = ("parallelism_config", "FSDP") if kind in ALONE else ("mpirun_config", "MULTI_CPU")
    found[section] = (f"not used with distributed_type: {kind}", f"write distributed_type: {needs}, or remove it")
    return found


def _options(config: Config, kind: str) -> dict[str, tuple[str, str]]:
    """Return the keys at the top that this type does not read, each with the reason and the fix."""
    found = {}
    for name in ("command_file", "commands"):
        found[name] = ("accelerate launch does not read it; accelerate tpu-config does", "remove it")
    if kind != "XLA":
        for name in _TPU:
            found[name] = ("only used with distributed_type: XLA", "remove it")
        if config.get("main_training_function") != "main":
            found["main_training_function"] = ("only used with distributed_type: XLA", "remove it")
    what = "accelerate launch reads it only from its command line"
    if config.get("rdzv_backend") != "static":
        found["rdzv_backend"] = (what, f"remove it, and pass --rdzv_backend {config.get('rdzv_backend')}")
    found["enable_cpu_affinity"] = (what, "remove it, and pass --enable_cpu_affinity")
    if kind not in (*ALONE, "FSDP"):
        what = f"not passed on with distributed_type: {kind}"
        found["use_cpu"] = (what, "remove it, and set use_cpu=True in TrainingArguments")
    several = (config.number("num_machines") or 1) > 1
    if kind in ALONE:
        if (config.number("num_processes") or 1) > 1 and not config.section("mpirun_config"):
            what = f"accelerate launch starts one process with distributed_type: {kind}"
            instead = "add mpirun_config with mpirun_hostfile" if kind == "MULTI_CPU" else "write num_processes: 1"
            found["num_processes"] = (what, instead)
        if several:
            found["machine_rank"] = ("mpirun numbers the machines itself", "remove it")
        elif (config.number("num_processes") or 1) == 1:
            found["main_process_ip"] = found["main_process_port"] = ("one process has none to meet", "remove it")
    elif not several:
        found["main_process_ip"] = ("no effect with num_machines: 1", "remove it")
    elif kind == "DEEPSPEED" and (launcher := _launcher(config)) not in ("standard", "nossh"):
        found["machine_rank"] = (f"{launcher} starts all machines from one of them", "write 0")
    return found


def _launcher(config: Config) -> str:
    return str(config.get(DEEPSPEED_KEYS, "deepspeed_multinode_launcher") or "pdsh")


def _machines(config: Config) -> Iterator[Hit]:
    """Yield keys for several machines that the launcher does not read."""
    several, launcher = (config.number("num_machines") or 1) > 1, _launcher(config)
    hosts: tuple[str, ...] = ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter")
    if not several and launcher != "standard":
        hosts += ("deepspeed_multinode_launcher",)
    if not several or launcher == "standard":
        why = "with deepspeed_multinode_launcher: standard" if several else "with num_machines: 1"
        for name in hosts:
            if (value := config.get(DEEPSPEED_KEYS, name)) not in _UNSET:
                yield Hit((DEEPSPEED_KEYS, name), value, f"no effect {why}", "remove it", severity="warning")
    elif (
        config.get(DEEPSPEED_KEYS, hosts[1]) not in _UNSET
        and (value := config.get(DEEPSPEED_KEYS, hosts[2])) not in _UNSET
    ):
        what = "no effect together with deepspeed_exclusion_filter"
        yield Hit((DEEPSPEED_KEYS, hosts[2]), value, what, "remove one of the two", severity="warning")
