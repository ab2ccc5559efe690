"""The models to evaluate: a run, one of its checkpoints, a model or adapter folder, a model on the Hub, or a server."""

from dataclasses import dataclass
from pathlib import Path

from ...recipe.errors import UserError, redact
from ...recipe.recipe import Recipe
from ...recipe.run_folder import RunFolder, model_of, read_recipe
from ...training import server
from ...training.model_folder import base_model, record, weights
from ...training.server import Server


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate."""

    name: str
    """The model as typed."""
    model: Path | Server
    """A folder or a Hub id, or a server."""
    run: RunFolder | None = None
    """The run that trained the model, or None."""
    recipe: Recipe | None = None
    """The recipe that trained the model, or None if it is unknown."""


def find(name: str, model: str | None) -> Candidate:
    """Return the model at a folder, a Hub id or an address; `model` names one of a server's several."""
    if server.is_address(name):
        return Candidate(redact(name), server.connect(name, model))
    place = Path(name)
    if not place.exists() and base_model.is_hub_id(name):
        return Candidate(name, place)
    if not place.is_dir():
        raise UserError(f"{name}: no such folder.")
    place = place.resolve()
    run = next((RunFolder(one) for one in (place, *place.parents[:2]) if RunFolder(one).recipe.exists()), None)
    folder = model_of(run) if run and run.path == place else place
    if not any((folder / file).exists() for file in ("config.json", base_model.ADAPTER)):
        raise UserError(f"{name}: has neither a model nor an adapter; a run's model is in its export/.")
    weights.check_intact(folder)
    held = record.read(folder)
    recipe = read_recipe(run) if run else held.recipe if held else None
    return Candidate(name, folder, run, recipe)


def base_of(candidate: Candidate) -> Candidate:
    """Return the model from which a candidate was trained, which the candidate's recipe did not train."""
    name = f"{candidate.name} before training"
    if isinstance(candidate.model, Path) and (candidate.model / base_model.ADAPTER).exists():
        return Candidate(name, base_model.find(candidate.model))
    recipe = candidate.recipe
    if recipe is None:
        raise UserError(f"{candidate.name}: --base needs a run, or a folder that ds-recipes export wrote.")
    draft = candidate.run.draft_model if candidate.run and recipe.draft.enabled else None
    path = draft or base_model.located(recipe.model.path)
    if not path.exists() and not base_model.is_hub_id(str(path)):
        raise UserError(
            f"{candidate.name}: its base model {path} does not exist; name the base model as one of the models instead."
        )
    return Candidate(name, path)
