"""The keys of accelerate 1.15's YAML and their allowed words; a test compares them with accelerate's own."""

TOP = (
    *(
        "compute_environment",
        "distributed_type",
        "mixed_precision",
        "use_cpu",
        "debug",
        "num_processes",
        "machine_rank",
    ),
    *("num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network"),
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
