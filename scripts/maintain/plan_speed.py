"""Measures the time and the peak memory of ds-recipes plan itself: `python -m scripts.maintain.plan_speed FILE.json`.

Cases: a recipe, 1,024 GPUs, a config.json for the first and the second time, and `doctor --measure` on two CPU ranks.
The exit status is 1 if a case with a limit takes longer; the limits are for an idle machine with two cores.
"""

import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from deepspeed_recipes.machine import children
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.run_folder import write_json

RECIPE, MEASURE = "llama3-8b, 8 GPUs", "doctor --measure, 2 CPU ranks"
LIMITS = {RECIPE: 0.5, MEASURE: 60}
"""In seconds: the first answer for a recipe, and the measurement of a machine, which `--help` calls a minute."""


def plan_speed(rounds: int) -> dict[str, Any]:
    """Return the seconds and the peak memory of each run of a command."""
    eight = ["--gpu", "H100", "--gpus", "8", "--json"]
    with children.scratch() as folder:
        config = folder / "config.json"
        write_json(config, dict(pages.page("llama3").SIZES["8b"].config) | {"intermediate_size": 14208})
        questions = {
            RECIPE: ["plan", "llama3-8b", *eight],
            "llama3-70b, 1,024 GPUs": ["plan", "llama3-70b", *eight, "--nodes", "128", "global_batch_size=1024"],
            "a config.json for the first time": ["plan", str(config), *eight],
            "the same once more": ["plan", str(config), *eight],
            MEASURE: ["doctor", "--measure", str(folder / "machine.json"), "--gpus", "2"],
        }
        asked: dict[str, list[dict[str, float]]] = {name: [] for name in questions}
        for turn in range(rounds):
            for name, words in questions.items():
                asked[name].append(answered(words, folder / f"cache{turn}"))
    return {"benchmark": "planner", "date": date.today().isoformat(), "cpus": os.cpu_count(), "runs": asked}


def answered(words: list[str], cache: Path) -> dict[str, float]:
    """Return the seconds, the CPU seconds and the peak memory of one run of ds-recipes.

    Raises:
        RuntimeError: the command failed.
    """
    command = [sys.executable, "-m", "deepspeed_recipes.commands", *words]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # already waited for
    if status:
        raise RuntimeError(" ".join(command))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime, "peak_gib": used.ru_maxrss / 2**20}


def table(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    keys = {"seconds": ".2f", "cpu_seconds": ".2f", "peak_gib": ".2f"}
    lines = ["| question | seconds | of them CPU | peak GiB | limit, seconds |", "|---|---|---|---|---|"]
    for name, runs in result["runs"].items():
        cells = [format(statistics.median(run[key] for run in runs), form) for key, form in keys.items()]
        lines.append(f"| {name} | {' | '.join(cells)} | {LIMITS.get(name, '-')} |")
    return "\n".join(lines)


def too_slow(result: dict[str, Any]) -> list[str]:
    """Return the cases whose median exceeds their limit."""
    medians = {name: statistics.median(run["seconds"] for run in runs) for name, runs in result["runs"].items()}
    return [name for name, limit in LIMITS.items() if medians[name] > limit]


if __name__ == "__main__":
    result = plan_speed(rounds=2)
    write_json(Path(sys.argv[1]), result)
    print(table(result))
    if slow := too_slow(result):
        sys.exit(f"over the limit: {', '.join(slow)}")
