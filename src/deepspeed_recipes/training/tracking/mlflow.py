"""MLflow, at MLFLOW_TRACKING_URI if it is set, otherwise in the run folder's `mlflow.db`."""

import os
import shlex
import time
from collections.abc import Mapping, Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from transformers.utils import flatten_dict

from ...recipe.files import JsonView
from ...recipe.recipe import Recipe
from ...recipe.run_folder import RunFolder
from .writer import ANSWERS, run_id, settings, tags

TAG = "deepspeed_recipes.run"
"""Tag by which a restarted run finds its entry."""
BATCH = 100
"""Maximum number of parameters per MLflow request."""


class Run:
    """A run in MLflow; a restarted one is continued."""

    def __init__(self, recipe: Recipe, run: RunFolder, deepspeed_config: JsonView) -> None:
        elsewhere = os.environ.get("MLFLOW_TRACKING_URI")
        self.uri = elsewhere or f"sqlite:///{run.path}/mlflow.db"
        self.client = MlflowClient(self.uri)
        name = recipe.wandb.project
        experiment = self.client.get_experiment_by_name(name)
        files = None if elsewhere else (run.path / "mlflow").as_uri()  # not the working directory
        number = experiment.experiment_id if experiment else self.client.create_experiment(name, files)
        found = self.client.search_runs([number], f"tags.`{TAG}` = '{run_id(run)}'")
        self.last = -1
        if found:
            self.id = found[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            self.last = max((one.step for one in self.client.get_metric_history(self.id, "loss")), default=-1)
            return
        labels = {TAG: run_id(run), "tags": ",".join(tags(recipe)), "group": recipe.wandb.group or ""}
        self.id = self.client.create_run(number, run_name=recipe.wandb.name or recipe.name, tags=labels).info.run_id
        shown = settings(recipe, deepspeed_config)
        params = [Param(key, str(value)[:500]) for key, value in flatten_dict(shown["recipe"]).items()]
        for start in range(0, len(params), BATCH):
            self.client.log_batch(self.id, params=params[start : start + BATCH])
        self.client.log_dict(self.id, shown["deepspeed"], "deepspeed.json")

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add numbers of a step."""
        now = int(1000 * time.time())
        self.client.log_batch(self.id, [Metric(key, float(value), now, step) for key, value in numbers.items()])

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Add the answers as `answers.json`."""
        self.client.log_dict(self.id, {"columns": list(ANSWERS), "data": [list(row) for row in rows]}, "answers.json")

    def alert(self, title: str, text: str) -> None:
        """Store the reason as a tag of the run."""
        self.client.set_tag(self.id, "alert", f"{title}: {text}"[:5000])

    def finish(self, summary: JsonView, status: int) -> str:
        """End the run as finished or failed."""
        self.client.log_dict(self.id, {**summary, "exit_status": status}, "summary.json")
        self.client.set_terminated(self.id, "FAILED" if status else "FINISHED")
        return f"MLflow       mlflow ui --backend-store-uri {shlex.quote(self.uri)}"
