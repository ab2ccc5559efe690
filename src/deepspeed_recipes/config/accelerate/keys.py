"""The keys of accelerate's YAML, from keys.toml, and those that it does not read with the file's type."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from ..rule import Config, Hit

_TABLES = tomllib.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8"))
_LISTS = {name: tuple(words.split()) for name, words in _TABLES.items() if isinstance(words, str)}
TOP, OLD, SAGEMAKER, ALONE = (_LISTS[name] for name in ("top", "old", "sagemaker", "alone"))
STRATEGIES, PREFETCHES, EXACT, IN_THE_FILE = (
    _LISTS[name] for name in ("strategies", "prefetches", "exact", "in_the_file")
)
SWITCH, SWITCHES, SWITCHES_OF_FSDP1 = (_LISTS[name] for name in ("switch", "switches", "switches_of_fsdp1"))
SECTIONS = {name: tuple(words.split()) for name, words in _TABLES["sections"].items()}
PREFIXES: dict[str, str] = _TABLES["prefixes"]
ONLY_FSDP1: dict[str, str] = _TABLES["only_fsdp1"]
CHOICES = {
    tuple(place.split(".")): tuple(words.split())
    for places, words in _TABLES["choices"].items()
    for place in places.split()
}
"""The allowed words by place."""
TYPES = CHOICES[("distributed_type",)]
MULTI_DEVICE = tuple(name for name in TYPES if name.startswith("MULTI_") and name != "MULTI_CPU")
DEEPSPEED_KEYS = "deepspeed_config"
_UNSET: tuple[object, ...] = (None, False, "", "no", "NO", [], {})
"""Values that count as unset; `accelerate config` writes some of them for every type."""


def machines(config: Config) -> float:
    """Return the number of machines, which is 1 unless the file names it."""
    return config.number("num_machines") or 1


def unread(config: Config, folder: Path) -> Iterator[Hit]:
    """Yield keys that have no effect with the file's type, as warnings."""
    kind = str(config.get("distributed_type", default="")).upper()
    kind = "NO" if config.get("distributed_type") is False else kind  # YAML reads a bare NO as false
    if kind not in TYPES:
        return
    found = {}  # what this type does not read, each with the reason and the fix
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
    what = "accelerate launch does not read it; accelerate tpu-config does"
    found["command_file"] = found["commands"] = (what, "remove it")
    if kind != "XLA":
        own = () if config.get("main_training_function") == "main" else ("main_training_function",)
        found |= dict.fromkeys((*_LISTS["tpu"], *own), ("only used with distributed_type: XLA", "remove it"))
    what = "accelerate launch reads it only from its command line"
    if config.get("rdzv_backend") != "static":
        found["rdzv_backend"] = (what, f"remove it, and pass --rdzv_backend {config.get('rdzv_backend')}")
    found["enable_cpu_affinity"] = (what, "remove it, and pass --enable_cpu_affinity")
    several, processes = machines(config) > 1, config.number("num_processes") or 1
    if kind not in (*ALONE, "FSDP"):
        what = f"not passed on with distributed_type: {kind}"
        found["use_cpu"] = (what, "remove it, and set use_cpu=True in TrainingArguments")
    if kind in ALONE:
        if processes > 1 and not config.section("mpirun_config"):
            what = f"accelerate launch starts one process with distributed_type: {kind}"
            instead = "add mpirun_config with mpirun_hostfile" if kind == "MULTI_CPU" else "write num_processes: 1"
            found["num_processes"] = (what, instead)
        if several:
            found["machine_rank"] = ("mpirun numbers the machines itself", "remove it")
        elif processes == 1:
            found["main_process_ip"] = found["main_process_port"] = ("one process has none to meet", "remove it")
    elif not several:
        found["main_process_ip"] = ("no effect with num_machines: 1", "remove it")
    elif kind == "DEEPSPEED" and (launcher := _launcher(config)) not in ("standard", "nossh"):
        found["machine_rank"] = (f"{launcher} starts all machines from one of them", "write 0")
    for name, (what, fix) in found.items():
        if config.get(name) not in _UNSET:
            yield Hit((name,), config.get(name), what, fix, severity="warning")
    if kind == "DEEPSPEED":
        yield from _unread_hosts(config)
        if not config.section(DEEPSPEED_KEYS):
            what = "without deepspeed_config accelerate trains with ZeRO-2"
            fix = "add deepspeed_config with deepspeed_config_file"
            yield Hit(("distributed_type",), kind, what, fix, severity="warning")


def _launcher(config: Config) -> str:
    return str(config.get(DEEPSPEED_KEYS, "deepspeed_multinode_launcher") or "pdsh")


def _unread_hosts(config: Config) -> Iterator[Hit]:
    """Yield keys for several machines that the launcher does not read."""
    several, launcher = machines(config) > 1, _launcher(config)
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
