"""Generates the current text of every document that is generated in whole or in part."""

from pathlib import Path

from deepspeed_recipes.benchmarks import overhead, scaling
from deepspeed_recipes.benchmarks.cases import BENCHMARKS
from deepspeed_recipes.planning.cost.constants import FILE
from deepspeed_recipes.recipe import files
from deepspeed_recipes.recipe.project import CONFIGS, PAGES
from deepspeed_recipes.recipe.run_folder import read_json

from .. import gpu_results, served
from ..calibration import MEASUREMENTS, accuracy, cpu_speed
from ..calibration.published_rows import published_rows
from . import chart, combinations, estimates, index, troubleshooting
from .blocks import END, begin

SCRIPTS = Path(__file__).parents[2]


def documents() -> dict[Path, str]:
    """Return the text of each document by its path."""
    blocks = {
        PAGES / "README.md": {"families": index.families()},
        CONFIGS / "README.md": {"chart": chart.render(), "combinations": combinations.render()},
        SCRIPTS / "README.md": {
            "hardware": index.hardware(),
            "names": index.names(),
            "served": served.table(read_json(served.FILE)),
            "accuracy": accuracy.sentence(published_rows(), read_json(FILE)),
            "cpu_speed": cpu_speed.errors(),
        },
        MEASUREMENTS / "README.md": measurements(),
    }
    found = {}
    for path, generated in blocks.items():
        text = path.read_text(encoding="utf-8")
        for name, content in generated.items():
            before, opening, rest = text.partition(begin(name))
            assert opening, f"{path} has no block {name!r}"
            text = before + opening + content + END + rest.partition(END)[2]
        found[path] = text
    found[CONFIGS / "TROUBLESHOOTING.md"] = troubleshooting.text()
    return found


def measurements() -> dict[str, str]:
    """Return the tables of measurements: the planner's errors, the project's own overhead, and benchmarks on GPUs."""
    results = gpu_results.results(MEASUREMENTS)
    names = [one.name for one in BENCHMARKS.values() if not one.estimates]
    on_gpus = (
        gpu_results.summary(names, results)
        if set(names) & set(results)
        else "No comparison has been run on a GPU yet.\n"
    )
    overheads = []
    for stage in (2, 3):
        result = read_json(MEASUREMENTS / f"overhead_zero{stage}_cpu.json")
        settings, rounds = result["settings"], len(result["runs"]["recipe"])
        where = f"{settings['ranks']} {'GPUs' if result['environment']['gpus'] else 'CPU ranks'}, {result['date']}"
        about = f"ZeRO-{settings['zero_stage']}, medians of {rounds} runs on {where}"
        overheads.append(f"{about}:\n\n{overhead.table(result)}\n")
    return {
        "accuracy": accuracy.table(published_rows(), read_json(FILE)),
        "cpu_speed": cpu_speed.section(),
        "overhead": "\n".join(overheads),
        "scaling": scaled(MEASUREMENTS),
        "speed": on_gpus,
        "estimates": estimates.render(list(estimates.rows(results))),
    }


def scaled(folder: Path) -> str:
    """Return the results of `benchmark.py scaling` on GPUs and on a CPU, with their figures."""
    files = [folder / f"scaling_{where}.json" for where in ("gpu", "cpu")]
    parts = [
        f"{scaling.section(read_json(file))}\n![Efficiency of the ranks]({file.with_suffix('.png').name})\n"
        for file in files
        if file.exists()
    ]
    return "\n".join(parts) or "Not measured yet.\n"


def write() -> list[Path]:
    """Write every document that is out of date, and return their paths."""
    changed = {path: text for path, text in documents().items() if path.read_text(encoding="utf-8") != text}
    for path, text in changed.items():
        files.write_text(path, text)
    return list(changed)
