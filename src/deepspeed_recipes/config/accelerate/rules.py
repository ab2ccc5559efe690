"""The rules for accelerate's YAML. Each rule yields its hits; `lint.py` adds their positions.

A rule takes the YAML and its folder. A hit is an error if accelerate stops or does not do what the file sets, and has
the severity "warning" otherwise.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...recipe.errors import counted
from ..read import Key
from ..rule import Config, Hit, Severity
from ..schema import nearest
from . import keys
from .keys import DEEPSPEED_KEYS, unread

FSDP = "fsdp_config"


def names(config: Config, section: str) -> dict[str, str]:
    """Return a section's keys as the file writes them, by their full names: accelerate adds a missing prefix."""
    prefix = keys.PREFIXES.get(section, "")
    return {name if str(name).startswith(prefix) else f"{prefix}{name}": name for name in config.section(section)}


def environment(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield an environment other than LOCAL_MACHINE, which accelerate reads as SageMaker's, and the errors of that."""
    value = config.get("compute_environment", default="LOCAL_MACHINE")
    if value == "LOCAL_MACHINE":
        return
    at = ("compute_environment",)
    if not sagemaker(config):
        what = "accelerate reads every environment but LOCAL_MACHINE as SageMaker's, and stops"
        yield Hit(at, value, what, "write LOCAL_MACHINE; on a cluster too, where each machine launches its own ranks")
        return
    for name, given in config.value.items():
        if name not in keys.SAGEMAKER:
            what = "accelerate stops at this key, which is unknown with compute_environment: AMAZON_SAGEMAKER"
            yield Hit((name,), given, what, "remove it, or write compute_environment: LOCAL_MACHINE")
    for name in ("ec2_instance_type", "iam_role_name"):
        if not config.has(name):
            yield Hit((), None, f"`{name}` is missing, at which accelerate stops", f"add {name}")


def sagemaker(config: Config) -> bool:
    """Return whether the file is for SageMaker, which has different keys."""
    return config.get("compute_environment") == "AMAZON_SAGEMAKER"


def unknown(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield unknown keys, which accelerate rejects at the top and ignores in a section, and sections without keys."""
    for name, value in config.value.items():
        if name not in (*keys.TOP, *keys.OLD):
            where = next((section for section, known in keys.SECTIONS.items() if name in known), None)
            meant = nearest(str(name), keys.TOP)
            fix = f"move it into {where}" if where else f"write {meant}" if meant else "remove it"
            yield Hit((name,), value, "accelerate stops at this key, which is unknown", fix)
    for section, known in keys.SECTIONS.items():
        if not isinstance(config.get(section, default={}), dict | None):
            what = "accelerate expects keys with values here, and stops"
            yield Hit((section,), config.get(section), what, "write one `key: value` per line, or remove it")
        for full, name in names(config, section).items():
            if full not in known:
                value, longer = config.get(section, name), f"{section}_{name}"
                meant = longer if longer in known else nearest(str(name), known)
                fix = f"write {meant}" if meant else "remove it"
                yield Hit((section, name), value, "accelerate ignores this key, which is unknown", fix)


def choices(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield values that are not among the allowed ones, and a missing type."""
    if not config.has("distributed_type"):
        yield Hit(
            (), None, "`distributed_type` is missing, at which accelerate stops", "add distributed_type: DEEPSPEED"
        )
    for path, allowed in keys.CHOICES.items():
        place = path if len(path) == 1 else (path[0], names(config, path[0]).get(path[1], path[1]))
        value = config.get(*place)
        if value is None or (value is False and path == ("distributed_type",)):  # YAML reads NO as false
            continue
        words = [str(one) if path[-1] in keys.EXACT else str(one).lower() for one in allowed]
        if (str(value) if path[-1] in keys.EXACT else str(value).lower()) in words:
            continue
        if value is False and "no" in words:
            what, fix = "YAML reads a bare no as false, at which accelerate stops", 'write "no", in quotes'
            yield Hit(place, value, what, fix)
            continue
        meant = nearest(str(value), tuple(map(str, allowed)))
        fix = f"write {meant}" if meant else "write one of them"
        yield Hit(place, value, f"not one of {', '.join(map(str, allowed))}", fix)


def values(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield values whose type accelerate rejects or misreads."""
    gpus, kind, alone = config.get("gpu_ids"), str(config.get("distributed_type")), keys.machines(config) <= 1
    if gpus is not None and not isinstance(gpus, str):
        numbers = ",".join(map(str, gpus)) if isinstance(gpus, list) else str(gpus)
        numbers = "all" if kind in keys.MULTI_DEVICE and "," not in numbers else numbers
        yield Hit(("gpu_ids",), gpus, "accelerate stops where this is not text", f'write "{numbers}", in quotes')
    elif gpus not in (None, "all") and kind in keys.MULTI_DEVICE and alone and "," not in str(gpus):
        what = f"accelerate stops at a single GPU with distributed_type: {kind}"
        yield Hit(("gpu_ids",), gpus, what, "write all, or at least two numbers")
    elif gpus not in (None, "all") and isinstance(ranks := config.get("num_processes"), int):
        named, each = len(gpus.strip(",").split(",")), int(ranks // max(1, keys.machines(config)))
        if named < each and not config.on("use_cpu"):
            what = f"names {counted(named, 'GPU')}, and the other of {each} processes have none"
            numbers = ",".join(map(str, range(each)))
            yield Hit(("gpu_ids",), gpus, what, f'write all, or write "{numbers}", in quotes')
    port = config.get("main_process_port")
    if port is not None and (not isinstance(port, int) or not 0 <= port < 2**16):
        yield Hit(("main_process_port",), port, "not a port", "write a number up to 65535, without quotes")
    steps, clipping = (DEEPSPEED_KEYS, "gradient_accumulation_steps"), (DEEPSPEED_KEYS, "gradient_clipping")
    value = config.get(*steps)
    if value not in (None, "auto") and not re.fullmatch(r"0*[1-9]\d{,17}", str(value)):
        yield Hit(steps, value, "not a number of steps", "write a whole number above 0, or auto")
    value = config.get(*clipping)
    try:  # accelerate reads the number from the value's text
        norm = -1.0 if isinstance(value, bool) else float(str(value))
    except ValueError:
        norm = -1.0
    if value not in (None, "auto") and not norm >= 0:
        yield Hit(clipping, value, "not a norm", "write a number of at least 0, or auto")
    flags = {"zero3_init_flag": keys.SWITCH, "zero3_save_16bit_model": ("true", "false")}
    for name, words in flags.items():
        value = config.get(DEEPSPEED_KEYS, name)
        if value is not None and str(value).lower() not in words:
            yield Hit((DEEPSPEED_KEYS, name), value, "not a switch", "write true or false")


def processes(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield numbers of processes and machines that contradict each other."""
    for name in ("num_processes", "num_machines", "machine_rank"):
        value = config.get(name)
        if config.has(name) and (isinstance(value, bool) or not isinstance(value, int)):
            yield Hit((name,), value, "not a whole number", f"write {name}: {0 if name == 'machine_rank' else 1}")
            return
    machines, rank = keys.machines(config), config.number("machine_rank") or 0
    count = config.number("num_processes")
    if machines < 1:
        yield Hit(("num_machines",), machines, "not a number of machines", "write num_machines: 1")
        return
    if count is None and str(config.get("distributed_type")).upper() != "NO":
        fix = "add it, or pass --num_processes to each launch"
        yield Hit((), None, "`num_processes` is missing", fix, severity="warning")
    elif count is not None and (count < 1 or count % machines):
        what = f"must be a multiple of num_machines: {machines:g}; it counts the GPUs of all machines together"
        yield Hit(
            ("num_processes",), count, what, f"write num_processes: {max(1, round(count / machines)) * machines:g}"
        )
    if not 0 <= rank < machines:
        yield Hit(("machine_rank",), rank, f"must be below num_machines: {machines:g}", "write machine_rank: 0")
    if machines < 2:
        return
    launcher = str(config.get(DEEPSPEED_KEYS, "deepspeed_multinode_launcher", default="pdsh"))
    deepspeed = str(config.get("distributed_type")).upper() == "DEEPSPEED"
    if (
        deepspeed
        and launcher in keys.CHOICES[DEEPSPEED_KEYS, "deepspeed_multinode_launcher"]
        and launcher != "standard"
    ):
        if not config.has(DEEPSPEED_KEYS, "deepspeed_hostfile"):
            what = f"{launcher} needs deepspeed_hostfile, which is missing"
            fix = "add deepspeed_hostfile, or write standard, which is started on each machine"
            fix += "" if config.get("main_process_ip") else ", and add main_process_ip"
            yield Hit((DEEPSPEED_KEYS, "deepspeed_multinode_launcher"), launcher, what, fix)
    elif config.get("main_process_ip") is None:
        yield Hit(
            ("num_machines",), machines, "needs main_process_ip, which is missing", "add the first machine's address"
        )
    if str(config.get("distributed_type")).upper() == "MULTI_CPU" and config.get("main_process_port") is None:
        what = "needs main_process_port, at whose absence accelerate stops"
        yield Hit(("num_machines",), machines, what, "add main_process_port: 29500")


def json_file(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield a missing DeepSpeed file, and keys that accelerate refuses together with a file."""
    path = (DEEPSPEED_KEYS, "deepspeed_config_file")
    file = config.get(*path)
    if file is None:
        return
    if referenced(config, folder) is None:
        yield Hit(path, file, "no such file, seen from this folder or the YAML's", "correct the path")
    refused: list[Key] = [(DEEPSPEED_KEYS, name) for name in keys.IN_THE_FILE if config.has(DEEPSPEED_KEYS, name)]
    refused += [("mixed_precision",)] if config.get("mixed_precision") is not None else []
    for key in refused:
        what = "accelerate stops at this key if deepspeed_config_file is set, since the JSON has it"
        yield Hit(key, config.get(*key), what, "remove it here, and set it in the JSON")


def referenced(config: Config, folder: Path) -> Path | None:
    """Return the DeepSpeed file that the YAML names, or None if it names no file or the file does not exist.

    accelerate resolves a relative path from the folder of the launch, which is usually the project's.
    """
    file = config.text(DEEPSPEED_KEYS, "deepspeed_config_file")
    if file is None:
        return None
    return next((path for base in (Path(), folder, *folder.parents) if (path := base / file).is_file()), None)


def stage(config: Config, json: Config | None) -> Iterator[Hit]:
    """Yield flags, offload keys and a sequence layout that do not suit the stage; `json` is the DeepSpeed file."""
    if str(config.get("distributed_type")).upper() != "DEEPSPEED" or not config.section(DEEPSPEED_KEYS):
        return
    named = config.get(DEEPSPEED_KEYS, "zero_stage")  # quoted, too: accelerate reads the text
    known = json.stage if json else 2 if named is None else {"0": 0, "1": 1, "2": 2, "3": 3}.get(str(named))
    if known is None:
        return
    flag = (DEEPSPEED_KEYS, "zero3_init_flag")
    for one in (flag, (DEEPSPEED_KEYS, "zero3_save_16bit_model")):
        if known != 3 and config.on(*one):
            yield Hit(one, True, f"has no effect at stage {known}", "write false", severity="warning")
    if known == 3 and config.has(*flag) and not config.on(*flag):
        what = "every process loads the whole model before it is sharded"
        yield Hit(flag, False, what, "write true", severity="warning")
    if json:
        return
    save, shared = (DEEPSPEED_KEYS, "zero3_save_16bit_model"), ("parallelism_config", "parallelism_config_sp_size")
    if known == 3 and not config.on(*save):
        what = "save_model writes no weights that transformers can load"
        yield Hit(save, config.get(*save), what, "write true", severity="warning")
    if known != 3 and (config.number(*shared) or 1) > 1:
        what = f"every gradient at stage {known} is {config.number(*shared)} times too large"
        yield Hit(shared, config.get(*shared), what, "write zero_stage: 3 in deepspeed_config")
    param, optimizer = (DEEPSPEED_KEYS, "offload_param_device"), (DEEPSPEED_KEYS, "offload_optimizer_device")
    if known != 3 and config.get(*param) not in (None, "none"):
        yield Hit(param, config.get(*param), f"has no effect at stage {known}", "write zero_stage: 3, or none")
    if known == 0 and config.get(*optimizer) not in (None, "none"):
        yield Hit(optimizer, config.get(*optimizer), "has no effect at stage 0", "write zero_stage: 2, or none")


def nvme(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield paths that accelerate's launcher drops (1.15.0, prepare_deepspeed_cmd_env), so that they are "none"."""
    for what in ("optimizer", "param"):
        device, path = (DEEPSPEED_KEYS, f"offload_{what}_device"), (DEEPSPEED_KEYS, f"offload_{what}_nvme_path")
        if config.get(*device) == "nvme" or config.has(*path):
            problem = "accelerate launch does not pass the NVMe path on, and would offload into a folder named none"
            at = path if config.has(*path) else device
            yield Hit(at, config.get(*at), problem, "use deepspeed_config_file with configs/zero3_nvme.json")


def fsdp(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield keys of the other version of FSDP, and wrapping that saves no memory."""
    if not config.section(FSDP):
        return
    section = _Fsdp(config, names(config, FSDP))
    version, reshard = (2 if str(section.get("fsdp_version")) == "2" else 1), section.get("fsdp_reshard_after_forward")
    yield from _fsdp_values(section, version)
    if version == 2:
        yield from _hybrid(section)
    named = "fsdp_reshard_after_forward" in section.keys and not _hybrid_name(reshard)
    if version == 2 and named and str(reshard).lower() not in keys.SWITCH:
        fix = f"write {str(str(reshard).upper() != 'SHARD_GRAD_OP').lower()}"
        yield section.hit("fsdp_reshard_after_forward", "FSDP2 takes true or false", fix)
    if version == 1 and reshard is not None and str(reshard).upper() not in ("FULL_SHARD", "1"):
        what = "accelerate launch ignores it: FSDP1, the default, reads fsdp_sharding_strategy"
        word = str(reshard).upper()
        fix = f"write it as fsdp_sharding_strategy: {word}" if word in keys.STRATEGIES else "add fsdp_version: 2"
        yield section.hit("fsdp_reshard_after_forward", what, fix)
    if version == 2:
        for name, instead in keys.ONLY_FSDP1.items():
            if section.get(name) is not None:
                yield section.hit(name, "FSDP2 ignores it", f"remove it: {instead}", "warning")
        if str(section.get("fsdp_state_dict_type")).upper() == "LOCAL_STATE_DICT":
            yield section.hit("fsdp_state_dict_type", "accelerate stops: FSDP2 has none", "write SHARDED_STATE_DICT")
    loads = section.get("fsdp_cpu_ram_efficient_loading", default=True)
    if loads and not section.get("fsdp_sync_module_states", default=True):
        what = "accelerate stops: fsdp_cpu_ram_efficient_loading, by default true, needs it"
        yield section.hit("fsdp_sync_module_states", what, "remove it")
    if config.on("use_cpu") or str(config.get("distributed_type")).upper() == "MULTI_CPU":
        yield Hit(("use_cpu",), True, "on CPUs accelerate silently makes DDP of it", "use GPUs, or ZeRO")
    policy, least = str(section.get("fsdp_auto_wrap_policy") or "NO_WRAP").upper(), section.get("fsdp_min_num_params")
    if policy == "NO_WRAP":
        what = "the model is one unit, so that every process gathers all of it at once"
        yield section.hit("fsdp_auto_wrap_policy", what, "write TRANSFORMER_BASED_WRAP", "warning")
    if policy == "SIZE_BASED_WRAP" and not least:
        what = "without fsdp_min_num_params accelerate wraps nothing"
        fix = "add fsdp_min_num_params: 100000000, or write TRANSFORMER_BASED_WRAP"
        yield section.hit("fsdp_auto_wrap_policy", what, fix)
    if policy != "SIZE_BASED_WRAP" and least:
        yield section.hit("fsdp_min_num_params", f"has no effect with {policy}", "remove it", "warning")
    checkpoints = version == 2 and section.get("fsdp_activation_checkpointing")
    if section.get("fsdp_activation_checkpointing_offload") and not checkpoints:
        what = "needs fsdp_version: 2 and fsdp_activation_checkpointing: true"
        yield section.hit("fsdp_activation_checkpointing_offload", what, "add them, or remove it")


@dataclass(frozen=True)
class _Fsdp:
    """`fsdp_config` by the full names of its keys."""

    config: Config
    keys: dict[str, str]
    """The keys as the file writes them."""

    def get(self, name: str, default: object = None) -> object:
        return self.config.get(FSDP, self.keys.get(name, name), default=default)

    def hit(self, name: str, what: str, fix: str, severity: Severity = "error") -> Hit:
        return Hit((FSDP, self.keys.get(name, name)), self.get(name), what, fix, severity=severity)


def _fsdp_values(section: _Fsdp, version: int) -> Iterator[Hit]:
    """Yield values of `fsdp_config` that the plugin cannot read. It gets them as text, and null as "None"."""
    for name in (*keys.SWITCHES, *(keys.SWITCHES_OF_FSDP1 if version == 1 else ())):
        if name in section.keys and str(section.get(name)).lower() not in keys.SWITCH:
            yield section.hit(name, "accelerate stops where it is neither true nor false", "write true or false")
    if "fsdp_version" in section.keys and section.get("fsdp_version") is None:
        yield section.hit("fsdp_version", "accelerate stops at a version without a value", "write 2")
    prefetch = section.get("fsdp_backward_prefetch")
    if prefetch is not None and str(prefetch).upper() not in (*keys.PREFETCHES, "1", "2"):
        what = f"not one of {', '.join(keys.PREFETCHES)}"
        fix = "write BACKWARD_PRE, or remove it" if version == 1 else "remove it: FSDP2 prefetches by itself"
        yield section.hit("fsdp_backward_prefetch", what, fix)
    strategy, known = section.get("fsdp_sharding_strategy"), (*keys.STRATEGIES, "1", "2", "3", "4", "5")
    if version == 1 and "fsdp_sharding_strategy" in section.keys and str(strategy).upper() not in known:
        what = f"not one of {', '.join(keys.STRATEGIES)}"
        yield section.hit("fsdp_sharding_strategy", what, "write FULL_SHARD")
    least = section.get("fsdp_min_num_params")
    if str(section.get("fsdp_auto_wrap_policy")).upper() == "SIZE_BASED_WRAP" and not str(least or 0).isdecimal():
        what = "not a whole number, which YAML only reads without an exponent"
        yield section.hit("fsdp_min_num_params", what, "write 100000000")


def _hybrid_name(value: object) -> str | None:
    """Return the name of a strategy that shards inside a machine and replicates across machines, or None."""
    name = str(value).upper()
    name = keys.STRATEGIES[int(name) - 1] if name in ("4", "5") else name
    return name if name.startswith("HYBRID_SHARD") else None


def _hybrid(section: _Fsdp) -> Iterator[Hit]:
    """Yield FSDP1's strategies in FSDP2, which has two separate keys: one for ZeRO's stage, one for machines."""
    machines, count = keys.machines(section.config), section.config.number("num_processes")
    for name in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
        given, moved = section.get(name), name == "fsdp_sharding_strategy"
        if given is None or not (moved or _hybrid_name(given)):
            continue
        word = _hybrid_name(given) or str(given).upper()
        reshard = str(word in ("FULL_SHARD", "1", "HYBRID_SHARD")).lower()
        fix = f"{'remove it, and ' if moved else ''}write fsdp_reshard_after_forward: {reshard}"
        if _hybrid_name(given) and machines > 1:
            each = f"{count / machines:g}" if count else "THE GPUS OF ONE"
            fix += (
                f", and parallelism_config with parallelism_config_dp_replicate_size: {machines:g} and "
                f"parallelism_config_dp_shard_size: {each}"
            )
        if word in ("NO_SHARD", "3"):
            fix = "write distributed_type: MULTI_GPU, and remove fsdp_config"
        what = "FSDP2 ignores it" if moved else "FSDP2 takes true or false"
        yield section.hit(name, what, fix, "warning" if word in ("FULL_SHARD", "1") else "error")


def parallelism(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield invalid sizes, sizes whose product is not the number of processes, and sizes that have no effect."""
    at, shard = "parallelism_config", "parallelism_config_dp_shard_size"
    sizes = {}
    for name in keys.SECTIONS[at]:
        if not name.endswith("_size") or not config.has(at, name):
            continue
        size = config.get(at, name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            yield Hit((at, name), size, "must be at least 1, and a whole number", "remove it: without it it is 1")
            return
        sizes[name.removeprefix("parallelism_config_").removesuffix("_size")] = size
    split = {name for name, size in sizes.items() if size > 1}
    kind = str(config.get("distributed_type"))
    fsdp2 = kind == "FSDP" and str(config.get(FSDP, names(config, FSDP).get("fsdp_version", ""))) == "2"
    needs = {"sp": ("DEEPSPEED",), "cp": ("FSDP",), "tp": ("FSDP", *keys.MULTI_DEVICE)}
    needs["dp_shard"] = ("FSDP", "DEEPSPEED")
    for name in sorted(split & set(needs)):
        path = (at, f"parallelism_config_{name}_size")
        if kind in keys.TYPES and kind not in needs[name]:
            what = f"with distributed_type: {kind} nothing is divided by it"
            instead = f"{shard} to {sizes[name] * sizes.get('dp_shard', 1)}"
            fix = f"remove it, and set {instead}" if kind in needs["dp_shard"] else "remove parallelism_config"
            yield Hit(path, sizes[name], what, fix)
            return
        if kind == "FSDP" and not fsdp2:
            what = "FSDP1, the default, divides nothing by it"
            yield Hit(path, sizes[name], what, "add fsdp_version: 2 to fsdp_config")
    product, count = math.prod(sizes.values()), config.number("num_processes")
    left = count / product if count else 1.0
    if sizes and left != 1:
        what = f"the sizes multiply to {product}, but num_processes is {count:g}"
        fix = f"set {shard} to {left * sizes.get('dp_shard', 1):g}, which is left"
        whole = f"write num_processes: {product}"
        if fsdp2 and not split & {"dp_shard", "cp"}:
            whole += ", and write distributed_type: MULTI_GPU, and remove fsdp_config"
        yield Hit((at,), None, what, fix if left % 1 == 0 else whole)
    elif config.section(at) and fsdp2 and not split & {"dp_shard", "cp"}:
        what = "accelerate stops: FSDP2 has nothing to shard over where dp_shard and cp are 1"
        replicated = sizes.get("dp_replicate", 1)
        fix = f"set {shard} to {replicated}, and remove parallelism_config_dp_replicate_size"
        alone = (
            "remove parallelism_config" if not split else "write distributed_type: MULTI_GPU, and remove fsdp_config"
        )
        yield Hit((at,), None, what, fix if replicated > 1 else alone)
    elif "dp_replicate" in split and split & {"tp", "cp"} and "dp_shard" not in split:
        path = (at, "parallelism_config_dp_replicate_size")
        what = "accelerate stops: not with tp or cp, unless dp_shard is above 1"
        sharded = f"set {shard} to {sizes['dp_replicate']}"
        fewer = f"write num_processes: {product // sizes['dp_replicate']}"
        yield Hit(path, sizes["dp_replicate"], what, f"remove it, and {sharded if kind == 'FSDP' else fewer}")


RULES = {
    "accelerate-environment": environment,
    "accelerate-key": unknown,
    "accelerate-value": choices,
    "accelerate-type": values,
    "accelerate-unread": unread,
    "accelerate-processes": processes,
    "accelerate-json": json_file,
    "accelerate-nvme": nvme,
    "accelerate-fsdp": fsdp,
    "accelerate-parallelism": parallelism,
}
"""The rules by the names in findings. The rule `stage` is separate, since it also reads the DeepSpeed file."""
