"""What is wrong with accelerate's YAML: each rule yields what it finds; `lint.py` adds the places.

Each takes the YAML and the folder that it is in. `Hit.severity` is "error" where accelerate stops or does something
else than the file says, else "warning".
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from ..read import Key
from ..rule import Config, Hit, Severity
from ..rules.spelling import nearest
from . import keys

DEEPSPEED, FSDP = "deepspeed_config", "fsdp_config"


def hit(path: Key, value: object, what: str, fix: str, severity: Severity = "error") -> Hit:
    """Return a place where a rule applies."""
    return Hit(path, value, what, fix, severity=severity)


def unknown(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield keys that accelerate rejects, at the top, or ignores, in a section."""
    for name, value in config.value.items():
        if name not in (*keys.TOP, *keys.OLD):
            where = next((section for section, known in keys.SECTIONS.items() if name in known), None)
            meant = nearest(str(name), keys.TOP)
            fix = f"move it into {where}" if where else f"write {meant}" if meant else "remove it"
            yield hit((name,), value, "accelerate stops at this key, which it does not know", fix)
    for section, known in keys.SECTIONS.items():
        for name, value in config.section(section).items():
            if section == FSDP and f"fsdp_{name}" in known:
                continue
            if name not in known:
                meant = nearest(str(name), known)
                fix = f"write {meant}" if meant else "remove it"
                yield hit((section, name), value, "accelerate ignores this key, which it does not know", fix)


def choices(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield words that accelerate does not know, and a missing type."""
    if not config.has("distributed_type"):
        yield hit(
            (), None, "`distributed_type` is missing, at which accelerate stops", "add distributed_type: DEEPSPEED"
        )
    for path, allowed in keys.CHOICES.items():
        value = config.get(*path)
        words = [str(one).lower() for one in allowed]
        if value is None or str(value).lower() in words or (value is False and "no" in words):  # YAML reads no as false
            continue
        meant = nearest(str(value), tuple(map(str, allowed)))
        yield hit(
            path,
            value,
            f"not one of {', '.join(map(str, allowed))}",
            f"write {meant}" if meant else "write one of them",
        )


def unused_section(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield sections of another type than the file's."""
    kind = str(config.get("distributed_type", default="")).upper()
    for section, needs in ((DEEPSPEED, "DEEPSPEED"), (FSDP, "FSDP")):
        if config.section(section) and kind in keys.TYPES and kind != needs:
            what = f"not used with distributed_type: {kind}"
            yield hit((section,), None, what, f"write distributed_type: {needs}, or remove the section", "warning")
    if kind == "DEEPSPEED" and not config.section(DEEPSPEED):
        what = "without deepspeed_config accelerate trains with ZeRO-2"
        yield hit(("distributed_type",), kind, what, "add deepspeed_config with deepspeed_config_file", "warning")


def processes(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield numbers of processes and machines that contradict each other."""
    machines, rank = config.number("num_machines") or 1, config.number("machine_rank") or 0
    count = config.number("num_processes")
    if count is None and str(config.get("distributed_type")).upper() != "NO":
        yield hit((), None, "`num_processes` is missing", "add it, or pass --num_processes to each launch", "warning")
    elif count is not None and (count < 1 or count % machines):
        what = f"must be a multiple of num_machines: {machines:g}; it counts the GPUs of all machines together"
        yield hit(
            ("num_processes",), count, what, f"write num_processes: {max(1, round(count / machines)) * machines:g}"
        )
    if not 0 <= rank < machines:
        yield hit(("machine_rank",), rank, f"must be below num_machines: {machines:g}", "write machine_rank: 0")
    if machines < 2:
        return
    launcher = str(config.get(DEEPSPEED, "deepspeed_multinode_launcher", default="pdsh"))
    deepspeed = str(config.get("distributed_type")).upper() == "DEEPSPEED"
    if deepspeed and launcher in keys.LAUNCHERS and launcher != "standard":
        if not config.has(DEEPSPEED, "deepspeed_hostfile"):
            what = f"{launcher} needs deepspeed_hostfile, which is missing"
            fix = "add it, or write standard, which needs no ssh and is started on each machine"
            yield hit((DEEPSPEED, "deepspeed_multinode_launcher"), launcher, what, fix)
    elif not config.has("main_process_ip"):
        yield hit(
            ("num_machines",), machines, "needs main_process_ip, which is missing", "add the first machine's address"
        )


def json_file(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield a DeepSpeed file that is missing, and keys that accelerate refuses beside one."""
    path = (DEEPSPEED, "deepspeed_config_file")
    file = config.get(*path)
    if file is None:
        return
    if referenced(config, folder) is None:
        yield hit(path, file, "no such file, seen from this folder or the YAML's", "correct the path")
    beside: list[Key] = [(DEEPSPEED, name) for name in keys.IN_THE_FILE if config.has(DEEPSPEED, name)]
    beside += [("mixed_precision",)] if config.get("mixed_precision") is not None else []
    for key in beside:
        what = "accelerate stops at this key beside deepspeed_config_file, which has it"
        yield hit(key, config.get(*key), what, "remove it here, and set it in the JSON")


def referenced(config: Config, folder: Path) -> Path | None:
    """Return the DeepSpeed file that the YAML names; None: none, or it is not there.

    accelerate takes a relative path from the folder of the launch, which is usually the project's.
    """
    file = config.text(DEEPSPEED, "deepspeed_config_file")
    if file is None:
        return None
    return next((path for base in (Path(), folder, *folder.parents) if (path := base / file).is_file()), None)


def stage(config: Config, json: Config | None) -> Iterator[Hit]:
    """Yield `zero3_init_flag` and offload keys beside another stage; `json` is the DeepSpeed file."""
    if str(config.get("distributed_type")).upper() != "DEEPSPEED" or not config.section(DEEPSPEED):
        return
    known = json.stage if json else config.number(DEEPSPEED, "zero_stage")
    known = 2 if known is None and json is None else known
    flag = (DEEPSPEED, "zero3_init_flag")
    if known is not None and known != 3 and config.on(*flag):
        yield hit(flag, True, f"has no effect at stage {known:g}", "write false", "warning")
    if known == 3 and config.has(*flag) and not config.on(*flag):
        yield hit(flag, False, "every process loads the whole model before it is sharded", "write true", "warning")
    if json:
        return
    param, optimizer = (DEEPSPEED, "offload_param_device"), (DEEPSPEED, "offload_optimizer_device")
    if known != 3 and config.get(*param) not in (None, "none"):
        yield hit(param, config.get(*param), f"has no effect at stage {known:g}", "write zero_stage: 3, or none")
    if known == 0 and config.get(*optimizer) not in (None, "none"):
        yield hit(optimizer, config.get(*optimizer), "has no effect at stage 0", "write zero_stage: 2, or none")


def nvme(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield paths that accelerate's launcher drops (1.15.0, prepare_deepspeed_cmd_env), so that they are "none"."""
    for what in ("optimizer", "param"):
        device, path = (DEEPSPEED, f"offload_{what}_device"), (DEEPSPEED, f"offload_{what}_nvme_path")
        if config.get(*device) == "nvme" or config.has(*path):
            said = "accelerate launch does not pass the NVMe path on, and would offload into a folder named none"
            at = path if config.has(*path) else device
            yield hit(at, config.get(*at), said, "use deepspeed_config_file with configs/zero3_nvme.json")


def fsdp(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield keys of one version of FSDP beside the other, and wrapping that saves nothing."""
    if not config.section(FSDP):
        return
    section = {name if name.startswith("fsdp_") else f"fsdp_{name}": name for name in config.section(FSDP)}

    def value(name: str) -> object:
        return config.get(FSDP, section.get(name, name))

    def at(name: str) -> Key:
        return (FSDP, section.get(name, name))

    version, reshard = (2 if str(value("fsdp_version")) == "2" else 1), value("fsdp_reshard_after_forward")
    if version == 2 and isinstance(reshard, str) and reshard.lower() not in ("true", "false"):
        fix = "write true (ZeRO-3's behaviour) or false (ZeRO-2's)"
        yield hit(at("fsdp_reshard_after_forward"), reshard, "FSDP2 takes true or false", fix)
    if version == 1 and isinstance(reshard, bool):
        what = "accelerate stops: FSDP1, the default, takes the name of a strategy"
        yield hit(at("fsdp_reshard_after_forward"), reshard, what, "add fsdp_version: 2")
    if version == 2:
        for name, instead in keys.ONLY_FSDP1.items():
            if value(name) is not None:
                yield hit(at(name), value(name), "FSDP2 ignores it", f"remove it: {instead}", "warning")
    if version == 2 and str(value("fsdp_state_dict_type")).upper() == "LOCAL_STATE_DICT":
        yield hit(
            at("fsdp_state_dict_type"),
            "LOCAL_STATE_DICT",
            "accelerate stops: FSDP2 has none",
            "write SHARDED_STATE_DICT",
        )
    if config.on("use_cpu") or str(config.get("distributed_type")).upper() == "MULTI_CPU":
        yield hit(("use_cpu",), True, "on CPUs accelerate makes DDP of it, without a word", "use GPUs, or ZeRO")
    yield from _wrapping(value, at)
    if value("fsdp_activation_checkpointing_offload") and (version == 1 or not value("fsdp_activation_checkpointing")):
        what = "needs fsdp_version: 2 and fsdp_activation_checkpointing: true"
        yield hit(at("fsdp_activation_checkpointing_offload"), True, what, "add them, or remove it")


def _wrapping(value: Callable[[str], object], at: Callable[[str], Key]) -> Iterator[Hit]:
    policy = str(value("fsdp_auto_wrap_policy") or "NO_WRAP").upper()
    name = at("fsdp_auto_wrap_policy")
    if policy == "NO_WRAP":
        what = "the model is one unit, so that every process gathers all of it at once"
        yield hit(name, value("fsdp_auto_wrap_policy"), what, "write TRANSFORMER_BASED_WRAP", "warning")
    if policy == "SIZE_BASED_WRAP" and not value("fsdp_min_num_params"):
        what = "without fsdp_min_num_params accelerate wraps nothing"
        yield hit(name, policy, what, "add fsdp_min_num_params: 100000000, or write TRANSFORMER_BASED_WRAP")
    if policy != "SIZE_BASED_WRAP" and value("fsdp_min_num_params"):
        least = at("fsdp_min_num_params")
        yield hit(least, value("fsdp_min_num_params"), f"has no effect with {policy}", "remove it", "warning")


def parallelism(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield sizes whose product is not the number of processes."""
    sizes = {name: config.number("parallelism_config", name) for name in keys.PARALLELISM if name.endswith("_size")}
    given = {name: size for name, size in sizes.items() if size is not None}
    product, count = 1, config.number("num_processes")
    for name, size in given.items():
        product *= max(1, int(size))
        if size < 1:
            yield hit(("parallelism_config", name), size, "must be at least 1", "write 1")
    if given and count and product != count:
        what = f"the sizes multiply to {product}, but num_processes is {count:g}"
        yield hit(("parallelism_config",), None, what, "set parallelism_config_dp_shard_size to what is left")


RULES = {
    "accelerate-key": unknown,
    "accelerate-value": choices,
    "accelerate-section": unused_section,
    "accelerate-processes": processes,
    "accelerate-json": json_file,
    "accelerate-nvme": nvme,
    "accelerate-fsdp": fsdp,
    "accelerate-parallelism": parallelism,
}
"""By the name that findings have; `stage` also reads the DeepSpeed file."""
