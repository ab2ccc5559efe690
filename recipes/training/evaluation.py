"""The held-out data, measured before, during and after training."""

from collections.abc import Callable
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerControl, TrainerState
from trl.models.utils import unwrap_model_for_generation

from recipes.spec.recipe import Recipe
from recipes.spec.run_folder import RunFolder, append_jsonl, read_jsonl
from recipes.training import pipeline_engine, score, world
from recipes.training.console import say
from recipes.training.data import IGNORED, Collator

GATHER_LIMIT = 2**30
"""Bytes of weights up to which ZeRO-3's shards are gathered once for generating, and not once per layer and token."""


class Evaluation(TrainerCallback):
    """Measures loss and metric at the start and the end, and the loss every `eval_steps`."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        tokenizer: PreTrainedTokenizerBase,
        raw: Dataset,
        rows: Dataset | None,
        on_record: Callable[[dict[str, Any]], None],
    ) -> None:
        """Take the held-out data twice: `raw` as read, and `rows` tokenised (None for preference pairs)."""
        self.recipe = recipe
        self.run = run
        self.tokenizer = tokenizer
        self.raw = raw
        self.rows = rows
        self.on_record = on_record
        self.trainer: Trainer | None = None

    @property
    def metric(self) -> str:
        """What the run is judged by: the recipe's metric."""
        return self.recipe.data.metric

    def before(self) -> float:
        """Return the metric before the first step, from the log, so that a resumed run knows it too."""
        return read_jsonl(self.run.evaluations)[0][self.metric]

    def last_line(self, after: float) -> str:
        """Return the line by which a run is judged: `exact match on 400 held-out examples: 1.8% -> 97.3%`."""
        form = ".4f" if self.metric == "loss" else ".1%"
        what = f"{self.metric.replace('_', ' ')} on {len(self.raw)} held-out examples"
        return f"{what}: {self.before():{form}} -> {after:{form}}"

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure before the first step."""
        if state.global_step == 0:
            self.measure(0, whole=True)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Ask for a log where an evaluation is due: it closes the window in which training is timed."""
        if self._due(state):
            control.should_log = True
        return control

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Measure the loss on the way, after the step's own record has been written."""
        if "loss" in (logs or {}) and self._due(state):
            self.measure(state.global_step, whole=False)

    def _due(self, state: TrainerState) -> bool:
        every = self.recipe.eval_steps
        return bool(every) and state.global_step % every == 0 and state.global_step < state.max_steps

    def measure(self, step: int, whole: bool) -> float | None:
        """Measure, log, and return the recipe's metric (None when `whole` is false and it is not the loss)."""
        measured = self._of_stages() if self.recipe.layout.pipeline > 1 else self._of_model(whole)
        record = {"step": step, **measured}
        if world.is_first():
            append_jsonl(self.run.evaluations, record)
            shown = "  ".join(f"{key.replace('_', ' ')} {value:.4f}" for key, value in record.items() if key != "step")
            say(f"held-out, step {step}: {shown}")
            self.on_record({f"held_out/{key}" if key != "step" else key: value for key, value in record.items()})
        return record.get(self.metric)

    def _of_stages(self) -> dict[str, float]:
        """Return loss and metric of a pipeline, which cannot generate, but tells what greedy decoding would."""
        engine = self.trainer.deepspeed
        collator = Collator(self.tokenizer.pad_token_id)
        loss, right, tokens = 0.0, 0, 0
        shares = list(score.shares(self.rows, self.recipe.micro_batch_size, self.recipe.layout))
        batches = [score.to_device(collator(rows)) for rows, _ in shares]
        results = iter(pipeline_engine.measure(engine, batches).split([len(rows) for rows, _ in shares]))
        for batch, (_, count) in zip(batches, shares, strict=True):
            mine = next(results)[:count]
            loss += mine[:, 0].sum().item()
            right += int((mine[:, 1] == 0).sum())
            tokens += int((batch["labels"][:count, 1:] != IGNORED).sum())
        loss, right, tokens = world.total(loss, right, tokens)
        measured = {"loss": loss / tokens}
        if self.metric == "exact_match":
            measured["exact_match"] = right / len(self.rows)
        return measured

    def _of_model(self, whole: bool) -> dict[str, float]:
        model = self.trainer.model
        training = model.training
        model.eval()
        measured: dict[str, float] = {}
        if self.rows is not None:
            collator = Collator(self.tokenizer.pad_token_id)
            size, layout = self.recipe.micro_batch_size, self.recipe.layout
            measured["loss"] = score.loss_per_token(model, self.rows, collator, size, layout)
        if whole or self.rows is None:
            measured |= self._metric(model)
        model.train(training)
        return measured

    def _metric(self, model: Any) -> dict[str, float]:
        if self.metric == "exact_match":
            return {"exact_match": self._exact_match(model)}
        if self.metric == "preference_accuracy":
            size, layout = self.recipe.micro_batch_size, self.recipe.layout
            return {
                "preference_accuracy": score.preference_accuracy(model, self.tokenizer, list(self.raw), size, layout)
            }
        return {}

    def _exact_match(self, model: Any) -> float:
        weights = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in model.parameters())
        gather = weights <= GATHER_LIMIT
        engine, accelerator = self.trainer.deepspeed, self.trainer.accelerator
        with unwrap_model_for_generation(engine, accelerator, gather_deepspeed3_params=gather) as whole:
            return score.exact_match(
                whole,
                self.tokenizer,
                self.raw["messages"],
                self.recipe.data.max_new_tokens,
                synced_gpus=not gather and accelerator.state.deepspeed_plugin.zero_stage == 3,
                layout=self.recipe.layout,
            )
