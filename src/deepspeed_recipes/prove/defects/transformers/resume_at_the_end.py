"""A Trainer that is resumed from its last step takes one step more than max_steps.

transformers checks `max_steps` only after a step. Resuming a finished run, as a scheduler that requeues jobs does,
changes the model again.
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


def measure() -> tuple[bool, str]:
    """Return whether a run of 2 steps has more after it is resumed from its checkpoint of step 2."""
    folder = tempfile.mkdtemp()
    steps = []
    for checkpoint in (None, f"{folder}/checkpoint-2"):
        arguments = TrainingArguments(
            folder, max_steps=2, save_steps=2, per_device_train_batch_size=1, report_to="none", use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(Line(), arguments, train_dataset=[{"x": torch.ones(1)}] * 16)
        trainer.train(resume_from_checkpoint=checkpoint)
        steps.append(trainer.state.global_step)
    return steps[1] > 2, f"max_steps=2; resumed from step 2 the run ends at step {steps[1]}"


if __name__ == "__main__":
    present, observed = measure()
    print(f"{'PRESENT' if present else 'absent'}: {observed}", flush=True)
