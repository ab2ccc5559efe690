"""The progress of a run: a bar on a terminal, a line per logged step elsewhere."""

import sys
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from .. import distributed
from ..console import duration


class Progress(TrainerCallback):
    """A progress bar over the optimizer steps."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the bar."""
        if distributed.is_first():
            shown = sys.stdout.isatty()
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                unit="step",
                disable=not shown,
                dynamic_ncols=True,
            )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the bar."""
        if self.bar is not None:
            self.bar.update(1)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()


def step_line(record: dict[str, Any], last_step: int) -> str:
    """Return one logged step as a line; `record` is an object of metrics.jsonl."""
    norm = record["grad_norm"]
    speed = record["tokens_per_second"]
    left = record["seconds"] / record["step"] * (last_step - record["step"])
    preference = ""
    # Over the training examples since the last log. TRL's rewards do not rank the held-out pairs: DPO's are likelihoods
    # relative to the reference model's.
    for key, name in (("rewards/accuracies", "reward accuracy"), ("accuracy", "accuracy")):
        if key in record:
            preference = f"{name} {record[key]:.0%}  "
    if "reward" in record:
        preference += f"reward {record['reward']:.3f}  "
    if "rewards/margins" in record:
        preference += f"reward margin {record['rewards/margins']:.2f}  "
    if "kl" in record:
        preference += f"KL {record['kl']:.2f}  "
    return (
        f"step {record['step']:>{len(str(last_step))}}/{last_step}  loss {record['loss']:.4f}  {preference}"
        f"lr {record['learning_rate']:.1e}  grad norm {'-' if norm is None else format(norm, '.2f')}  "
        f"{speed:,.0f} tokens/s  {duration(left)} left"
    )
