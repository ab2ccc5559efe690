"""`ds-recipes doctor --measure`: this machine's rates, for the planner."""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

from ...launching.command import launcher_command, rank_count, rank_environment, threads, visible_gpus
from ...launching.restarts import HostAttempts
from ...launching.ssh import hostfile, remote
from ...machine import children, system
from ...planning.hardware import machine_file
from ...prove.ranks import Ranks, read_logs
from ...recipe import files
from ...recipe.errors import UserError, cannot_write
from ...recipe.files import Json, JsonView
from ...recipe.project import require
from ...recipe.run_folder import RunFolder, write_json

PROBE = "deepspeed_recipes.benchmarks.probe"
LIMIT = 300
"""Seconds after which the probe is ended."""
ROUNDS = 2
"""How often a CPU is measured: three take over a minute."""
BUSY = 0.5
"""Load per core at which a machine without GPUs is busy."""
NO_HEADER = "--format=csv,noheader"


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the file, print a table, and return the exit status."""
    require("deepspeed")
    gpus = visible_gpus()
    ranks = rank_count(arguments.gpus, gpus)
    file = Path(arguments.measure) if arguments.measure else machine_file.default_file()
    files.check_writable("--measure", file)
    pool = hostfile.read(arguments.hostfile) if arguments.hostfile else None
    if not gpus:
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        if load > BUSY * cores:
            print(f"This machine is busy (load {load:.1f} on {cores} cores): the figures will be too low.", flush=True)
    elif apps := system.output("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", NO_HEADER):
        raise UserError(
            f"--measure: the GPUs are in use ({'; '.join(apps.splitlines()[:3])}), so the figures would be wrong; "
            "wait for these processes, or choose free GPUs with CUDA_VISIBLE_DEVICES."
        )
    drive = system.drive_speed(arguments.nvme) if arguments.nvme else None
    words = ("quick",) if arguments.quick else ()
    found = probe(ranks, gpus, words) if gpus else on_cpus(ranks, words)
    environment = found["environment"]
    measured = {
        "version": machine_file.VERSION,
        "date": date.today().isoformat(),
        "device": environment["gpus"][0] if environment["gpus"] else "CPU",
        "driver": system.output("nvidia-smi", "--query-gpu=driver_version", NO_HEADER) if gpus else None,
        "ranks": ranks,
        **found,
        **({"nvme_gbs": min(drive)} if drive else {}),
        **({"network": between(pool, arguments.output_dir)} if pool else {}),
    }
    try:
        write_json(file, measured)
    except OSError as error:
        raise UserError(cannot_write(error, file) or f"{file}: {error.strerror}.") from error
    for name, value in lines(measured):
        print(f"{name:42} {value}")
    if arguments.quick:
        print("\n--quick: few repetitions, so the figures vary; measure without it before you plan with them")
    if not gpus:
        how = f"--gpu cpu --machine {file}" if arguments.measure else "--gpu cpu"
        print(f"\n{file}: written; ds-recipes plan ... {how} predicts how fast these CPU ranks train")
    elif arguments.measure:
        print(f"\n{file}: written; ds-recipes plan ... --machine {file} uses it")
    else:
        print(f"\n{file}: written; plan and launch on this machine use it from now on")
    return 0


def probe(ranks: int, gpus: int, words: Sequence[str]) -> Json:
    """Return the measurements of this machine's GPUs (`benchmarks.probe`); raises as `started`."""
    with children.scratch() as folder:
        result = folder / "measured.json"
        return started(launcher_command((PROBE, str(result), *words), ranks), rank_environment(ranks, gpus), result)


def on_cpus(ranks: int, words: Sequence[str]) -> Json:
    """Return the measurements of CPU ranks, and under `alone` those of a rank that has all cores: medians of rounds.

    Other guests slow down a CPU for seconds at a time. The ranks of each round are forks of a process that has imported
    the stack once, which takes longer than half of the probes.
    """
    alone, shared = threads(1), threads(ranks)  # before they are in the environment, as if the user had set them
    os.environ |= rank_environment(ranks, 0)
    with children.scratch() as folder, Ranks((PROBE,)) as forks:

        def measured(ranks: int, *words: str) -> Json:
            result, log = folder / f"{ranks}.json", folder / "log"
            statuses = forks.run(_probe, str(result), *words, world_size=ranks, log=log, timeout=LIMIT)
            if -signal.SIGKILL in statuses:
                raise UserError(f"--measure: a rank was killed, for want of memory, or since it took over {LIMIT} s.")
            return _written(result, next(filter(None, statuses), 0), "\n".join(read_logs(log)))

        together, single = [], []
        for _ in range(1 if "quick" in words else ROUNDS):
            together.append(measured(ranks, *words))
            if ranks > 1:
                single.append(measured(1, *words, f"threads={alone}", f"shared={shared}")["seconds"])
    seconds = [one["seconds"] for one in together]
    found = together[0] | {"seconds": machine_file.median_of(seconds), "spread": spread(seconds, single)}
    if single:
        found["alone"] = machine_file.median_of(single)
        # A step of a rank that has its share of the cores, with fewer others in the caches than between ranks that
        # compute.
        found["seconds"] |= found["alone"].pop("shared")
    return found


def spread(*measured: Sequence[JsonView]) -> float:
    """Return the standard deviation of the logarithm of a round's time, pooled over what was `measured` in rounds.

    It is the time of all products and attentions of a round: long enough that it is the machine's speed that varies,
    and not the clock.
    """
    paces = [
        [math.log(sum([*one["products"].values(), *one["attention"].values()])) for one in rounds]
        for rounds in measured
        if len(rounds) > 1
    ]
    return math.sqrt(statistics.mean(map(statistics.variance, paces))) if paces else 0.0


def _probe(*words: str) -> None:
    from ...benchmarks import probe

    probe.main(*words)


def between(pool: hostfile.HostPool, shared: Path) -> Json:
    """Return the measured collectives over all slots of several hosts; all of them have the folder `shared`."""
    hostfile.check_command(shared.absolute(), None)
    try:
        shared.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(cannot_write(error, shared) or f"{shared}: {error.strerror}.") from error
    with children.scratch("measure-", shared) as folder:
        run, result = RunFolder(folder), folder / "measured.json"
        hosts = HostAttempts(pool, run, None)
        command = launcher_command(
            (PROBE, str(result), "collectives"), pool.ranks, pool, hosts.addresses[pool.hosts[0]]
        )
        try:
            found = started(command, remote.launcher_environment(run, hosts.environment), result)
        except UserError:
            remote.run_on_each(pool.hosts, lambda _: f"pkill -KILL -f {folder}")  # pdsh's end ends no rank
            raise
    return {"hosts": len(pool.hosts), "ranks": pool.ranks, "seconds": found["seconds"]}


def started(command: list[str], environment: dict[str, str], result: Path) -> Json:
    """Run the probe's ranks for at most `LIMIT`, and return what they wrote to `result`."""
    log = result.with_name("log")
    with log.open("wb") as out:
        try:
            done = children.run(command, LIMIT, env=environment, stdout=out, stderr=out)
        except subprocess.TimeoutExpired:
            raise UserError(f"--measure: not done after {LIMIT} s; the machine is busy, or a rank hangs.") from None
    return _written(result, done.returncode, log.read_text(errors="replace"))


def _written(result: Path, status: int, log: str) -> Json:
    """Return the ranks' measurements; raise a UserError with the last error in their log if one failed."""
    if status or not result.exists():
        lines = [line for line in log.splitlines() if line.strip()]
        said = [line for line in lines if "Error" in line] or lines or ["without a message"]
        raise UserError(f"--measure: the ranks failed with status {status}: {said[-1][:300]}")
    rates: Json = json.loads(result.read_text(encoding="utf-8"))
    return rates


def lines(measured: Json) -> Iterator[tuple[str, str]]:
    """Yield what was measured, in the units of datasheets."""
    seconds, sizes = measured["seconds"], measured["sizes"]
    for name, taken in seconds["products"].items():
        side, dtype = name.split()
        yield f"product {side} x {side}, {dtype}", f"{2 * int(side) ** 3 / taken / 1e12:,.2f} TFLOP/s"
    operations = machine_file.attention_operations(sizes)
    for name, taken in seconds["attention"].items():
        kernel, dtype, which = name.split()
        if kernel == "narrow":
            continue
        passes = 3.5 if which == "both" else 1
        title = "both passes" if which == "both" else "forward"
        yield f"attention {kernel}, {dtype}, {title}", f"{passes * operations / taken / 1e12:,.2f} TFLOP/s"
    yield "memory, read and written", f"{2 * sizes['copy'] / seconds['copy'] / 1e9:,.0f} GB/s"
    for name, title in (("from_host", "from host"), ("to_host", "to host")):
        if name in seconds:
            yield title, f"{sizes['copy'] / seconds[name] / 1e9:,.1f} GB/s"
    if measured.get("spread"):
        yield "speed from one round to the next", f"+- {measured['spread']:.0%}"
    yield "launch of a kernel from Python", f"{1e6 * seconds['operation']:.1f} us"
    for name, title in (("plain", "plain"), ("zero1", "ZeRO-1"), ("zero3", "ZeRO-3")):
        taken = seconds[f"layer {name}"]
        yield (
            f"host, per layer, {title}",
            f"{1e3 * taken['forward']:.2f} ms forward, {1e3 * taken['backward']:.2f} ms backward",
        )
    groups = [(f"{measured['ranks']} ranks", seconds)]
    if network := measured.get("network"):
        groups.append((f"{network['hosts']} hosts, {network['ranks']} ranks", network["seconds"]))
    for who, taken in groups:
        for name in ("all_reduce", "all_gather"):
            if f"{name} large" in taken:
                rate = sizes["message"] / taken[f"{name} large"] / 1e9
                yield (
                    f"{name.replace('_', '-')} over {who}",
                    f"{rate:,.2f} GB/s of message, {1e6 * taken[f'{name} small']:.0f} us at least",
                )
    if "host_adam" in seconds:
        yield (
            "Adam on the host",
            f"{measured['ranks'] * sizes['adam'] / seconds['host_adam'] / 1e9:.2f} billion parameters/s",
        )
    else:
        yield "Adam on the host", "not measured: ds-recipes doctor --build compiles its op"
    if "nvme_gbs" in measured:
        yield "drive, the slower of reading and writing", f"{measured['nvme_gbs']:.2f} GB/s"
