"""Measures the held-out data before, during and after training."""

import math
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from torch import distributed as dist
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from ...recipe.errors import counted, first_line
from ...recipe.files import Json
from ...recipe.methods.method import higher_is_better, shown, title
from ...recipe.project import display
from ...recipe.recipe import Recipe
from ...recipe.run_folder import (
    RunFolder,
    append_jsonl,
    best_step,
    checkpoints,
    comparable,
    for_ties,
    is_marked,
    judgements,
    read_jsonl,
    step_of,
)
from .. import distributed
from ..console import say
from ..data.load import Datasets
from ..parallel import Holding


class Evaluation(TrainerCallback):
    """Measures loss and metric at the start and the end, and every `eval_steps` the loss and the metric on a sample.

    `early_stopping` and `keep_best` read evaluations.jsonl, which a resumed run has up to its checkpoint: so they
    decide after any interruption as without it.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        datasets: Datasets,
        parallel: Holding,
        metric: Callable[[object, object], dict[str, float]],
        on_record: Callable[[Json], None],
        answer: Callable[[object, object], None] | None = None,
        digest: str | None = None,
    ) -> None:
        """Measure with a method's and a layout's own functions.

        `datasets` has held-out examples, `parallel` measures the loss and `metric` is the method's own. `on_record`
        gets the numbers of each evaluation. `answer` stores a few answers at the start and the end, where the metric
        needs none. Each record has the held-out examples' `digest`, by which later ones are comparable.
        """
        self.recipe = recipe
        self.run = run
        self.datasets = datasets
        self.parallel = parallel
        self.measure_metric = metric
        self.on_record = on_record
        self.answer = answer
        self.digest = digest
        self.ended: str | None = None
        """Why the run ended before its last step, or None."""
        self.latest: Json = {}
        """The record of the newest evaluation."""

    @property
    def metric(self) -> str:
        """The metric that judges the run: the method's own where it has one, otherwise the recipe's."""
        return self.recipe.metric

    def before(self) -> float | None:
        """Return the metric before the first step; read from the log, so that a resumed run has it too.

        None if it was not measured then, on the examples of the latest evaluation and by the metric that judges now.
        """
        first = self._rows()[0]
        return None if first["step"] else first.get(self.metric)

    def _rows(self) -> list[Json]:
        return comparable(read_jsonl(self.run.evaluations))

    def described(self) -> Json:
        """Return the model card's facts about the held-out examples, except the metric after training."""
        return {"metric": self.metric, "before": self.before(), "held_out": len(self.judged)}

    @property
    def judged(self) -> Dataset:
        """The held-out examples that count; there are some."""
        found = self.datasets.judged
        assert found is not None, "nothing measures without them"
        return found

    def last_line(self, after: float) -> str:
        """Return the line that judges a run: `exact match on 400 held-out examples: 1.8% -> 97.3%`."""
        kind = "sequence" if self.recipe.method.examples == "texts" else "example"  # long texts are cut into several
        of = "all pairs of " if self.metric == "judgement_accuracy" else ""
        what = f"{title(self.metric)} on {of}{counted(len(self.judged), f'held-out {kind}')}"
        if (before := self.before()) is None:
            return f"{what}: {shown(self.metric, after)} (before training: not measured)"
        line = f"{what}: {shown(self.metric, before)} -> {shown(self.metric, after)}"
        # The margin of preferences, or the method's second number.
        method = self.recipe.method
        key = method.beside or self.metric.replace("_accuracy", "_margin")
        found = [row[key] for row in self._rows() if key != self.metric and key in row]
        if found and method.beside:
            line += f", {title(key)} {shown(key, found[0])} -> {shown(key, found[-1])}"
        elif found:
            line += f", margin {found[0]:.2f} -> {found[-1]:.2f} {method.unit}"
        return line

    def warning(self, after: float) -> str | None:
        """Return a warning if no answer is right, the kept step is worse than none, or length decides, or None."""
        rows, known = self._rows(), self.before() is not None
        first, last = rows[0], rows[-1] | {self.metric: after}
        sign = -1 if higher_is_better(self.metric) else 1
        if self.recipe.keep_best and known:
            before, reached = ((sign * row[self.metric], for_ties(self.recipe, row)) for row in (first, last))
            if reached > before:
                key = self.metric if reached[0] != before[0] else self.recipe.tie_breaker
                return (
                    "warning: the model before training is better than the best step, which is exported: "
                    f"{title(key)} {shown(key, first[key])}, then {shown(key, last.get(key, math.nan))}; lower "
                    f"learning_rate (now {self.recipe.learning_rate:g}), or evaluate more often (eval_steps)."
                )
        if known and self.recipe.method.reference and self.metric == "preference_accuracy" and after < 0.5:
            if (rose := last["preference_margin"] - first["preference_margin"]) <= 0:
                return None
            return (
                "warning: most of the better answers are less likely than the others, as longer answers are; their "
                f"margin, which {self.recipe.method.title} trains, rose by {rose:.2f} {self.recipe.method.unit}.\n"
                "Compare runs by the margin, or train orpo_lora or simpo_lora, which compare answers per token."
            )
        if self.metric != "exact_match" or after > 0:
            return None
        cut_off = round(last.get("cut_off", 0.0) * len(self.judged))
        long = (
            f"; {cut_off} of them were cut off at data.max_new_tokens={self.recipe.data.max_new_tokens}, raise it if "
            "answers in the data are longer"
        )
        return (
            f"warning: 0 of {len(self.judged)} answers match the expected text exactly{long if cut_off else ''}. "
            f"The first are in {display(self.run.answers)}.\n"
            "Train for more steps; if answers in other words can be right too, use data.metric=loss."
        )

    def on_step_end(
        self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        """Request an evaluation where one is due, and a log before it, which ends the timed window."""
        every, step = self.recipe.steps_between_evaluations, state.global_step
        if (every and step % every == 0 and step < state.max_steps) or (
            self.recipe.keep_best and step == state.max_steps
        ):
            control.should_log = control.should_evaluate = True
        return control

    def on_evaluate(
        self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        """Save the best model so far, and end the run after too many evaluations without a gain."""
        step = state.global_step
        best = self.decide(step)
        if self.recipe.keep_best and best == step:
            control.should_save = True
        if self.ended and step < state.max_steps:
            # With a checkpoint, so that an interrupted export does not train again.
            control.should_save = control.should_save or bool(self.recipe.save_steps)
            control.should_training_stop = True
            say(f"stopping early after step {step} of {state.max_steps}: {self.ended}")
        return control

    def decide(self, step: int) -> int | None:
        """Set `ended`, and return the step of the best weights: those of `step`, or in a checkpoint; a collective."""
        found: list[Any] = [None, None]
        if self.recipe.picks and distributed.is_first():
            values = judgements(self.run, self.recipe)
            kept = {step_of(one) for one in checkpoints(self.run) if is_marked(one)} | {step}
            found[0] = best_step(self.recipe, {one: values[one] for one in kept & values.keys()})
            patience, best = self.recipe.early_stopping, best_step(self.recipe, values)
            if patience is not None and best is not None and sum(later > best for later in values) >= patience:
                found[1] = (
                    f"no better {self.recipe.judged_by} than that of step {best}, {shown(self.metric, values[best][0])}"
                    f", in {patience} evaluation{'s'[: patience != 1]} (early_stopping={patience})"
                )
        if self.recipe.picks:
            dist.broadcast_object_list(found)
        best, self.ended = found
        return best

    def measure(self, trainer: Trainer, with_metric: bool, exported: int | None = None) -> dict[str, float]:
        """Measure, log, and return the numbers; a collective.

        `with_metric` also computes a metric that needs more than the loss's forward passes, such as generated answers;
        without it, only on `eval_examples` examples, as `sampled_METRIC`. `exported` is the step whose weights are
        loaded to be exported, or None for the last step's.
        """
        step = trainer.state.global_step if exported is None else exported
        record, training = self.latest, trainer.model.training
        # The last step, if `early_stopping` or `keep_best` has judged it.
        known = exported is None and with_metric and record.get("step") == step and self.metric in record
        trainer.model.eval()
        if not known:
            always = self.recipe.picks and not self.recipe.eval_examples
            record = {"step": step, **self._measured(trainer, with_metric or always)}
            record |= {"held_out": self.digest} if self.digest else {}
            record |= {} if exported is None else {"exported": True}
        if with_metric and self.answer:
            try:
                self.answer(trainer, self.judged)
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # some models cannot generate
                say(f"the report will lack answers: {type(error).__name__}: {first_line(error)}")
        trainer.model.train(training)
        if known:
            return record
        if distributed.is_first():
            append_jsonl(self.run.evaluations, record)
            numbers = {key: value for key, value in record.items() if key not in ("step", "exported", "held_out")}
            say(f"held-out, step {step}: {'  '.join(f'{title(key)} {value:.4f}' for key, value in numbers.items())}")
            if exported is None:
                self.on_record({"step": step, **{f"held_out/{key}": value for key, value in numbers.items()}})
        self.latest = record
        return record

    def _measured(self, trainer: Trainer, with_metric: bool) -> dict[str, float]:
        sequences = self.datasets.held_out_sequences
        measured = self.parallel.measure(trainer, sequences) if sequences is not None else {}
        wanted = [self.metric, *self.recipe.data.metrics] if self.recipe.method.metric is None else [self.metric]
        measured = {name: value for name, value in measured.items() if name in ("loss", *wanted)}
        missing = [name for name in wanted if name not in measured and name != "loss"]
        if missing and (with_metric or sequences is None):
            measured |= self.measure_metric(trainer, self.judged)
        elif missing and self.recipe.eval_examples:
            sample = self.judged.select(range(min(self.recipe.eval_examples, len(self.judged))))
            found = self.measure_metric(trainer, sample)
            measured |= {f"sampled_{name}": found[name] for name in dict.fromkeys(missing) if name in found}
        return measured
