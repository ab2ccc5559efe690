"""Assembles the report of a run from its sections, and writes it into the run folder when the run ends."""

import sys
from pathlib import Path

from ..recipe.errors import first_line
from ..recipe.run_folder import RunFolder
from . import html, index, run_data
from .document import Document
from .run_data import RunData
from .sections import curves, evaluation, layers, memory, profile, rollouts, settings, system, verdict
from .sections import examples as answers


def document(run: RunData, examples: bool = True) -> Document:
    """Return the report of a run, starting with the verdict.

    Args:
        run: the content of its folder.
        examples: whether to include texts of the data and answers to them.
    """
    texts = (*rollouts.sections(run), answers.answer_section(run), answers.data_section(run)) if examples else ()
    sections = (
        verdict.section(run),
        curves.section(run),
        *((profile.section(run),) if run.profile else ()),
        *layers.sections(run),
        memory.section(run),
        memory.rank_section(run),
        *system.sections(run),
        *evaluation.sections(run),
        *texts,
        settings.recipe_section(run),
        settings.deepspeed_section(run),
        settings.version_section(run),
        settings.restart_section(run),
    )
    return Document(run.recipe.name, str(run.folder.path), sections)


def page(run: RunFolder) -> Path:
    """Write a run's `report.html`, update the index if the run is in `runs/`, and return the report's path.

    Raises:
        UserError: the folder is not a run folder, or has nothing to report.
        OSError: the folder cannot be written to.
    """
    html.write(run.report_page, document(run_data.read(run.path)))
    index.update(run)
    return run.report_page


def at_end(run: RunFolder) -> None:
    """Write the report of a run that has finished, stopped or failed; errors are only printed."""
    if not run.metrics.exists():
        return
    try:
        page(run)
    except Exception as error:
        print(f"{run.report_page} could not be written: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
