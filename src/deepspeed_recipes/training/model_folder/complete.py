"""Adds to exported weights the files that make the folder usable on any machine."""

import shutil
from pathlib import Path

from ...recipe import files
from ...recipe.errors import UserError
from ...recipe.files import JsonView
from ...recipe.run_folder import CHECK_FAILED, RunFolder, read_json, step_of
from . import base_model, card, expected, record, response_template


def check(source: Path, output: Path) -> None:
    """Refuse to overwrite files, and to export a model that failed its check.

    Raises:
        UserError: the message names the folder.
    """
    files.check_writable("--output", output, folder=True)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output}: exists and is not empty; choose a new folder.")
    if (source / CHECK_FAILED).exists():
        raise UserError(f"{source}: this export failed its check: it computes other logits than the trained model.")


def check_smaller(source: Path, output: Path, option: str) -> None:
    """Refuse a model of which `option` cannot make a smaller copy.

    Raises:
        UserError: as `check`, or `source` is not a model, returns scores or is already quantised.
    """
    check(source, output)
    adapter = (source / base_model.ADAPTER).exists()
    if not adapter and not (source / "config.json").exists():
        raise UserError(f"{source}: not a model folder (it holds neither config.json nor {base_model.ADAPTER}).")
    if card.look(source).scores:
        raise UserError(f"{source}: {option} is for models that write text, and this model returns scores.")
    if not adapter and "quantization_config" in base_model.config_of(source):
        raise UserError(f"{source}: is already quantised; use {option} on the model that it was made from.")


def of_run(folder: Path, run: RunFolder, place: Path, results: JsonView, step: int | None = None) -> None:
    """Add the card, `training/` and the response template to weights of a run, and remove absolute paths.

    Args:
        folder: holds the weights.
        run: the run that trained them.
        place: the folder that it will be renamed to.
        results: content of the run's summary.json, now or later.
        step: the step of the checkpoint with these weights, or None for the run's result.
    """
    record.write(folder, record.of_run(run, results, step), run.deepspeed)
    _finish(folder, place)


def of_copy(folder: Path, source: Path, place: Path) -> None:
    """Do the same for weights that are copied from a run's export, one of its checkpoints, or any model folder.

    A folder of another origin keeps its own card.

    Args:
        folder: holds the weights.
        source: where they come from.
        place: the folder that it will be renamed to.
    """
    expected.copy(source, folder)
    if (source / record.FOLDER / record.RECIPE).exists():
        shutil.copytree(source / record.FOLDER, folder / record.FOLDER)
    elif (run := RunFolder(source.parent)).recipe.exists():
        return of_run(folder, run, place, read_json(run.summary) if run.summary.exists() else {})
    elif (run := RunFolder(source.parents[1])).recipe.exists() and source.name.startswith("checkpoint-"):
        step = step_of(source)
        return of_run(folder, run, place, record.at_step(run, step), step)
    elif (source / card.FILE).exists():
        shutil.copy2(source / card.FILE, folder)
    _finish(folder, place)


def of_quantized(folder: Path, place: Path, quantization: JsonView) -> None:
    """Do the same for a quantised copy, whose card and results describe the quantisation.

    Args:
        folder: holds the weights, and the original's `training/` if it had one.
        place: the folder that it will be renamed to.
        quantization: the description for `training/results.json`.
    """
    record.add(folder, {record.QUANTIZATION: dict(quantization)})
    _finish(folder, place)


def of_certificate(folder: Path, asked: str, verdict: JsonView) -> bool:
    """Record a certificate in `training/results.json` and in the card; return False if the folder has no record.

    Args:
        folder: the export.
        asked: the software that computed its answers, with the version.
        verdict: `difference`, `bound`, `same` and `places`.
    """
    if (held := record.read(folder)) is None:
        return False
    record.add(folder, {record.CERTIFICATES: {**held.results.get(record.CERTIFICATES, {}), asked: dict(verdict)}})
    return card.write(folder)


def _finish(folder: Path, place: Path) -> None:
    record.add(folder, {record.CERTIFICATES: None})
    base_model.make_portable(folder, place)
    response_template.write(folder)
    card.write(folder)
