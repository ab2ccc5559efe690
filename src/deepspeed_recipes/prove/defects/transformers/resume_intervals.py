"""A resumed Trainer logs, evaluates and saves at the intervals of its checkpoint instead of its arguments.

transformers restores `logging_steps`, `eval_steps` and `save_steps` from trainer_state.json. A run that is resumed to
save more often does not; transformers only prints a warning.
"""

import tempfile

import torch
from transformers import Trainer, TrainingArguments

RANKS = 1


class Line(torch.nn.Module):
    """y = w x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": (self.weight * x).square().mean()}


def trainer(folder: str, **options: int) -> Trainer:
    """Return a Trainer that writes to `folder`."""
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=1, report_to="none", use_cpu=True, disable_tqdm=True, **options
    )
    return Trainer(Line(), arguments, train_dataset=[{"x": torch.ones(1)}] * 16)


def measure() -> tuple[bool, str]:
    """Return whether a run that saved every 2 steps still does so when it is resumed to save every step."""
    folder = tempfile.mkdtemp()
    trainer(folder, max_steps=2, save_steps=2).train()
    resumed = trainer(folder, max_steps=4, save_steps=1)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return resumed.state.save_steps != 1, f"requested save_steps=1; the resumed run has {resumed.state.save_steps}"


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
